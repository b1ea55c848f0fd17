"""scripts/bench-train: its summary, its rows, and a whole run of two contestants on a few rows."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cpuft.errors import CpuftError
from cpuft.kernels import kernels_for
from cpuft.launch.rank_variables import memory_settings
from cpuft.train.fast.projection import linear
from cpuft.train.model import find_model
from scripts.benchmarks.bench_train import (
    KernelProduct,
    count_kernel_products,
    format_breakdown,
    format_summary,
    header,
    main,
    parse_arguments,
    run,
    summarise,
    time_kernel_products,
)
from scripts.benchmarks.contestants import Contestant, Workload, read_rows, thin_out
from scripts.benchmarks.roofline import Limits


def write_mrpc(folder: Path, rows: int) -> Path:
    """MRPC's layout, with a lone quotation mark in each row, and rows that are easily told apart."""
    words = [("the same sentence", 'the same "sentence'), ("a cat sleeps", 'prices "fell today')]
    lines = [f"{1 - number % 2}\t{number}\t{number}\t" + "\t".join(words[number % 2]) for number in range(rows)]
    for name in ("train.tsv", "dev.tsv"):
        text = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "\n".join(lines) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def turn(number: int, who: str, rate: float, megabytes: int = 100) -> dict[str, Any]:
    return {
        "kind": "turn",
        "round": number,
        "contestant": who,
        "samples_per_second": rate,
        "peak_megabytes": megabytes,
    }


def test_ratios_are_taken_round_by_round() -> None:
    turns = [turn(0, "ours", 1.0), turn(0, "theirs", 100.0)]
    for number, (ours, theirs) in enumerate([(10.0, 5.0), (20.0, 5.0), (30.0, 10.0)], 1):
        turns += [turn(number, "ours", ours), turn(number, "theirs", theirs, 200 + number)]
    metrics: list[dict[str, Any]] = [
        {"kind": "metric", "contestant": "ours", "accuracy": 0.75},
        {"kind": "metric", "contestant": "theirs", "accuracy": 0.5},
    ]
    lines = summarise(turns + metrics, "ours")
    assert lines[1] == {
        "kind": "summary",
        "contestant": "theirs",
        "samples_per_second": 5.0,
        "ratio": 3.0,
        "ratio_least": 2.0,
        "ratio_most": 4.0,
        "peak_megabytes": 203,
        "accuracy": 0.5,
    }
    assert [line["ratio"] for line in lines[:1]] == [1.0]
    assert format_summary(lines, "ours").splitlines()[2].split() == [
        *("theirs", "5.0", "3.00x", "2.00", "4.00", "203", "0.500")
    ]


def test_rows_keep_lone_quotation_marks(tmp_path: Path) -> None:
    def tokenizer(first: list[str], second: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[len(a), len(b)] for a, b in zip(first, second)], "token_type_ids": [[0, 1]] * len(first)}

    write_mrpc(tmp_path, 6)
    rows = read_rows(tmp_path / "train.tsv", tokenizer)
    assert [row["label"] for row in rows] == [1, 0, 1, 0, 1, 0]
    assert rows[0]["input_ids"] == [len("the same sentence"), len('the same "sentence')]
    assert read_rows(tmp_path / "train.tsv", tokenizer, 100) == rows
    assert read_rows(tmp_path / "train.tsv", tokenizer, 2) == rows[:2]
    with pytest.raises(CpuftError, match=r"dev\.tsv is not there"):
        read_rows(tmp_path / "nowhere" / "dev.tsv", tokenizer)


def test_few_rows_have_batches_of_lengths_that_stand_for_all() -> None:
    rows = [{"input_ids": [0] * length} for length in random.Random(0).sample(range(100), 100)]
    lengths = [len(row["input_ids"]) for row in thin_out(rows, 20, 10)]
    assert lengths == [*range(20, 30), *range(70, 80)]
    assert [len(row["input_ids"]) for row in thin_out(rows, 5, 10)] == [*range(50, 60)]


