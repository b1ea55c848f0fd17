"""The queue of a sweep, with programs in place of launches: what is started where, and what survives."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shlex
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from cpuft import execute
from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError, Interrupted
from cpuft.execute import Answer
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import LOGIN_REFUSED, TIMED_OUT, HostError, SshTransport
from cpuft.record import Line, format_line
from cpuft.report.sweep import (
    DONE,
    FAILED,
    FILE_NAME,
    LOST,
    PRUNED,
    STOPPED,
    VERSION,
    AttemptEnd,
    AttemptStart,
    SearchSettings,
    SweepHeader,
    Trial,
    format_sweep,
    read_sweep,
    sweep_to_json,
)
from cpuft.sweep import queue
from cpuft.sweep.queue import (
    Place,
    SweepQueue,
    _ActiveRun,
    continue_journal,
    estimate_seconds_left,
    find_lost_hosts,
    format_status,
    has_locked_journal,
    name_in_trackers,
    open_journal,
    plan_places,
)
from cpuft.sweep.study import OptunaSearch
from cpuft.train.checkpoint.files import write_checkpoint
from tests.records import make_record

LOST_NODE1 = {"node1": "does not answer"}
PLACES = [Place("node1", ("--only-hosts=node1",)), Place("node2", ("--only-hosts=node2",))]
PROGRAM = """
import math, os, pathlib, signal, sys, time
words = sys.argv[1:]
options = dict(word[2:].split("=", 1) for word in words if "=" in word)
folder = pathlib.Path(words[words.index("--run-dir" if "--run-dir" in words else "--resume") + 1])
with open(folder.parent / "calls", "a") as calls:
    calls.write(" ".join(words) + "\\n")
folder.mkdir(exist_ok=True)
(folder / "group").write_text(os.environ.get("WANDB_RUN_GROUP", ""))
record = folder / "record.jsonl"
lines = pathlib.Path(__file__).with_name("record").read_text().splitlines(keepends=True)
if not record.exists():
    record.write_text("".join(lines[:-1]))
seed = int(options.get("seed", "1"))
if seed == 3 and "--resume" not in words:
    time.sleep(600)
if seed == 2:
    sys.exit("step 1/3  loss nan\\ncpuft: error: the loss is nan: lower --learning-rate")
if seed == 7 and "--resume" not in words:
    sys.exit(75)
if any(folder.parent.glob("bad-" + options["only-hosts"])):
    sys.exit("cpuft: error: the disk is full")
if "learning-rate" in options:
    journal = folder.parent / "sweep.jsonl"
    metric = 0.9 - 0.1 * abs(math.log10(float(options["learning-rate"])) + 4)
    for update in (10, 20):
        noted = journal.read_text().count('"evaluation"')
        print(f"step {update}/30  loss 0.7")
        print(f"evaluation after update {update}: accuracy {metric:.4f}  f1 0.1", flush=True)
        while journal.read_text().count('"evaluation"') == noted:
            time.sleep(0.02)
        time.sleep(0.5)  # until the sweep has decided
    print("evaluating on 4 examples\\nevaluation after update 30: accuracy 0.0000  f1 0.1", flush=True)
with record.open("a") as file:
    file.write(lines[-1])
"""


@dataclass
class Launches:
    """Programs in place of launches. With seed 2 they fail, and with seed 3 they wait until a signal comes."""

    folder: Path
    said: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[str]:
        """The arguments of all launches, in their order."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def header(self, *seeds: int, **changes: Any) -> SweepHeader:
        """A sweep over seeds."""
        runs = [{"seed": str(seed)} for seed in seeds]
        return replace(SweepHeader(VERSION, ["--task=demo"], runs, "", "auto", 1, 0.0, [1.0] * len(runs)), **changes)

    def run(self, header: SweepHeader | None, places: list[Place] | None = None, stop_after: int = 0) -> int:
        """Carry out a new sweep, or continue the one that is there."""
        folder = str(self.folder)
        with open_journal(folder, header) if header else continue_journal(folder) as journal:
            settings = journal.sweep.header.search
            search = OptunaSearch(settings, True) if settings.trials else None
            return SweepQueue(journal, ("--no-check",), places or PLACES, stop_after, self.said.append, search).run()


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launches:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    record = make_record()
    assert record.footer
    lines: list[Line] = [record.header, *record.steps, *record.evaluations, record.footer]
    (tmp_path / "record").write_text("".join(format_line(line) + "\n" for line in lines))
    monkeypatch.setattr(queue, "module_command", lambda python, module: (sys.executable, str(program)))
    return Launches(tmp_path / "sweep")


