"""What a run leaves behind on hosts and on this machine, and how it is resumed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import pytest

from cpuft.argv import pack_argv
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.cluster import STATE_FILE, Access, Cluster, gather_cluster, read_host_folder
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import SshTransport
from cpuft.launch import resume
from cpuft.launch.inputs import Bundle, plan_sending
from cpuft.launch.plan import Job, add_transfers, find_prepared_hosts, plan_run, plan_training
from cpuft.launch.results import describe_left, plan_partial_cleanup, plan_results, remove_all_but_checkpoints
from cpuft.launch.resume import (
    HostCopy,
    ResumedRun,
    check_newest_checkpoint,
    gather_host_copies,
    gather_resumed_run,
    has_begun,
    parse_host_copy,
    read_resumed_run,
    remove_empty_run,
)
from cpuft.launch.run_state import FINISHED, INTERRUPTED, begin_state, read_state, write_state
from cpuft.launch.supervise import run_as_head_host
from cpuft.plans import Plan, RunPlan, Step
from cpuft.rank import describe_run
from cpuft.record import Line, RecordedRank, ResumedLine, Writer, format_line, read_measurements
from tests.conftest import run_cpuft
from tests.launch.test_inputs import AWAY
from tests.launch.test_plan import make_cluster
from tests.records import make_record, make_state, make_steps

TRAIN = TrainConfig(seed=7, batch_size=16)
HEADER = replace(make_record(2).header, options=dict(vars(TRAIN)))


def write_run(run: Path, *lines: Line) -> Path:
    (run / "logs").mkdir(parents=True)
    (run / "record.jsonl").write_text("".join(format_line(line) + "\n" for line in lines))
    return run


def test_options_ranks_and_batch_are_the_runs_own(tmp_path: Path) -> None:
    resumed = read_resumed_run(str(write_run(tmp_path / "run", HEADER, *make_steps(3, [0.1]))))
    assert resumed == ResumedRun(str(tmp_path / "run"), TRAIN, 2, 3, 64)
    assert resumed.take_over(LaunchConfig(), TrainConfig(), {}) == (LaunchConfig(np=2), TRAIN)
    given = replace(TrainConfig(), backend="mpi", seed=7)
    config, train = resumed.take_over(LaunchConfig(np=5), given, {"np", "seed", "backend"})
    assert (config.np, train) == (5, replace(TRAIN, backend="mpi"))


@pytest.mark.parametrize(
    "lines, message",
    [
        ((), "has no header, as the run ended before its first step"),
        ((replace(HEADER, independent=True),), "measured independent ranks, and cannot be resumed: start"),
    ],
)
def test_runs_that_cannot_be_resumed(tmp_path: Path, lines: tuple[Line, ...], message: str) -> None:
    run = write_run(tmp_path / "run", *lines)
    with pytest.raises(CpuftError, match=message):
        read_resumed_run(str(run))


def test_a_finished_run_is_never_trained_again(tmp_path: Path) -> None:
    """Also that of a script, which has no record, and one of which only a host knows that it has finished."""
    run = write_run(tmp_path / "run", HEADER)
    write_state(str(run), make_state(phase=FINISHED))
    (tmp_path / "script").mkdir()
    write_state(str(tmp_path / "script"), make_state(phase=FINISHED))
    for folder, is_script in ((run, False), (tmp_path / "script", True)):
        with pytest.raises(CpuftError, match="is finished, and there is nothing to resume: start a new run"):
            read_resumed_run(str(folder), is_script)
    write_state(str(run), make_state(phase=INTERRUPTED))
    there = HostCopy(Host("b"), exists=True, state=make_state(owner=2, phase=FINISHED))
    assert read_resumed_run(str(run), host_copies=[there]).finished_on == "b"
    assert read_resumed_run(str(run), host_copies=[HostCopy(Host("b"), state=make_state(owner=4))]).owner == 4


def test_a_run_is_the_same_under_every_path_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hosts know it by its path."""
    asked = list[str]()

    def ask(hosts: object, access: object, run_dir: str) -> tuple[tuple[HostCopy, ...], list[CpuftError]]:
        asked.append(run_dir)
        return (), []

    monkeypatch.setattr("cpuft.launch.resume.gather_host_copies", ask)
    run = write_run(tmp_path / "run", HEADER)
    (tmp_path / "link").symlink_to(".")
    Path("hosts").write_text("127.0.0.2 port=9\n")
    resumed = gather_resumed_run("run/../link/run", LaunchConfig(hostfile="hosts"))
    assert (asked, resumed.run_dir) == ([str(run)], str(run))


