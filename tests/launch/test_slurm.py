"""Inside a job of a real Slurm: its hosts, no ssh, no hostfile."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

import pytest

from cpuft.record import read_record
from tests.launch.slurm import Slurm, has_slurm, open_slurm
from tests.provision.simulated import needs_root, simulate

pytestmark = [needs_root, pytest.mark.skipif(not has_slurm(), reason="Slurm's programs are not installed")]
LAUNCH = (sys.executable, "-m", "cpuft", "launch")
HELLO = """import os, socket
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), socket.gethostname())
"""
TRAINING = ("--task", "demo", "--max-train-samples", "64", "--max-steps", "4", "--precision", "fp32", "--dropout", "0")
LONG = ("--task", "demo", "--epochs", "4", "--batch-size", "8", "--precision", "fp32", "--dropout", "0")
QUIET = ("--backend", "gloo", "--no-save-model", "--plain")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with simulate(tmp_path_factory.mktemp("slurm"), "--nodes", "4") as cluster, open_slurm(cluster) as opened:
        (cluster.folder / "hello.py").write_text(HELLO, encoding="utf-8")
        (cluster.folder / "two").write_text("localhost slots=2\n", encoding="utf-8")
        yield opened


def launch(slurm: Slurm, *words: str, options: tuple[str, ...], before: str = "exec") -> tuple[int, str]:
    return slurm.submit(f"{before} {shlex.join((*LAUNCH, *words))}", *options)


def said(slurm: Slurm, run: str) -> list[str]:
    return [path.read_text().strip() for path in sorted((slurm.cluster.folder / run / "logs").glob("rank-*.out"))]


def test_ranks_run_on_the_hosts_that_the_job_was_given(slurm: Slurm) -> None:
    """Three tasks on two hosts: two and one."""
    options = ("--nodes=2", "--ntasks=3", "--ntasks-per-node=2")
    code, text = launch(slurm, "--np", "3", "--run-dir", "uneven", "--", "hello.py", options=options)
    assert code == 0, text
    first, second = (slurm.cluster.on(number, "hostname") for number in (1, 2))
    assert said(slurm, "uneven") == [f"0 3 0 {first}", f"1 3 1 {first}", f"2 3 0 {second}"]


@pytest.mark.parametrize(
    ("words", "before", "message"),
    [
        (("--np", "5"), "exec", "5 ranks do not fit: 2 hosts with 4 slots: lower --np"),
        (("--np", "2"), "srun", "srun starts cpuft launch 4 times: write it into the job's script without srun"),
    ],
    ids=("more ranks than tasks", "srun"),
)
def test_what_the_job_does_not_allow(words: tuple[str, ...], before: str, message: str, slurm: Slurm) -> None:
    options = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    code, text = launch(slurm, *words, "--", "hello.py", options=options, before=before)
    assert (code, message in text) == (2, True), text


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_job_trains_as_a_plain_launch_does(ranks: int, slurm: Slurm) -> None:
    words = ("--np", str(ranks), *TRAINING, *QUIET, "--batch-size", str(32 // ranks))
    options = ("--nodes=4", f"--ntasks={max(4, ranks)}")
    code, text = launch(slurm, *words, "--run-dir", f"job-{ranks}", options=options)
    assert code == 0, text
    (slurm.cluster.folder / "here").write_text(f"localhost slots={ranks}\n", encoding="utf-8")
    plain = slurm.cluster.cpuft("launch", "--hostfile", "here", *words, "--run-dir", f"plain-{ranks}")
    assert plain.returncode == 0, plain.stderr
    ours, theirs = (read_record(str(slurm.cluster.folder / f"{kind}-{ranks}")) for kind in ("job", "plain"))
    assert ours.metrics == theirs.metrics
    assert [line.loss for line in ours.steps] == pytest.approx([line.loss for line in theirs.steps], abs=1e-5)
    assert len({rank.host for rank in ours.header.ranks}) == min(4, ranks)


@pytest.mark.proof
def test_a_job_that_is_short_of_time_is_queued_again_and_comes_to_its_end(slurm: Slurm) -> None:
    """Slurm's signal comes up to a minute early; the job saves itself, waits for its turn, and goes on."""
    words = ("launch", "--np", "2", *LONG, *QUIET)
    site = ("--nodes", "2", "--time", "2", "--extra=--signal=B:USR1@60")
    done = slurm.cpuft("submit", "slurm", *site, "--wait", "--", *words, "--run-dir", "limited", seconds=580)
    assert done.returncode == 0, done.stdout + done.stderr
    plain = slurm.cpuft(*words, "--run-dir", "unlimited", "--hostfile", "two")
    assert plain.returncode == 0, plain.stderr
    ours, theirs = (read_record(str(slurm.cluster.folder / name)) for name in ("limited", "unlimited"))
    assert [line.step for line in ours.steps] == [line.step for line in theirs.steps]
    assert ours.metrics == theirs.metrics
    assert "resumed" in (slurm.cluster.folder / "limited" / "record.jsonl").read_text()


def test_it_is_up_at_once(slurm: Slurm) -> None:
    """Three seconds where nothing else runs."""
    assert slurm.seconds < 20
