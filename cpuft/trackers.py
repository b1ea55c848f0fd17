"""Trackers: send the record of a run to TensorBoard, MLflow, Weights & Biases or Trackio (`--report-to`).

The process of `cpuft.train.tracker_process` follows the record of a run that is training. `cpuft report RUN --to NAMES`
sends a record afterwards.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, install_command, suggest_names
from cpuft.files import hash_text
from cpuft.record import FILE_NAME, EvaluationLine, Footer, Header, Line, StepLine, format_line, parse_lines
from cpuft.secret_variables import mask_secrets

_PROJECT = "cpuft"
"""Project or experiment of all runs, unless the tracker's own environment variable names another one."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker has to know of a run."""

    name: str
    key: str
    """16 hexadecimal digits that stay the same when the run is restarted or resumed, and that no other run has."""
    options: Mapping[str, Any]
    """What the run page shows as its configuration: training options, model, number of ranks and versions."""
    folder: Path


class Tracker:
    """One run in a tracker. The library of the tracker is imported when the object is made, and only then.

    `log` is called with growing steps, several times for a step that was evaluated. A restart of the run makes the
    object again with the same `TrackedRun.key`, and continues the tracked run; it may repeat steps with the same
    values. All methods may raise whatever the library raises.
    """

    _run: Any
    """The run of a library that queues values and sends them in the background; other trackers have own methods."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send values of one update by name, such as `train/loss`."""
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        """Send what is left, and mark the run as complete."""
        self._run.finish()  # waits until everything is sent or, offline, written


class TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add one event with all values, which TensorBoard stores as fp32."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=found)))

    def finish(self) -> None:
        """Write all events to the disk."""
        self._writer.close()


class MLflow(Tracker):
    """A run in the experiment `cpuft`, or MLFLOW_EXPERIMENT_NAME, of the server of MLFLOW_TRACKING_URI."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([number], f"tags.`cpuft.key` = '{run.key}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(number, run_name=run.name, tags={"cpuft.key": run.key}).info.run_id
        for option, value in run.options.items():
            self._client.log_param(self._run, option, str(value)[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send all values in one request. `@` in names becomes `_at_`, because MLflow does not accept it."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics)

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)


class WeightsAndBiases(Tracker):
    """A run in the project `cpuft`, or WANDB_PROJECT. With WANDB_MODE=offline its files stay in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=run.name,
            id=run.key,
            resume="allow",
            config=dict(run.options),
            dir=str(run.folder),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )


class Trackio(Tracker):
    """A run in the project `cpuft` of Trackio's database on this host, or TRACKIO_PROJECT."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT") or _PROJECT
        self._run = trackio.init(
            project=project, name=f"{run.name}-{run.key}", config=dict(run.options), resume="allow"
        )


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
"""Values of --report-to: names of the packages, and of the extras that install these."""


def parse_trackers(text: str) -> list[str]:
    """Return the names in a list of trackers with commas between them, each once. Raises CpuftError: one is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise CpuftError(f"{name!r:.60} is not a tracker: {suggest_names(name, TRACKERS)}")
    return list(dict.fromkeys(names))


def check_trackers(text: str, environ: Mapping[str, str]) -> None:
    """Raise CpuftError if a tracker in a list with commas is unknown or not installed, or is mlflow while `environ` has
    no MLFLOW_TRACKING_URI. Nothing is raised for "".
    """
    for name in parse_trackers(text):
        if importlib.util.find_spec(name) is None:
            raise CpuftError(f"the tracker {name} is not installed: {install_command(name)}")
        if name == "mlflow" and not environ.get("MLFLOW_TRACKING_URI"):
            # MLflow would write to the folder in which the rank runs.
            raise CpuftError(
                "the tracker mlflow needs the address of its server: set MLFLOW_TRACKING_URI, for example to "
                "http://server:5000 or sqlite:////home/me/mlflow.db"
            )


def values_of(line: Line) -> dict[str, float]:
    """Return what trackers get of a line: train/loss, train/learning_rate and train/samples_per_second of a step,
    eval/METRIC of an evaluation, and three values of a footer, such as run/train_seconds; {} of others.
    """
    if isinstance(line, StepLine):
        rate = line.samples / line.step_seconds if line.step_seconds else 0.0
        return {"train/loss": line.loss, "train/learning_rate": line.learning_rate, "train/samples_per_second": rate}
    if isinstance(line, EvaluationLine):
        return {f"eval/{name}": value for name, value in line.metrics.items()}
    if isinstance(line, Footer):
        return {
            "run/steady_samples_per_second": line.steady_samples_per_second,
            "run/train_seconds": line.train_seconds,
            "run/peak_memory_bytes": float(line.peak_memory_bytes),
        }
    return {}


def make_tracked_run(header: Header, folder: Path) -> TrackedRun:
    """Return a TrackedRun with the name of `folder`, a hash of the header as its key, and as its options those of the
    header and ranks, hosts ("h1, h2"), cpu, precision and version_PACKAGE.
    """
    versions = {f"version_{name}": version for name, version in header.versions.items()}
    more = {"ranks": header.world_size, "hosts": ", ".join(header.hosts), "cpu": header.cpu_model}
    return TrackedRun(
        folder.absolute().name,
        hash_text(format_line(header), 16),
        {**header.options, **more, "precision": header.precision, **versions},
        folder,
    )


def send(lines: Iterator[Line], names: Sequence[str], folder: Path) -> None:
    """Send the lines of a record, from its header on, to trackers by their names in TRACKERS, and finish these at the
    end. `folder` is the run's. Evaluations and the footer count to the last update. Raises whatever the libraries
    raise.
    """
    trackers: list[Tracker] = []
    step = 0
    for line in lines:
        if isinstance(line, Header):
            trackers = [TRACKERS[name](make_tracked_run(line, folder)) for name in names]
        if isinstance(line, (StepLine, EvaluationLine)):
            step = line.step
        if values := values_of(line):
            for tracker in trackers:
                tracker.log(step, values)
    for tracker in trackers:
        tracker.finish()


def send_record(run: str, names: Sequence[str]) -> None:
    """Send the record in the run folder `run`, as it is now, to the trackers of these names. Raises CpuftError: the
    folder has no record, the record is broken, or a tracker fails.
    """
    path = Path(run) / FILE_NAME
    try:
        lines = parse_lines(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except OSError:
        raise CpuftError(f"{run} holds no {FILE_NAME}: give the folder of a run") from None
    try:
        send(iter(lines), names, Path(run))
    except Exception as error:  # each library has errors of its own
        reason = mask_secrets(" ".join(str(error).split()), os.environ)[:200] or type(error).__name__
        raise CpuftError(f"{run} was not sent to {', '.join(names)} ({reason}): try again when it answers") from None


def follow(path: Path) -> Iterator[Line]:
    """Yield the lines of a record as they are written; the footer, for which it waits without a limit, is the last.
    Raises FileNotFoundError: there is no record yet; CpuftError: a line is broken.
    """
    with path.open("rb") as file:
        rest = b""
        while True:
            *complete, rest = (rest + file.read()).split(b"\n")
            for text in complete:
                for line in parse_lines(text.decode(errors="replace") + "\n", str(path)):
                    yield line
                    if isinstance(line, Footer):
                        return
            time.sleep(_POLL_SECONDS)
