"""The comparison of fine-tuning with cheaper ways: the few examples, what is kept, and the tables made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cpuft.instance_types import find_instance
from scripts.benchmarks.bench_alternatives import (
    GPUS,
    INSTANCE,
    choose_few,
    format_alternatives,
    format_gpu_hours,
    format_machine,
    keep_figures,
    read_figures,
)

MACHINE = {"time": 0.0, "cpu": "Xeon", "cores": 2, "precision": "bf16", "products": {"teraflops": 0.123}}


def make_figures(task: str, way: str, seconds: float) -> dict[str, Any]:
    shares = {"largest_class": 0.6, "accuracy": 0.75, "least": 0.7, "most": 0.8}
    return {"task": task, "way": way, "labels": 100, "seconds": seconds, "peak_bytes": 3 << 29, **shares}


def test_each_label_gets_the_same_few_examples_each_time() -> None:
    rows = [((f"first {n}", f"second {n}"), n % 3) for n in range(60)]
    few = choose_few(rows, 4)
    assert few == choose_few(rows, 4)
    assert sorted(label for _, label in few) == [0] * 4 + [1] * 4 + [2] * 4
    assert {texts for texts, _ in few} < {(f"first {n} [SEP] second {n}",) for n in range(60)}


def test_the_last_figures_of_a_way_are_kept_and_make_the_tables(tmp_path: Path) -> None:
    for task, way, seconds in (("wnli", "all", 9.0), ("mrpc", "all", 1.0), ("mrpc", "lora", 2.0), ("mrpc", "all", 3.6)):
        keep_figures(tmp_path, MACHINE, make_figures(task, way, seconds))
    kept = read_figures(tmp_path)
    hour = 2 * find_instance(INSTANCE).dollars_per_hour / find_instance(INSTANCE).cores
    table = format_alternatives(kept).splitlines()
    assert table[2:8] == [
        "| SST-2 | always the largest class |  |  |  | not measured |  |",
        "|  | LoRA of rank 16 |  |  |  | not measured |  |",
        "|  | all weights |  |  |  | not measured |  |",
        "| MRPC | always the largest class |  |  |  | 0.600 |  |",
        f"|  | LoRA of rank 16 | 100 | 2.0 | {hour / 18:.2g} | 0.750 (0.700 to 0.800) | 1.5 GB |",
        f"|  | all weights | 100 | 3.6 | {hour / 10:.2g} | 0.750 (0.700 to 0.800) | 1.5 GB |",
    ]
    assert table[8:10] == [
        "| WNLI | always the largest class |  |  |  | 0.600 |  |",
        "|  | LoRA of rank 16 |  |  |  | not measured |  |",
    ]
    assert "2 cores of an Xeon on 1970-01-01" in format_machine(kept)
    assert f"| {GPUS[0].dollars_per_hour / hour:.1f} |" in format_gpu_hours(kept).splitlines()[2]
