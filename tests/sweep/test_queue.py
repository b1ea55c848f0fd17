"""The queue of a sweep, with programs in place of launches: what is started where, and what survives."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from cpuft import execute
from cpuft.errors import CpuftError, Interrupted
from cpuft.execute import Answer
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import LOGIN_REFUSED, TIMED_OUT, HostError, SshTransport
from cpuft.launch.run_state import SAVING, write_state
from cpuft.record import Line, format_line
from cpuft.sweep import queue
from cpuft.sweep.places import Place
from cpuft.sweep.queue import SweepQueue, _ActiveRun, estimate_seconds_left, format_status, name_in_trackers
from cpuft.sweep.results import format_sweep, sweep_to_json
from cpuft.sweep.search_space import OptionValues, make_key
from cpuft.sweep.study import (
    DONE,
    FAILED,
    FILE_NAME,
    LOST,
    PRUNED,
    STOPPED,
    Attempt,
    Sweep,
    SweepSettings,
    create_sweep,
    is_active,
    make_sweep,
    open_sweep,
    read_sweep,
)
from cpuft.train.checkpoint.folders import write_checkpoint
from tests.records import make_record, make_state

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
if seed in (7, 9) and "--resume" not in words:
    sys.exit({7: 75, 9: 74}[seed])
if any(folder.parent.parent.glob("bad-" + options["only-hosts"])):
    sys.exit("cpuft: error: the disk is full")
if "learning-rate" in options:
    journal = folder.parent / "sweep.jsonl"
    metric = 0.9 - 0.1 * abs(math.log10(float(options["learning-rate"])) + 4)
    for update in (10, 20):
        noted = journal.read_text().count('"intermediate_value"')
        print(f"step {update}/30  loss 0.7")
        print(f"evaluation after update {update}: accuracy {metric:.4f}  f1 0.1", flush=True)
        while journal.read_text().count('"intermediate_value"') == noted:
            time.sleep(0.02)
        time.sleep(0.5)  # until the sweep has decided
    print("evaluating on 4 examples\\nevaluation after update 30: accuracy 0.0000  f1 0.1", flush=True)
time.sleep(float(options.get("epochs", 0)))
with record.open("a") as file:
    file.write(lines[-1])
if seed == 8:
    time.sleep(600)
"""


@dataclass
class Launches:
    """Programs in place of launches. With seed 2 they fail, with seed 3 they wait until a signal comes, and with seed 8
    they do so after the run has finished.
    """

    folder: Path
    said: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[str]:
        """The arguments of all launches, in their order."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def run(
        self, runs: Sequence[OptionValues] = (), places: list[Place] | None = None, stop_after: int = 0, **settings: Any
    ) -> int:
        """Carry out a new sweep over `runs`, or with these settings; without both, continue the one that is there."""
        if runs or settings:
            create(str(self.folder), runs, **settings)
        with open_sweep(str(self.folder)) as sweep:
            return SweepQueue(sweep, ("--no-check",), places or PLACES, stop_after, self.said.append).run()


def seeds(*numbers: int) -> list[OptionValues]:
    """One run with each seed."""
    return [{"seed": str(number)} for number in numbers]


def make_settings(runs: Sequence[OptionValues], **changes: Any) -> SweepSettings:
    return replace(SweepSettings(["--task=demo"], len({*map(make_key, runs)})), **changes)


def create(folder: str, runs: Sequence[OptionValues], **changes: Any) -> None:
    create_sweep(folder, make_settings(runs, **changes), True, runs)


def list_numbers(sweep: Sweep, *statuses: str) -> list[int]:
    """The numbers of the runs with these statuses."""
    return [run.number for run in sweep.list_runs(*statuses)]


def list_attempts(sweep: Sweep) -> list[tuple[int, Attempt]]:
    """Run and attempt, in the order of their starts."""
    found = [(run.number, attempt) for run in sweep.runs for attempt in run.attempts]
    return sorted(found, key=lambda pair: pair[1].time)


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
    assert launches.run(seeds(1, 4, 5, 6)) == 0
    sweep = read_sweep(str(launches.folder))
    assert list_numbers(sweep, DONE) == [1, 2, 3, 4]
    assert sorted(call.partition("--task")[2] for call in launches.calls) == [
        f"=demo --seed={seed} --run-dir {launches.folder}/run-{run}" for run, seed in enumerate((1, 4, 5, 6), start=1)
    ]
    assert {attempt.place for _, attempt in list_attempts(sweep)} == {"node1", "node2"}
    assert all(call.startswith("launch --no-check --only-hosts=node") for call in launches.calls)
    assert launches.said[-1].startswith("run ")


def test_a_run_that_fails_is_noted_and_the_others_go_on(launches: Launches) -> None:
    assert launches.run(seeds(2, 1, 4)) == 1
    sweep = read_sweep(str(launches.folder))
    assert (list_numbers(sweep, FAILED), list_numbers(sweep, DONE)) == ([1], [2, 3])
    (end,) = sweep.runs[0].attempts
    assert (end.exit_code, end.reason) == (1, "the loss is nan: lower --learning-rate")
    assert re.search(r"failed after \d+ s: the loss is nan: lower --learning-rate", "".join(launches.said))


def test_the_reason_of_a_failure_is_not_that_of_an_earlier_attempt(launches: Launches, tmp_path: Path) -> None:
    """Both attempts write to one log, and the second one is killed without a message."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        "if '--resume' not in sys.argv:\n"
        "    sys.exit(print('cpuft: error: the disk was full') or 74)\n"
        "print('step 2/3', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    create(str(launches.folder), seeds(1))
    record = make_record()
    (launches.folder / "run-1").mkdir()
    (launches.folder / "run-1" / "record.jsonl").write_text(
        "".join(format_line(line) + "\n" for line in (record.header, *record.steps))
    )
    assert launches.run(places=PLACES[:1]) == 1
    first, second = read_sweep(str(launches.folder)).runs[0].attempts
    assert (first.reason, second.reason) == ("the disk was full", "step 2/3")