def test_products_of_the_kernel_are_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuft.train.fast.products._has_products", lambda kernels: True)
    layer, x = torch.nn.Linear(64, 96).bfloat16(), torch.randn(1100, 64).bfloat16()
    with count_kernel_products() as counted:
        linear(layer, x)
    if kernels_for(x) is None:
        return
    output = KernelProduct(1100, 64, 96, left_transposed=False, right_transposed=True)
    assert dict(counted) == {output: 1}
    # Both factors are read at 1 GB/s, and the result is written at 2 GB/s.
    limits, limit = Limits(1e12, 1e9, 2e9), 2 * 1100 * 64 * 96 / (2e-9 * (1100 * 64 + 64 * 96) + 1e-9 * 1100 * 96)
    (line,) = time_kernel_products(counted, limits, repeats=1)
    assert (line["name"], line["count"]) == ("output", 1)
    assert line["kernel_seconds"] > 0 < line["torch_seconds"]
    assert line["attainable_operations_per_second"] == pytest.approx(limit)
    assert line["share_of_attainable"] * limit == pytest.approx(line["share_of_peak"] * 1e12)
    told = {"seconds": 1.0, "kinds": {"products": 1.0}, "limit_seconds": 0.5, "share_of_limit": 0.5}
    told |= {"operations_per_second": 5e11, "peak_operations_per_second": 1e12, "kernel_products": [line]}
    told |= {"read_bytes_per_second": 1e9, "written_bytes_per_second": 2e9}
    line |= {"share_of_peak": 0.02, "share_of_attainable": 0.75}
    text = format_breakdown(told)
    assert "registers: 1.00 TFLOP/s; products have 50 % of that" in text
    assert "memory: 1.0 GB/s are read, or 2.0 GB/s written" in text
    assert "1 times output                1100 x 64 x 96" in text
    assert text.endswith("0.05  2 % of the peak, 75 % of the limit")


@pytest.mark.real
@pytest.mark.proof
def test_a_turn_trains_some_of_a_pool_and_is_judged_by_few_rows(tmp_path: Path) -> None:
    write_mrpc(tmp_path, 64)
    workload = Workload(tmp_path, find_model("minilm"), "minilm", 16, 1, batch=8, pool=64, evaluated=8)
    assert len(workload.read_rows("dev", workload.evaluated)) == 8
    contestant = Contestant("cpuft", workload)
    rate, megabytes = contestant.turn()
    assert rate > 0
    assert megabytes > 100
    assert contestant.finish() * 8 in range(9)


@pytest.mark.proof
def test_a_whole_run(tmp_path: Path) -> None:
    words = ["--data", str(write_mrpc(tmp_path, 64)), "--models", "minilm", "--rows", "64", "--rounds", "2"]
    words += ["--contestants", "cpuft,trainer-accelerated", "--record", "record.jsonl"]
    command = [sys.executable, "-m", "scripts.benchmarks.bench_train", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in Path("record.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines[1:]] == ["turn"] * 6 + ["metric"] * 2 + ["summary"] * 2 + ["breakdown"]
    # Six updates are enough for rows so easily told apart: whoever does not reach this does not learn.
    assert [line["accuracy"] for line in lines[1:] if line["kind"] == "metric"] == [1.0, 1.0]
    breakdown = lines[-1]
    assert 0 < breakdown["share_of_limit"] < 1.5
    assert set(breakdown["kinds"]) >= {"products", "optimizer"}
    assert "its products alone" in done.stdout


def test_a_record_names_no_folder_of_this_machine_also_with_torch_2_8(monkeypatch: pytest.MonkeyPatch) -> None:
    options = argparse.Namespace(data=Path("/somewhere/of/mine/MRPC"), model="org/name", rounds=3, isa="")
    assert header(options)["options"] == {"data": "MRPC", "model": "org/name", "rounds": "3", "isa": ""}
    monkeypatch.delattr("torch.cpu.get_capabilities", raising=False)
    assert header(options)["capabilities"] == []


def test_a_roofline_needs_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.benchmarks.bench_train.kernels_for", lambda *tensors: None)
    options = parse_arguments(["--data", str(tmp_path), "--roofline", str(tmp_path / "roofline.svg")])
    with pytest.raises(CpuftError, match="products of cpuft's own kernel, which does not run here"):
        run(options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, message",
    [
        (("--contestants", "cpufd"), "'cpufd' is unknown: did you mean cpuft?"),
        (
            ("--roofline", "nowhere/roofline.svg"),
            "--roofline nowhere/roofline.svg: give a file in an existing folder whose name ends with .svg",
        ),
        (("--pool", "8"), "--pool 8 has no batch of 32 examples: give --pool at least 32, or a smaller --batch-size"),
    ],
)
def test_options_without_sense_are_one_line(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for setting in memory_settings({}):  # else it starts itself again with them
        monkeypatch.setenv(setting.name, setting.value)
    monkeypatch.setattr(sys, "argv", ["bench-train", "--data", str(tmp_path), *words])
    assert (main(), capsys.readouterr().err) == (2, f"bench-train: {message}\n")
