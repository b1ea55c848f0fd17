"""Ranks that are not alike: without kernels, with other instructions, or with other parameters at the end."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from cpuft.config.train import TrainConfig
from cpuft.hosts.facts import find_free_port
from cpuft.record import Record, read_record
from tests.comm.ranks import fork_ranks, mpirun
from tests.train.fast.test_kernels import build_for
from tests.train.tiny import make_config, save_tiny

pytestmark = pytest.mark.real
Jobs = dict[str, dict[str, Any]]
"""Options of runs by the names of their folders."""

TORCH, KERNELS = "ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=AVX"
"""Torch without AVX2, and kernels without an instruction that multiplies and adds."""
LACKING: Jobs = {"exact": {}, "powersgd": {"grad_compression": "powersgd"}, "shards": {"shard": "optimizer"}}
ALIKE: Jobs = LACKING | {"int8": {"grad_compression": "int8"}}
AVERAGES: Jobs = {"averages": {"sync_every": 3, "outer_momentum": 0.9, "grad_compression": "none"}}
PLAIN: Jobs = {"plain": {"fast_path": False}}


def train(folder: Path, jobs: Jobs, *words: str) -> subprocess.CompletedProcess[str]:
    """Train 30 updates of each job, clipped, on two ranks, in fp32 unless the options say otherwise."""
    usual = {"max_steps": 30, "precision": "fp32", "max_grad_norm": 0.5, "batch_size": 8, "comm_timeout": 60.0}
    usual |= {"backend": "gloo"}
    return start(
        folder, {name: make_config(folder, "class", **usual | options) for name, options in jobs.items()}, *words
    )


def start(
    folder: Path, configs: dict[str, TrainConfig], *words: str, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    jobs = [(vars(config), str(folder / name), find_free_port()) for name, config in configs.items()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    start_ranks = mpirun if TORCH in words else fork_ranks
    return start_ranks(ranks, "tests.train.mixed_ranks", str(folder / "jobs.json"), *words)


def read(folder: Path) -> Record:
    record = read_record(str(folder))
    assert record.footer is not None
    return record


@pytest.mark.parametrize(
    "jobs",
    [
        LACKING,
        pytest.param(
            {"powersgd without the fast path": {"fast_path": False, "grad_compression": "powersgd"}},
            marks=pytest.mark.proof,
        ),
    ],
    ids=["fast path", "plain"],
)
def test_where_one_rank_has_no_kernels_no_rank_uses_them(tmp_path: Path, jobs: Jobs) -> None:
    done = train(tmp_path, jobs, "CPUFT_KERNELS=0")
    assert done.returncode == 0, done.stdout
    for name in jobs:
        record = read(tmp_path / name)
        assert record.header.kernels == "absent"
    lines = [line for line in done.stdout.splitlines() if "compiled kernels" in line]
    assert lines == len(jobs) * [
        f"warning: the compiled kernels are not used on {record.header.hosts[0]} (CPUFT_KERNELS=0), and so by no other "
        "rank, because all ranks must round alike: training without them is slower, on x86-64 2 to 3 times"
    ]


def test_ranks_with_other_instructions_make_the_same_updates(tmp_path: Path) -> None:
    build_for("sandybridge")  # compiled here, because the other rank would wait for it
    done = train(tmp_path, ALIKE, TORCH, KERNELS)
    assert done.returncode == 0, done.stdout
    assert [read(tmp_path / name).header.kernels for name in ALIKE] == ["compiled"] * 4


def test_ranks_whose_torch_updates_with_other_instructions_average_or_do_not_start(tmp_path: Path) -> None:
    build_for("sandybridge")
    done = train(tmp_path, AVERAGES | PLAIN, TORCH)
    assert read(tmp_path / "averages").header.kernels == "compiled", done.stdout
    assert done.returncode == 2, done.stdout
    assert "rank 1: torch computes with AVX2 on " in done.stdout.replace("AVX512", "AVX2")
    assert "export ATEN_CPU_CAPABILITY=default for all ranks" in done.stdout
    assert not (tmp_path / "plain").exists()


def test_ranks_that_differ_at_the_end_save_the_model_before_they_say_so(tmp_path: Path) -> None:
    done = train(tmp_path, {"run": {}}, "damage")
    assert done.returncode == 2, done.stdout
    assert "rank 0: after the last step, the parameters of rank " in done.stdout
    assert "(train it with --np 1). The training is complete, and the model of rank 0 was saved" in done.stdout
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    assert read(tmp_path / "run").metrics


@pytest.mark.proof
def test_metrics_are_computed_by_one_rank(tmp_path: Path) -> None:
    done = train(tmp_path, {"run": {"max_steps": 2, "comm_timeout": 20.0}}, "slow")
    assert done.returncode == 0, done.stdout
    calls = [json.loads((tmp_path / f"run.{rank}.json").read_text()) for rank in range(2)]
    assert [one.get("metrics", 0) for one in calls] == [1, 0]


def test_ranks_draw_masks_of_their_own_examples_only(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over a lazy dog\n" * 400)
    save_tiny(tmp_path / "tiny")
    usual: dict[str, Any] = {"max_length": 16, "batch_size": 8, "max_steps": 3, "grad_compression": "none"}
    usual |= {"precision": "fp32", "model": str(tmp_path / "tiny"), "train_file": str(tmp_path / "a.txt")}
    pieces = TrainConfig(task="text", backend="gloo", **usual)
    done = start(tmp_path, {"pieces": pieces, "words": replace(pieces, whole_word_mask=True)})
    assert done.returncode == 0, done.stdout
    # The first update's batch is also that of the warm-up. With whole words, counting draws once more.
    for name, most in (("pieces", 8 * 4), ("words", 8 * 7)):
        for rank in range(2):
            assert json.loads((tmp_path / f"{name}.{rank}.json").read_text())["masks"] <= most


def test_ranks_that_measure_different_speeds_train_in_the_precision_of_rank_0(tmp_path: Path) -> None:
    done = train(tmp_path, {"auto": {"precision": "auto", "max_steps": 3}}, "doubt")
    assert done.returncode == 0, done.stdout
    assert read(tmp_path / "auto").header.precision == "fp32"
    assert "fp32: bf16 is slower with this torch (0.10 TFLOP/s measured)" in done.stdout
