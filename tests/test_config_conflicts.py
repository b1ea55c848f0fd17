"""Options that exclude each other."""

from __future__ import annotations

from typing import Any

import pytest

from cpuft.config import (
    COMPRESSIONS,
    ENGINES,
    SHARDED_COMPRESSIONS,
    TrainConfig,
    describe_unknown_value,
    format_flag,
    refuse_conflicts,
    refuse_engine,
)
from cpuft.errors import CpuftError

LAYERS = "because it trains with layers of its own: leave one of them out"


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"engine": "ipex", "fast_path": False}, f"--engine ipex excludes --no-fast-path, {LAYERS}"),
        ({"engine": "deepspeed", "compile": True}, f"--engine deepspeed excludes --compile, {LAYERS}"),
        ({"engine": "ipex", "lora_rank": 16}, f"--engine ipex excludes --lora-rank, {LAYERS}"),
        (
            {"engine": "ipex", "sync_every": 2},
            "--engine ipex excludes --sync-every, because it keeps the fp32 weights to itself: leave one of them out",
        ),
        (
            {"engine": "deepspeed", "grad_compression": "int8"},
            "--engine deepspeed excludes --grad-compression, because it sends gradients in its own way: "
            "leave one of them out",
        ),
        (
            {"engine": "deepspeed", "shard": "optimizer"},
            "--engine deepspeed excludes --shard, because it shares the optimizer out itself: leave one of them out",
        ),
        (
            {"engine": "ort", "shard": "optimizer"},
            "--engine ort excludes --shard, because nobody has tried both: leave one of them out",
        ),
        *(
            (
                {"engine": "ort", **some},
                "--engine ort trains in fp32 and over gloo only: add --precision fp32 --backend gloo",
            )
            for some in ({}, {"precision": "fp32"}, {"backend": "gloo"}, {"precision": "bf16", "backend": "gloo"})
        ),
        (
            {"engine": "ort", "precision": "fp32", "backend": "gloo", "task": "text"},
            "--engine ort takes the first batch's masked places for all: train --task text without it",
        ),
        (
            {"shard": "optimizer", "sync_every": 2},
            "--sync-every has each rank make all updates itself, --shard a part of each: leave one out",
        ),
        *(
            (
                {"shard": "optimizer", "grad_compression": way},
                f"--shard sends gradients as none, bf16, fp16 only: leave --grad-compression {way} out, or --shard",
            )
            for way in ("int8", "powersgd")
        ),
        *(
            (
                {"precision": "int8", name: value},
                f"--precision int8 is the fast path's own, and {format_flag(name, value)} goes without: leave one out",
            )
            for name, value in {"engine": "ipex", "fast_path": False, "compile": True, "lora_rank": 16}.items()
        ),
        (
            {"task": "mrpc", "label_type": "number"},
            "--label-type number is for --task files; the labels of --task mrpc are known: leave it out",
        ),
        (
            {"lora_merge": True},
            "--lora-merge says how adapters are kept, and there are none: add --lora-rank 16, or leave it out",
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
        {"shard": "optimizer", "compile": True},
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
            CpuftError, match=f"--interruption-notice wants a checkpoint, and --engine {engine} makes none: leave"
        ):
            refuse_engine(engine, notice=True, apart=False)
    refuse_engine("torch", notice=True, apart=True)
    with pytest.raises(CpuftError, match="--ideal trains ranks apart, and --engine deepspeed together only: leave"):
        refuse_engine("deepspeed", notice=False, apart=True)


def test_a_removed_compression_is_answered_with_what_to_give_instead() -> None:
    answer = (
        "--grad-compression late was removed, because it cost too much accuracy: give --grad-compression int8, which "
        "sends as many bytes"
    )
    assert describe_unknown_value("--grad-compression", "late", COMPRESSIONS) == answer
    with pytest.raises(CpuftError) as refused:
        refuse_conflicts(TrainConfig(grad_compression="late"))
    assert str(refused.value) == answer
