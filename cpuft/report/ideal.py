"""A run against its ideal, the same ranks each for itself at the same time: where the missing share of a step went."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from cpuft.record import Record, StepLine

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


def average(found: Sequence[Against]) -> Against:
    """The mean of repeats."""
    return Against(
        statistics.fmean(one.samples_per_second for one in found),
        statistics.fmean(one.efficiency for one in found),
        statistics.fmean(one.step_seconds for one in found),
        statistics.fmean(one.ideal_seconds for one in found),
        {name: statistics.fmean(one.parts[name] for one in found) for name in PARTS if all(o.parts for o in found)},
    )


def describe(label: str, against: Against) -> str:
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
