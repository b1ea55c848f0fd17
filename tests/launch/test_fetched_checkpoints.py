"""Copies of checkpoints: how they come to the launcher's machine, and how they reach another host."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Access, Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.rank_counts import Assignment
from cpuft.launch import plan as planning
from cpuft.launch.fetched_checkpoints import CheckpointCopier, check_copy, choose_copy_seconds, pack_checkpoints
from cpuft.launch.plan import Job, plan_run
from cpuft.launch.results import fetch_and_clean_up, plan_results
from cpuft.launch.resume import HostCopy, ResumedRun, check_newest_checkpoint, find_checkpoint_here, read_resumed_run
from cpuft.launch.run_state import write_state
from cpuft.plans import RunPlan
from cpuft.record import Line, format_line
from cpuft.train.checkpoint.folders import keep_best, write_checkpoint
from cpuft.transfer import connect, receive
from tests.conftest import wait_until
from tests.launch.test_inputs import AWAY
from tests.launch.test_plan import make_cluster
from tests.launch.test_resume import HEADER, TRAIN
from tests.records import make_state, make_steps


def write(run: Path, update: int, rank: int = 0) -> Path:
    record: list[Line] = [HEADER, *make_steps(update, [0.1])]
    lines = "".join(f"{format_line(line)}\n" for line in record)
    files = {"state.safetensors": memoryview(bytes(1000)), "record.jsonl": memoryview(lines.encode())}
    return write_checkpoint(run / "checkpoints", update, rank, files)


def names(run: Path, part: str = "") -> list[str]:
    folder = run / "checkpoints" / part
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


class OnThisMachine(Cluster):
    """A cluster whose head host is this machine, where the work folder is another one."""

    work = ""

    def work_dir(self, run_dir: str) -> str:
        return self.work


@pytest.fixture
def copier(tmp_path: Path) -> CheckpointCopier:
    cluster = OnThisMachine((Assignment(Host("a"), 1),), (), AWAY.mpi, works_remotely=True)
    object.__setattr__(cluster, "work", str(tmp_path / "work"))
    return CheckpointCopier(cluster, str(tmp_path / "runs" / "run"), 0.05, lambda line: None)


def test_only_the_newest_checkpoint_and_the_best_one_are_copied(tmp_path: Path, copier: CheckpointCopier) -> None:
    work, run = tmp_path / "work", tmp_path / "runs" / "run"
    copier.copy_last()  # the ranks have not written any yet
    assert not (run / "checkpoints").exists()
    keep_best(write(work, 3))
    (work / "checkpoints" / "000000009.0.new").mkdir()
    copier.copy_last()
    assert (names(run), names(run, "best")) == (["000000003.0", "best"], ["000000003.0"])
    write(work, 5, rank=1)
    copied = (run / "checkpoints" / "best" / "000000003.0").stat().st_ino
    copier.copy_last()
    assert (names(run), names(run, "best")) == (["000000005.1", "best"], ["000000003.0"])
    # What is here already is not sent again.
    assert (run / "checkpoints" / "best" / "000000003.0").stat().st_ino == copied
    keep_best(write(work, 7))
    copier.copy_last()
    assert (names(run), names(run, "best")) == (["000000007.0", "best"], ["000000007.0"])
    assert check_copy(str(run)) == (7, "")


def test_a_checkpoint_that_the_ranks_remove_meanwhile_is_sent_as_a_whole(
    tmp_path: Path, copier: CheckpointCopier
) -> None:
    """The receiver reads nothing before the ranks have written two newer ones."""
    first = write(tmp_path / "work", 2)
    (first / "state.safetensors").write_bytes(bytes(1 << 20))
    step = copier.plan_copy()
    words = [*step.command[step.command.index("sh") :]]
    received = tmp_path / "received"
    with connect(words) as stream:
        wait_until(lambda: all(list(first.parent.glob(f"copy.*/*/{path.name}")) for path in first.iterdir()))
        for update in (3, 4):
            write(tmp_path / "work", update)
        assert not first.exists()
        receive(stream, str(received))
    assert (received / "000000002.0" / "state.safetensors").stat().st_size == 1 << 20
    assert [path.name for path in received.iterdir()] == ["000000002.0"]
    assert names(tmp_path / "work") == ["000000003.0", "000000004.0"]


def test_checkpoints_are_copied_while_ranks_run(tmp_path: Path, copier: CheckpointCopier) -> None:
    work, run = tmp_path / "work", tmp_path / "runs" / "run"
    before = threading.active_count()
    with copier.keep_copying():
        for update in (2, 4):
            write(work, update)
            wait_until(partial(lambda name: names(run) == [name], f"00000000{update}.0"))
    assert threading.active_count() == before
    write(work, 6)
    time.sleep(0.3)
    assert names(run) == ["000000004.0"]


def test_a_copy_that_takes_long_is_given_up_at_the_end(
    tmp_path: Path, copier: CheckpointCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "run"
    step = copier.plan_copy()
    program = f"touch {tmp_path}/begun; exec sleep 60"
    slow = replace(step, command=(*step.command[: step.command.index("sh")], "sh", "-c", program))
    monkeypatch.setattr(copier, "plan_copy", lambda: slow)
    with copier.keep_copying():
        wait_until((tmp_path / "begun").exists)
        begun = time.monotonic()
    assert time.monotonic() - begun < 10
    assert list(run.iterdir()) == []


def test_a_full_disk_is_reported_once(tmp_path: Path, copier: CheckpointCopier) -> None:
    said = list[str]()
    copier._say = said.append
    write(tmp_path / "work", 2)
    (tmp_path / "runs").write_text("a file where the folder of the run is to be")
    copier.copy_last()
    copier.copy_last()
    (line,) = said
    assert line.startswith(f"cpuft: checkpoints cannot be copied to {tmp_path}/runs/run/checkpoints (")


def test_a_copy_says_whether_it_is_whole(tmp_path: Path) -> None:
    assert check_copy(str(tmp_path)) == (0, "no checkpoint had been copied yet")
    state = write(tmp_path, 12) / "state.safetensors"
    assert check_copy(str(tmp_path)) == (12, "")
    state.write_bytes(b"x" + state.read_bytes()[1:])
    problem = "the copy of its checkpoint of update 12 is damaged (state.safetensors is damaged)"
    assert check_copy(str(tmp_path)) == (0, problem)


@pytest.mark.parametrize("every, seconds", [(-1.0, 30.0), (0.0, 30.0), (0.1, 1.0), (5.0, 5.0), (600.0, 30.0)])
def test_new_checkpoints_are_looked_for_as_often_as_they_are_written(every: float, seconds: float) -> None:
    assert choose_copy_seconds(every) == seconds


def test_a_checkpoint_is_sent_if_no_host_of_the_run_has_it(tmp_path: Path) -> None:
    assert pack_checkpoints(AWAY, "/work", str(tmp_path), ()) == ()
    keep_best(write(tmp_path, 4))
    newest = write(tmp_path, 6)
    for copies in ((), (HostCopy(Host("a"), True, checkpoint_update=5),), (HostCopy(Host("z"), checkpoint_update=9),)):
        first, best = pack_checkpoints(AWAY, "/work", str(tmp_path), copies)
        assert first.remote_folder == "/work/checkpoints/000000006.0"
        assert best.remote_folder == "/work/checkpoints/best/000000004.0"
        assert {path.name for path in first.sources} == {path.name for path in newest.iterdir()}
        assert first.is_for_head
    assert pack_checkpoints(AWAY, "/work", str(tmp_path), [HostCopy(Host("b"), checkpoint_update=6)]) == ()
    assert pack_checkpoints(replace(AWAY, works_remotely=False), str(tmp_path), str(tmp_path), ()) == ()


def make_away(*names: str) -> Cluster:
    cluster = make_cluster((1,) * len(names))
    assignments = tuple(Assignment(Host(name), 1) for name in names)
    prefixes: dict[str, tuple[str, ...]] = {name: ("ssh", name) for name in names}
    return replace(
        cluster,
        assignments=assignments,
        works_remotely=True,
        command_prefixes=prefixes,
        access=Access(AWAY.access.transport),
    )


def test_the_plan_of_a_resumed_run_sends_the_checkpoint_to_its_head_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "gather_missing", lambda bundles, cluster: {})
    write(tmp_path, 6)
    job = Job(str(tmp_path), LaunchConfig(np=2, copy_checkpoints=True), TRAIN)
    resumed = ResumedRun(str(tmp_path), TRAIN, 2, 6, 64, (HostCopy(Host("b")), HostCopy(Host("c"))))
    plan = plan_run(job, make_away("b", "c"), resumed)
    ((send,),) = plan.inputs
    assert send.why.startswith("send state.safetensors to b (")
    assert plan.copy_seconds == 30.0
    assert f"each new checkpoint is copied to {tmp_path}/checkpoints (a look every 30 s)" in plan.notes[0]
    new = plan_run(replace(job, run_dir="/runs/new"), make_away("b", "c"))
    assert new.inputs == ()


def test_a_sent_checkpoint_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of the plan, with this machine in place of the host."""
    monkeypatch.setattr(planning, "gather_missing", lambda bundles, cluster: {})
    run, own = tmp_path / "run", tmp_path / "cpuft-0"
    keep_best(write(run, 6))
    prefixes: dict[str, tuple[str, ...]] = {"b": ("sh", "-c")}
    cluster = replace(make_away("b"), command_prefixes=prefixes)
    job = Job(str(run), LaunchConfig(np=1), TRAIN)
    plan = plan_run(job, cluster, ResumedRun(str(run), TRAIN, 1, 6, 64, (HostCopy(Host("b")),)))
    for (step,) in plan.inputs:
        command = [word.replace(cluster.folder, str(own)) for word in step.command]
        subprocess.run(command, check=True)
    work = Path(cluster.work_dir(str(run)).replace(cluster.folder, str(own)))
    assert names(work) == ["000000006.0", "best"]
    assert names(work, "best") == ["000000006.0"]
    assert check_copy(str(work)) == (6, "")
    # A checkpoint that is there already stays.
    for (step,) in plan.inputs:
        subprocess.run([word.replace(cluster.folder, str(own)) for word in step.command], check=True)
    assert names(work) == ["000000006.0", "best"]


