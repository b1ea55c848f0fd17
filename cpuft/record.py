"""The run record, and the record of measurements: versioned JSON lines, with their writer and reader."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import statistics
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cpuft.config import TrainConfig, option_names, rename_old_options
from cpuft.errors import CpuftError
from cpuft.serialization import load, parse_json

FORMAT = 1
"""Of every record; its header says it."""


@dataclass(frozen=True)
class Travels:
    """What gradients are made of, wherever they travel: `cpuft estimate` reads it."""

    parameters: int = 0
    """Numbers of all gradients but those of words; 0 in the record of an older version."""
    row: int = 0
    """Numbers of one word's gradient; 0 where words' are no rows of their own, and part of the parameters."""
    factors: int = 0
    """Numbers of powersgd's factors of all gradients but those of words; 0 in the record of an older version."""
    words: dict[str, float] = field(default_factory=dict)
    """Different words of an update, on average, by the number of ranks."""


@dataclass(frozen=True)
class MeasuredHeader:
    """What a file of measurements begins with, where a run's has a header."""

    what: str
    """The verb that measured."""
    versions: dict[str, str]
    format: int = FORMAT


@dataclass(frozen=True)
class Measurement:
    """One operation of a backend on one message, measured by `cpuft bench comm`.

    Bandwidths are nccl-tests' (doc/PERFORMANCE.md): algorithm bandwidth is bytes a rank holds over time; bus bandwidth
    multiplies it by 2(n-1)/n for all_reduce, (n-1)/n for all_gather and reduce_scatter of n ranks, 1 for broadcast, so
    that it compares with the link's own speed whatever n. Of all_gather and reduce_scatter the bytes are the whole's.
    """

    backend: str
    operation: str
    dtype: str
    nbytes: int
    """Of the whole message, as nccl-tests count it."""
    ranks: int
    seconds: tuple[float, ...]
    """Each repetition; of the slowest rank; warm-up left out."""
    busy: tuple[float, ...]
    """Each repetition; the share of its cores that the busiest rank kept busy, its library's threads included."""

    @property
    def median_seconds(self) -> float:
        """The middle repetition."""
        return statistics.median(self.seconds)

    @property
    def algorithm_bytes_per_second(self) -> float:
        """Message bytes over time."""
        return self.nbytes / self.median_seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """What the busiest link carries."""
        return self.algorithm_bytes_per_second * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """nccl-tests' factor from algorithm to bus bandwidth."""
    shares = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    return shares[operation] * (ranks - 1) / ranks if operation in shares else 1.0


@dataclass(frozen=True)
class Link:
    """What one TCP connection carries from a host to another."""

    source: str
    """As the hostfile names it."""
    target: str
    latency_us: float
    """Half a round trip of one byte, microseconds."""
    bits_per_second: float
    error: str = ""


FILE_NAME = "record.jsonl"
PHASES = ("data", "forward", "backward", "communication", "update")


@dataclass(frozen=True)
class RecordedRank:
    """Where a rank ran, as a record keeps it."""

    rank: int
    host: str
    cpus: list[int]
    """Hardware threads it was bound to."""