def test_all_runs_end_and_each_has_its_options(launches: Launches) -> None:
    assert launches.run(launches.header(1, 4, 5, 6)) == 0
    sweep = read_sweep(str(launches.folder))
    assert sweep.list_with_status(DONE) == [1, 2, 3, 4]
    assert sorted(call.partition("--task")[2] for call in launches.calls) == [
        f"=demo --seed={seed} --run-dir {launches.folder}/run-{run}" for run, seed in enumerate((1, 4, 5, 6), start=1)
    ]
    assert {start.place for start in sweep.starts} == {"node1", "node2"}
    assert all(call.startswith("launch --no-check --only-hosts=node") for call in launches.calls)
    assert sweep.find_end(1) is not None
    assert launches.said[-1].startswith("run ")


def test_a_run_that_fails_is_noted_and_the_others_go_on(launches: Launches) -> None:
    assert launches.run(launches.header(2, 1, 4)) == 1
    sweep = read_sweep(str(launches.folder))
    assert (sweep.list_with_status(FAILED), sweep.list_with_status(DONE)) == ([1], [2, 3])
    end = sweep.find_end(1)
    assert end is not None
    assert (end.exit_code, end.reason) == (1, "the loss is nan: lower --learning-rate")
    assert re.search(r"failed after \d+ s: the loss is nan: lower --learning-rate", "".join(launches.said))


def test_a_failed_run_is_tried_again_when_the_sweep_is_continued(launches: Launches) -> None:
    assert launches.run(launches.header(2, 1)) == 1
    assert launches.run(None) == 1
    starts = [start for start in read_sweep(str(launches.folder)).starts if start.run == 1]
    assert [start.folder for start in starts] == ["run-1", "run-1-attempt-2"]


def test_a_host_on_which_no_run_can_train_gets_no_more_runs(launches: Launches) -> None:
    launches.folder.mkdir()
    (launches.folder / "bad-node1").touch()
    assert launches.run(launches.header(1, 4, 5, 6)) == 0
    sweep = read_sweep(str(launches.folder))
    assert sweep.list_with_status(DONE) == [1, 2, 3, 4]
    assert sum(start.place == "node1" for start in sweep.starts) <= 2
    assert "it starts again, because it ended without an update (the disk is full)" in "".join(launches.said)


def test_an_interruption_notice_is_no_failure(launches: Launches) -> None:
    assert launches.run(launches.header(7), PLACES[:1]) == 0
    starts = read_sweep(str(launches.folder)).starts
    assert [(start.attempt, start.folder) for start in starts] == [(1, "run-1"), (2, "run-1")]
    assert "--resume" in launches.calls[1]


def test_a_stopped_run_continues_where_its_checkpoint_is(launches: Launches) -> None:
    interrupt_soon(lambda: len(launches.calls) == 2)
    with pytest.raises(Interrupted):
        launches.run(launches.header(3, 3))
    before = {start.run: start.place for start in read_sweep(str(launches.folder)).starts}
    assert launches.run(None, PLACES[::-1]) == 0
    assert {start.run: start.place for start in read_sweep(str(launches.folder)).starts[2:]} == before


def test_too_many_failures_end_the_sweep(launches: Launches) -> None:
    with pytest.raises(CpuftError, match=r"1 run failed, and --stop-after-failures is 1: correct the reason") as told:
        launches.run(launches.header(2, 3, 3, 3), stop_after=1)
    assert told.value.exit_code == 1
    sweep = read_sweep(str(launches.folder))
    assert sweep.list_with_status(FAILED) == [1]
    assert sweep.list_with_status(STOPPED) == [2]


def test_a_metric_that_no_run_reports_ends_the_sweep(launches: Launches) -> None:
    with pytest.raises(
        CpuftError, match=r"the runs do not report --metric bleu: start a new sweep with one of accuracy"
    ):
        launches.run(launches.header(1, 3, metric="bleu"))