def test_a_run_is_resumed_from_a_copy_if_its_hosts_are_gone(tmp_path: Path) -> None:
    """The record comes from the checkpoint, because this machine has no other."""
    run = str(tmp_path)
    write(tmp_path, 6)
    assert read_resumed_run(run, host_copies=[HostCopy(Host("b"))]) == ResumedRun(run, TRAIN, 2, 6, 64)
    with pytest.raises(CpuftError, match="is cpuft's own training and has no script"):
        read_resumed_run(run, is_script=True)
    lost = [HostCopy(Host("z"), checkpoint_update=6)]
    check_newest_checkpoint(lost, AWAY, run)
    write_state(str(tmp_path), make_state(checkpoints={"z": 9}))
    check_newest_checkpoint([HostCopy(Host("a"))], AWAY, run)
    with pytest.raises(CpuftError, match="of update 7, is on z, which would not be used"):
        check_newest_checkpoint([replace(lost[0], checkpoint_update=7)], AWAY, run)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CpuftError, match="none of these hosts has a checkpoint"):
        check_newest_checkpoint([HostCopy(Host("a"))], AWAY, run)


def test_a_script_is_resumed_from_a_copy(tmp_path: Path) -> None:
    files = {"state.safetensors": memoryview(b"1"), "values.json": memoryview(b"{}")}
    write_checkpoint(tmp_path / "checkpoints", 5, 0, files)
    assert read_resumed_run(str(tmp_path), is_script=True) == ResumedRun(str(tmp_path))


def test_a_finished_run_keeps_no_copies(tmp_path: Path) -> None:
    run, work = tmp_path / "run", tmp_path / "work"
    write(run, 6)
    work.mkdir()
    (work / "record.jsonl").write_text("{}\n")
    (fetch,), _ = plan_results(replace(AWAY, command_prefixes={}), str(work), str(run))
    plan = RunPlan(results=((fetch,), ()))
    fetch_and_clean_up(plan, str(run), AWAY, False, lambda line: None)
    assert find_checkpoint_here(str(run)) is not None
    fetch_and_clean_up(plan, str(run), AWAY, True, lambda line: None)
    assert sorted(path.name for path in run.iterdir()) == ["plan.sh", "record.jsonl"]
