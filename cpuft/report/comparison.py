"""Compare runs on different numbers of ranks: speedup, efficiency, intervals, and where the missing time went."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cpuft.errors import CpuftError, counted
from cpuft.record import PHASES, Record, StepLine
from cpuft.serialization import load

_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""The 0.975 quantile for 1, 2, ... degrees of freedom. Source: NIST/SEMATECH e-Handbook, 1.3.6.7.2. A report is made
where scipy is not."""


def half_width(values: Sequence[float]) -> float:
    """Half the interval around the mean of two or more values; beyond 31 of them a little too wide."""
    quantile = _T[min(len(values) - 1, len(_T)) - 1]
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


PARTS = {
    "waiting": "waiting for gradients",
    "slowed": "compute slowed by communication",
    "uneven": "uneven work",
    "rest": "the rest",
}
"""Where time goes that the ideal does not take, in words."""


@dataclass(frozen=True)
class Against:
    """A run against its ideal, both in the same steps: without the first tenth, and while all of the ideal ran."""

    samples_per_second: float
    """Of the ideal: the sum of its ranks' rates."""
    efficiency: float
    """The run's rate over the ideal's."""
    step_seconds: float
    """Of the run."""
    ideal_seconds: float
    """What the ideal takes for as many rows."""
    parts: dict[str, float]
    """Seconds that are missing in a step, by `PARTS`; empty when the record says nothing of its other ranks.

    They add up to step_seconds - ideal_seconds. waiting: of the slowest rank, for what others send; slowed: by how
    much the ranks compute longer than in the ideal, on average; uneven: by how much the slowest does than the average.
    """


def find_ideals(group: Sequence[Record], ideals: Sequence[Record]) -> list[Record]:
    """The ideals of as many ranks on the same hosts with the same batch, the first first."""
    wanted = _place(group[0])
    return sorted((one for one in ideals if _place(one) == wanted), key=lambda one: one.header.started)


def _place(record: Record) -> tuple[int, int, list[str]]:
    return record.header.world_size, record.header.global_batch, record.header.hosts


