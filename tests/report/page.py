"""Made-up runs for pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpuft.record import EvaluationLine, Record
from tests.records import make_record, make_steps, with_rate


def make_runs(numbers: tuple[int, ...], steps: int = 345, ideal: bool = True) -> list[Record]:
    """A run and its ideal for each number of ranks; a rank a host; the others wait longer the more there are."""
    runs = []
    for at, ranks in enumerate(numbers):
        compute = [1.0 + 0.08 * (ranks > 1) + 0.01 * (rank % 7) for rank in range(ranks)]
        waited = 0.05 * ranks**0.5 * (ranks > 1)
        lines = make_steps(steps, compute, 0.01 + compute[0] + waited, 32 * ranks, waited)
        phases = [
            {"data": 0.02, "forward": 0.4 * c, "backward": 0.5 * c, "communication": waited, "update": 0.1 * c}
            for c in compute
        ]
        record = make_record(ranks, ranks, 10.0)
        assert record.footer is not None
        samples = 32 * ranks * steps
        seconds = sum(line.step_seconds for line in lines)
        rates: dict[str, Any] = {"train_seconds": seconds, "steady_samples_per_second": samples / seconds}
        footer = replace(record.footer, samples=samples, phases=phases, **rates)
        evaluations = [EvaluationLine(steps * part // 4, {"accuracy": 0.6 + 0.05 * part}, 408, 2.0) for part in (1, 4)]
        header = replace(record.header, started=f"2026-01-01T00:{at:02}:00+00:00")
        runs.append(replace(record, header=header, steps=lines, footer=footer, evaluations=evaluations))
        if ideal and ranks > 1:
            apart = [replace(line, compute_seconds=[1.0] * ranks, step_seconds=1.0) for line in lines]
            alone = replace(runs[-1], header=replace(header, independent=True), steps=apart, evaluations=[])
            runs.append(replace(alone, path=f"runs/ideal-{ranks}"))
    return runs


def make_equal_cores(speedup: float, **changes: Any) -> list[Record]:
    """One rank on 8 of 16 cores, and two on all of them, which wait for a tenth of the time."""
    two = make_record(2, 1, **changes)
    one = with_rate(make_record(1), 10.0)
    one = replace(one, header=replace(one.header, ranks=two.header.ranks[:1]))
    return [one, replace(with_rate(two, 10 * speedup), steps=make_steps(20, [0.3], 0.4))]