def test_an_active_run_cannot_be_resumed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEADER)
    with (
        Writer(str(run), format_line(HEADER) + "\n"),
        pytest.raises(CpuftError, match="is still active: wait until it ends, or stop it first"),
    ):
        read_resumed_run(str(run))
    assert read_resumed_run(str(run)).updates == 0


def test_an_interrupted_run_on_nfs_4_is_resumed_and_an_active_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exclusive lock of NFSv4 needs a file that is open for writing."""
    flock: Any = fcntl.flock

    def flock_on_nfs_4(file: IO[str], operation: int) -> None:
        if operation & fcntl.LOCK_EX and not file.writable():
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_on_nfs_4)
    run = write_run(tmp_path / "run", HEADER)
    assert read_resumed_run(str(run)).updates == 0
    with Writer(str(run), format_line(HEADER) + "\n"), pytest.raises(CpuftError, match="is still active: wait"):
        read_resumed_run(str(run))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF])
def test_a_run_on_a_file_system_without_locks_is_resumed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert read_resumed_run(str(write_run(tmp_path / "run", HEADER))).updates == 0


def test_runs_of_scripts_and_trainings_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "script/logs").mkdir(parents=True)
    assert read_resumed_run(str(tmp_path / "script"), is_script=True) == ResumedRun(str(tmp_path / "script"))
    with pytest.raises(CpuftError, match=r"has recorded no update: name its script"):
        read_resumed_run(str(tmp_path / "script"))
    with pytest.raises(CpuftError, match="is cpuft's own training and has no script: leave the script out"):
        read_resumed_run(str(write_run(tmp_path / "run", HEADER)), is_script=True)


def test_a_script_is_resumed_with_as_many_ranks_as_its_first_start_had(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for cluster in (make_cluster((2, 1)), make_cluster((1,))):
        write_state(str(tmp_path), begin_state(cluster, str(tmp_path), 1))
    resumed = read_resumed_run(str(tmp_path), is_script=True)
    assert resumed.take_over(LaunchConfig(), TrainConfig(), set())[0].np == 3
    assert resumed.take_over(LaunchConfig(np=2), TrainConfig(), {"np"})[0].np == 2


def test_recorded_options_with_wrong_types_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(HEADER, options=dict(vars(TRAIN)) | {"batch_size": "many"}))
    with pytest.raises(
        CpuftError, match=r"cannot be resumed, because the record.batch_size is 'many', and must be a whole"
    ):
        read_resumed_run(str(run))


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEADER)
    told = [run_cpuft("launch", "--resume", str(run), *words) for words in (("--seed", "8"), ("--run-dir", "x"))]
    assert [done.returncode for done in told] == [2, 2]
    assert told[0].stderr == f"cpuft: error: {run} was started with --seed 7, not 8: leave --seed out\n"
    said = "--resume and --run-dir both name the folder of the run: leave --run-dir out"
    assert told[1].stderr == f"cpuft: error: {said}\n"


def test_a_resumed_run_uses_its_folder_and_keeps_its_logs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEADER)
    resumed = ResumedRun(str(run), TRAIN, 2, 3, 64)
    plan = plan_training(make_cluster((2,)), LaunchConfig(np=2), TRAIN, str(run), "lines", {}, resumed=resumed)
    ((ranks,),), ((make,),) = plan.ranks, plan.make
    assert {"--recorded-updates=3", "--global-batch=64"} <= set(ranks.command)
    assert "CPUFT_RESUMED" in ranks.command
    for number in (1, 2):
        (run / "logs" / f"of-start-{number}").touch()
        subprocess.run(make.command, check=True)
    assert sorted(path.name for path in run.iterdir()) == ["logs", "logs-1", "logs-2", "record.jsonl"]
    assert [path.name for path in (run / "logs-2").iterdir()] == ["of-start-2"]


@pytest.mark.parametrize("ranks, told", [((2,), True), ((1, 1), True), ((1, 1, 1), False)])
def test_measurements_are_reused_only_between_the_same_hosts(
    tmp_path: Path, ranks: tuple[int, ...], told: bool
) -> None:
    """The third attempt has a new host, node3."""
    again = ResumedLine(3, 0, 1, [RecordedRank(0, "node2", [0])], "gloo", "fp32", "", "2026")
    resumed = read_resumed_run(str(write_run(tmp_path / "run", HEADER, again)))
    plan = plan_training(make_cluster(ranks), LaunchConfig(np=sum(ranks)), TRAIN, "r", "lines", {}, resumed=resumed)
    words = {word for stage in plan.ranks for step in stage for word in step.command if "--measurements=" in word}
    measured = json.dumps(asdict(read_measurements(HEADER)))
    assert words == (set(pack_argv([f"--measurements={measured}"])) if told else set())


def test_rejected_input_leaves_a_resumed_run_unchanged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", HEADER)
    refused = Step("prepare", ("sh", "-c", "echo 'cpuft: error: no such rows' >&2; exit 2"))
    plan = RunPlan(prepare=((refused,),), ranks=((Step("ranks", ("true",)),),), resumed=True)
    with pytest.raises(CpuftError, match="no such rows"):
        run_as_head_host(plan, str(run), make_state("localhost"), 0.0, make_cluster((1,)).access.transport)
    assert (run / "record.jsonl").exists()


HERE = replace(AWAY, command_prefixes={})
ALL_LOGS = ["logs", "logs-1", "logs-2"]


def write_work(folder: Path, *updates: str) -> Path:
    """Write the work folder of a run as a host has it: record, logs, prepared examples, lock and checkpoints."""
    work = folder / "mark" / "a 0"
    (work / "logs").mkdir(parents=True)
    for path in (work / "data.npz", work / ".hidden", folder / "mark/a 0.lock"):
        path.touch()
    lines: list[Line] = [HEADER, *make_steps(3, [0.1])]
    text = "".join(format_line(line) + "\n" for line in lines)
    (work / "record.jsonl").write_text(text)
    for update in updates:
        (work / "checkpoints" / update).mkdir(parents=True)
        (work / "checkpoints" / update / "record.jsonl").write_text(text)
    return work


def keep(folder: Path, work: Path, part: str = "head") -> subprocess.CompletedProcess[str]:
    """Run the step of a host on this machine."""
    ((step, *_),) = plan_partial_cleanup(HERE, str(work))
    words = [*step.command[:4], str(folder), str(folder / "mark.sent"), str(work), part]
    return subprocess.run(words, capture_output=True, text=True, check=True)


def test_only_checkpoints_of_an_unfinished_run_stay_on_hosts(tmp_path: Path) -> None:
    work = write_work(tmp_path, "000000008.0", "000000010.0", "000000012.0.new")
    (tmp_path / "mark.sent").mkdir()
    (tmp_path / "other").mkdir()
    done = keep(tmp_path, work)
    assert (done.stdout, done.stderr) == ("000000010.0\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mark", "other"]
    assert [path.name for path in (tmp_path / "mark").iterdir()] == ["a 0"]
    assert [path.name for path in work.iterdir()] == ["checkpoints"]
    assert (work / "checkpoints/000000010.0/record.jsonl").exists()


def test_a_run_without_checkpoints_is_removed_completely(tmp_path: Path) -> None:
    work = write_work(tmp_path, "000000012.0.new")
    assert keep(tmp_path, work).stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_files_on_the_disk_of_a_lost_head_host_stay(tmp_path: Path) -> None:
    work = write_work(tmp_path, "000000010.0")
    assert keep(tmp_path, work, part="").stdout == ""
    assert (work / "record.jsonl").exists()


def test_hosts_with_checkpoints_are_named_and_noted_for_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of one host, e, does not answer."""
    monkeypatch.setattr("cpuft.launch.results._PARTIAL_REMOVE_SECONDS", 6.0)
    said = {"a": "echo 000000008.0", "b": "echo Warning: b >&2; echo 000000010.1", "c": "exit 255", "d": "true"}
    said["e"] = "exec sleep 60"
    plan = RunPlan(
        partial_cleanup=(tuple(Step("keep", ("sh", "-c", script), host=host) for host, script in said.items()),)
    )
    run = tmp_path / "run"
    run.mkdir()
    write_state(str(run), make_state())
    printed = list[str]()
    remove_all_but_checkpoints(plan, str(run), without="a", say=printed.append)
    assert printed == [
        describe_left(["c", "e"]),
        f"cpuft: checkpoints up to update 10 are saved on b: continue with cpuft launch --resume {run}",
    ]
    noted = read_state(str(run))
    assert noted
    assert (noted.checkpoints, noted.sequence) == ({"b": 10}, 1)
    for owner, advice in (
        ("b", "it was removed there, so start a new run"),
        ("z", "add z to the hosts again, or start"),
    ):
        write_state(str(run), make_state(checkpoints={owner: 10}))
        with pytest.raises(CpuftError, match=f"has a checkpoint of {run}, but {owner} had one: {advice}"):
            check_newest_checkpoint([HostCopy(Host("a"))], AWAY, str(run))
    check_newest_checkpoint([HostCopy(Host("a"), checkpoint_update=3)], AWAY, str(run))
    nothing = replace(plan, partial_cleanup=((plan.partial_cleanup[0][3],),))
    remove_all_but_checkpoints(nothing, str(tmp_path / "none"), say=printed.append)
    assert len(printed) == 2
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("cluster, updates", [(AWAY, (4, 9)), (replace(AWAY, works_remotely=False), (9, 4))])
def test_the_host_with_the_newest_checkpoint_must_be_used(cluster: Cluster, updates: tuple[int, int]) -> None:
    """If the run folder is on this machine, checkpoints on hosts are not used."""
    kept = [HostCopy(Host("a"), checkpoint_update=updates[0]), HostCopy(Host("z"), checkpoint_update=updates[1])]
    with pytest.raises(
        CpuftError, match=r"the newest checkpoint of run, of update 9, is on [az], which would not be used"
    ):
        check_newest_checkpoint(kept, cluster, "run")
    check_newest_checkpoint(kept[:1], AWAY, "run")
    check_newest_checkpoint([HostCopy(Host("a"), exists=True)], AWAY, "run")


