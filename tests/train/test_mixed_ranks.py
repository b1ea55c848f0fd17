"""Ranks that are not alike: without kernels, with other instructions, or with other parameters at the end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from cpuft.config.train import TrainConfig
from cpuft.record import Record, read_record
from tests.comm.ranks import mpirun
from tests.train.fast.test_kernels import build_for
from tests.train.tiny import make_config, save_tiny

pytestmark = pytest.mark.real


def train(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Train 30 updates, clipped, on two ranks, in fp32 unless the options say otherwise."""
    usual = {"max_steps": 30, "precision": "fp32", "max_grad_norm": 0.5, "batch_size": 8, "comm_timeout": 60.0}
    return start(folder, make_config(folder, "class", **usual | options), *words)


def start(folder: Path, config: TrainConfig, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(vars(config)))
    return mpirun(2, "tests.train.mixed_ranks", str(folder / "config.json"), str(folder / "run"), *words)


def read(folder: Path, done: subprocess.CompletedProcess[str]) -> Record:
    assert done.returncode == 0, done.stdout
    record = read_record(str(folder / "run"))
    assert record.footer is not None
    return record


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grad_compression": "powersgd"},
        pytest.param({"fast_path": False, "grad_compression": "powersgd"}, marks=pytest.mark.proof),
        {"shard": "optimizer"},
    ],
    ids=["exact", "powersgd", "powersgd without the fast path", "shards"],
)
def test_where_one_rank_has_no_kernels_no_rank_uses_them(tmp_path: Path, options: dict[str, Any]) -> None:
    done = train(tmp_path, "CPUFT_KERNELS=0", **options)
    record = read(tmp_path, done)
    assert record.header.kernels == "absent"
    (line,) = [line for line in done.stdout.splitlines() if "compiled kernels" in line]
    assert line == (
        f"warning: the compiled kernels are not used on {record.header.hosts[0]} (CPUFT_KERNELS=0), and so by no other "
        "rank, because all ranks must round alike: training without them is 2 to 3 times slower"
    )


TORCH, KERNELS = "ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=AVX"
"""Torch without AVX2, and kernels without an instruction that multiplies and adds."""


@pytest.mark.parametrize(
    "settings, options",
    [
        ([TORCH, KERNELS], {}),
        ([TORCH, KERNELS], {"grad_compression": "int8"}),
        ([TORCH, KERNELS], {"shard": "optimizer"}),
        ([TORCH, KERNELS], {"grad_compression": "powersgd"}),
        ([TORCH], {"sync_every": 3, "outer_momentum": 0.9, "grad_compression": "none"}),
    ],
    ids=["exact", "int8", "shards", "powersgd", "averages"],
)
def test_ranks_with_other_instructions_make_the_same_updates(
    tmp_path: Path, settings: list[str], options: dict[str, Any]
) -> None:
    build_for("sandybridge")  # compiled here, because the other rank would wait for it
    assert read(tmp_path, train(tmp_path, *settings, **options)).header.kernels == "compiled"


def test_ranks_whose_torch_updates_with_other_instructions_do_not_start(tmp_path: Path) -> None:
    done = train(tmp_path, "ATEN_CPU_CAPABILITY=default", fast_path=False)
    assert done.returncode == 2, done.stdout
    assert "rank 1: torch computes with AVX2 on " in done.stdout.replace("AVX512", "AVX2")
    assert "export ATEN_CPU_CAPABILITY=default for all ranks" in done.stdout
    assert not (tmp_path / "run").exists()


def test_ranks_that_differ_at_the_end_save_the_model_before_they_say_so(tmp_path: Path) -> None:
    done = train(tmp_path, "damage")
    assert done.returncode == 2, done.stdout
    assert "rank 0: after the last step, the parameters of rank " in done.stdout
    assert "(train it with --np 1). The training is complete, and the model of rank 0 was saved" in done.stdout
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model")
    record = read_record(str(tmp_path / "run"))
    assert record.footer is not None
    assert record.metrics


@pytest.mark.proof
def test_metrics_are_computed_by_one_rank(tmp_path: Path) -> None:
    read(tmp_path, train(tmp_path, "slow", max_steps=2, comm_timeout=20.0))
    calls = [json.loads((tmp_path / f"run.{rank}.json").read_text()) for rank in range(2)]
    assert [one.get("metrics", 0) for one in calls] == [1, 0]


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_draw_masks_of_their_own_examples_only(tmp_path: Path, whole: bool) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over a lazy dog\n" * 400)
    config = TrainConfig(
        task="text",
        model=save_tiny(tmp_path / "tiny"),
        train_file=str(tmp_path / "a.txt"),
        max_length=16,
        batch_size=8,
        max_steps=3,
        whole_word_mask=whole,
        grad_compression="none",
        precision="fp32",
    )
    read(tmp_path, start(tmp_path, config))
    for rank in range(2):
        calls = json.loads((tmp_path / f"run.{rank}.json").read_text())
        # The first update's batch is also that of the warm-up. With whole words, counting draws once more.
        assert calls["masks"] <= 8 * (4 + 3 * whole)