def test_a_failed_run_is_tried_again_when_the_sweep_is_continued(launches: Launches) -> None:
    assert launches.run(seeds(2, 1)) == 1
    assert launches.run() == 1
    attempts = read_sweep(str(launches.folder)).runs[0].attempts
    assert [attempt.folder for attempt in attempts] == ["run-1", "run-1-attempt-2"]


def test_a_host_on_which_no_run_can_train_gets_no_more_runs(launches: Launches) -> None:
    (launches.folder.parent / "bad-node1").touch()
    assert launches.run(seeds(1, 4, 5, 6)) == 0
    sweep = read_sweep(str(launches.folder))
    assert list_numbers(sweep, DONE) == [1, 2, 3, 4]
    assert sum(attempt.place == "node1" for _, attempt in list_attempts(sweep)) <= 2
    assert "it starts again, because it ended without an update (the disk is full)" in "".join(launches.said)


@pytest.mark.parametrize("seed", [7, 9])
def test_an_interruption_notice_and_results_that_were_not_fetched_are_no_failures(
    seed: int, launches: Launches
) -> None:
    assert launches.run(seeds(seed), PLACES[:1]) == 0
    (run,) = read_sweep(str(launches.folder)).runs
    assert [attempt.folder for attempt in run.attempts] == ["run-1", "run-1"]
    assert "--resume" in launches.calls[1]


def test_a_stopped_run_continues_where_its_checkpoint_is(launches: Launches) -> None:
    interrupt_soon(lambda: len(launches.calls) == 2)
    with pytest.raises(Interrupted):
        launches.run(seeds(3, 3))
    before = [attempt.place for run in read_sweep(str(launches.folder)).runs for attempt in run.attempts]
    assert launches.run((), PLACES[::-1]) == 0
    assert [run.attempts[1].place for run in read_sweep(str(launches.folder)).runs] == before


def test_too_many_failures_end_the_sweep(launches: Launches) -> None:
    with pytest.raises(CpuftError, match=r"1 run failed, and --stop-after-failures is 1: correct the reason") as told:
        launches.run(seeds(2, 3, 3, 3), stop_after=1)
    assert told.value.exit_code == 1
    sweep = read_sweep(str(launches.folder))
    assert list_numbers(sweep, FAILED) == [1]
    assert list_numbers(sweep, STOPPED) == [2]


