"""The process beside a training that sends its record to trackers: it disturbs nothing, and ends with the run."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cpuft.record import format_line, read_record
from cpuft.train import tracker_process
from cpuft.train.tracker_process import run_trackers
from tests.conftest import run_cpuft
from tests.records import make_record

JOB = ("--task", "demo", "--max-train-samples", "64", "--max-steps", "4", "--batch-size", "16", "--no-save-model")


def follow(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[float, list[str]]:
    """Put a shell command in the place of the trackers; return how long the end took, and the warnings."""
    warnings: list[str] = []
    (folder / "record.jsonl").write_text(format_line(make_record(1).header) + "\n")
    popen: Any = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **options: popen(["sh", "-c", command, *argv], **options))
    with run_trackers("wandb", str(folder), warnings.append):
        start = time.monotonic()
    return time.monotonic() - start, warnings


def test_a_tracker_that_hangs_costs_less_than_a_second_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, warnings = follow(tmp_path, "exec sleep 60", monkeypatch)
    assert tracker_process._END_SECONDS < 1.0
    assert tracker_process._END_SECONDS <= seconds < 30
    assert len(warnings) == 1
    assert "do not have the whole record" in warnings[0]


def test_a_tracker_that_fails_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_process, "_END_SECONDS", 60.0)
    seconds, warnings = follow(tmp_path, "echo no server >&2; exit 1", monkeypatch)
    assert seconds < 30
    assert ["have failed" in line for line in warnings] == [True]
    assert warnings[0].endswith("send it with cpuft report RUN --to wandb, where RUN is the folder of the run")
    assert (tmp_path / "logs/trackers.err").read_text() == "no server\n"


def test_a_tracker_that_has_everything_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_process, "_END_SECONDS", 60.0)
    seconds, warnings = follow(tmp_path, "exit 0", monkeypatch)
    assert (warnings, seconds < 30) == ([], True)


def test_without_trackers_nothing_is_started(tmp_path: Path) -> None:
    with run_trackers("", str(tmp_path), pytest.fail):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
def test_tensorboard_follows_a_run_of_two_ranks(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = run_cpuft("launch", "--np", "2", *JOB, "--run-dir", "run", "--report-to", "tensorboard")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    found = event_accumulator.EventAccumulator("run/tensorboard")
    found.Reload()
    record = read_record("run")
    assert [event.step for event in found.Scalars("train/loss")] == [line.step for line in record.steps]
    assert found.Scalars("eval/accuracy")[0].value == pytest.approx(record.metrics["accuracy"])


@pytest.mark.proof
def test_a_run_on_this_machine_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "lib/tensorboard").mkdir(parents=True)
    (tmp_path / "lib/tensorboard/__init__.py").write_text("raise OSError")
    done = run_cpuft(
        *("launch", *JOB, "--run-dir", "runs/a", "--report-to", "tensorboard"),
        settings={"PYTHONPATH": str(tmp_path / "lib")},
    )
    assert done.returncode == 0, done.stderr
    assert f"send it with cpuft report {tmp_path}/runs/a --to tensorboard\n" in done.stderr + done.stdout
