"""Trackers: what they get of a record, and that a restart continues the tracked run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.record import EvaluationLine, Footer, Header, Line, Record, StepLine, format_line
from cpuft.trackers import (
    TRACKERS,
    MLflow,
    TrackedRun,
    Tracker,
    check_trackers,
    follow,
    make_tracked_run,
    parse_trackers,
    send,
    send_record,
    values_of,
)
from tests.conftest import run_cpuft
from tests.records import make_record

RECORD = make_record(2)


def lines_of(record: Record) -> list[Line]:
    assert record.footer is not None
    return [record.header, *record.steps, *record.evaluations, record.footer]


def write_record(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "record.jsonl"
    path.write_text("".join(format_line(line) + "\n" for line in lines_of(RECORD)))
    return path


class Listening(Tracker):
    """Remembers what it gets, in `heard`."""

    heard: list[tuple[int, dict[str, float]]]
    keys: list[str]

    def __init__(self, run: TrackedRun) -> None:
        type(self).keys.append(run.key)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        type(self).heard.append((step, dict(values)))

    def finish(self) -> None:
        type(self).keys.append("finished")


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> type[Listening]:
    monkeypatch.setattr(Listening, "heard", [], raising=False)
    monkeypatch.setattr(Listening, "keys", [], raising=False)
    monkeypatch.setitem(TRACKERS, "listening", Listening)
    return Listening


def test_a_tracker_gets_every_value_of_the_record(listening: type[Listening], tmp_path: Path) -> None:
    send(iter(lines_of(RECORD)), ["listening"], tmp_path)
    losses = [values["train/loss"] for _, values in listening.heard if "train/loss" in values]
    assert losses == [line.loss for line in RECORD.steps]
    metrics = [values for _, values in listening.heard if any(name.startswith("eval/") for name in values)]
    assert metrics == [{f"eval/{name}": value for name, value in RECORD.metrics.items()}]
    assert [step for step, values in listening.heard if "train/loss" in values] == [one.step for one in RECORD.steps]
    assert listening.keys[-1] == "finished"


def test_a_restarted_run_has_the_same_key_and_another_run_another() -> None:
    key = make_tracked_run(RECORD.header, Path("run")).key
    assert make_tracked_run(RECORD.header, Path("elsewhere/run")).key == key
    other = replace(RECORD.header, started="2026-01-01T00:00:00+00:00")
    assert make_tracked_run(other, Path("run")).key != key


def test_a_record_is_followed_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    texts = [format_line(line) + "\n" for line in lines_of(RECORD)]
    path.write_text(texts[0])
    rest = "".join(texts[1:])

    def write() -> None:
        with path.open("a") as file:
            for start in range(0, len(rest), 97):  # lines are cut anywhere
                file.write(rest[start : start + 97])
                file.flush()

    writer = threading.Thread(target=write)
    writer.start()
    assert list(follow(path)) == lines_of(RECORD)
    writer.join()


def test_lists_of_trackers() -> None:
    assert parse_trackers("") == []
    assert parse_trackers("wandb, tensorboard,wandb") == ["wandb", "tensorboard"]
    with pytest.raises(CpuftError, match="'tensorbord' is not a tracker: did you mean tensorboard"):
        parse_trackers("tensorbord")


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CpuftError, match=r"the tracker wandb is not installed: .* pip install .*\[wandb\]"):
        check_trackers("wandb", {})


def test_mlflow_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check_trackers("mlflow", {"MLFLOW_TRACKING_URI": "http://server"})
    with pytest.raises(CpuftError, match="set MLFLOW_TRACKING_URI, for example to"):
        check_trackers("mlflow", {})


def test_mlflow_gets_names_that_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, float]] = []
    entities = SimpleNamespace(Metric=lambda name, value, *_: sent.append((name, value)))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    tracker: Any = object.__new__(MLflow)
    tracker._client, tracker._run = SimpleNamespace(log_batch=lambda *_: None), "r"
    tracker.log(3, {"eval/ndcg@10": 0.5, "eval/map": 0.25})
    assert sent == [("eval/ndcg_at_10", 0.5), ("eval/map", 0.25)]


def test_a_tracker_that_fails_is_one_message(listening: type[Listening], tmp_path: Path) -> None:
    write_record(tmp_path / "run")
    listening.finish = lambda self: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(CpuftError, match=r"run was not sent to listening \(division by zero\): try again"):
        send_record(str(tmp_path / "run"), ["listening"])


MLFLOW = """
import os, sys
class MlflowClient:
    def __init__(self):
        address, token = os.environ["MLFLOW_TRACKING_URI"], os.environ["MLFLOW_TRACKING_TOKEN"]
        print(f"{address} does not answer", file=sys.stderr)
        raise ConnectionError(f"API request to {address}/api failed with the token {token}")