def test_a_metric_that_no_run_reports_ends_the_sweep(launches: Launches) -> None:
    with pytest.raises(
        CpuftError, match=r"the runs do not report --metric bleu: start a new sweep with one of accuracy"
    ):
        launches.run(seeds(1, 3), metric="bleu")


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
        launches.run(seeds(1, 3, 3))
    sweep = read_sweep(str(launches.folder))
    assert (list_numbers(sweep, DONE), list_numbers(sweep, STOPPED)) == ([1], [2, 3])
    # What was written last may have been cut off.
    with (launches.folder / FILE_NAME).open("a") as file:
        file.write('{"kind": "en')
    assert launches.run() == 0
    sweep = read_sweep(str(launches.folder))
    assert list_numbers(sweep, DONE) == [1, 2, 3]
    resumed = [call.partition("--only-hosts=")[2][6:] for call in launches.calls[3:]]
    assert sorted(resumed) == [f"--resume {launches.folder}/run-{run}" for run in (2, 3)]


def test_a_run_that_ended_while_its_sweep_was_killed_is_not_repeated(launches: Launches) -> None:
    launches.run(seeds(1, 4))
    path = launches.folder / FILE_NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"done"' not in line and '"values":[' not in line))
    assert launches.run() == 0
    assert len(launches.calls) == 2
    after = read_sweep(str(launches.folder))
    assert list_numbers(after, DONE) == [1, 2]
    assert [trial.state.name for trial in after.study.trials] == ["COMPLETE"]


def test_a_run_that_had_finished_when_its_sweep_was_stopped_is_done(launches: Launches) -> None:
    def has_finished() -> bool:
        path = launches.folder / "run-1" / "record.jsonl"
        return path.exists() and path.read_text().count("\n") == record_lines

    record_lines = (launches.folder.parent / "record").read_text().count("\n")
    interrupt_soon(has_finished)
    with pytest.raises(Interrupted):
        launches.run(seeds(8), PLACES[:1])
    with open_sweep(str(launches.folder)) as sweep:
        assert list_numbers(sweep, DONE) == [1]
        # As an earlier version noted it.
        sweep.note(sweep.runs[0], replace(sweep.runs[0].attempts[0], status=STOPPED, metrics={}))
    assert launches.run() == 0
    assert len(launches.calls) == 1


def test_a_finished_run_whose_results_were_being_fetched_is_not_done(launches: Launches) -> None:
    """The sweep and its launch were killed, and the record had come."""
    create(str(launches.folder), seeds(1))
    with open_sweep(str(launches.folder)) as sweep:
        sweep.note(sweep.runs[0], Attempt("node1", "run-1", time.time()))
    (launches.folder / "run-1").mkdir()
    (launches.folder / "run-1" / "record.jsonl").write_text((launches.folder.parent / "record").read_text())
    write_state(str(launches.folder / "run-1"), make_state("node1", phase=SAVING))
    assert launches.run() == 0
    (call,) = launches.calls
    assert call.endswith(f"--resume {launches.folder}/run-1")


def test_a_run_continues_after_any_number_of_stops_of_its_sweep(launches: Launches) -> None:
    """A run that is interrupted by itself again and again is given up."""
    create(str(launches.folder), seeds(7))
    (launches.folder / "run-1").mkdir()
    (launches.folder / "run-1" / "plan.sh").touch()
    with open_sweep(str(launches.folder)) as sweep:
        for status in (STOPPED, STOPPED, STOPPED, STOPPED, STOPPED, STOPPED, ""):
            begun = Attempt("node1", "run-1", 0.0)
            sweep.note(sweep.runs[0], begun)
            if status:
                sweep.note(sweep.runs[0], replace(begun, status=status))
    assert launches.run() == 0
    assert launches.calls[0].endswith(f"--resume {launches.folder}/run-1")


def test_a_killed_sweep_continues_what_was_running_and_trains_each_configuration_once(launches: Launches) -> None:
    """Of three configurations, the first has ended, and the second was running when the sweep was killed."""
    create(str(launches.folder), [{"lora_rank": rank, "seed": "1"} for rank in ("4", "8", "16")])
    with open_sweep(str(launches.folder)) as sweep:
        for run in sweep.runs[:2]:
            begun = Attempt("node1", f"run-{run.number}", time.time())
            sweep.note(run, begun)
        sweep.note(sweep.runs[0], replace(sweep.runs[0].attempts[0], status=DONE, metrics={"accuracy": 0.5}))
    (launches.folder / "run-2").mkdir()
    (launches.folder / "run-2" / "plan.sh").touch()
    assert launches.run((), PLACES[:1]) == 0
    first, second = launches.calls
    assert first.endswith(f"--resume {launches.folder}/run-2")
    assert second.endswith(f"--lora-rank=16 --seed=1 --run-dir {launches.folder}/run-3")
    after = read_sweep(str(launches.folder))
    assert [len(run.attempts) for run in after.runs] == [1, 2, 1]
    assert [trial.state.name for trial in after.study.trials] == ["COMPLETE"] * 3


def test_the_run_of_a_lost_host_starts_again_elsewhere(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "find_lost_hosts", lambda place, options: LOST_NODE1 if place.name == "node1" else {})
    monkeypatch.setattr(queue, "_RETURN_SECONDS", 0.5)
    monkeypatch.setattr(queue, "_ASK_SECONDS", 0.1)
    header = seeds(2, 1)
    with pytest.raises(CpuftError, match="no host of the sweep can be used any more: repair them") as told:
        launches.run(header, [PLACES[0]])
    assert told.value.exit_code == 75  # so that the script of a job asks its scheduler for another start
    assert list_numbers(read_sweep(str(launches.folder)), LOST) == [1]
    # The host is repaired, or another one is there.
    assert launches.run((), [PLACES[1]]) == 1
    sweep = read_sweep(str(launches.folder))
    assert (list_numbers(sweep, FAILED), list_numbers(sweep, DONE)) == ([1], [2])
    assert [(number, attempt.folder) for number, attempt in list_attempts(sweep)] == [
        (1, "run-1"),
        (1, "run-1-attempt-2"),
        (2, "run-2"),
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
    create(str(launches.folder), seeds(2), options=["--task=demo", "--data-dir=glue", "--epochs=1.0"])
    write_copy(launches, "run-1")
    assert launches.run((), places) == 0
    sweep = read_sweep(str(launches.folder))
    attempts = sweep.runs[0].attempts[:2]
    assert [(attempt.place, attempt.folder) for attempt in attempts] == [("node1", "run-1"), ("node2", "run-1")]
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
    create(str(launches.folder), seeds(2))
    if is_there:
        (write_copy(launches, "run-1") / "state.safetensors").write_bytes(b"wiights")
        problem = "the copy of its checkpoint of update 12 is damaged (state.safetensors is damaged)"
    assert launches.run((), places) == 1
    sweep = read_sweep(str(launches.folder))
    assert [attempt.folder for attempt in sweep.runs[0].attempts[:2]] == ["run-1", "run-1-attempt-2"]
    assert f"it starts again from the beginning on another host, because {problem}" in "".join(launches.said)
    assert not any("--resume" in call for call in launches.calls)


def test_a_stopped_run_whose_host_is_not_used_any_more_continues_from_its_copy(launches: Launches) -> None:
    interrupt_soon(lambda: len(launches.calls) == 2)
    with pytest.raises(Interrupted):
        launches.run(seeds(3, 3))
    write_copy(launches, "run-1")
    others = [Place(name, (f"--only-hosts={name}",)) for name in ("node8", "node9")]
    interrupt_soon(lambda: len(launches.calls) == 4)
    with pytest.raises(Interrupted):
        launches.run((), others)
    assert launches.calls[2].endswith(f"--only-hosts=node8 --resume {launches.folder}/run-1")
    assert launches.calls[3].endswith(f"--run-dir {launches.folder}/run-2-attempt-2")
    assert "run 1 of 2 continues on node8: seed 3" in launches.said
    problem = "no checkpoint had been copied yet"
    assert f"run 2 of 2 starts on node9 from the beginning, because {problem}: seed 3" in launches.said


def test_copies_can_be_turned_off(launches: Launches) -> None:
    places = [replace(PLACES[0], hosts=(Host("node1"),))]
    create(str(launches.folder), seeds(1))
    with open_sweep(str(launches.folder)) as sweep:
        SweepQueue(sweep, ("--no-check", "--no-copy-checkpoints"), places, 0, launches.said.append).run()
    assert "--copy-checkpoints" not in launches.calls[0].split()


def test_hosts_that_were_all_lost_are_used_when_they_answer_again(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_ASK_SECONDS", 0.1)
    answers = iter([LOST_NODE1, LOST_NODE1, {}])
    monkeypatch.setattr(queue, "find_lost_hosts", lambda place, options: next(answers, {}))
    assert launches.run(seeds(2, 1), PLACES[:1]) == 1
    sweep = read_sweep(str(launches.folder))
    assert (list_numbers(sweep, FAILED), list_numbers(sweep, DONE)) == ([1], [2])
    assert "no host answers any more: waiting up to 10 min for one" in launches.said


SEARCH: dict[str, Any] = {
    "search": "tpe",
    "trials": 9,
    "pruner": "median",
    "search_seed": 5,
    "spaces": [{"learning_rate": "1e-6..1e-2", "seed": "1"}],
}
RANKS: dict[str, Any] = {"search": "tpe", "trials": 3, "seeds": 2, "spaces": [{"lora_rank": "4,8,16", "seed": "1,4"}]}


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_runs_that_are_worse_than_the_median_are_pruned(launches: Launches, search: str) -> None:
    rates = ("1e-4", "1e-6", "2e-4", "1e-5", "1e-3", "3e-6", "1e-2", "9e-5", "3e-3")
    runs = [{"learning_rate": rate, "seed": "1"} for rate in rates] if search == "random" else []
    assert launches.run(runs, PLACES[:1], **SEARCH | {"search": search}) == 0
    sweep = read_sweep(str(launches.folder))
    done, pruned = list_numbers(sweep, DONE), list_numbers(sweep, PRUNED)
    assert sorted(done + pruned) == [*range(1, 10)]
    metrics = {one.runs[0].number: one.curve[10] for one in sweep.configurations}
    assert pruned
    for run in metrics:
        earlier = [metrics[one] for one in done if one < run]
        assert (run in pruned) == (len(earlier) >= 5 and metrics[run] < statistics.median(earlier))
    (end,) = sweep.runs[pruned[0] - 1].attempts
    assert (end.exit_code, end.reason[:16]) == (143, f"accuracy {metrics[pruned[0]]:.4f} "[:16])
    assert "after 10 updates, and no evaluation up to this one was as good as the median" in end.reason
    assert f"run {pruned[0]} of 9 was pruned after " in "".join(launches.said)
    # The evaluation at the end is none of those that are compared.
    assert {update for one in sweep.configurations for update in one.curve} == {10, 20}
    states = [trial.state.name for trial in sweep.study.trials]
    assert states == ["PRUNED" if run in pruned else "COMPLETE" for run in metrics]
    # Nothing is repeated.
    assert launches.run() == 0
    assert len(launches.calls) == 9
    numbers = ", ".join(map(str, pruned))
    assert f"because their evaluations were worse: {numbers}" in " ".join(format_sweep(sweep).split())
    assert sweep_to_json(sweep)["pruned"] == [sweep.runs[run - 1].values for run in pruned]
    assert format_status(sweep, 0, 0.0).startswith(f"9 runs: {len(done)} done, 0 running, 0 queued, 0 failed, ")
    assert f" failed, {len(pruned)} pruned\n" in format_status(sweep, 0, 0.0)


def test_without_a_pruner_all_runs_train_to_their_end(launches: Launches) -> None:
    assert launches.run(**RANKS) == 0
    sweep = read_sweep(str(launches.folder))
    assert list_numbers(sweep, DONE) == [1, 2, 3, 4, 5, 6]
    assert sorted(run.values["lora_rank"] for run in sweep.runs) == ["16", "16", "4", "4", "8", "8"]
    assert [one.value is not None for one in sweep.configurations] == [True, True, True]
    assert not any(one.curve for one in sweep.configurations)


def test_a_sweep_whose_values_are_used_up_ends_after_its_runs(launches: Launches) -> None:
    with pytest.raises(CpuftError, match="hardly any configuration is left after 2") as told:
        launches.run(**RANKS | {"spaces": [{"epochs": "1,2"}], "seeds": 1})
    assert told.value.exit_code == 1
    assert list_numbers(read_sweep(str(launches.folder)), DONE) == [1, 2]


def test_a_search_that_was_stopped_continues_with_its_runs_and_then_with_new_ones(launches: Launches) -> None:
    interrupt_soon(lambda: len(launches.calls) == 2)
    with pytest.raises(Interrupted):
        launches.run(**RANKS | {"spaces": [{"lora_rank": "4,8,16", "seed": "3,1"}]})
    before = read_sweep(str(launches.folder))
    assert list_numbers(before, STOPPED)
    assert before.total == 6
    # The new run with seed 3 waits for the signal, too.
    interrupt_soon(lambda: any("/run-3" in call for call in launches.calls))
    with pytest.raises(Interrupted):
        launches.run()
    assert any("--resume" in call for call in launches.calls)
    after = read_sweep(str(launches.folder))
    known = [run.values for run in before.runs]
    assert [run.values for run in after.runs[: len(known)]] == known
    assert len(after.configurations) > len(before.configurations)


def test_a_pruned_configuration_is_not_started_again(launches: Launches) -> None:
    """Neither the seeds that had not begun, nor one that had failed."""
    runs = [{"lora_rank": "4", "seed": seed} for seed in ("4", "5", "6")]
    create(str(launches.folder), runs, pruner="median")
    with open_sweep(str(launches.folder)) as sweep:
        for run, status in zip(sweep.runs, (FAILED, PRUNED)):
            attempt = Attempt("node1", f"run-{run.number}", 0.0)
            sweep.note(run, attempt)
            sweep.note(run, replace(attempt, status=status))
        sweep.prune(sweep.configurations[0], "worse")
    assert launches.run() == 1
    assert launches.calls == []
    after = read_sweep(str(launches.folder))
    assert list_numbers(after, PRUNED) == [2, 3]
    assert [trial.state.name for trial in after.study.trials] == ["PRUNED"]


def test_an_earlier_failure_of_a_pruned_configuration_does_not_end_a_continued_sweep(launches: Launches) -> None:
    create(str(launches.folder), [{"lora_rank": rank, "seed": "2"} for rank in ("4", "8")], pruner="median")
    with open_sweep(str(launches.folder)) as sweep:
        begun = Attempt("node1", "run-1", 0.0)
        sweep.note(sweep.runs[0], begun)
        sweep.note(sweep.runs[0], replace(begun, status=FAILED))
        sweep.prune(sweep.configurations[0], "worse")
    assert launches.run((), PLACES[:1], stop_after=2) == 2


def test_no_other_seed_of_a_configuration_starts_while_its_runs_are_being_ended(launches: Launches) -> None:
    runs = [{"lora_rank": "4", "seed": seed} for seed in ("4", "5")]
    sweep = make_sweep("s", make_settings(runs, pruner="median"), True, runs)
    sweep.note(sweep.runs[0], Attempt("node1", "run-1", 0.0))
    waiting = SweepQueue(sweep, (), PLACES, 0, launches.said.append)
    active = _ActiveRun(sweep.runs[0], PLACES[0], cast(execute.Process, None), 0.0, False, 0)
    waiting._active.append(active)
    assert waiting._list_open() == [sweep.runs[1]]
    sweep.prune(sweep.configurations[0], "worse")
    assert waiting._list_open() == []
    waiting._conclude(sweep.configurations[0])
    assert not sweep.configurations[0].is_told


def test_the_longest_runs_start_first(launches: Launches) -> None:
    launches.run([{"max_steps": steps} for steps in ("10", "30", "20")], PLACES[:1])
    assert [call.rpartition("run-")[2] for call in launches.calls] == ["2", "3", "1"]


@pytest.mark.parametrize(("kind", "said"), [(LOGIN_REFUSED, "refuses the login"), (TIMED_OUT, "does not answer")])
def test_a_host_that_refuses_the_login_is_not_asked_again(
    kind: str, said: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five refused logins in ten minutes lead to a lock by fail2ban's usual rule."""
    logins = list[str]()

    def run(self: SshTransport, host: Host, argv: Sequence[str], stdin: str = "", seconds: float = 0.0) -> Answer:
        logins.append(host.name)
        raise HostError(host.name, kind, "no")

    monkeypatch.setattr(SshTransport, "run", run)
    monkeypatch.setattr(queue, "_RETURN_SECONDS", 0.5)
    monkeypatch.setattr(queue, "_ASK_SECONDS", 0.1)
    with pytest.raises(CpuftError, match="no host of the sweep can be used any more") as told:
        launches.run(seeds(2, 1), [replace(PLACES[0], hosts=(Host("node1"),))])
    assert (told.value.exit_code, len(logins) > 1) == ((75, True) if kind == TIMED_OUT else (1, False))
    assert f"node1 gets no more runs, because node1 {said}" in launches.said


def test_trackers_group_the_runs_of_a_sweep() -> None:
    def name(runs: list[OptionValues], *options: str) -> dict[str, str]:
        sweep = make_sweep("/runs/lab", make_settings(runs, options=["--task=demo", *options]), True, runs)
        return name_in_trackers(sweep, {"MLFLOW_EXPERIMENT_NAME": "mine"})

    assert name(seeds(1)) == {}
    named = {"WANDB_RUN_GROUP": "lab", "TRACKIO_PROJECT": "lab"}
    assert name(seeds(1), "--report-to=wandb") == name([{"report_to": "wandb"}]) == named


def test_the_launches_get_the_names_for_trackers(launches: Launches) -> None:
    launches.run(seeds(1), options=["--task=demo", "--report-to=wandb"])
    assert (launches.folder / "run-1" / "group").read_text() == "sweep"


def test_the_status_of_a_sweep(launches: Launches) -> None:
    runs = [{"max_steps": steps, "seed": seed} for steps, seed in (("20", "1"), *(("10", seed) for seed in "234"))]
    sweep = make_sweep("s", make_settings(runs), True, runs)
    first = Attempt("node1", "run-1", 0.0)
    sweep.note(sweep.runs[0], first)
    sweep.note(sweep.runs[0], replace(first, status=DONE, seconds=240.0, metrics={"accuracy": 0.8}))
    sweep.note(sweep.runs[1], Attempt("node1", "run-2", 240.0))
    assert format_status(sweep, 2, 300.0).split("\n") == [
        "4 runs: 1 done, 1 running, 2 queued, 0 failed, 1 place idle",
        "best accuracy until now: 0.8000 (max-steps 20)",
        "about 2 min left",
        "  run 2 on node1 for 1.0 min: max-steps 10, seed 2",
    ]
    # Three runs of 120 s each are left, of which one has trained for 60 s, on two places.
    assert estimate_seconds_left(sweep, 300.0, 2) == 150.0
    # On more places it is the longest of them.
    assert estimate_seconds_left(sweep, 300.0, 9) == 120.0
    assert "no cpuft sweep works on these runs now: continue with" in format_status(sweep, 0, 300.0, False)


def test_a_sweep_is_locked_while_a_process_works_on_it(launches: Launches) -> None:
    """The lock is on the file itself, so that a sweep on another host that sees the file is kept out, too."""
    folder = str(launches.folder)
    refusal = pytest.raises(CpuftError, match=f"another cpuft sweep is working on {folder}, here or on another host: ")
    create(folder, seeds(1))
    assert not is_active(folder)
    with open_sweep(folder) as sweep:
        with refusal, open_sweep(folder):
            pass
        assert is_active(folder)
        text = Path(folder, FILE_NAME).read_text()
        sweep.note(sweep.runs[0], Attempt("node1", "run-1", 1.0))
    assert not is_active(folder)
    assert Path(folder, FILE_NAME).read_text().startswith(text)
    assert len(read_sweep(folder).runs[0].attempts) == 1


def test_a_file_system_without_locks_does_not_stop_a_sweep(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = str(launches.folder)
    create(folder, seeds(1))
    with open_sweep(folder) as sweep:
        sweep.note(sweep.runs[0], Attempt("node1", "run-1", 1.0))
    assert not is_active(folder)
    assert len(read_sweep(folder).runs[0].attempts) == 1
