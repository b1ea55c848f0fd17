"""The run record and the record of measurements: JSON lines with a version, their writer and their reader.

A record begins with a header. Then come lines for updates, evaluations, interruptions and restarts, perhaps one with a
baseline, and a footer if the run is complete. Reports, comparisons and estimates read nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar

from cpuft.errors import CpuftError
from cpuft.serialization import load, parse_json
from cpuft.transfer import lock_file

FORMAT = 2


@dataclass(frozen=True)
class GradientSizes:
    """How many numbers the gradients of a model have. `cpuft estimate` derives the bytes per update from it."""

    parameters: int = 0
    """Numbers in all gradients except those of word embeddings; 0 if they were not counted."""
    embedding_row: int = 0
    """Numbers in one row of the word embeddings. 0 if `parameters` includes them, because rows are not sent alone."""
    factors: int = 0
    """Numbers in the PowerSGD factors of all gradients except those of word embeddings."""
    tokens: dict[str, float] = field(default_factory=dict)
    """Mean number of different tokens in one update, by the number of ranks."""

    def count_tokens(self, ranks: int) -> float:
        """Return the number of different tokens in an update of this many ranks, not rounded; 0 if nothing is known. A
        power law (Heaps' law) is used between two known numbers of ranks and above them; else the nearest one's value.
        """
        known = sorted((int(size), count) for size, count in self.tokens.items())
        if not known:
            return 0.0
        after = min((index for index, (size, _) in enumerate(known) if size >= ranks), default=len(known) - 1)
        (low, few), (high, many) = known[max(0, after - 1)], known[after]
        if high == ranks or low == high or not few:
            return many
        return few * math.pow(ranks / low, math.log(many / few) / math.log(high / low))


@dataclass(frozen=True)
class Line:
    """A line of a file; `kind` names its class there."""

    kinds: ClassVar[dict[str, type[Line]]] = {}
    """All classes of lines by their kind."""
    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        Line.kinds[kind] = cls


@dataclass(frozen=True)
class MeasuredHeader(Line, kind="measured"):
    """First line of a file of measurements."""

    what: str
    """The command that measured, for example `bench comm`."""
    versions: dict[str, str]
    format: int = FORMAT


@dataclass(frozen=True)
class Measurement(Line, kind="backend"):
    """One collective of one backend on one message size; bandwidths are those of nccl-tests (doc/PERFORMANCE.md)."""

    backend: str
    operation: str
    """all_reduce, all_gather, reduce_scatter or broadcast."""
    dtype: str
    """Type of the elements as torch names it, such as float32."""
    nbytes: int
    """Bytes of the whole message of all ranks, as nccl-tests count them."""
    ranks: int
    seconds: tuple[float, ...]
    """Seconds of the slowest rank in each repetition, without the warm-up."""
    busy: tuple[float, ...]
    """Share of its cores that the busiest rank used in each repetition, with all threads of the library."""

    @property
    def median_seconds(self) -> float:
        """Median of the repetitions, in seconds."""
        return statistics.median(self.seconds)

    @property
    def algorithm_bytes_per_second(self) -> float:
        """Bytes of the whole message divided by the median time."""
        return self.nbytes / self.median_seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """Algorithm bandwidth times `bus_factor`, to compare with the speed of a link for any number of ranks."""
        return self.algorithm_bytes_per_second * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """Return nccl-tests' factor of bus bandwidth: all_reduce 2(n-1)/n, all_gather, reduce_scatter (n-1)/n, others 1."""
    shares = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    return shares[operation] * (ranks - 1) / ranks if operation in shares else 1.0


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of a TCP connection between hosts of the hostfile, measured by the doctor."""

    source: str
    target: str
    latency_us: float
    """Half of the round-trip time of one byte, in microseconds."""
    bits_per_second: float
    error: str = ""
    """Why the link could not be measured; empty if it could."""


FILE_NAME = "record.jsonl"
STEP_PHASES = ("data", "forward", "backward", "communication", "update")
"""The phases of a step in their order; `StepLine` has a field PHASE_seconds for each."""


@dataclass(frozen=True)
class RecordedRank:
    """Where a rank ran."""

    rank: int
    host: str
    cpus: list[int]
    """Hardware threads that the rank was pinned to."""


@dataclass(frozen=True)
class Header(Line, kind="header"):
    """First line of a record: what was trained, where, and with which options and versions."""

    task: str
    model: str
    data: str
    """Checksum of the examples before they were tokenised."""
    options: dict[str, Any]
    """Values of all fields of TrainConfig by name."""
    world_size: int
    ranks: list[RecordedRank]
    backend: str
    precision: str
    """Number format of matrix products: bf16, fp32 or int8."""
    cpu_model: str
    cpu_flags: list[str]
    """Those of `cpuft.hardware.DECIDING_FLAGS` that the CPU has; they decide how fast matrix products are."""
    versions: dict[str, str]
    """Versions of Python packages by name, such as torch, and of `python`."""
    global_batch: int
    """Examples of one update of all ranks together."""
    parameters: int
    started: str
    """UTC, ISO 8601."""
    products: dict[str, Any] = field(default_factory=dict)
    """Measured speed of matrix products on rank 0, as `cpuft.train.precision.measure_products` returns it: `teraflops`
    in `precision`, and `fp32_teraflops`."""
    independent: bool = False
    """Whether this run measured the ideal: all ranks trained at the same time, each on its share of the examples, and
    exchanged nothing."""
    gradient_sizes: GradientSizes = field(default_factory=GradientSizes)
    examples: int = 0
    cpu_quota: float = 0.0
    """Cores' worth of CPU time that a control group allows the head host; 0 for no limit."""
    gradients: str = ""
    """Compression level of the gradients if it was chosen by measuring; else empty, and the options tell."""
    kernels: str = ""
    """`compiled`: all ranks ran the C++ kernels. `absent`: at least one rank had none, and so no rank used them, unless
    ranks trained independently. Empty if the fast path was off."""
    fast_path: str = ""
    """How many layers the fast path has replaced, or why it replaced none."""
    simulated: bool = False
    """Whether the hosts are parts of one machine, so that they share its memory, its caches and perhaps its cores."""
    format: int = FORMAT

    @property
    def hosts(self) -> list[str]:
        """Host names in the order of their first rank, each name once."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))


@dataclass(frozen=True)
class StepLine(Line, kind="step"):
    """One update. Seconds are those of rank 0; samples and tokens are the sums over all ranks."""

    step: int
    """Number of the update, from 1."""
    loss: float
    learning_rate: float
    samples: int
    tokens: int
    """Tokens without padding."""
    data_seconds: float
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    """Time that communication adds after the last gradient is ready; the rest overlaps with the backward pass."""
    update_seconds: float
    step_seconds: float
    bytes_sent: int = 0
    """Bytes that rank 0 gave to collectives in this update. With a hierarchical mean (int8 and powersgd with several
    ranks on each of several hosts), those of collectives within the host are left out."""
    compute_seconds: list[float] = field(default_factory=list)
    """Seconds of each rank without communication. In a run of independent ranks, their whole steps."""


@dataclass(frozen=True)
class ResumedLine(Line, kind="resumed"):
    """The run was resumed. The lines after this one ran on these ranks, with the options of the header."""

    step: int
    """The last update before the run was resumed."""
    repeated: int
    """How many later updates were lost and are repeated; their lines are no longer in the record."""
    world_size: int
    ranks: list[RecordedRank]
    backend: str
    precision: str
    reset: str
    """State that the checkpoint does not hold and that started from the beginning; empty for none."""
    started: str
    """UTC, ISO 8601."""
    lost_seconds: float = 0.0
    """After an automatic restart: seconds from the last update, or from when the loss was noticed, to this line."""
    restart_reason: str = ""
    """After an automatic restart: which rank or host was lost."""


@dataclass(frozen=True)
class InterruptedLine(Line, kind="interrupted"):
    """The run stopped early, after a checkpoint of this update."""

    step: int
    updates: int
    by: str
    """What stopped the run: the name of the signal, such as SIGTERM, or "the notice PLACE on HOST"."""
    leaving: tuple[int, ...] = ()
    """Ranks on hosts that have an interruption notice."""


@dataclass(frozen=True)
class EvaluationLine(Line, kind="evaluation"):
    """Metrics of one evaluation on a validation split."""

    step: int
    metrics: dict[str, float]
    examples: int
    seconds: float


@dataclass(frozen=True)
class BaselineLine(Line, kind="baseline"):
    """What simple counts of words reach on the same validation examples without a model."""

    name: str
    """What was fitted, such as "BM25"."""
    metrics: dict[str, float]
    """By the names of the model's metrics."""
    seconds: float
    """Processor time of fitting and predicting."""
    rows: int = 0
    """Training examples to which it was fitted; 0 for a method that learns nothing from them."""
    examples: int = 0


@dataclass(frozen=True)
class Footer(Line, kind="footer"):
    """Last line of a complete run: its totals."""

    train_seconds: float
    """Seconds from the first update's begin to the last one's end, without evaluation, tokenising and saving."""
    samples: int
    samples_per_second: float
    steady_samples_per_second: float
    """Samples per second without the first tenth of the steps, in which caches and kernels warm up."""
    tokens_per_second: float
    peak_memory_bytes: int
    """Largest resident set size of any rank."""
    total_seconds: float
    """Seconds from the start of Python on rank 0 to the saved model."""
    checksum: str
    """Checksum of the parameters, which is equal on all ranks."""
    bytes_per_step: float = 0.0
    """Mean bytes that rank 0 gave to collectives in one update."""
    phases: list[dict[str, float]] = field(default_factory=list)
    """For each rank the mean seconds of a steady step by the names in STEP_PHASES."""
    evaluation_seconds: float = 0.0
    saved_step: int = 0
    """Number of the update whose weights were saved, with --save-best; 0: those of the last update."""
    other_load: float = 0.0
    """Share of a rank's cores that other programs, or other guests of its machine, took while it trained and evaluated:
    that of the rank with most."""


@dataclass(frozen=True)
class Record:
    """The record of a run as it was read; `footer` is None if the run is not complete."""

    path: str
    header: Header
    steps: list[StepLine] = field(default_factory=list)
    evaluations: list[EvaluationLine] = field(default_factory=list)
    footer: Footer | None = None
    resumptions: list[ResumedLine] = field(default_factory=list)
    baseline: BaselineLine | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the saved model, by the last evaluation or with --save-best by the best one; {} without any."""
        saved = self.footer.saved_step if self.footer else 0
        lines = [line for line in self.evaluations if line.step == saved] or self.evaluations
        return lines[-1].metrics if lines else {}


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as one line: "accuracy 0.8627  f1 0.9012", with two spaces between metrics."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def format_baseline(line: BaselineLine) -> str:
    """Return a baseline as one line: "baseline (BM25, 1.2 s): ndcg@10 0.7034  mrr@10 0.6512"."""
    return f"baseline ({describe_baseline(line)}): {format_metrics(line.metrics)}"


def describe_baseline(line: BaselineLine) -> str:
    """Return what a baseline is: "BM25, 1.2 s", or "BM25, 500 of 1,000 examples, 1.2 s" if it was not fitted to all."""
    some = f", {line.rows:,} of {line.examples:,} examples" if 0 < line.rows < line.examples else ""
    return f"{line.name}{some}, {line.seconds:.1f} s"


def drop_warm_up(steps: list[StepLine]) -> list[StepLine]:
    """Return the steps without the first tenth (rounded down), in which caches and kernels warm up."""
    return steps[len(steps) // 10 :]


def format_line(line: Line) -> str:
    """Return the line as one JSON object without a newline: `{"kind": "step", "step": 1, ...}`."""
    return json.dumps({"kind": line.kind} | dataclasses.asdict(line), allow_nan=True)


class Writer:
    """Writes a record line by line and flushes each line, so that a killed run leaves all of them.

    The file is locked (flock) while the writer is open, if its file system has locks. A `with` block closes the file.
    """

    def __init__(self, run_dir: str, begun: str | None = None) -> None:
        """Create record.jsonl (FileExistsError: it is there), or replace it by the lines `begun` of a resumed run."""
        path = Path(run_dir) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = str(path)
        beside = path if begun is None else path.with_suffix(".new")
        if begun is not None:
            beside.unlink(missing_ok=True)  # left by an earlier start that was killed before it renamed the file
        # Mode "x" does not follow a link, and does not wait for the other end of a named pipe.
        self._file: IO[str] = open(beside, "x", encoding="utf-8")  # noqa: SIM115
        # The lock only tells `cpuft launch --resume` that the run is active. Some file systems have no locks (ENOLCK).
        with suppress(OSError):
            lock_file(self._file, waits=True)
        self._file.write(begun or "")
        self._file.flush()
        beside.rename(path)

    def write(self, line: Line) -> None:
        """Append a line and flush it. Raises OSError with the name of the record if the disk does not store it."""
        try:
            self._file.write(format_line(line) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = self._path
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(OSError) if kind else nullcontext():  # the error that was raised is the one to show
            self._file.close()


def parse_lines(text: str, path: str) -> list[Line]:
    """Return the lines of a record; a broken last line without a newline is left out, as a killed process leaves it.
    Raises CpuftError, which names `path` and the number: another line is broken or of another version of the format.
    """
    lines = text.split("\n")
    parsed: list[Line] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            parsed.append(_parse_line(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise CpuftError(
                f"{path}, line {number} is not a line of a record ({error}): give one of this version"
            ) from None
    return parsed


def parse_record(text: str, path: str = "record") -> Record:
    """Return the record of a run from its text; CpuftError, which names `path`: the first line is no header, or as
    `parse_lines`.
    """
    parsed = parse_lines(text, path)
    if not parsed or not isinstance(parsed[0], Header):
        raise CpuftError(f"{path} has no header, as the run ended before its first step: look into the run's logs")
    return Record(
        path,
        parsed[0],
        [line for line in parsed if isinstance(line, StepLine)],
        [line for line in parsed if isinstance(line, EvaluationLine)],
        next((line for line in parsed if isinstance(line, Footer)), None),
        [line for line in parsed if isinstance(line, ResumedLine)],
        next((line for line in parsed if isinstance(line, BaselineLine)), None),
    )


def parse_measurements(text: str, path: str) -> list[Measurement]:
    """Return the measurements in the text of a comm.jsonl of `cpuft bench comm`, in its order. Raises CpuftError, which
    names `path`: its first line is no header of measurements, or as `parse_lines`.
    """
    parsed = parse_lines(text, path) if '"kind"' in text else []
    if not parsed or not isinstance(parsed[0], MeasuredHeader):
        raise CpuftError(f"{path} is no record of cpuft bench comm of this version: give its comm.jsonl")
    return [line for line in parsed if isinstance(line, Measurement)]


def _parse_line(text: str) -> Line:
    values = load(dict[str, Any], parse_json(text))
    kind = load(str, values.pop("kind", None), "its kind")
    if kind in ("header", "measured") and values.get("format") != FORMAT:
        raise ValueError(f"format {values.get('format')!r:.60}, this version reads {FORMAT}")
    if kind not in Line.kinds:
        raise ValueError(f"kind {kind[:60]!r} is unknown")
    return load(Line.kinds[kind], values)


def read_record(run_dir: str) -> Record:
    """Read the record of a run from its folder or file; CpuftError: it is missing, without a header, or damaged."""
    path = Path(run_dir)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        found = f"{run_dir} holds no {FILE_NAME}" if Path(run_dir).exists() else f"there is no folder {run_dir}"
        below = sorted(Path(run_dir).glob(f"*/{FILE_NAME}"), key=lambda one: one.stat().st_mtime)
        example = below[-1].parent if below else "runs/mrpc-np2"
        raise CpuftError(f"{found}: give the folder of an earlier run, for example {example}") from None
    return parse_record(text, str(path))


@dataclass(frozen=True)
class EarlierMeasurements:
    """What the first start of a run has measured, and which later starts of the run reuse."""

    ranks: int
    backend: str = ""
    """The backend that `auto` chose; "" if nothing was measured, because --backend was given or there was one rank."""
    gradients: str = ""
    """The compression level that was chosen by measuring; "" if none was (`Header.gradients`)."""
    precision: str = ""
    """The precision of the run; "" at its first start."""


def read_measurements(header: Header) -> EarlierMeasurements:
    """Return the ranks and choices of a run's first start; backend is "" if --backend named it, or for one rank."""
    was_given = header.options.get("backend") != "auto" or header.world_size == 1
    backend = "" if was_given else header.backend
    return EarlierMeasurements(header.world_size, backend, header.gradients, header.precision)