def measure_against(run: Record, ideal: Record) -> Against | None:
    """Compare a run with its ideal; None when one of them has no steps that can be compared."""
    common = slice(len(run.steps) // 10, count_common(ideal.steps, len(run.steps)))
    own, apart = run.steps[common], ideal.steps[common]
    ranks = run.header.world_size
    if not own or any(len(line.compute_seconds) != ranks for line in apart):
        return None
    # Each rank sees as many rows: the sum of rates is that of the harmonic mean of seconds.
    means = [statistics.fmean(rank) for rank in _by_rank(apart)]
    step = statistics.fmean(line.step_seconds for line in own)
    if not all(mean > 1e-9 for mean in (*means, step)):
        return None
    seconds = statistics.harmonic_mean(means)
    rate = statistics.fmean(line.samples for line in own) / seconds
    known = all(len(line.compute_seconds) == ranks for line in own)
    every = run.header.options.get("sync_every", 1)
    parts = divide(own, seconds, every if type(every) is int and every > 0 else 1) if known else {}
    return Against(rate, seconds / step, step, seconds, parts)


def count_common(steps: Sequence[StepLine], most: int) -> int:
    """How many steps every rank of an ideal had done when the first of them was through: they kept all hosts busy."""
    ends = [list(itertools.accumulate(rank)) for rank in _by_rank(steps)]
    first = min((rank[-1] for rank in ends), default=0.0)
    common = min((sum(end <= first for end in rank) for rank in ends), default=0)
    # Of very few steps at least the last that can be compared.
    return min(max(common, most // 10 + 1), most)


def divide(steps: Sequence[StepLine], ideal_seconds: float, every: int = 1) -> dict[str, float]:
    """The seconds of a step beyond the ideal's, part by part, of ranks that meet after `every` updates."""
    mean = statistics.fmean(statistics.fmean(line.compute_seconds) for line in steps)
    meetings = itertools.groupby(steps, key=lambda line: (line.step - 1) // every)
    slowest = sum(max(map(sum, _by_rank(list(lines)))) for _, lines in meetings) / len(steps)
    of_rank_0 = statistics.fmean(line.compute_seconds[0] for line in steps)
    waited = statistics.fmean(line.communication_seconds for line in steps)
    step = statistics.fmean(line.step_seconds for line in steps)
    return {
        # Rank 0 waits for the slowest rank, too: that part is uneven work.
        "waiting": waited - (slowest - of_rank_0),
        "slowed": mean - ideal_seconds,
        "uneven": slowest - mean,
        "rest": step - of_rank_0 - waited,
    }


def average_ideals(found: Sequence[Against]) -> Against:
    """The mean of repeats."""
    return Against(
        statistics.fmean(one.samples_per_second for one in found),
        statistics.fmean(one.efficiency for one in found),
        statistics.fmean(one.step_seconds for one in found),
        statistics.fmean(one.ideal_seconds for one in found),
        {name: statistics.fmean(one.parts[name] for one in found) for name in PARTS if all(o.parts for o in found)},
    )


def describe_ideal(label: str, against: Against) -> str:
    """One sentence: the share of the ideal, and where the rest of a step went."""
    said = f"{label} reached {against.efficiency * 100:.0f} % of the ideal ({against.samples_per_second:.1f} samples/s)"
    missing = 1 - against.efficiency
    if missing <= 0 or not against.parts:
        return f"{said}."
    listed = ", ".join(
        f"{PARTS[name]} {seconds / against.step_seconds * 100:.1f} %" for name, seconds in against.parts.items()
    )
    return f"{said}; of its steps' time {missing * 100:.1f} % is missing: {listed}."


def _by_rank(steps: Sequence[StepLine]) -> list[tuple[float, ...]]:
    return list(zip(*(line.compute_seconds for line in steps)))


_MUST_BE_EQUAL = ("task", "model", "data", "precision")
_EQUAL_OPTIONS = (
    "epochs",
    "max_steps",
    "max_length",
    "padding",
    "learning_rate",
    "lora_rank",
    "gradient_accumulation",
    "seed",
    "dropout",
    "engine",
    "mlm_probability",
    "whole_word_mask",
)

MOST_EFFICIENCY = 1.1
"""More than this needs a word. A little over 1 happens: smaller shares fit caches better."""

MOST_SECONDS = 1e9


@dataclass(frozen=True)
class Row:
    """One run in a comparison, or the mean of its repeats."""

    np: int
    hosts: int
    cores: int
    """Different hardware threads that its ranks were bound to, all hosts together."""
    global_batch: int
    train_seconds: float
    samples_per_second: float
    """Steady: without the first tenth of the steps."""
    samples_per_second_per_rank: float
    speedup: float
    """Steady samples per second of this run over those of the baseline."""
    efficiency: float
    """Speedup over (ranks / the baseline's ranks)."""
    metrics: dict[str, float]
    path: str
    """Of the first of its repeats."""
    repeats: int
    ideal: Against | None
    intervals: dict[str, float]
    """Half the 95 % interval of samples_per_second, speedup, efficiency and ideal (its efficiency), where there are
    repeats; speedup and efficiency are of runs of the same round."""


@dataclass(frozen=True)
class Comparison:
    """Runs of the same job on different numbers of ranks, the fewest ranks first: the baseline."""

    task: str
    model: str
    precision: str
    epochs: float
    max_steps: int
    """Updates that each run was limited to; 0 for whole epochs."""
    scaling: str
    """weak: the batch a rank is fixed; strong: the global batch is; mixed: neither; single: one number of ranks."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """What a reader must know to read the numbers right."""


def compare(records: list[Record]) -> Comparison:
    """Compare finished runs.

    Raises CpuftError: no run, one that did not finish or trained nothing, or runs that differ in what must be equal
    (named).
    """
    if all(record.header.apart for record in records):
        raise CpuftError(f"there is no run{' beside the ideal' if records else ''} to report on: name run directories")
    for record in records:
        if record.footer is None:
            raise CpuftError(
                f"{record.path} did not finish ({counted(len(record.steps), 'step')} recorded): run it "
                f"again, or leave it out of the report"
            )
        if not (record.footer.steady_samples_per_second > 0 and record.header.world_size > 0):
            raise CpuftError(f"{record.path} trained no rows: leave it out of the report")
        _refuse_impossible(record)
    records = sorted(records, key=lambda record: (record.header.world_size, record.header.started))
    refuse_differences(records)
    runs, ideals = ([one for one in records if one.header.apart == apart] for apart in (False, True))
    groups = group_repeats(runs)
    rows = tuple(_make_row(group, groups[0], find_ideals(group, ideals)) for group in groups)
    baseline = runs[0]
    header = baseline.header
    scaling = find_scaling(runs)
    try:
        epochs = load(float, header.options.get("epochs"), "its epochs")
        max_steps = load(int, header.options.get("max_steps", 0), "its max_steps")
    except ValueError as error:
        raise CpuftError(f"{baseline.path}: {error}: name a run of this version of cpuft") from None
    return Comparison(
        header.task,
        header.model,
        header.precision,
        epochs,
        max_steps,
        scaling,
        rows,
        (*make_notes(rows, scaling, runs), *note_ideals(rows), *note_repeats(rows), *note_restarts(runs)),
    )


def _refuse_impossible(record: Record) -> None:
    """Raises CpuftError for seconds that cannot be reckoned with: a record is what its last editor left of it."""
    for line in record.steps:
        seconds = (line.step_seconds, *(getattr(line, f"{name}_seconds") for name in PHASES), *line.compute_seconds)
        if not all(abs(value) < MOST_SECONDS for value in seconds):
            raise CpuftError(f"{record.path}, step {line.step}: no step takes so long: leave it out of the report")


def refuse_differences(records: list[Record]) -> None:
    """Raises CpuftError naming what differs and between which runs."""
    first = records[0]
    for record in records[1:]:
        pairs = [(n, getattr(first.header, n), getattr(record.header, n)) for n in _MUST_BE_EQUAL]
        # Older runs know of fewer options, which were off.
        pairs += [(n, first.header.options.get(n) or 0, record.header.options.get(n) or 0) for n in _EQUAL_OPTIONS]
        differing = [f"{name} ({a} and {b})" for name, a, b in pairs if a != b]
        if differing:
            raise CpuftError(
                f"{first.path} and {record.path} are not the same job: they differ in {', '.join(differing)}; "
                f"compare runs that differ in ranks and hosts only"
            )


def find_scaling(records: list[Record]) -> str:
    """Which of the two kinds of scaling these runs show."""
    per_rank = {record.header.global_batch / record.header.world_size for record in records}
    in_all = {record.header.global_batch for record in records}
    if len({record.header.world_size for record in records}) == 1:
        return "single"
    if len(per_rank) == 1:
        return "weak"
    return "strong" if len(in_all) == 1 else "mixed"


def count_cores(record: Record) -> int:
    """Different hardware threads of all ranks."""
    return len({(place.host, cpu) for place in record.header.ranks for cpu in place.cpus})


def shares_cores(row: Row, base: Row) -> bool:
    """Whether a run had more ranks than the baseline, but no more cores."""
    return row.np > base.np and row.cores <= base.cores


def group_repeats(runs: Sequence[Record]) -> list[list[Record]]:
    """Runs that differ in nothing but when they ran, together; all in their order."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        header = run.header
        alike = (header.world_size, header.global_batch, header.ranks, header.versions, sorted(header.options.items()))
        groups.setdefault(repr(alike), []).append(run)
    return list(groups.values())


def _rates(group: Sequence[Record]) -> list[float]:
    """The steady rates: one slow step at the start would else decide a comparison of short runs."""
    return [record.footer.steady_samples_per_second for record in group if record.footer]


def _make_row(group: Sequence[Record], baseline: Sequence[Record], ideals: Sequence[Record]) -> Row:
    first, rates = group[0], _rates(group)
    times = first.header.world_size / baseline[0].header.world_size
    speedups = [own / other for own, other in zip(rates, _rates(baseline))]
    against = [found for run, ideal in zip(group, ideals) if (found := measure_against(run, ideal))]
    samples = {
        "samples_per_second": rates,
        "speedup": speedups,
        "efficiency": [speedup / times for speedup in speedups],
        "ideal": [found.efficiency for found in against],
    }
    return Row(
        first.header.world_size,
        len(first.header.hosts),
        count_cores(first),
        first.header.global_batch,
        statistics.fmean(run.footer.train_seconds for run in group if run.footer),
        statistics.fmean(rates),
        statistics.fmean(rates) / first.header.world_size,
        statistics.fmean(speedups),
        statistics.fmean(speedups) / times,
        {name: statistics.fmean(run.metrics.get(name, first.metrics[name]) for run in group) for name in first.metrics},
        first.path,
        len(group),
        average_ideals(against) if against else None,
        {name: half_width(values) for name, values in samples.items() if len(values) > 1},
    )


def note_ideals(rows: Sequence[Row]) -> list[str]:
    """What the ideal is, and each run against its own."""
    found = [describe_ideal(f"np {row.np}", row.ideal) for row in rows if row.ideal]
    if not found:
        return []
    return [
        "the ideal: the same ranks on the same rows at the same time, each for itself; it and what is measured against "
        "it are without the first tenth of the steps, in which caches warm up.",
        *found,
        *(
            f"np {row.np} was faster than its ideal: something else kept the hosts busy meanwhile; run both again."
            for row in rows
            if row.ideal and row.ideal.efficiency - row.intervals.get("ideal", 0.0) > MOST_EFFICIENCY
        ),
    ]


def note_repeats(rows: Sequence[Row]) -> list[str]:
    """What the intervals are, and which differences they hide."""
    base, notes = rows[0], list[str]()
    if any(row.intervals for row in rows):
        notes.append("\u00b1 is half the 95 % interval of the mean (Student's t over the repeats).")
    for row in rows:
        if row is not base and abs(row.speedup - 1) <= row.intervals.get("speedup", -1.0):
            notes.append(f"np {row.np} and np {base.np}: no clear difference in speed.")
        if row.ideal and abs(row.ideal.efficiency - 1) <= row.intervals.get("ideal", -1.0):
            notes.append(f"np {row.np} and its ideal: no clear difference.")
    return notes


def note_restarts(records: Sequence[Record]) -> list[str]:
    """Of each run that was started again by itself: what was lost."""
    notes = []
    for record in records:
        again = [line for line in record.resumptions if line.because]
        if again:
            lost = f"{sum(line.lost_seconds for line in again):.0f} s"
            made = counted(sum(line.repeated for line in again), "update")
            ranks = " and ".join(str(line.world_size) for line in again)
            why = "; ".join(line.because for line in again)
            notes.append(
                f"np {record.header.world_size} was started again {counted(len(again), 'time')}, on {ranks} ranks, "
                f"which took {lost} and made {made} again ({why}): its seconds are not those of a run in peace."
            )
    return notes


def make_notes(rows: tuple[Row, ...], scaling: str, records: list[Record]) -> list[str]:
    """Baseline, kind of scaling, and whatever makes the numbers mean less than they seem to."""
    base = rows[0]
    notes = [
        f"speedup and efficiency are relative to np {base.np} ({counted(base.hosts, 'host')}).",
        "samples/s, speedup and efficiency leave out the first tenth of the steps, in which caches warm up; train "
        "seconds include it.",
    ]
    if scaling == "weak":
        notes.append(
            "weak scaling: the batch a rank is fixed, so the global batch grows with the ranks"
            f"{'' if records[0].header.options.get('max_steps') else ', and updates get fewer'}; compare the metrics."
        )
    if scaling == "strong":
        notes.append("strong scaling: the global batch is fixed, so every run makes the same updates.")
    if scaling == "mixed":
        notes.append("neither the batch a rank nor the global batch is the same in all runs.")
    if len({record.footer.samples for record in records if record.footer}) > 1:
        notes.append("the runs trained on different numbers of examples: compare samples/s, not train seconds.")
    notes += [
        f"np {row.np} is {row.speedup:.2f} times as fast as np {base.np}, more than its ranks explain: something else "
        f"kept the hosts busy in the meantime, or cores were idle at np {base.np}; run both again before you trust it."
        for row in rows[1:]
        if row.efficiency > MOST_EFFICIENCY
    ]
    same_cores = [row.np for row in rows[1:] if shares_cores(row, base)]
    if same_cores:
        listed = ", ".join(map(str, same_cores))
        notes.append(
            f"np {listed} ran on no more cores than np {base.np} ({counted(base.cores, 'core')}): the speedup shows "
            f"what splitting the work gains or costs, not what more hosts bring."
        )
    if len({(record.header.cpu_model, tuple(record.header.cpu_flags)) for record in records}) > 1:
        notes.append("the runs' master hosts have different CPUs.")
    if len({tuple(sorted(record.header.versions.items())) for record in records}) > 1:
        notes.append("the runs used different software versions.")
    return notes
