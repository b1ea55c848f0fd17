"""Inside a job of a real Slurm: its hosts, no ssh, no hostfile."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

import pytest

from cpuft.record import read_record
from cpuft.sweep.study import DONE, read_sweep
from tests.conftest import wait_until
from tests.launch.slurm import Slurm, has_slurm, open_slurm
from tests.provision.simulated import needs_root, simulate

pytestmark = [needs_root, pytest.mark.skipif(not has_slurm(), reason="Slurm's programs are not installed")]
LAUNCH = (sys.executable, "-m", "cpuft", "launch")
TRAINING = ("--task", "demo", "--max-steps", "2", "--batch-size", "4", "--precision", "fp32", "--no-save-model")
HELLO = """import os, socket
print(*(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")), socket.gethostname())
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with simulate(tmp_path_factory.mktemp("slurm"), "--nodes", "4") as cluster, open_slurm(cluster) as opened:
        (cluster.folder / "hello.py").write_text(HELLO, encoding="utf-8")
        yield opened


def launch(slurm: Slurm, *words: str, options: tuple[str, ...], before: str = "exec") -> tuple[int, str]:
    return slurm.submit(f"{before} {shlex.join((*LAUNCH, *words))}", *options)


def said(slurm: Slurm, run: str) -> list[str]:
    return [path.read_text().strip() for path in sorted((slurm.cluster.folder / run / "logs").glob("rank-*.out"))]


def test_ranks_run_on_the_hosts_that_the_job_was_given(slurm: Slurm) -> None:
    """Three tasks on two hosts: two and one."""
    options = ("--nodes=2", "--ntasks=3", "--ntasks-per-node=2")
    code, text = launch(slurm, "--np", "3", "--independent", "--run-dir", "uneven", "--", "hello.py", options=options)
    assert code == 0, text
    first, second = (slurm.cluster.on(number, "hostname") for number in (1, 2))
    assert said(slurm, "uneven") == [f"0 3 0 {first}", f"1 3 1 {first}", f"2 3 0 {second}"]


@pytest.mark.parametrize(
    ("words", "before", "message"),
    [
        (("--np", "5"), "exec", "5 ranks do not fit: 2 hosts with 4 slots: lower --np"),
        (
            ("--np", "2"),
            "srun",
            "srun starts cpuft launch 4 times: write cpuft launch into the job's script without srun",
        ),
    ],
    ids=("more ranks than tasks", "srun"),
)
def test_options_that_a_slurm_job_does_not_allow(
    words: tuple[str, ...], before: str, message: str, slurm: Slurm
) -> None:
    options = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
    code, text = launch(slurm, *words, "--", "hello.py", options=options, before=before)
    assert (code, message in text) == (2, True), text


def test_on_a_login_node_srun_starts_the_ranks(slurm: Slurm) -> None:
    """This machine is not a host of the job."""
    folder = slurm.cluster.folder
    words = ("--np", "3", "--independent", "--run-dir", str(folder / "login"), "--", str(folder / "hello.py"))
    done = slurm.ask("salloc", "--quiet", "--nodes=2", "--ntasks=3", *LAUNCH, *words, seconds=240)
    assert done.returncode == 0, done.stderr
    first, second = (slurm.cluster.on(number, "hostname") for number in (1, 2))
    assert said(slurm, "login") == [f"0 3 0 {first}", f"1 3 1 {first}", f"2 3 0 {second}"]
    assert "with srun; output" in (folder / "login" / "plan.sh").read_text()


@pytest.mark.proof
def test_a_sweep_in_a_job_trains_one_run_on_each_host(slurm: Slurm) -> None:
    """Three runs on two hosts: the host of the job's script starts its ranks itself, and srun those of the other."""
    words = ("sweep", *TRAINING, "--seed", "1,2,3", "--run-dir", "swept")
    code, text = slurm.submit(
        shlex.join((sys.executable, "-m", "cpuft", *words)), "--nodes=2", "--exclusive", seconds=500
    )
    assert code == 0, text
    sweep = read_sweep(str(slurm.cluster.folder / "swept"))
    attempts = [attempt for run in sweep.runs for attempt in run.attempts]
    assert len(sweep.list_runs(DONE)) == 3, text
    names = [slurm.cluster.on(number, "hostname") for number in (1, 2)]
    for start in attempts:
        record = read_record(f"{sweep.folder}/{start.folder}")
        assert [rank.host for rank in record.header.ranks] == [start.place]
    assert {start.place for start in attempts} == {*names}


@pytest.mark.proof  # it takes more than a minute
def test_a_sweep_in_a_job_with_several_hosts_for_each_run(slurm: Slurm) -> None:
    words = ("sweep", *TRAINING, "--seed", "1,2", "--hosts-per-run", "2", "--run-dir", "pairs")
    code, text = slurm.submit(
        shlex.join((sys.executable, "-m", "cpuft", *words)), "--nodes=4", "--exclusive", seconds=500
    )
    assert code == 0, text
    sweep = read_sweep(str(slurm.cluster.folder / "pairs"))
    attempts = [attempt for run in sweep.runs for attempt in run.attempts]
    names = [slurm.cluster.on(number, "hostname") for number in range(1, 5)]
    assert sorted(start.place for start in attempts) == [",".join(names[:2]), ",".join(names[2:])]
    for start in attempts:
        record = read_record(f"{sweep.folder}/{start.folder}")
        assert [rank.host for rank in record.header.ranks] == start.place.split(",")


@pytest.mark.proof  # it takes more than a minute
def test_a_submitted_sweep_continues_when_its_job_is_started_again(slurm: Slurm) -> None:
    """Slurm's signal comes while two runs train; the next start resumes both."""
    longer = ("--task", "demo", "--max-steps", "60", "--precision", "fp32", "--batch-size", "8", "--no-save-model")
    words = ("sweep", *longer, "--seed", "1,2", "--no-check", "--run-dir", "requeued")
    job = slurm.cpuft("submit", "slurm", "--nodes", "2", "--", *words).stdout.strip().removeprefix("slurm:")
    folder = slurm.cluster.folder / "requeued"
    logs = [folder / "logs" / f"run-{number}.log" for number in (1, 2)]
    wait_until(lambda: all(log.exists() and "step " in log.read_text() for log in logs))
    assert slurm.ask("scancel", "--batch", "--signal=USR1", job).returncode == 0
    state = ("scontrol", "show", "job", job)
    wait_until(lambda: "Restarts=1" in slurm.ask(*state).stdout, seconds=300, pause=0.3)
    wait_until(lambda: "JobState=COMPLETED" in slurm.ask(*state).stdout, seconds=300, pause=0.3)
    sweep = read_sweep(str(folder))
    assert len(sweep.list_runs(DONE)) == 2
    folders = [[attempt.folder for attempt in run.attempts] for run in sweep.runs]
    assert folders == [["run-1", "run-1"], ["run-2", "run-2"]]
    for run in (1, 2):
        record = read_record(str(folder / f"run-{run}"))
        assert len(record.resumptions) == 1
        assert len(record.steps) == 60


def test_a_submitted_job_is_ended_and_no_other(slurm: Slurm) -> None:
    job = slurm.cpuft("submit", "slurm", "--extra=--hold", "--", "launch", "--np", "2").stdout.strip()
    other = slurm.ask("sbatch", "--parsable", "--hold", "--comment=cpuft-not", "--wrap=true").stdout.strip()
    done = slurm.cpuft("submit", "cancel", job)
    assert (done.returncode, done.stderr) == (0, "")
    assert "JobState=CANCELLED" in slurm.ask("scontrol", "show", "job", job.removeprefix("slurm:")).stdout
    refused = slurm.cpuft("submit", "cancel", f"slurm:{other}")
    assert (refused.returncode, f"slurm:{other} was not submitted by cpuft submit" in refused.stderr) == (2, True)
    slurm.ask("scancel", other)


def test_it_is_up_at_once(slurm: Slurm) -> None:
    """Three seconds where nothing else runs."""
    assert slurm.seconds < 20