def look(place: Path) -> HostCopy:
    return parse_host_copy(json.dumps(describe_run.describe_run(f"{place}/mark/a 0")), Host("a"))


def test_a_host_reports_its_files_of_a_run(tmp_path: Path) -> None:
    assert look(tmp_path) == HostCopy(Host("a"))
    work = write_work(tmp_path, "000000008.0", "000000010.1", "000000012.0.new")
    found = HostCopy(Host("a"), True, False, 10, 3, format_line(HEADER), has_data=True)
    assert look(tmp_path) == found
    with (tmp_path / "mark/a 0.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert look(tmp_path) == replace(found, is_active=True)
    (work / "checkpoints/rank-1.last").write_text("14\n")
    keep(tmp_path, work)
    assert look(tmp_path) == replace(found, steps=14, has_data=False)


def test_a_run_that_its_detached_command_has_fetched_is_not_trained_again(tmp_path: Path) -> None:
    """Its hosts have nothing else of it, or an older checkpoint."""
    fetched = tmp_path / "detached/mark/run/a 0"
    fetched.mkdir(parents=True)
    write_state(str(fetched), make_state(owner=2, phase=FINISHED))
    found = look(tmp_path)
    assert found == HostCopy(Host("a"), state=make_state(owner=2, phase=FINISHED))
    older = HostCopy(Host("b"), True, checkpoint_update=8, header=format_line(HEADER), state=make_state())
    with pytest.raises(CpuftError, match="run x is finished, and its results are on a: fetch them with cpuft attach x"):
        read_resumed_run("x", host_copies=[older, found])


@pytest.mark.parametrize("code", [-1, 1, 255])
def test_a_host_that_does_not_answer_the_question_is_not_one_without_files(code: int, tmp_path: Path) -> None:
    write_state(str(tmp_path), make_state())

    class Transport(SshTransport):
        def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 0.0) -> Answer:
            assert argv[-1] == "0123456789ab/run"
            return Answer(code, "", "no shell") if host.name == "b" else Answer(0, '{"exists": true}', "")

    copies, (error,) = gather_host_copies([Host("a"), Host("b")], Access(Transport()), str(tmp_path))
    assert copies == (HostCopy(Host("a"), exists=True),)
    assert str(error) == "host b cannot list its files of the run (no shell): check its disk"


