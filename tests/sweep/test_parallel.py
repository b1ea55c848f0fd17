"""How many runs train at a time: what is measured and chosen, with programs in place of launches."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from cpuft.errors import CpuftError, Interrupted
from cpuft.record import Line, format_line
from cpuft.sweep import parallel
from cpuft.sweep.parallel import (
    choose_parallel,
    describe_choice,
    find_rate,
    list_candidates,
    measure_parallel,
    parse_parallel,
    read_steps,
)
from cpuft.sweep.places import Place
from tests.records import make_record, make_steps

PROGRAM = """
import os, pathlib, sys, time
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--run-dir") + 1])
here = pathlib.Path(__file__).parent
with open(here / "numbers", "a") as numbers:
    numbers.write(str(os.getpid()) + "\\n")
with open(here / "calls", "a") as calls:
    calls.write(" ".join(words) + "\\n")
if "--fails" in words and "--place=2" in words:
    sys.exit("cpuft: error: the memory does not suffice")
folder.mkdir()
head, *steps = (here / "record").read_text().splitlines(keepends=True)
with open(folder / "record.jsonl", "w") as record:
    record.write(head)
    for step in steps:
        record.write(step.replace("0.4,", "0.5,") if any("place" in word for word in words) else step)
        record.flush()
        time.sleep(0.02)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that need 0.4 s for 32 samples, or 0.5 s if they have a place. Returns their folder."""
    (tmp_path / "program.py").write_text(PROGRAM)
    lines: list[Line] = [make_record().header, *make_steps(500, [0.1])]
    (tmp_path / "record").write_text("".join(format_line(line) + "\n" for line in lines))
    monkeypatch.setattr(
        parallel, "module_command", lambda python, module: (sys.executable, str(tmp_path / "program.py"))
    )
    monkeypatch.setattr(parallel, "_SECONDS", 0.5)
    monkeypatch.setattr(parallel, "_POLL_SECONDS", 0.05)
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    return tmp_path


DIVIDED = {1: [Place("this machine")], 2: [Place("a", ("--place=1",)), Place("b", ("--place=2",))]}


def test_the_rates_of_runs_at_the_same_time_are_added(programs: Path) -> None:
    said = list[str]()
    rates = measure_parallel(DIVIDED, ("--task=demo", "--seed=1"), said.append)
    assert rates == {1: pytest.approx(80), 2: pytest.approx(128)}
    calls = (programs / "calls").read_text().splitlines()
    assert [call.partition(" --max-steps")[0] for call in calls[:1]] == ["launch --task=demo --seed=1"]
    assert sorted(call.partition(" --max-steps")[0] for call in calls[1:]) == [
        f"launch --task=demo --seed=1 --place={number}" for number in (1, 2)
    ]
    assert all("--no-save-model --report-to= --no-check" in call for call in calls)
    assert said == [f"--parallel auto: measuring {text} at a time" for text in ("1 run", "2 runs")]
    assert list((programs / "files").iterdir()) == []


def test_runs_that_fail_are_not_chosen(programs: Path) -> None:
    said = list[str]()
    rates = measure_parallel(DIVIDED, ("--fails",), said.append)
    assert rates == {1: pytest.approx(80), 2: 0}
    assert said[-1].startswith("--parallel auto: 2 runs at a time could not be measured (")
    assert choose_parallel(rates) == 1


def test_runs_that_end_early_are_measured_until_then(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_SECONDS", 60.0)
    text = (programs / "record").read_text().splitlines(keepends=True)
    (programs / "record").write_text("".join(text[:60]))
    began = time.monotonic()
    assert measure_parallel({1: DIVIDED[1]}, (), lambda line: None) == {1: pytest.approx(80)}
    assert time.monotonic() - began < 30


def test_a_signal_ends_what_is_measured(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_SECONDS", 30.0)

    def interrupt() -> None:
        end = time.monotonic() + 20
        while not (programs / "calls").exists() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(Interrupted):
        measure_parallel(DIVIDED, (), lambda line: None)
    assert time.monotonic() - began < 20
    (number,) = (programs / "numbers").read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)
    assert list((programs / "files").iterdir()) == []


def test_the_faster_one_is_chosen_and_said() -> None:
    assert choose_parallel({1: 80.0, 2: 128.0}) == 2
    assert choose_parallel({1: 80.0, 2: 79.0, 4: 60.0}) == 1
    # One run at a time needs less memory.
    assert choose_parallel({2: 80.0, 1: 80.0}) == 1
    assert describe_choice({1: 80.0, 2: 128.0}) == (
        "--parallel auto, measured with the first configuration: 1 run at a time 80.0 samples/s, 2 runs at a time "
        "128.0 samples/s; chosen: 2 at a time"
    )
    assert "2 runs at a time not measured; chosen: 1 at a time" in describe_choice({1: 80.0, 2: 0.0})


def test_what_is_worth_a_measurement() -> None:
    many = [(cpu,) for cpu in range(16)]
    assert list_candidates(many, 10) == [1, 2, 4]
    assert list_candidates(many[:15], 10) == [1, 2]
    assert list_candidates(many, 3) == [1, 2]
    assert list_candidates(many, 1) == [1]
    assert list_candidates([(0, 1)], 10) == [1, 2]
    assert list_candidates([(0,)], 10) == [1]


def test_values_of_the_option() -> None:
    assert [parse_parallel(text) for text in ("", "0", "3", "auto")] == [0, 0, 3, None]
    for text in ("-1", "two", "1.5", "AUTO"):
        with pytest.raises(CpuftError, match="is not a number of runs: give a whole number, or auto"):
            parse_parallel(text)


def test_a_record_that_is_being_written(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "record.jsonl") == []
    steps = make_steps(3, [0.1], step_seconds=0.5)
    lines: list[Line] = [make_record().header, *steps]
    text = "".join(format_line(line) + "\n" for line in lines)
    (tmp_path / "record.jsonl").write_text(text[:-10])
    assert read_steps(tmp_path / "record.jsonl") == steps[:2]
    assert find_rate(steps) == pytest.approx(64)
    assert find_rate([]) == 0