def interrupt_soon(condition: Callable[[], bool]) -> None:
    """Send this process Ctrl-C as soon as a condition holds."""

    def wait() -> None:
        end = time.monotonic() + 20
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def test_an_interrupted_sweep_continues_with_its_runs(launches: Launches) -> None:
    interrupt_soon(lambda: len(launches.calls) == 3)
    with pytest.raises(Interrupted):
        launches.run(launches.header(1, 3, 3))
    sweep = read_sweep(str(launches.folder))
    assert (sweep.list_with_status(DONE), sweep.list_with_status(STOPPED)) == ([1], [2, 3])
    # What was written last may have been cut off.
    with (launches.folder / FILE_NAME).open("a") as file:
        file.write('{"kind": "en')
    assert launches.run(None) == 0
    sweep = read_sweep(str(launches.folder))
    assert sweep.list_with_status(DONE) == [1, 2, 3]
    resumed = [call.partition("--only-hosts=")[2][6:] for call in launches.calls[3:]]
    assert sorted(resumed) == [f"--resume {launches.folder}/run-{run}" for run in (2, 3)]


def test_a_run_that_ended_while_its_sweep_was_killed_is_not_repeated(launches: Launches) -> None:
    launches.run(launches.header(1, 4))
    path = launches.folder / FILE_NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"end"' not in line))
    assert launches.run(None) == 0
    assert len(launches.calls) == 2
    assert read_sweep(str(launches.folder)).list_with_status(DONE) == [1, 2]


def test_the_run_of_a_lost_host_starts_again_elsewhere(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "find_lost_hosts", lambda place, options: LOST_NODE1 if place.name == "node1" else {})
    monkeypatch.setattr(queue, "_RETURN_SECONDS", 0.5)
    header = launches.header(2, 1)
    with pytest.raises(CpuftError, match="no host of the sweep can be used any more: repair them") as told:
        launches.run(header, [PLACES[0]])
    assert told.value.exit_code == 75  # so that the script of a job asks its scheduler for another start
    assert read_sweep(str(launches.folder)).list_with_status(LOST) == [1]
    # The host is repaired, or another one is there.
    assert launches.run(None, [PLACES[1]]) == 1
    sweep = read_sweep(str(launches.folder))
    assert (sweep.list_with_status(FAILED), sweep.list_with_status(DONE)) == ([1], [2])
    assert [(start.run, start.attempt, start.folder) for start in sweep.starts] == [
        (1, 1, "run-1"),
        (1, 2, "run-1-attempt-2"),
        (2, 1, "run-2"),
    ]