def test_a_finished_run_that_was_not_fetched_is_recognized(tmp_path: Path) -> None:
    """It only has to be fetched, whatever this machine has of it."""
    work = write_work(tmp_path, "000000010.0")
    write_state(str(work.parent), make_state(sequence=1))
    assert not look(tmp_path).is_finished
    write_state(str(work), make_state(sequence=2, phase=FINISHED))
    found = look(tmp_path)
    assert found.is_finished
    run = str(tmp_path / "run")
    assert read_resumed_run(run, host_copies=[found]) == ResumedRun(run, finished_on="a")
    assert read_resumed_run(run, is_script=True, host_copies=[found]).finished_on == "a"
    with pytest.raises(CpuftError, match="is still active: wait"):
        read_resumed_run(run, host_copies=[replace(found, is_active=True)])


def test_a_run_without_a_local_record_is_read_from_its_hosts(tmp_path: Path) -> None:
    """If the head host was lost, this machine has no record."""
    run = str(tmp_path / "run")
    copies = [HostCopy(Host("a"), True), HostCopy(Host("b"), True, False, 10, 9, format_line(HEADER))]
    assert read_resumed_run(run, host_copies=copies) == ResumedRun(run, TRAIN, 2, 10, 64)
    assert read_resumed_run(run, is_script=True, host_copies=copies[:1]) == ResumedRun(run)
    with pytest.raises(CpuftError, match="is still active: wait"):
        read_resumed_run(run, host_copies=[replace(copies[1], is_active=True)])
    with pytest.raises(CpuftError, match="is cpuft's own training and has no script"):
        read_resumed_run(run, is_script=True, host_copies=copies)
    with pytest.raises(CpuftError, match="has recorded no update"):
        read_resumed_run(run, host_copies=copies[:1])
    write_run(tmp_path / "run", HEADER, *make_steps(12, [0.1]))
    assert read_resumed_run(run, host_copies=copies).updates == 12


