"""What a run reports while it trains: progress on rank 0's terminal, and the lines of the record."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, replace

from cpuft.compressions import COMPRESSIONS_WITH_FEEDBACK
from cpuft.config.train import WorkerConfig
from cpuft.errors import counted
from cpuft.hardware import Cpu, list_deciding
from cpuft.rank.progress import FINAL_EVALUATION_MARK, ProgressEvent, format_evaluation, format_event
from cpuft.record import (
    STEP_PHASES,
    EvaluationLine,
    Footer,
    Header,
    Line,
    RecordedRank,
    ResumedLine,
    StepLine,
    Writer,
    drop_warm_up,
    format_metrics,
)
from cpuft.train.checkpoint.writer_thread import CheckpointWriter
from cpuft.train.engines import name_packages
from cpuft.train.evaluate import KeptPredictions
from cpuft.train.exchange.compression_choice import count_sent_numbers
from cpuft.train.model import count_parameters, get_model_name
from cpuft.train.optimizer import describe_fast_path
from cpuft.train.run_warnings import RunWatch
from cpuft.train.setup import TrainingSetup

_PLAIN_LINES = 10
"""Number of progress lines in a whole run, where there is no bar."""
_WARM_UP_STEPS = 2
"""Steps in which caches and kernels warm up. The speed that is shown leaves them out."""
_WINDOW_STEPS = 20
"""Number of latest steps whose mean speed is shown."""
_EVENT_SECONDS = 0.1
"""Shortest time between two events for the launcher's progress bar."""
_PACKAGES = ("cpuft", "torch", "transformers", "tokenizers", "numpy")
"""Packages whose versions are recorded."""


