"""Figures of classes of CPUs: kept by model, a real CPU's before a limited one's, and the table made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.benchmarks.figures import (
    format_contestants,
    format_figures,
    format_shares,
    keep_figures,
    read_figures,
)


def found(rate: float, isa: str = "", rounds: int = 3) -> dict[str, Any]:
    def line(contestant: str, ratio: float) -> dict[str, Any]:
        spread = {"ratio": ratio, "ratio_least": ratio - 0.1, "ratio_most": ratio + 0.1}
        return {"contestant": contestant, "samples_per_second": rate / ratio, **spread}

    summary = [line("cpuft", 1.0), line("trainer-accelerated", 1.1), line("trainer-slow", 8.0), line("trainer", 2.0)]
    return {
        "header": {"time": 0.0, "cpu": "Xeon", "options": {"isa": isa, "threads": "2", "rounds": str(rounds)}},
        "summary": summary,
        "breakdown": {},
    }


def test_a_models_last_run_is_kept_and_a_limited_cpu_gives_way(tmp_path: Path) -> None:
    keep_figures(tmp_path, "avx2", "minilm", found(10.0, isa="AVX2"))
    keep_figures(tmp_path, "avx2", "bert-base", found(5.0))
    keep_figures(tmp_path, "avx2", "minilm", found(20.0))
    keep_figures(tmp_path, "avx2", "minilm", found(30.0, isa="AVX2"))
    keep_figures(tmp_path, "avx2", "minilm", found(40.0, rounds=2))
    assert read_figures(tmp_path) == {"avx2": {"minilm": found(20.0), "bert-base": found(5.0)}}


def test_a_table_has_a_row_for_each_measured_class() -> None:
    table = format_figures({name: {"minilm": found(20.0)} for name in ("bf16", "avx2")}).splitlines()
    assert table[2:] == [
        f"| {name} | **2.00 times** (1.90 to 2.10) | not measured | Xeon, 1970-01-01 |"
        for name in ("AVX2 only", "bf16 of Arm")
    ]


def test_everybody_has_a_row() -> None:
    one = found(20.0)
    for line in one["summary"]:
        line["peak_megabytes"] = 100
    table = format_contestants({"amx_bf16": {"minilm": one}}).splitlines()
    assert table[2] == "| AMX | MiniLM (22 M) | cpuft | 20.0 |  | 100 |"
    assert table[5] == "|  |  | trainer | 10.0 | 2.00 (1.90 to 2.10) | 100 |"
    assert len(table) == 6


def test_what_has_no_column_of_its_own_is_summed() -> None:
    one = found(20.0)
    kinds = {
        "products": 5.0,
        "attention": 1.0,
        "norms and activations": 1.0,
        "optimizer": 1.0,
        "idle": 0.5,
        "other": 1.5,
    }
    one["breakdown"] = {"seconds": 0.1234, "kinds": kinds}
    table = format_shares({"avx2": {"bert-base": one}}).splitlines()
    assert table[2] == "| AVX2 only | BERT-base-sized (110 M) | 123 | 50% | 10% | 10% | 10% | 20% |"
    assert len(table) == 3