@pytest.mark.parametrize(
    ("copy", "message"),
    [
        (HostCopy(Host("a"), is_active=True), "is still active: wait"),
        (
            HostCopy(Host("a"), exists=True),
            "has recorded no update: name its script if it has one, else start it again in a new folder",
        ),
        (HostCopy(Host("a"), state=make_state()), "has recorded no update"),
        (HostCopy(Host("a")), "give the folder of an earlier run"),
    ],
)
def test_a_run_without_a_record_is_active_or_did_not_begin_or_never_was(
    copy: HostCopy, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CpuftError, match=message):
        read_resumed_run(str(tmp_path / "run"), host_copies=[copy])


def test_a_silent_host_is_named_if_no_other_has_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, silent = str(tmp_path / "run"), CpuftError("host b does not answer")
    monkeypatch.setattr(resume, "read_hosts", lambda config: (Host("a"), Host("b")))
    monkeypatch.setattr(resume, "find_access", lambda config: Access(SshTransport()))
    copies = [HostCopy(Host("a"), state=make_state())]
    monkeypatch.setattr(resume, "gather_host_copies", lambda *given: (copies, [silent]))
    with pytest.raises(CpuftError, match="is not here, and host b does not answer: try again when they answer"):
        gather_resumed_run(run, LaunchConfig())
    write_run(tmp_path / "run", HEADER)
    assert gather_resumed_run(run, LaunchConfig()).unreachable == ("host b does not answer",)


