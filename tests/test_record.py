"""The run record."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.comm.bench import format_record
from cpuft.errors import CpuftError, explain_os_error
from cpuft.record import (
    BaselineLine,
    EvaluationLine,
    Footer,
    Header,
    Line,
    Measurement,
    StepLine,
    Writer,
    format_line,
    parse_measurements,
    parse_record,
    read_record,
)
from tests.records import make_record
from tests.train.checkpoint.test_folders import largest_file

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
STEPS = st.builds(StepLine, *([st.integers(0, 9), NUMBERS, NUMBERS, st.integers(), st.integers()] + [NUMBERS] * 6))
EVALUATIONS = st.builds(EvaluationLine, st.integers(), st.dictionaries(st.text(), NUMBERS), st.integers(), NUMBERS)


@given(st.lists(STEPS, max_size=4), st.lists(EVALUATIONS, max_size=2), st.text())
def test_what_is_written_reads_back(steps: list[StepLine], evaluations: list[EvaluationLine], task: str) -> None:
    whole = make_record(task=task)
    lines: list[Line] = [whole.header, *steps, *evaluations]
    record = parse_record("".join(format_line(line) + "\n" for line in lines))
    assert (record.header, record.steps, record.evaluations, record.footer) == (whole.header, steps, evaluations, None)
    assert record.baseline is None
    baseline = BaselineLine("BM25", {"map": 0.25}, 1.5, 3, 4)
    lines.append(baseline)
    assert parse_record("".join(format_line(line) + "\n" for line in lines)).baseline == baseline


def test_a_line_cut_short_is_forgiven_wherever_it_was_cut() -> None:
    whole = make_record()
    header, step = format_line(whole.header), format_line(whole.steps[0])
    for cut in range(1, len(step)):
        assert parse_record(f"{header}\n{step}\n{step[:cut]}").steps == whole.steps[:1]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no header"),
        ("{}\n{}\n", "line 1 is not a line of a record"),
        ('{"kind": "header", "format": 99}\n', "format 99, this version reads 2"),
        ('{"kind": "header", "format": 2}\n', "line 1 is not a line of a record .it has no 'task'"),
        ('{"kind": "step", "step": "1"}\n', "line 1 is not a line of a record .it has no 'loss'"),
        (
            '{"kind": "evaluation", "step": "1", "metrics": {}, "examples": 1, "seconds": 1}\n',
            "it.step is '1', and must be a wh",
        ),
        (
            format_line(make_record().header).replace('"cpus": [0,', '"cpus": ["0",') + "\n",
            r"it.ranks\[0\].cpus\[0\] is '0', and must be a whole number",
        ),
        ('{"kind": []}\n', "its kind is .., and must be a text"),
        ('{"kind": "end"}\n', "kind 'end' is unknown"),
        ("[" * 100_000 + "\n", "line 1 is not a line of a record .it is nested too deep"),
        ('{"kind": "step", "step": ' + "9" * 5000 + "}\n", "line 1 is not a line of a record"),
        ("5\n", "it is 5, and must be an object"),
    ],
)
def test_what_is_no_record(text: str, message: str) -> None:
    with pytest.raises(CpuftError, match=message):
        parse_record(text)


def test_files(tmp_path: Path) -> None:
    whole = make_record()
    with Writer(str(tmp_path / "run")) as writer:
        lines: list[Line] = [whole.header, *whole.steps, *whole.evaluations]
        for line in lines:
            writer.write(line)
        unfinished = read_record(str(tmp_path / "run"))
        assert unfinished.footer is None
        assert isinstance(whole.footer, Footer)
        writer.write(whole.footer)
    assert read_record(str(tmp_path / "run")).footer == whole.footer
    assert isinstance(unfinished.header, Header)
    with pytest.raises(
        CpuftError, match=rf"holds no record.jsonl: give the folder of an earlier run, .*{tmp_path}/run$"
    ):
        read_record(str(tmp_path))


def test_measurements_read_back(tmp_path: Path) -> None:
    row = Measurement("gloo", "all_reduce", "float32", 1024, 2, (0.001, 0.002, 0.003), (0.5, 0.5, 0.5))
    path = tmp_path / "comm.jsonl"
    path.write_text(format_record([row]))
    assert parse_measurements(path.read_text(), str(path)) == [row]
    damaged = '{"format": "cpuft-comm-bench-1", "torch": "2.13.0"}\n{"backend": "gloo"}\n'
    with pytest.raises(CpuftError, match=r"is no record of cpuft bench comm of this version: give its comm\.jsonl"):
        parse_measurements(damaged, str(path))


def fill(run: Path) -> None:
    with Writer(str(run)) as writer:
        for _ in range(9):
            writer.write(make_record().header)


def test_a_disk_that_is_full_is_named_by_the_records_path(tmp_path: Path) -> None:
    with largest_file(1 << 10), pytest.raises(OSError, match="File too large") as caught:
        fill(tmp_path)
    said = f"{tmp_path}/record.jsonl cannot be used (File too large): see to its disk and its mode, or give another"
    assert str(explain_os_error(caught.value)).startswith(said)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_record_is_written_on_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with Writer(str(tmp_path)) as writer:
        writer.write(make_record().header)
    assert (tmp_path / "record.jsonl").read_text() == format_line(make_record().header) + "\n"


def test_a_resumed_record_is_written_through_no_link_and_into_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    plants: tuple[Callable[[Path], None], ...] = (lambda path: path.symlink_to("precious"), os.mkfifo)
    for plant in plants:
        plant(tmp_path / "record.new")
        with Writer(str(tmp_path), "begun\n"):
            pass
        assert (tmp_path / "record.jsonl").read_text() == "begun\n"
    assert (tmp_path / "precious").read_text() == "mine"
