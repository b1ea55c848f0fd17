"""Which options of a training exclude each other."""
# ruff: noqa: E501 (a message stands on one line, as a terminal shows it)

from __future__ import annotations

from typing import Any

import pytest

from cpuft.compressions import COMPRESSIONS, SHARDED_COMPRESSIONS
from cpuft.config.conflicts import check_engine_for_launch, refuse_conflicts
from cpuft.config.fields import format_flag
from cpuft.config.train import ENGINES, TrainConfig
from cpuft.errors import CpuftError

LAYERS = "because it trains with its own layers: leave out one of them"


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"engine": "ipex", "fast_path": False}, f"--engine ipex excludes --no-fast-path, {LAYERS}"),
        ({"engine": "ipex", "lora_rank": 16}, f"--engine ipex excludes --lora-rank, {LAYERS}"),
        (
            {"engine": "ipex", "sync_every": 2},
            "--engine ipex excludes --sync-every, because it keeps the fp32 weights to itself: leave out one of them",
        ),
        (
            {"engine": "deepspeed", "grad_compression": "int8"},
            "--engine deepspeed excludes --grad-compression, because it sends gradients in its own way: "
            "leave out one of them",
        ),
        (
            {"engine": "deepspeed", "shard": "optimizer"},
            "--engine deepspeed excludes --shard, because it shards the optimizer state itself: leave out one of them",
        ),
        (
            {"engine": "ort", "shard": "optimizer"},
            "--engine ort excludes --shard, because this combination is not tested: leave out one of them",
        ),
        *(
            (
                {"engine": "ort", **some},
                "--engine ort trains only in fp32 and over gloo: add --precision fp32 --backend gloo",
            )
            for some in ({}, {"precision": "fp32"}, {"backend": "gloo"}, {"precision": "bf16", "backend": "gloo"})
        ),
        (
            {"engine": "ort", "precision": "fp32", "backend": "gloo", "task": "text"},
            "--engine ort masks the same positions in every batch of --task text: leave out one of them",
        ),
        (
            {"outer_momentum": 0.9},
            "--outer-momentum changes nothing by itself: add --sync-every 4, or leave it out",
        ),
        (
            {"eval_every": "epoch", "best_metric": "f1"},
            "--best-metric changes nothing by itself: add --save-best or --early-stopping, or leave it out",
        ),
        (
            {"shard": "optimizer", "sync_every": 2},
            "--shard excludes --sync-every, because each rank updates only its share of the parameters: leave out one of them",
        ),
        *(
            (
                {"shard": "optimizer", "grad_compression": way},
                f"--shard supports only none, bf16, fp16 as --grad-compression: leave out --grad-compression {way}, or --shard",
            )
            for way in ("int8", "powersgd")
        ),
        *(
            (
                {"precision": "int8", name: value},
                f"--precision int8 excludes {format_flag(name, value)}, because it needs the fast path: leave out one of them",
            )
            for name, value in {"engine": "ipex", "fast_path": False, "lora_rank": 16}.items()
        ),
        *(
            (
                {"task": task, "label_column": "stars"},
                f"--label-column has no effect with --task {task}: leave it out, or give --task files or scored-pairs or "
                "rerank",
            )
            for task in ("mrpc", "pairs")
        ),
        (
            {"task": "mrpc", "label_type": "number"},
            "--label-type has no effect with --task mrpc: leave it out, or give --task files",
        ),
        (
            {"lora_merge": True},
            "--lora-merge changes nothing by itself: add --lora-rank 16, or leave it out",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(CpuftError) as refused:
        refuse_conflicts(TrainConfig(**options))
    assert str(refused.value) == problem


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fast_path": False, "sync_every": 2},
        {"task": "files", "label_type": "number"},
        {"lora_rank": 16, "lora_merge": True, "fast_path": False, "sync_every": 4},
        *(
            {"shard": "optimizer", "grad_compression": way, "gradient_accumulation": 2}
            for way in ("auto", *SHARDED_COMPRESSIONS)
        ),
        {"precision": "int8", "gradient_checkpointing": True, "sync_every": 2},
        {"engine": "ipex", "grad_compression": "int8"},
        {"engine": "deepspeed", "gradient_accumulation": 2},
        {"engine": "ort", "precision": "fp32", "backend": "gloo", "sync_every": 2},
    ],
)
def test_others_may_go_together(options: dict[str, Any]) -> None:
    refuse_conflicts(TrainConfig(**options))


def test_every_way_to_send_gradients_is_decided() -> None:
    assert {"auto", *SHARDED_COMPRESSIONS, "int8", "powersgd"} == set(COMPRESSIONS)


def test_engines_of_others_make_no_checkpoints() -> None:
    for engine in ENGINES[1:]:
        with pytest.raises(
            CpuftError, match=f"--interruption-notice needs checkpoints, and --engine {engine} writes none: leave"
        ):
            check_engine_for_launch(engine, has_notice=True, is_independent=False)
    check_engine_for_launch("torch", has_notice=True, is_independent=True)
    with pytest.raises(
        CpuftError, match="--ideal trains every rank independently, which --engine deepspeed cannot: leave"
    ):
        check_engine_for_launch("deepspeed", has_notice=False, is_independent=True)