def test_remote_paths_in_recorded_options_may_be_replaced() -> None:
    sent = replace(TRAIN, data_dir=f"{AWAY.inputs}/feed/MRPC")
    taken = ResumedRun("run", sent, 2).take_over(LaunchConfig(), TrainConfig(data_dir="here", seed=7), {"data_dir"})[1]
    assert taken == replace(TRAIN, data_dir="here")
    assert ResumedRun("run", sent, 2).take_over(LaunchConfig(), TrainConfig(), {})[1] == sent
    bundle = Bundle((), f"{AWAY.inputs}/feed")
    assert plan_sending((bundle,), {"a": set(), "b": set()}, AWAY) == ()
    with pytest.raises(
        CpuftError, match=r"/feed, with which the run was started, is missing on b: name --model, --data-dir"
    ):
        plan_sending((bundle,), {"a": set(), "b": {bundle.remote_folder}}, AWAY)


def test_a_resumed_run_is_planned_on_the_hosts_that_answer() -> None:
    """Another host may be the head host, and the files on the old one are removed at the end."""
    cluster = replace(
        make_cluster((2, 1)),
        works_remotely=True,
        command_prefixes={"node1": ("ssh", "node1"), "node2": ("ssh", "node2")},
    )
    kept = (HostCopy(Host("node0"), True), HostCopy(Host("node1"), True, checkpoint_update=9), HostCopy(Host("node3")))
    resumed = ResumedRun("/runs/one", TRAIN, 4, 9, 64, kept)
    work = cluster.work_dir("/runs/one")
    plan = plan_training(cluster, LaunchConfig(np=3), TRAIN, work, "lines", {}, resumed=resumed)
    plan = add_transfers(plan, (), {}, cluster, "/runs/one", kept)
    ((make,),), ((ranks,),) = plan.make, plan.ranks
    assert make.host == ranks.host == "node1"
    assert {"--recorded-updates=9", "--global-batch=64"} <= set(ranks.command)
    assert f"--run-dir={work}" in ranks.command
    _, clean = plan.results
    assert [step.host for step in clean] == ["node1", "node2", "node0"]
    assert plan.command_prefixes["node0"][0] == "ssh"
    assert [[step.host for step in stage] for stage in plan.partial_cleanup] == [["node1", "node2"]]
    assert plan.partial_cleanup[0][0] not in [step for stage in plan.full_plan.stages for step in stage]


def plan_sequel(work: str, resumed: ResumedRun) -> RunPlan:
    """The plan of a resumed run on three hosts with disks of their own."""
    command_prefixes: dict[str, tuple[str, ...]] = {name: ("ssh", name) for name in ("node1", "node2", "node3")}
    cluster = replace(make_cluster((1, 1, 1)), works_remotely=True, command_prefixes=command_prefixes)
    plan = plan_training(cluster, LaunchConfig(np=3), TRAIN, work, "lines", {}, resumed=resumed)
    return add_transfers(
        plan, (), {}, cluster, resumed.run_dir, resumed.host_copies, find_prepared_hosts(resumed, cluster)
    )


