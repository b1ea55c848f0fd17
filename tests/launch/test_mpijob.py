"""Inside an MPIJob or a TrainJob: the manifest that cpuft submit prints, made real on simulated hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpuft.record import read_record
from tests.conftest import wait_until
from tests.launch.operator import Operator, operate
from tests.provision.simulated import needs_root, simulate

pytestmark = needs_root
SUBMIT = ("--dry-run", "--image", "i", "--nodes", "2", "--name", "j", "--", "launch")
TRAINING = (
    "--task",
    "demo",
    "--max-train-samples",
    "32",
    "--max-steps",
    "3",
    "--batch-size",
    "4",
    "--max-length",
    "32",
)
QUIET = ("--backend", "gloo", "--no-save-model", "--no-fast-path")
WAITS = """import os, pathlib, sys, time, torch, torch.distributed as dist
from cpuft.rank.interruption import is_interrupted
dist.init_process_group("gloo")
dist.barrier()
pathlib.Path(sys.argv[1]).touch()
told = torch.zeros(1)
while "CPUFT_RESUMED" not in os.environ:
    time.sleep(0.05)
    told += is_interrupted()
    dist.all_reduce(told)
    if told:
        sys.exit(75)
print("of", dist.get_world_size())
"""

MEETS = """import socket, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size(), "on", socket.gethostname())
"""


@contextmanager
def make_job(folder: Path, *words: str, kind: str = "kubernetes") -> Iterator[Operator]:
    """A job of two workers; its run is operator/work/runs/j."""
    (folder / "waits.py").write_text(WAITS, encoding="utf-8")
    with simulate(folder, "--nodes", "3") as cluster:
        done = cluster.cpuft("submit", kind, *SUBMIT, *words)
        assert done.returncode == 0, done.stderr
        with operate(done.stdout, cluster) as operator:
            yield operator


@pytest.mark.parametrize(
    "kind, worker",
    [("kubernetes", "j-worker-{}"), pytest.param("trainjob", "j-node-0-{}", marks=pytest.mark.proof)],
)
def test_a_script_runs_on_two_workers(kind: str, worker: str, tmp_path: Path) -> None:
    (tmp_path / "meets.py").write_text(MEETS, encoding="utf-8")
    with make_job(tmp_path, "--np", "2", "--", str(tmp_path / "meets.py"), kind=kind) as operator:
        code, said = operator.launch()
        refused = operator.launch("cpuft", "launch", "--np", "5", "--task", "demo")
    assert code == 0, said
    logs = tmp_path / "operator" / "work" / "runs" / "j" / "logs"
    met = [(logs / f"rank-{rank}.out").read_text() for rank in (0, 1)]
    assert met == [f"rank {rank} of 2 on {worker.format(rank)}\n" for rank in (0, 1)]
    line = (
        "cpuft: error: 5 ranks do not fit: 2 hosts with 2 slots: lower --np, or add hosts or slots=N to the hostfile\n"
    )
    assert refused == (2, line)


@pytest.mark.proof
def test_two_workers_train(tmp_path: Path) -> None:
    with make_job(tmp_path, "--np", "2", *TRAINING, *QUIET) as operator:
        code, said = operator.launch()
    assert code == 0, said
    record = read_record(str(tmp_path / "operator" / "work" / "runs" / "j"))
    assert [rank.host for rank in record.header.ranks] == ["j-worker-0", "j-worker-1"]
    assert [line.step for line in record.steps] == [1, 2, 3]


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["kubernetes", "trainjob"])
def test_a_lost_worker_is_not_used_for_the_restart(kind: str, tmp_path: Path) -> None:
    words = ("--np", "2", "--", str(tmp_path / "waits.py"), str(tmp_path / "here"))
    with make_job(tmp_path, *words, kind=kind) as operator, operator.launcher() as process:
        wait_until((tmp_path / "here").exists)
        killed = operator.cluster.cpuft("provision", "local", "kill", "2", "--name", operator.cluster.name)
        assert killed.returncode == 0, killed.stderr
        said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    name = "j-worker-{}.j.default.svc" if kind == "kubernetes" else "j-node-0-{}.j"
    hosts = [name.format(number) for number in (0, 1)]
    assert (
        f"cpuft: restart 1 of 3: host {hosts[1]} was lost; 1 rank on {hosts[0]} starts from the beginning, "
        in said.splitlines()
    )


@pytest.mark.proof
def test_an_evicted_launcher_is_continued_by_the_next_one(tmp_path: Path) -> None:
    with make_job(tmp_path, "--np", "2", "--", str(tmp_path / "waits.py"), str(tmp_path / "here")) as operator:
        with operator.launcher() as process:
            wait_until((tmp_path / "here").exists)
            operator.tell_to_go(process)
            said, _ = process.communicate(timeout=150)
        assert process.returncode == 75, said
        code, said = operator.launch()
    assert code == 0, said
    logs = tmp_path / "operator" / "work" / "runs" / "j" / "logs"
    assert [(logs / f"rank-{rank}.out").read_text() for rank in (0, 1)] == ["of 2\n", "of 2\n"]