class Progress:
    """Shows the progress of a run on rank 0: messages on standard error, metrics on standard output. The style "lines"
    is about ten plain lines; "bar" sends events to the launcher's progress bar (`cpuft.rank.progress`).
    """

    def __init__(self, style: str, rank: int) -> None:
        self._style, self._is_shown = style, rank == 0
        self._event: ProgressEvent | None = None
        """The last event, until the training has ended."""
        self._event_at = 0.0
        self._metric = ""
        """The main metric of the last evaluation, which the bar shows."""
        self._steps_made = 0
        self._recent = deque[StepLine](maxlen=_WINDOW_STEPS)
        """The latest steps after the warm-up. Their own seconds count: lines of several ranks come many at once."""

    def show_start(self, header: Header, precision_reason: str, backend_reason: str) -> None:
        """Show what is trained on which ranks, in which precision and over which backend; the reasons are clauses."""
        ranks = f"{counted(header.world_size, 'rank')} on {', '.join(header.hosts)}"
        self.show(f"{header.task} with {header.model}, {ranks}, {header.precision}: {precision_reason}")
        if header.independent and header.world_size > 1:
            self.show("each rank trains independently at the same time: the ideal")
        elif header.world_size > 1:
            self.show(f"gradients over {header.backend}: {backend_reason}")

    def show(self, text: str) -> None:
        """Show a line on standard error; on other ranks than 0, do nothing."""
        if self._is_shown:
            print(text, file=sys.stderr, flush=True)

    def show_resumption(self, line: ResumedLine, updates: int) -> None:
        """Show after which update a run is resumed, out of `updates`, and what its checkpoint does not contain."""
        resumed = f"resumed after update {line.step} of {updates} on {counted(line.world_size, 'rank')}"
        repeated = f", {counted(line.repeated, 'update')} repeated" if line.repeated else ""
        self.show(f"{resumed}{repeated}{f'; not in the checkpoint: {line.reset}' if line.reset else ''}")

    def show_step(self, line: StepLine, updates: int) -> None:
        """Count a finished step of `updates`; show it on rank 0 in the bar, or as a line each tenth of the run."""
        if not self._is_shown:
            return
        self._steps_made += 1
        if self._steps_made > _WARM_UP_STEPS:
            self._recent.append(line)
        if self._style == "bar":
            self._send_step(line, updates)
        elif line.step == updates or line.step % max(1, updates // _PLAIN_LINES) == 0:
            parts = [f"step {line.step}/{updates}", f"loss {line.loss:.4f}"]
            if speed := self._measure_speed():
                rate, seconds = speed
                parts += [f"{rate:.1f} samples/s", f"{seconds * (updates - line.step):.0f} s left"]
            self.show("  ".join(parts))

    def _measure_speed(self) -> tuple[float, float] | None:
        """Return samples per second and seconds per step of the latest steps; None during the warm-up."""
        if not self._recent:
            return None
        seconds = max(sum(line.step_seconds for line in self._recent), 1e-9)
        return sum(line.samples for line in self._recent) / seconds, seconds / len(self._recent)

    def _send_step(self, line: StepLine, updates: int) -> None:
        """Tell the launcher about a step, unless it was told a moment ago."""
        now = time.perf_counter()
        if self._event and now - self._event_at < _EVENT_SECONDS and line.step < updates:
            return
        rate, seconds = self._measure_speed() or (0.0, 0.0)
        left = seconds * (updates - line.step)
        self._event, self._event_at = ProgressEvent(line.step, updates, line.loss, rate, left, self._metric), now
        self.show(format_event(self._event))

    def _end_bar(self) -> None:
        if self._event:
            self.show(format_event(replace(self._event, is_last=True)))
            self._event = None

    def show_evaluation_start(self, examples: int) -> None:
        """Show that the evaluation after the training, on this number of examples, begins; it may take a while."""
        self._end_bar()
        self.show(f"{FINAL_EVALUATION_MARK}{counted(examples, 'example')}")

    def show_evaluation(self, line: EvaluationLine, name: str) -> None:
        """Show an evaluation while training on rank 0's standard error; the bar goes on with the metric `name`."""
        self._metric = f"{name} {line.metrics[name]:.4f}"
        self.show(format_evaluation(line.step, line.metrics))

    def show_metrics(self, line: EvaluationLine) -> None:
        """Print the metrics of the trained model in one line on rank 0's standard output, and end the bar."""
        self._end_bar()
        self.show_result(format_metrics(line.metrics))

    def show_result(self, text: str) -> None:
        """Print a line on standard output, where the metrics are; on other ranks than 0, do nothing."""
        if self._is_shown:
            print(text, flush=True)


@dataclass(frozen=True)
class TrainingResult:
    """What a training leaves for the footer of its record."""

    steps: list[StepLine]
    """All steps of the run, with those before it was resumed."""
    phases: list[dict[str, float]]
    """For each rank, the mean seconds of a steady step by phase."""
    checksum: str
    """Of the parameters of most ranks; empty if ranks trained independently."""
    evaluation: EvaluationLine | None = None
    """The evaluation of the weights that the model has now; None if ranks trained independently."""
    evaluation_seconds: float = 0.0
    saved_step: int = 0
    """Update whose weights the model has now, if they are not the last ones; else 0."""
    difference: str = ""
    """How the ranks' parameters differ at the end; empty if they are equal, or if ranks trained independently."""
    predictions: KeptPredictions | None = None
    """Those of `evaluation`, on rank 0 and only if examples have rows; None if ranks trained independently."""


class RunReporter:
    """Reports a run as it goes on: to the user, to the record (both on rank 0), and to the record in checkpoints;
    `record`, `checkpoint_writer` and `watch` are None on ranks without them, and until they are set.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.record: Writer | None = None
        self.checkpoint_writer: CheckpointWriter | None = None
        self.watch: RunWatch | None = None
        """Warns of what the lines show."""
        self.earlier_steps: list[StepLine] = []
        """Steps of the run before it was resumed; `earlier_evaluations` likewise."""
        self.earlier_evaluations: list[EvaluationLine] = []

    def add(self, line: Line) -> None:
        """Write a line to the record and to that of later checkpoints, where this rank has them; show the warning of
        `watch`.
        """
        if self.record:
            self.record.write(line)
        if self.checkpoint_writer:
            self.checkpoint_writer.add_line(line)
        if self.watch and (warning := self.watch.add(line)):
            self.progress.show(warning)


def make_header(
    setup: TrainingSetup, worker: WorkerConfig, ranks: list[RecordedRank], backend: str, cpu: Cpu, kernels: str
) -> Header:
    """Return the header of the run's record, without `products`, with the present time as `started`."""
    config, prepared, model = setup.config, setup.prepared, setup.model
    packages = (*_PACKAGES, *name_packages(config.engine))
    return Header(
        task=config.task,
        model=get_model_name(config),
        data=prepared.checksum,
        options=dict(vars(config)),
        world_size=len(ranks),
        ranks=ranks,
        backend=backend,
        precision=setup.precision,
        cpu_model=cpu.model,
        cpu_flags=list_deciding(cpu.flags),
        versions={"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages},
        global_batch=setup.global_batch,
        parameters=count_parameters(model),
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        independent=setup.independent,
        gradient_sizes=count_sent_numbers(model, setup.objective, config, prepared),
        examples=len(prepared.train),
        cpu_quota=worker.cpu_quota,
        simulated=worker.simulated,
        gradients=setup.compression,
        kernels=kernels,
        fast_path=describe_fast_path(model, config),
    )


def make_resumed_line(header: Header, worker: WorkerConfig, done: int) -> ResumedLine:
    """Return the line of a run that is resumed after `done` updates; later ones that were recorded are `repeated`."""
    reset = ""
    if header.options["sync_every"] > 1:
        reset = "the outer momentum, and the moments of all ranks but the one that wrote the checkpoint"
    elif (header.gradients or header.options["grad_compression"]) in COMPRESSIONS_WITH_FEEDBACK:
        reset = "the parts of gradients that were not sent yet (error feedback)"
    return ResumedLine(
        step=done,
        repeated=max(0, worker.recorded_updates - done),
        world_size=header.world_size,
        ranks=header.ranks,
        backend=header.backend,
        precision=header.precision,
        reset=reset,
        started=header.started,
        lost_seconds=round(max(0.0, time.time() - worker.stopped_at), 1) if worker.stopped_at else 0.0,
        restart_reason=worker.restart_reason,
    )


def merge_steps(ranks: list[list[StepLine]]) -> list[StepLine]:
    """Return independent ranks' steps as one run's: mean loss and step seconds, sums of samples and tokens, all ranks'
    step seconds as `compute_seconds`, else rank 0's; as many as the rank with the fewest made.
    """
    return [
        replace(
            lines[0],
            loss=statistics.fmean(line.loss for line in lines),
            samples=sum(line.samples for line in lines),
            tokens=sum(line.tokens for line in lines),
            step_seconds=statistics.fmean(line.step_seconds for line in lines),
            compute_seconds=[line.step_seconds for line in lines],
        )
        for lines in zip(*ranks)
    ]


def average_phases(steps: list[StepLine]) -> dict[str, float]:
    """Return a step's mean seconds by phase (STEP_PHASES), 0.0 without steps; the first tenth of them is left out."""
    steady = drop_warm_up(steps)
    return {
        name: statistics.fmean(getattr(line, f"{name}_seconds") for line in steady) if steady else 0.0
        for name in STEP_PHASES
    }


def make_footer(result: TrainingResult, peak_memory_bytes: int, other_load: float, total_seconds: float) -> Footer:
    """Return the footer of the run's record. Memory and load are the most of any rank; without steps, speeds are 0."""
    steps = result.steps
    steady = drop_warm_up(steps)
    seconds = sum(line.step_seconds for line in steps)
    steady_seconds = sum(line.step_seconds for line in steady)
    samples = sum(line.samples for line in steps)
    return Footer(
        train_seconds=seconds,
        samples=samples,
        samples_per_second=samples / seconds if seconds else 0.0,
        steady_samples_per_second=sum(line.samples for line in steady) / steady_seconds if steady_seconds else 0.0,
        tokens_per_second=sum(line.tokens for line in steps) / seconds if seconds else 0.0,
        peak_memory_bytes=peak_memory_bytes,
        total_seconds=total_seconds,
        checksum=result.checksum,
        bytes_per_step=sum(line.bytes_sent for line in steps) / len(steps) if steps else 0.0,
        phases=result.phases,
        evaluation_seconds=result.evaluation_seconds,
        saved_step=result.saved_step,
        other_load=other_load,
    )