@pytest.mark.parametrize(
    "because, prepares",
    [
        ("host node4 was lost", ["copy the prepared examples to node2"]),
        (
            "",
            ["check and tokenize the examples once, before any rank starts"]
            + [f"copy the prepared examples to node{number}" for number in (2, 3)],
        ),
    ],
)
def test_examples_are_prepared_once_per_launch(because: str, prepares: list[str]) -> None:
    """A user who resumes a run later may have other examples."""
    kept = (HostCopy(Host("node1"), has_data=True), HostCopy(Host("node2")), HostCopy(Host("node3"), has_data=True))
    plan = plan_sequel("/work/one", ResumedRun("/runs/one", TRAIN, 4, 9, 64, kept, restart_reason=because))
    assert [step.why for stage in plan.prepare for step in stage] == prepares


def test_prepared_examples_of_a_local_run_are_reused(tmp_path: Path) -> None:
    resumed = ResumedRun(str(tmp_path), restart_reason="rank 1 was killed")
    assert find_prepared_hosts(resumed, make_cluster((2,))) == set()
    (tmp_path / "data.npz").touch()
    assert find_prepared_hosts(resumed, make_cluster((2,))) == {"node1"}
    assert find_prepared_hosts(replace(resumed, restart_reason=""), make_cluster((2,))) == set()


@pytest.mark.parametrize("fetched, logs", [("node1", ["logs"]), ("node2", ALL_LOGS), ("", ALL_LOGS)])
def test_logs_that_are_here_are_not_fetched_again(tmp_path: Path, fetched: str, logs: list[str]) -> None:
    work = write_work(tmp_path)
    (work / "logs-1").mkdir()
    (work / "logs" / "old").touch()
    ((make,),) = plan_sequel(str(work), ResumedRun("/runs/one", TRAIN, fetched_from=fetched)).make
    script = make.command[2].replace(make_cluster(()).folder, str(tmp_path))
    subprocess.run(["sh", "-c", script, *make.command[3:]], check=True)
    assert sorted(path.name for path in work.glob("logs*")) == logs
    assert list((work / "logs").iterdir()) == []
    assert (work / "data.npz").exists()


def fetch(work: Path, run: Path) -> int:
    (step,), _ = plan_results(HERE, str(work), str(run))
    return subprocess.run(Plan().as_local(step).command, input=step.stdin.encode(), check=False).returncode


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_resumed_run_is_merged_into_the_local_run(tmp_path: Path) -> None:
    work, run = write_work(tmp_path / "there", "000000010.0"), write_run(tmp_path / "runs/a 0", HEADER)
    (run / "logs/first").touch()
    (run / "report.html").touch()
    (run / "mine").mkdir()
    (run / "mine/old").touch()
    (work / "mine").mkdir()
    (work / "mine/new").touch()
    (work / "logs/second").touch()
    assert fetch(work, run) == 0
    assert names(run) == [".hidden", "data.npz", "logs", "logs-1", "mine", "record.jsonl", "report.html"]
    assert [names(run / part) for part in ("logs", "logs-1", "mine")] == [["second"], ["first"], ["new", "old"]]
    assert (run / "record.jsonl").read_text() == (work / "record.jsonl").read_text()
    (work / "logs").rename(work / "logs-1")
    (work / "logs").mkdir()
    assert fetch(work, run) == 0
    assert names(run)[2:6] == ["logs", "logs-1", "logs-2", "logs-3"]
    assert sorted(names(run / "logs-2") + names(run / "logs-3")) == ["second", "second"]
    assert names(run.parent) == ["a 0"]