@dataclass(frozen=True)
class Header:
    """What was run, where and with what."""

    task: str
    model: str
    data: str
    """Checksum of the rows, before they were tokenised."""
    options: dict[str, Any]
    world_size: int
    ranks: list[RecordedRank]
    backend: str
    precision: str
    cpu_model: str
    cpu_flags: list[str]
    """Only those that decide how fast a product is."""
    versions: dict[str, str]
    global_batch: int
    """Rows of one update, all ranks together."""
    parameters: int
    started: str
    """UTC, ISO 8601."""
    products: dict[str, Any] = field(default_factory=dict)
    """What matrix products ran on at the start, on rank 0: see `cpuft.train.precision.measure_products`."""
    apart: bool = False
    """Each rank trained for itself on its share of the rows: nothing was exchanged, all at the same time."""
    travels: Travels = field(default_factory=Travels)
    rows: int = 0
    """Of one epoch; 0 in the record of an older version."""
    cores_allowed: float = 0.0
    """CPU time that a control group allows rank 0's host, in cores; 0 for no limit."""
    gradients: str = ""
    """What gradients were sent as, where that was chosen by measuring; else '' and the options tell."""
    kernels: str = ""
    """`compiled`: all ranks ran the C++ kernels of the fast path. `absent`: at least one rank had none, and was slower.
    Empty where the fast path was off, and in the record of an older version."""
    fast_path: str = ""
    """How many layers of the model the fast path has replaced, or why it has not; empty in the record of an older
    version."""
    format: int = FORMAT

    @property
    def hosts(self) -> list[str]:
        """Host names in the order of ranks, each once."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))


@dataclass(frozen=True)
class StepLine:
    """One update. Seconds are of rank 0; samples and tokens of all ranks."""

    step: int
    loss: float
    learning_rate: float
    samples: int
    tokens: int
    """Without padding."""
    data_seconds: float
    forward_seconds: float
    backward_seconds: float
    communication_seconds: float
    """What communication added after the last gradient was ready; the rest is hidden behind backward."""
    update_seconds: float
    step_seconds: float
    bytes_sent: int = 0
    """Payload that rank 0 handed to collectives in this step."""
    compute_seconds: list[float] = field(default_factory=list)
    """Of each rank, all but communication; of ranks that train apart, their whole steps."""


@dataclass(frozen=True)
class ResumedLine:
    """The run was resumed: what follows ran here, with the header's options, global batch and rows."""

    step: int
    """The last update before it."""
    repeated: int
    """Updates that had been made after that one, and are made again; their lines are gone."""
    world_size: int
    ranks: list[RecordedRank]
    backend: str
    precision: str
    reset: str
    """What no checkpoint has, and began anew; empty for nothing."""
    started: str
    """UTC, ISO 8601."""
    lost_seconds: float = 0.0
    """Of a restart by itself: from the last update recorded, or from when its loss was seen, to this line."""
    because: str = ""
    """Of a restart by itself: what was lost."""


@dataclass(frozen=True)
class InterruptedLine:
    """The run was told to end, and has a checkpoint of this update. `by`: a signal to the launch, or a notice."""

    step: int
    updates: int
    """Of the whole run."""
    by: str
    leaving: tuple[int, ...] = ()
    """Ranks whose hosts are about to go, by a notice there."""


@dataclass(frozen=True)
class EvaluationLine:
    """Metrics of one validation split."""

    step: int
    metrics: dict[str, float]
    rows: int
    seconds: float


@dataclass(frozen=True)
class Footer:
    """How the run ended."""

    train_seconds: float
    """From the first step's begin to the last one's end, without evaluation, tokenising or saving."""
    samples: int
    samples_per_second: float
    steady_samples_per_second: float
    """Without the first tenth of the steps, which warm caches and kernels up."""
    tokens_per_second: float
    peak_memory_bytes: int
    """Largest resident set of any rank."""
    total_seconds: float
    """From the start of rank 0's Python to the saved model."""
    checksum: str
    """Of the parameters, equal on all ranks."""
    bytes_per_step: float = 0.0
    """Payload that rank 0 handed to collectives, on average over the steps."""
    phases: list[dict[str, float]] = field(default_factory=list)
    """Of each rank: seconds of a steady step by phase, on average."""


@dataclass(frozen=True)
class Record:
    """A record as read back; `footer` is None when the run did not come to its end."""

    path: str
    header: Header
    steps: list[StepLine] = field(default_factory=list)
    evaluations: list[EvaluationLine] = field(default_factory=list)
    footer: Footer | None = None
    resumptions: list[ResumedLine] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """The last evaluation's metrics; empty without one."""
        return self.evaluations[-1].metrics if self.evaluations else {}