"""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose mlflow names the password and the token of its server in its errors."""
    (tmp_path / "lib/mlflow").mkdir(parents=True)
    (tmp_path / "lib/mlflow/__init__.py").touch()
    (tmp_path / "lib/mlflow/tracking.py").write_text(MLFLOW)
    secret = {"MLFLOW_TRACKING_URI": "https://me:pass-word@server", "MLFLOW_TRACKING_TOKEN": "tok-123"}
    return {"PYTHONPATH": str(tmp_path / "lib"), **secret}


def test_the_error_of_a_tracker_shows_no_password(settings: dict[str, str], tmp_path: Path) -> None:
    write_record(tmp_path / "run")
    done = run_cpuft("report", "run", "--to", "mlflow", settings=settings)
    assert done.returncode == 2
    reason = "(API request to https://***@server/api failed with the token ***)"
    assert done.stderr.splitlines()[-1].startswith(f"cpuft: error: run was not sent to mlflow {reason}: try again")


def test_the_log_of_a_tracker_shows_no_password(settings: dict[str, str], tmp_path: Path) -> None:
    write_record(tmp_path / "run")
    command = [sys.executable, "-m", "cpuft.train.tracker_process", "mlflow", "run"]
    done = subprocess.run(
        command, env=os.environ | settings, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    lines = done.stderr.splitlines()
    assert lines[:2] == ["https://***@server does not answer", "Traceback (most recent call last):"]
    assert lines[-1] == "ConnectionError: API request to https://***@server/api failed with the token ***"
    assert "pass-word" not in done.stderr
    assert done.returncode == 1


def test_no_tracker_is_imported_before_it_is_used() -> None:
    code = "import sys, cpuft.cli, cpuft.trackers; sys.exit(any(n in sys.modules for n in %r))"
    names = ["tensorboard", "mlflow", "wandb", "trackio"]
    assert subprocess.run([sys.executable, "-c", code % names], timeout=60, check=False).returncode == 0


def test_the_event_files_of_tensorboard_hold_the_record(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_record(tmp_path / "run")
    done = run_cpuft("report", str(tmp_path / "run"), "--to", "tensorboard")
    assert (done.returncode, done.stdout) == (0, f"sent to tensorboard: {tmp_path}/run\n")
    found = event_accumulator.EventAccumulator(str(tmp_path / "run/tensorboard"))
    found.Reload()
    curve = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert curve == [(line.step, pytest.approx(line.loss, rel=1e-6)) for line in RECORD.steps]
    assert [event.value for event in found.Scalars("eval/accuracy")] == [pytest.approx(RECORD.metrics["accuracy"])]


def test_lines_without_values_are_not_sent() -> None:
    assert values_of(RECORD.header) == {}
    assert values_of(EvaluationLine(3, {"f1": 0.5}, 1, 0.1)) == {"eval/f1": 0.5}
    assert isinstance(RECORD.header, Header)
    assert isinstance(RECORD.footer, Footer)
    assert isinstance(RECORD.steps[0], StepLine)