def test_a_rejected_resume_leaves_the_local_run_unchanged(tmp_path: Path) -> None:
    work, run = write_work(tmp_path / "there", "000000010.0"), write_run(tmp_path / "runs/run", HEADER)
    keep(tmp_path / "there", work)
    assert fetch(work, run) == 0
    assert names(run) == ["logs", "record.jsonl"]
    assert names(run.parent) == ["run"]


def claim(plan: RunPlan) -> int:
    """Make the run folder on this machine as the plan says; the exit code."""
    ((step,),) = plan.claim
    return subprocess.run(Plan().as_local(step).command, input=step.stdin.encode(), check=False).returncode


def test_the_folder_on_hosts_is_found_from_whichever_machine_has_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has another host name than the one before it, and may have the run folder under another path."""
    run, asked = tmp_path / "runs/a 0", list[str]()
    away = replace(make_cluster((1,)), works_remotely=True, command_prefixes={"node1": ("sh", "-c")})
    job = Job(str(run), LaunchConfig(np=1), TRAIN, ("true",))
    plan = plan_run(job, away)
    ((make,),) = plan.make
    assert claim(plan) == 0

    class Transport(SshTransport):
        def run(self, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 0.0) -> Answer:
            asked.append(argv[-1])
            return Answer(0, '{"exists": true}')

    monkeypatch.setattr("socket.gethostname", lambda: "next")
    moved = (tmp_path / "runs").rename(tmp_path / "mounted") / "a 0"
    gather_host_copies([Host("node1")], Access(Transport()), str(moved))
    work = make.command[-1]
    assert (f"{away.folder}/{asked[0]}", work.endswith("/a 0")) == (work, True)
    later = replace(away, token="another")
    resumed = plan_run(replace(job, run_dir=str(moved)), later, ResumedRun(str(moved)))
    assert claim(resumed) == 0
    assert (resumed.make[0][0].command[-1], later.work_dir(str(moved))) == (work, work)


def test_two_launchers_with_the_same_paths_do_not_share_a_folder_on_hosts() -> None:
    """Containers may have the same host name, too."""
    first, second = (replace(gather_cluster(LaunchConfig()), works_remotely=True) for _ in range(2))
    assert first.work_dir("/runs/one") == first.work_dir("/runs/one") != second.work_dir("/runs/one")
    assert first.work_dir("/runs/one") != first.work_dir("/runs/two/one")


def test_a_new_run_does_not_take_an_existing_folder(tmp_path: Path) -> None:
    """Another launch may have made it since the plan was made."""
    away = replace(make_cluster((1,)), works_remotely=True)
    plan = plan_run(Job(str(tmp_path / "run"), LaunchConfig(np=1), TRAIN, ("true",)), away)
    assert (claim(plan), claim(plan)) == (0, 1)


@pytest.mark.parametrize(
    "changes", [{"id": "run"}, {"id": "../0123456789ab"}, {"name": ".."}, {"name": "a/b"}, {"name": ""}, {"id": 5}]
)
def test_a_state_that_names_no_folder_of_a_run_is_ignored(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text(json.dumps({"id": "0123456789ab", "name": "run"} | changes))
    assert read_host_folder(str(tmp_path)) == ""


def test_no_host_says_where_the_files_of_a_run_are(tmp_path: Path) -> None:
    work, run = write_work(tmp_path / "there"), write_run(tmp_path / "runs/run", HEADER)
    write_state(str(work), make_state(id="ba9876543210"))
    write_state(str(run), make_state())
    assert fetch(work, run) == 0
    assert read_host_folder(str(run)) == "0123456789ab/run"


def test_a_run_folder_with_nothing_but_notes_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_state(str(run), make_state())
    assert not has_begun(str(run))
    (run / "mine").touch()
    assert has_begun(str(run))
    remove_empty_run(str(run))
    (run / "mine").unlink()
    write_state(str(run), make_state(checkpoints={"b": 8}))
    remove_empty_run(str(run))
    assert run.exists()
    write_state(str(run), make_state())
    remove_empty_run(str(run))
    assert not run.exists()