def drop_warm_up(steps: list[StepLine]) -> list[StepLine]:
    """Without the first tenth, in which caches and kernels warm up: what is steady."""
    return steps[len(steps) // 10 :]


Line = Header | StepLine | ResumedLine | InterruptedLine | EvaluationLine | Footer | MeasuredHeader | Measurement | Link
_KINDS: dict[str, type[Line]] = {
    "header": Header,
    "step": StepLine,
    "resumed": ResumedLine,
    "interrupted": InterruptedLine,
    "evaluation": EvaluationLine,
    "footer": Footer,
    "measured": MeasuredHeader,
    "backend": Measurement,
    "link": Link,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


def format_line(line: Line) -> str:
    """One JSON object with the line's kind first, no newline inside."""
    return json.dumps({"kind": _NAMES[type(line)]} | dataclasses.asdict(line), allow_nan=True)


class Writer:
    """Writes a record line by line, each one flushed, so that a killed run leaves all it had. Locked meanwhile."""

    def __init__(self, run_dir: str, begun: str | None = None) -> None:
        """`begun`: what a resumed run's record begins with, in the place of the one that is there."""
        path = Path(run_dir) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = str(path)
        beside = path if begun is None else path.with_suffix(".new")
        if begun is not None:
            beside.unlink(missing_ok=True)  # of a start that ended before it could rename it
        # "x" follows no link, and does not wait at a named pipe.
        self._file: IO[str] = open(beside, "x", encoding="utf-8")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(begun or "")
        self._file.flush()
        beside.rename(path)

    def write(self, line: Line) -> None:
        """Append a line. Raises OSError, with the record's name: the disk does not take it."""
        try:
            self._file.write(format_line(line) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = self._path
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(OSError) if kind else nullcontext():  # what could not be written then cannot be now
            self._file.close()


def parse_lines(text: str, path: str) -> list[Line]:
    """The lines of a record. Raises CpuftError for another format, or a broken line that is not the last."""
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
                f"{path}, line {number} is not a record line ({error}): name one made by this version of cpuft"
            ) from None
    return parsed


def parse_record(text: str, path: str = "record") -> Record:
    """A run's record from its text. Raises CpuftError as `parse_lines`, and when it has no header."""
    parsed = parse_lines(text, path)
    if not parsed or not isinstance(parsed[0], Header):
        raise CpuftError(f"{path} has no header: the run ended before its first step; look into its logs")
    return Record(
        path,
        parsed[0],
        [line for line in parsed if isinstance(line, StepLine)],
        [line for line in parsed if isinstance(line, EvaluationLine)],
        next((line for line in parsed if isinstance(line, Footer)), None),
        [line for line in parsed if isinstance(line, ResumedLine)],
    )


def parse_measurements(text: str, path: str) -> list[Measurement]:
    """What `cpuft bench comm` measured. Raises CpuftError for what is not that, or of an older version."""
    parsed = parse_lines(text, path) if '"kind"' in text else []
    if not parsed or not isinstance(parsed[0], MeasuredHeader):
        raise CpuftError(f"{path} is no record of this cpuft's bench comm: name its comm.jsonl, or measure anew")
    return [line for line in parsed if isinstance(line, Measurement)]


def _parse_line(text: str) -> Line:
    values = load(dict[str, Any], parse_json(text))
    kind = load(str, values.pop("kind", None), "its kind")
    if kind in ("header", "measured") and values.get("format") != FORMAT:
        raise ValueError(f"format {values.get('format')!r:.60}, this version reads {FORMAT}")
    if kind not in _KINDS:
        raise ValueError(f"kind {kind[:60]!r} is unknown")
    if kind == "header" and isinstance(options := values.get("options"), dict):
        values["options"] = rename_old_options(options, option_names(TrainConfig))
    return load(_KINDS[kind], values)


def read_record(run_dir: str) -> Record:
    """The record of a run directory (or of a record file itself). Raises CpuftError when there is none."""
    path = Path(run_dir)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        found = f"{run_dir} holds no {FILE_NAME}" if Path(run_dir).exists() else f"there is no file or folder {run_dir}"
        raise CpuftError(f"{found}: give the folder of an earlier run, for example runs/mrpc-np2") from None
    return parse_record(text, str(path))
