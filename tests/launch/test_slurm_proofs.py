"""Whole trainings in jobs of a real Slurm: what they come to, and what they survive."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.record import Record, read_record
from tests.launch.slurm import Slurm, has_slurm, open_slurm
from tests.provision.simulated import needs_root, simulate

pytestmark = [
    needs_root,
    pytest.mark.proof,
    pytest.mark.skipif(not has_slurm(), reason="Slurm's programs are not installed"),
]
LAUNCH = (sys.executable, "-m", "cpuft", "launch")
BY_SRUN = ("--mpirun", "srun")
TRAINING = ("--task", "demo", "--max-train-samples", "64", "--max-steps", "4", "--precision", "fp32", "--dropout", "0")
DEMO = ("--task", "demo", "--epochs", "4", "--batch-size", "8", "--precision", "fp32", "--dropout", "0")
LONG, SHORTER = (*DEMO, "--max-steps", "150"), (*DEMO, "--max-steps", "60")
QUIET = ("--backend", "gloo", "--no-save-model", "--no-fast-path")
SUM = """import os, sys, torch, torch.distributed as dist
from cpuft import comm
comm.start(sys.argv[1])
total = torch.ones(1) * (1 + dist.get_rank())
dist.all_reduce(total)
print(int(total), os.environ["LOCAL_WORLD_SIZE"])
dist.destroy_process_group()
"""
GOING_SECONDS = 30.0
"""From a host's loss to the next update of those that are left."""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with simulate(tmp_path, "--nodes", "4") as cluster, open_slurm(cluster) as opened:
        (cluster.folder / "sum.py").write_text(SUM, encoding="utf-8")
        yield opened


def launch(slurm: Slurm, *words: str, options: tuple[str, ...]) -> tuple[int, str]:
    return slurm.submit(f"exec {shlex.join((*LAUNCH, *words))}", *options, seconds=900)


def launch_plainly(slurm: Slurm, ranks: int, *words: str) -> Record:
    """On this machine alone; what it recorded."""
    (slurm.cluster.folder / "here").write_text(f"localhost slots={ranks}\n", encoding="utf-8")
    own = ("--hostfile", "here", "--run-dir", "plain", "--np", str(ranks))
    done = slurm.cpuft("launch", *own, *words, seconds=900)
    assert done.returncode == 0, done.stderr
    return read(slurm, "plain")


def read(slurm: Slurm, run: str) -> Record:
    return read_record(str(slurm.cluster.folder / run))


def count_steps(slurm: Slurm, run: str) -> int:
    try:
        return len(read(slurm, run).steps)
    except CpuftError:
        return 0


def is_resumed(slurm: Slurm, run: str) -> bool:
    try:
        return bool(read(slurm, run).resumptions)
    except CpuftError:
        return False


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 240.0) -> float:
    """Seconds until it holds."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() < begun + seconds, what
        time.sleep(0.1)
    return time.monotonic() - begun


@pytest.mark.parametrize(
    ("ranks", "hosts"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 4)], ids=("1", "2", "2 and 1", "4", "8")
)
def test_a_job_trains_as_a_plain_launch_does(ranks: int, hosts: int, slurm: Slurm) -> None:
    words = (*TRAINING, *QUIET, "--batch-size", str(32 // ranks))
    theirs = launch_plainly(slurm, ranks, *words)
    options = (f"--nodes={hosts}", f"--ntasks={ranks}", f"--ntasks-per-node={-(-ranks // hosts)}")
    for run, starter in (("mpirun", ()), ("srun", BY_SRUN)):
        code, text = launch(slurm, *starter, "--np", str(ranks), *words, "--run-dir", run, options=options)
        assert code == 0, text
        ours = read(slurm, run)
        assert ours.metrics == theirs.metrics
        assert [line.loss for line in ours.steps] == pytest.approx([line.loss for line in theirs.steps], abs=1e-5)
        assert len({rank.host for rank in ours.header.ranks}) == hosts


@pytest.mark.parametrize("backend", ["gloo", "mpi", "ccl"])
def test_a_script_over_each_backend(backend: str, slurm: Slurm) -> None:
    options = ("--nodes=2", "--ntasks=3", "--ntasks-per-node=2")
    for run, starter in (("mpirun", ()), ("srun", BY_SRUN)):
        words = (*starter, "--np", "3", "--run-dir", run, "--", "sum.py", backend)
        code, text = launch(slurm, *words, options=options)
        assert code == 0, text
        logs = sorted((slurm.cluster.folder / run / "logs").glob("rank-*.out"))
        assert [path.read_text().splitlines()[-1] for path in logs] == ["6 2", "6 2", "6 1"]


def test_worlds_of_one_are_refused_by_every_rank(slurm: Slurm) -> None:
    """MPI knows nothing of srun's other tasks without PMI."""
    settings = 'export MASTER_ADDR=$(getent hosts "$SLURMD_NODENAME" | cut -d" " -f1) MASTER_PORT=29517'
    command = shlex.join((sys.executable, "-m", "cpuft.rank", sys.executable, "sum.py", "mpi"))
    code, text = slurm.submit(f"{settings}\nsrun --label {command}", "--nodes=2", "--ntasks=3")
    assert code
    said = [line.partition(":")[0] for line in text.splitlines() if "MPI has 1 rank(s) and the group 3" in line]
    assert sorted(said) == ["0", "1", "2"], text
    assert text.count("start through `cpuft launch`, mpirun or srun --mpi=pmi2") == 3
    code, text = slurm.submit(f"{settings}\nsrun --mpi=pmi2 {command}", "--nodes=2", "--ntasks=3")
    assert (code, sorted(line for line in text.splitlines() if line[0] == "6")) == (0, ["6 1", "6 2", "6 2"]), text