def lose_first_host(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Let node1 be lost when a run on it fails; return two places with hosts of their own."""
    monkeypatch.setattr(queue, "find_lost_hosts", lambda place, options: LOST_NODE1 if place.name == "node1" else {})
    return [replace(place, hosts=(Host(place.name),)) for place in PLACES]


def write_copy(launches: Launches, run: str) -> Path:
    """Write a checkpoint of update 12 into the folder of a run, as the launch on a lost host has copied it."""
    files = {"state.safetensors": memoryview(b"weights"), "record.jsonl": memoryview(b"")}
    return write_checkpoint(launches.folder / run / "checkpoints", 12, 0, files)


def test_the_run_of_a_lost_host_continues_elsewhere_from_its_copied_checkpoint(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 2 fails, here because its host is lost."""
    places = lose_first_host(monkeypatch)
    write_copy(launches, "run-1")
    header = launches.header(2, options=["--task=demo", "--data-dir=glue", "--epochs=1.0"])
    assert launches.run(header, places) == 0
    sweep = read_sweep(str(launches.folder))
    assert [(start.place, start.folder) for start in sweep.starts[:2]] == [("node1", "run-1"), ("node2", "run-1")]
    told = "it continues on another host after update 12, from the copy of its checkpoint"
    assert told in "".join(launches.said)
    first, second = launches.calls[:2]
    assert first.endswith(f"--run-dir {launches.folder}/run-1 --copy-checkpoints")
    # The other host may not have the files that the first launch sent.
    assert second.endswith(f"--only-hosts=node2 --data-dir=glue --resume {launches.folder}/run-1 --copy-checkpoints")


@pytest.mark.parametrize("is_there", [True, False])
def test_without_a_whole_copy_the_run_of_a_lost_host_starts_from_the_beginning(
    is_there: bool, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, problem = lose_first_host(monkeypatch), "no checkpoint had been copied yet"
    if is_there:
        (write_copy(launches, "run-1") / "state.safetensors").write_bytes(b"wiights")
        problem = "the copy of its checkpoint of update 12 is damaged (state.safetensors is damaged)"
    assert launches.run(launches.header(2), places) == 1
    sweep = read_sweep(str(launches.folder))
    assert [start.folder for start in sweep.starts[:2]] == ["run-1", "run-1-attempt-2"]
    assert f"it starts again from the beginning on another host, because {problem}" in "".join(launches.said)
    assert not any("--resume" in call for call in launches.calls)


def test_a_stopped_run_whose_host_is_not_used_any_more_continues_from_its_copy(launches: Launches) -> None:
    interrupt_soon(lambda: len(launches.calls) == 2)
    with pytest.raises(Interrupted):
        launches.run(launches.header(3, 3))
    write_copy(launches, "run-1")
    others = [Place(name, (f"--only-hosts={name}",)) for name in ("node8", "node9")]
    interrupt_soon(lambda: len(launches.calls) == 4)
    with pytest.raises(Interrupted):
        launches.run(None, others)
    assert launches.calls[2].endswith(f"--only-hosts=node8 --resume {launches.folder}/run-1")
    assert launches.calls[3].endswith(f"--run-dir {launches.folder}/run-2-attempt-2")
    assert "run 1 of 2 continues on node8: seed 3" in launches.said
    problem = "no checkpoint had been copied yet"
    assert f"run 2 of 2 starts on node9 from the beginning, because {problem}: seed 3" in launches.said


def test_copies_can_be_turned_off(launches: Launches) -> None:
    places = [replace(PLACES[0], hosts=(Host("node1"),))]
    with open_journal(str(launches.folder), launches.header(1)) as journal:
        SweepQueue(journal, ("--no-check", "--no-copy-checkpoints"), places, 0, launches.said.append).run()
    assert "--copy-checkpoints" not in launches.calls[0].split()


def test_hosts_that_were_all_lost_are_used_when_they_answer_again(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([LOST_NODE1, LOST_NODE1, {}])
    monkeypatch.setattr(queue, "find_lost_hosts", lambda place, options: next(answers, {}))
    assert launches.run(launches.header(2, 1), PLACES[:1]) == 1
    sweep = read_sweep(str(launches.folder))
    assert (sweep.list_with_status(FAILED), sweep.list_with_status(DONE)) == ([1], [2])
    assert "no host answers any more: waiting up to 10 min for one" in launches.said


SEARCH = SearchSettings(
    9, 1, "random", "median", 5, [{"learning_rate": "1e-6..1e-2", "seed": "1"}], study="sweep", token="a"
)


def test_runs_that_are_worse_than_the_median_are_pruned(launches: Launches) -> None:
    assert launches.run(launches.header(search=SEARCH), PLACES[:1]) == 0
    sweep = read_sweep(str(launches.folder))
    done, pruned = sweep.list_with_status(DONE), sweep.list_with_status(PRUNED)
    assert sorted(done + pruned) == [*range(1, 10)]
    metrics = {run: sweep.average_curve(run)[0][1] for run in sweep.numbers}
    assert pruned
    for run in sweep.numbers:
        earlier = [metrics[one] for one in done if one < run]
        assert (run in pruned) == (len(earlier) >= 5 and metrics[run] < statistics.median(earlier))
    end = sweep.find_end(pruned[0])
    assert end is not None
    assert (end.exit_code, end.reason[:16]) == (143, f"accuracy {metrics[pruned[0]]:.4f} "[:16])
    assert "after 10 updates, and no evaluation up to this one was as good as the median" in end.reason
    assert f"run {pruned[0]} of 9 was pruned after " in "".join(launches.said)
    # The evaluation at the end is none of those that are compared.
    assert {one.update for one in sweep.evaluations} == {10, 20}
    # Nothing is repeated.
    assert launches.run(None) == 0
    assert len(launches.calls) == 9
    numbers = ", ".join(map(str, pruned))
    assert f"because their evaluations were worse: {numbers}" in " ".join(format_sweep(sweep).split())
    assert sweep_to_json(sweep)["pruned"] == [sweep.header.runs[run - 1] for run in pruned]
    assert format_status(sweep, 0, 0.0).startswith(f"9 runs: {len(done)} done, 0 running, 0 queued, 0 failed, ")
    assert f" failed, {len(pruned)} pruned\n" in format_status(sweep, 0, 0.0)


def test_without_a_pruner_all_runs_train_to_their_end(launches: Launches) -> None:
    settings = replace(SEARCH, trials=3, pruner="none", seeds=2, spaces=[{"lora_rank": "4,8,16", "seed": "1,4"}])
    assert launches.run(launches.header(search=settings)) == 0
    sweep = read_sweep(str(launches.folder))
    assert sweep.list_with_status(DONE) == [1, 2, 3, 4, 5, 6]
    assert sorted(run["lora_rank"] for run in sweep.header.runs) == ["16", "16", "4", "4", "8", "8"]
    assert [trial.number for trial in sweep.trials] == [1, 2, 3]
    assert not sweep.evaluations


def test_a_search_that_was_stopped_continues_with_its_runs_and_then_with_new_ones(launches: Launches) -> None:
    settings = replace(SEARCH, trials=3, pruner="none", seeds=2, spaces=[{"lora_rank": "4,8,16", "seed": "3,1"}])
    interrupt_soon(lambda: len(launches.calls) == 2)
    with pytest.raises(Interrupted):
        launches.run(launches.header(search=settings), PLACES)
    before = read_sweep(str(launches.folder))
    assert before.list_with_status(STOPPED)
    assert before.total == 6
    # The new run with seed 3 waits for the signal, too.
    interrupt_soon(lambda: any("/run-3" in call for call in launches.calls))
    with pytest.raises(Interrupted):
        launches.run(None)
    assert any("--resume" in call for call in launches.calls)
    after = read_sweep(str(launches.folder))
    assert after.trials[: len(before.trials)] == before.trials
    assert len(after.trials) > len(before.trials)


def test_a_pruned_configuration_is_not_started_again(launches: Launches) -> None:
    """Neither the seeds that had not begun, nor one that had failed."""
    settings = replace(SEARCH, trials=1, seeds=3, spaces=[{"lora_rank": "4,8", "seed": "4,5,6"}])
    runs = [{"lora_rank": "4", "seed": seed} for seed in ("4", "5", "6")]
    with open_journal(str(launches.folder), launches.header(search=settings)) as journal:
        for line in (
            Trial(1, {"lora_rank": "4"}, runs, [1.0, 1.0, 1.0]),
            AttemptStart(1, 1, "node1", "run-1", 0.0),
            AttemptEnd(1, 1, FAILED, 1, 1.0, {}, "no"),
            AttemptStart(2, 1, "node1", "run-2", 0.0),
            AttemptEnd(2, 1, PRUNED, 143, 1.0, {}, "worse"),
        ):
            journal.write(line)
    assert launches.run(None) == 1
    assert launches.calls == []
    assert read_sweep(str(launches.folder)).list_with_status(PRUNED) == [2, 3]


def test_no_other_seed_of_a_configuration_starts_while_its_runs_are_being_ended(launches: Launches) -> None:
    settings = replace(SEARCH, trials=1, seeds=2, spaces=[{"lora_rank": "4,8", "seed": "4,5"}])
    runs = [{"lora_rank": "4", "seed": seed} for seed in ("4", "5")]
    start, process = AttemptStart(1, 1, "node1", "run-1", 0.0), cast(execute.Process, None)
    with open_journal(str(launches.folder), launches.header(search=settings)) as journal:
        journal.write(Trial(1, {"lora_rank": "4"}, runs, [1.0, 1.0]))
        journal.write(start)
        waiting = SweepQueue(journal, (), PLACES, 0, launches.said.append)
        waiting._active.append(_ActiveRun(start, PLACES[0], process, 0.0, False, 0, 0))
        assert waiting._list_open() == [2]
        waiting._active[0].pruned_because = "worse"
        assert waiting._list_open() == []


def test_the_longest_runs_start_first(launches: Launches) -> None:
    launches.run(launches.header(4, 5, 6, lengths=[1.0, 3.0, 2.0]), PLACES[:1])
    assert [call.rpartition("run-")[2] for call in launches.calls] == ["2", "3", "1"]


def test_a_host_that_answers_is_not_lost() -> None:
    assert find_lost_hosts(Place("this machine"), ()) == {}
    assert find_lost_hosts(Place("localhost", hosts=(Host("localhost"),)), ("--no-check",)) == {}


def test_lost_hosts_are_asked_again_after_growing_pauses_and_refused_logins_hardly(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five refused logins in ten minutes lead to a lock by fail2ban's usual rule."""
    now, kinds = [0.0], {"node1": LOGIN_REFUSED, "node2": TIMED_OUT}
    logins: dict[str, list[float]] = {"node1": [], "node2": []}

    def run(self: SshTransport, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 0.0) -> Answer:
        logins[host.name].append(now[0])
        raise HostError(host.name, kinds[host.name], "no")

    monkeypatch.setattr(SshTransport, "run", run)
    monkeypatch.setattr("cpuft.sweep.queue.time.monotonic", lambda: now[0])
    monkeypatch.setattr("cpuft.sweep.queue.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    places = [Place(name, hosts=(Host(name),)) for name in logins]
    with open_journal(str(launches.folder), launches.header(1)) as journal:
        waiting = SweepQueue(journal, (), [], 0, launches.said.append)
        waiting._lost = places
        assert not waiting._wait_for_hosts()
    assert 1 < len(logins["node1"]) < 4
    assert [find_lost_hosts(place, ()) for place in places] == [
        {"node1": "refuses the login"},
        {"node2": "does not answer"},
    ]
    pauses = [round(after - before) for before, after in pairwise(logins["node2"])]
    assert (pauses[:6], max(pauses), len(pauses) > 8) == ([1, 2, 4, 8, 16, 32], 60, True)


def write_hosts(folder: Path, *names: str) -> LaunchConfig:
    path = folder / "hosts"
    path.write_text("".join(f"{name}\n" for name in names))
    return LaunchConfig(hostfile=str(path))


def test_hosts_are_grouped_and_this_machine_is_divided(tmp_path: Path) -> None:
    config = write_hosts(tmp_path, "a1", "a2", "a3", "a4", "a5")
    assert [place.name for place in plan_places(config, 2, 0, [(0,)])] == ["a1,a2", "a3,a4"]
    first = plan_places(config, 1, 3, [(0,)])
    assert [place.options for place in first] == [(f"--only-hosts=a{number}",) for number in (1, 2, 3)]
    assert first[0].hosts == (Host("a1"),)
    cores = [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert plan_places(LaunchConfig(), 1, 0, cores) == [Place("this machine")]
    # The threads of a core stay together.
    halves = [place.prefix[-1] for place in plan_places(LaunchConfig(), 1, 2, cores)]
    assert halves == ["0,1,4,5", "2,3,6,7"]
    threads = [place.prefix[-1] for place in plan_places(LaunchConfig(), 1, 2, [(0, 1)])]
    assert threads == ["0", "1"]
    assert [place.prefix[-1] for place in plan_places(LaunchConfig(), 1, 3, cores)] == ["0,4", "1,5", "2,3,6,7"]


def test_each_run_sees_its_share_of_the_quota_of_this_machine() -> None:
    """A control group with 3.5 of 8 cores: one run gets one core of the three that can be used, the other one two."""
    shares = [place.prefix for place in plan_places(LaunchConfig(), 1, 2, [(0,), (1,), (2,)], 3.5)]
    assert [float(share[1].removeprefix("CPUFT_CPU_QUOTA=")) for share in shares] == pytest.approx([3.5 / 3, 7 / 3])
    assert [share[-1] for share in shares] == ["0", "1,2"]
    # A whole number of cores is not rounded down.
    six = plan_places(LaunchConfig(), 1, 3, [(cpu,) for cpu in range(6)], 6.0)
    assert [place.prefix[:2] for place in six] == [("env", "CPUFT_CPU_QUOTA=2.0")] * 3
    assert plan_places(LaunchConfig(), 1, 1, [(0,), (1,)], 1.5)[0].prefix == ()


def test_trackers_group_the_runs_of_a_sweep() -> None:
    plain = SweepHeader(VERSION, ["--task=demo"], [{"seed": "1"}], "", "auto", 1, 0.0, [1.0])
    assert name_in_trackers(plain, "/runs/lab", {}) == {}
    named = {"WANDB_RUN_GROUP": "lab", "TRACKIO_PROJECT": "lab"}
    for header in (replace(plain, options=["--report-to=wandb"]), replace(plain, runs=[{"report_to": "wandb"}])):
        assert name_in_trackers(header, "/runs/lab", {"MLFLOW_EXPERIMENT_NAME": "mine"}) == named


def test_the_launches_get_the_names_for_trackers(launches: Launches) -> None:
    launches.run(launches.header(1, options=["--task=demo", "--report-to=wandb"]))
    assert (launches.folder / "run-1" / "group").read_text() == "sweep"


@pytest.mark.parametrize(
    ("names", "hosts_per_run", "parallel", "problem"),
    [
        ((), 2, 0, "--hosts-per-run 2 needs more hosts than this machine"),
        ((), 1, 3, "--parallel 3 is more than the 2 cores of this machine"),
        (("a1",), 2, 0, "--hosts-per-run 2 is more than the 1 host that there are"),
        (("a1", "a2"), 1, 3, "--parallel 3 is more than the 2 groups of 1 that the hosts make"),
    ],
)
def test_places_that_do_not_exist(
    tmp_path: Path, names: tuple[str, ...], hosts_per_run: int, parallel: int, problem: str
) -> None:
    config = write_hosts(tmp_path, *names) if names else LaunchConfig()
    with pytest.raises(CpuftError) as told:
        plan_places(config, hosts_per_run, parallel, [(0,), (1,)])
    assert problem in str(told.value)


def test_the_status_of_a_sweep(launches: Launches) -> None:
    header = launches.header(1, 2, 3, 4, lengths=[2.0, 1.0, 1.0, 1.0])
    with open_journal(str(launches.folder), header) as journal:
        for line in (
            AttemptStart(1, 1, "node1", "run-1", 0.0),
            AttemptEnd(1, 1, DONE, 0, 240.0, {"accuracy": 0.8}),
            AttemptStart(2, 1, "node1", "run-2", 240.0),
        ):
            journal.write(line)
        assert format_status(journal.sweep, 2, 300.0).split("\n") == [
            "4 runs: 1 done, 1 running, 2 queued, 0 failed, 1 place idle",
            "best accuracy until now: 0.8000 (run-1)",
            "about 2 min left",
            "  run 2 on node1 for 1.0 min: seed 2",
        ]
        # Three runs of 120 s each are left, of which one has trained for 60 s, on two places.
        assert estimate_seconds_left(journal.sweep, {2: 60.0}, 2) == 150.0
        # On more places it is the longest of them.
        assert estimate_seconds_left(journal.sweep, {2: 60.0}, 9) == 120.0
        assert "no cpuft sweep works on these runs now: continue with" in format_status(journal.sweep, 0, 300.0, False)


def test_a_second_sweep_cannot_write_to_the_same_journal(launches: Launches) -> None:
    launches.run(launches.header(1))
    with pytest.raises(FileExistsError), open_journal(str(launches.folder), launches.header(1)):
        pass
    assert shlex.split(launches.calls[0])[0] == "launch"


def test_a_journal_is_locked_while_a_sweep_writes_to_it(launches: Launches, tmp_path: Path) -> None:
    """The lock is on the file itself, so that a sweep on another host that sees the file is kept out, too."""
    folder = str(launches.folder)
    refusal = pytest.raises(CpuftError, match=f"another cpuft sweep is working on {folder}, here or on another host: ")
    assert not has_locked_journal(str(tmp_path / "none"))
    with open_journal(folder, launches.header(1)) as journal:
        with refusal, continue_journal(folder):
            pass
        assert has_locked_journal(folder)
        text = Path(folder, FILE_NAME).read_text()
    assert not has_locked_journal(folder)
    with continue_journal(folder) as journal:
        assert has_locked_journal(folder)
        with refusal, continue_journal(folder):
            pass
        journal.write(AttemptStart(1, 1, "node1", "run-1", 1.0))
    assert Path(folder, FILE_NAME).read_text().startswith(text)
    assert len(read_sweep(folder).starts) == 1


def test_a_file_system_without_locks_does_not_stop_a_sweep(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = str(launches.folder)
    with open_journal(folder, launches.header(1)):
        assert not has_locked_journal(folder)
    with continue_journal(folder) as journal:
        journal.write(AttemptStart(1, 1, "node1", "run-1", 1.0))
    assert len(read_sweep(folder).starts) == 1
