"""Records of runs that never ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cpuft.launch.run_state import RunState
from cpuft.record import (
    EvaluationLine,
    Footer,
    Header,
    Record,
    RecordedRank,
    StepLine,
)


def make_state(*hosts: str, **changes: Any) -> RunState:
    """The state of a run with a rank on each of these hosts."""
    return RunState(**{"id": "0123456789ab", "hosts": hosts, **changes})


def make_record(ranks: int = 1, hosts: int = 1, seconds: float = 100.0, **changes: Any) -> Record:
    """A run of MRPC on `hosts` hosts of 16 cores; `changes` go to the header, or to its options."""
    per_host = ranks // hosts
    share = 16 // per_host
    places = [
        RecordedRank(rank, f"node{rank // per_host + 1}", [rank % per_host * share + cpu for cpu in range(share)])
        for rank in range(ranks)
    ]
    options = {"epochs": 3.0, "batch_size": 32, "seed": 42, "learning_rate": 2e-5}
    values: dict[str, Any] = {
        "task": "mrpc",
        "model": "minilm",
        "data": "0123456789abcdef",
        "options": options | changes.pop("options", {}),
        "world_size": ranks,
        "ranks": places,
        "backend": "gloo",
        "precision": "bf16",
        "cpu_model": "Intel(R) Xeon(R)",
        "cpu_flags": ["avx512f", "amx_bf16"],
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "global_batch": 32 * ranks,
        "parameters": 22_713_986,
        "started": f"2026-01-01T00:00:{ranks:02}+00:00",
    }
    samples = 11004
    step = StepLine(1, 0.7, 2e-5, 32, 1700, 0.001, 0.1, 0.2, 0.01, 0.02, 0.331)
    return Record(
        f"runs/np-{ranks}",
        Header(**values | changes),
        [step],
        [EvaluationLine(1, {"accuracy": 0.75 + ranks / 100, "f1": 0.84}, 408, 2.0)],
        Footer(
            seconds, samples, samples / seconds, samples / seconds, 5000.0, 1 << 30, seconds + 9, "feedbeef00000000"
        ),
    )


def make_steps(
    count: int, compute: list[float], step_seconds: float = 0.4, samples: int = 32, waited: float = 0.0
) -> list[StepLine]:
    """So many steps, all alike, in which the ranks compute for `compute` seconds each, and rank 0 waits."""
    forward, backward = 0.3 * compute[0], 0.6 * compute[0]
    step = StepLine(
        *(1, 0.7, 2e-5, samples, 50 * samples, 0.02 * compute[0], forward, backward, waited),
        *(0.08 * compute[0], step_seconds),
        compute_seconds=compute,
    )
    return [replace(step, step=number, loss=0.7 - 0.3 * number / count) for number in range(1, count + 1)]


def with_rate(record: Record, samples_per_second: float) -> Record:
    """The same run, at another speed."""
    assert record.footer is not None
    seconds = record.footer.samples / samples_per_second
    rates: dict[str, Any] = {"samples_per_second": samples_per_second, "steady_samples_per_second": samples_per_second}
    return replace(record, footer=replace(record.footer, train_seconds=seconds, **rates))