def test_a_job_that_is_short_of_time_is_queued_again_and_comes_to_its_end(slurm: Slurm) -> None:
    """Slurm's signal comes up to half a minute early; the job saves itself, waits for its turn, and goes on."""
    theirs = launch_plainly(slurm, 2, *LONG, *QUIET)
    site = ("--nodes", "2", "--time", "1", "--extra=--signal=B:USR1@30")
    words = ("launch", "--np", "2", *LONG, *QUIET, "--run-dir", "limited")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(slurm.cpuft, "submit", "slurm", *site, "--wait", "--", *words, seconds=900)
        wait_until(lambda: is_resumed(slurm, "limited") or job.done(), "it does not go on")
        (number,) = slurm.ask("squeue", "--noheader", "--format=%A").stdout.split()
        longer = slurm.ask("scontrol", "update", f"JobId={number}", "TimeLimit=30")  # once is enough
        assert longer.returncode == 0, longer.stderr
        done = job.result()
    assert done.returncode == 0, done.stdout + done.stderr
    check_going_on(read(slurm, "limited"), theirs)


def test_a_job_that_gives_way_goes_on_later(slurm: Slurm) -> None:
    """A more urgent one wants its hosts: Slurm's signal, a minute, and its place in the queue again."""
    theirs = launch_plainly(slurm, 2, *SHORTER, *QUIET)
    words = ("launch", "--np", "2", *SHORTER, *QUIET, "--run-dir", "preempted")
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(slurm.cpuft, "submit", "slurm", "--nodes", "2", "--wait", "--", *words, seconds=900)
        wait_until(lambda: count_steps(slurm, "preempted") > 5 or job.done(), "it does not train")
        other = ("sbatch", "--wait", "--partition=urgent", "--nodes=4", "--exclusive", "--wrap=true")
        urgent = slurm.ask(*other, seconds=120)
        assert urgent.returncode == 0, urgent.stderr
        done = job.result()
    assert done.returncode == 0, done.stdout + done.stderr
    check_going_on(read(slurm, "preempted"), theirs)


def check_going_on(ours: Record, theirs: Record) -> None:
    assert [line.step for line in ours.steps] == [line.step for line in theirs.steps]
    assert ours.metrics == theirs.metrics
    assert ours.resumptions


@pytest.mark.parametrize("hosts", [2, 3])
@pytest.mark.parametrize("starter", [(), BY_SRUN], ids=("mpirun", "srun"))
def test_a_job_that_loses_a_host_goes_on_without_it(starter: tuple[str, ...], hosts: int, slurm: Slurm) -> None:
    """Inside its allocation, long before Slurm itself misses the host."""
    words = (*starter, "--np", str(hosts), *DEMO, "--max-steps", "30", *QUIET, "--checkpoint-every", "1")
    cluster = slurm.cluster
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(
            launch, slurm, *words, "--run-dir", "lost", options=(f"--nodes={hosts}", f"--ntasks={hosts}", "--no-kill")
        )
        wait_until(lambda: count_steps(slurm, "lost") > 5 or job.done(), "it does not train")
        done = cluster.cpuft("provision", "local", "--name", cluster.name, "kill", "2")
        assert done.returncode == 0, done.stderr
        begun = time.monotonic()
        wait_until(lambda: is_resumed(slurm, "lost") or job.done(), "it does not go on")
        before = count_steps(slurm, "lost")
        wait_until(lambda: count_steps(slurm, "lost") > before or job.done(), "it makes no step")
        seconds = time.monotonic() - begun
        code, text = job.result()
    assert code == 0, text
    print(f"going on after {seconds:.1f} s")
    assert "restart 1 of 3: host" in text
    assert seconds < GOING_SECONDS, text


def test_a_launch_on_a_login_node_ends_after_slurm_and_all_hosts_are_lost(slurm: Slurm) -> None:
    """srun does not notice it and would wait without limit."""
    cluster, run = slurm.cluster, slurm.cluster.folder / "gone"
    (cluster.folder / "wait.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    words = (*LAUNCH, "--np", "2", "--run-dir", str(run), "--", str(cluster.folder / "wait.py"))
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(slurm.ask, "salloc", "--quiet", "--nodes=2", "--ntasks=2", *words, seconds=400)
        outputs = [run / "logs" / f"rank-{rank}.out" for rank in range(2)]
        wait_until(lambda: all(path.exists() and path.read_text() for path in outputs) or job.done(), "it does not run")
        assert slurm.ask("scontrol", "shutdown", "slurmctld").returncode == 0
        for number in ("1", "2"):
            assert cluster.cpuft("provision", "local", "--name", cluster.name, "kill", number).returncode == 0
        done = job.result()
    assert (done.returncode, "no other host is left" in done.stderr) == (75, True), done.stderr
    assert "which was still running although no rank gives a heartbeat" in done.stderr
