"""Options that the launcher, the ranks and the record share, under the names of this version and of earlier ones; and which exclude each other."""
# ruff: noqa: E501 (a message stands on one line, as a terminal shows it)

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cpuft.cli import main
from cpuft.cli.launch import launch
from cpuft.cli.options import read_config
from cpuft.compressions import COMPRESSIONS, SHARDED_COMPRESSIONS
from cpuft.config import (
    ENGINES,
    OLD_NAMES,
    LaunchConfig,
    TrainConfig,
    WorkerConfig,
    check_engine_for_launch,
    describe_unknown_value,
    format_flag,
    option_names,
    parse_arguments,
    refuse_conflicts,
    rename_old_options,
)
from cpuft.errors import CpuftError
from cpuft.record import format_line, parse_record
from cpuft.train.__main__ import parse_worker
from tests.conftest import run_cpuft
from tests.records import make_record

USERS = [*option_names(TrainConfig), *option_names(LaunchConfig)]
WORKERS = option_names(WorkerConfig)
OLD_FLAGS = sorted(old for old, new in OLD_NAMES.items() if new.removeprefix("no_") in USERS)
"""Old options of cpuft launch; the others are those of the ranks, which users do not see."""
BOOLEANS = {"recompute": True, "whole_words": True, "plain": True}
"""Old options that are switched on or off."""


def test_every_new_name_is_an_option_and_no_old_one_is() -> None:
    assert {new.removeprefix("no_") for new in OLD_NAMES.values()} <= {*USERS, *WORKERS}
    assert not set(OLD_NAMES) & {*USERS, *WORKERS}


@pytest.mark.parametrize("old", OLD_FLAGS)
def test_an_old_flag_is_answered_with_one_line_that_names_the_new_one(
    old: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        [format_flag(old)]
        if old in BOOLEANS
        else [format_flag(old), "0.5" if old in ("held_out", "mask_share") else "64"]
    )
    with launch.make_context("launch", words) as context:
        values = context.params
    new = OLD_NAMES[old]
    assert values[new.removeprefix("no_")] in (64, 0.5, "64", not new.startswith("no_"))
    assert capsys.readouterr().err == (
        f"cpuft: write {format_flag(new)} instead of {format_flag(old)}: the old name still works, and will be removed "
        "in a later version\n"
    )


@pytest.mark.parametrize(
    "words, name, value",
    [
        (["--no-plain"], "fast_path", True),
        (["--no-recompute"], "gradient_checkpointing", False),
        (["--accumulation=4"], "gradient_accumulation", 4),
        (["--run-dir", "--lora"], "run_dir", "--lora"),
        (["--", "train.py", "--lora", "4"], "script", ("train.py", "--lora", "4")),
    ],
)
def test_old_flags_keep_their_values_and_what_is_no_flag_stays(words: list[str], name: str, value: object) -> None:
    with launch.make_context("launch", words) as context:
        assert context.params[name] == value


def test_two_old_flags_are_answered_in_the_same_line() -> None:
    done = run_cpuft("launch", "--accumulation", "2", "--plain", "--dry-run")
    assert done.returncode == 0
    assert done.stderr == (
        "cpuft: write --gradient-accumulation instead of --accumulation, --no-fast-path instead of --plain: the old "
        "name still works, and will be removed in a later version\n"
    )
    assert "--gradient-accumulation=2" in done.stdout
    assert "--fast-path=False" in done.stdout


def test_a_yaml_file_may_have_old_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("accumulation: 4\nplain: true\nwhole-words: yes\ntask: text\n")
    assert read_config(str(path), option_names(TrainConfig)) == {
        "gradient_accumulation": "4",
        "fast_path": "false",
        "whole_word_mask": "yes",
        "task": "text",
    }
    assert capsys.readouterr().err == (
        f"cpuft: --config {path}: write gradient-accumulation instead of accumulation, fast-path: false instead of "
        "plain, whole-word-mask instead of whole-words: the old name still works, and will be removed in a later "
        "version\n"
    )


def test_a_yaml_file_must_not_have_both_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "options.yaml").write_text("lora: 4\nlora-rank: 8\n")
    with pytest.raises(SystemExit):
        main(["launch", "--config", str(tmp_path / "options.yaml")])
    assert "'lora_rank' is there twice: keep one of the lines" in capsys.readouterr().err


def test_old_names_are_in_no_help() -> None:
    told = run_cpuft("launch", "--help").stdout.split()
    assert not {format_flag(old) for old in OLD_FLAGS} & set(told)


def test_a_plan_of_an_earlier_version_still_runs() -> None:
    config = parse_arguments(TrainConfig, ["--accumulation=2", "--plain=True", "--recompute=False", "--lora", "8"])
    assert config == TrainConfig(gradient_accumulation=2, fast_path=False, lora_rank=8)
    old = [
        "--plain=False",
        "--apart=True",
        "--since=5.0",
        "--because=lost",
        "--resume=7",
        "--cores-allowed=0.5",
        "--measured=",
    ]
    assert parse_worker([*old, "--run-dir=r"]) == (
        TrainConfig(),
        WorkerConfig("r", independent=True, stopped_at=5.0, restart_reason="lost", recorded_updates=7, cpu_quota=0.5),
    )


def test_a_record_of_an_earlier_version_is_read_with_the_names_of_this_one() -> None:
    record = make_record(2)
    old = {"accumulation": 4, "plain": False, "clip_norm": 0.5, "task": "mrpc"}
    text = format_line(dataclasses.replace(record.header, options=old)) + "\n"
    assert json.loads(text)["options"] == old
    assert parse_record(text).header.options == {
        "gradient_accumulation": 4,
        "fast_path": True,
        "max_grad_norm": 0.5,
        "task": "mrpc",
    }


def test_other_options_stay_as_they_are() -> None:
    assert rename_old_options({"late": 1, "lora": 2}, ["fast_path"]) == {"late": 1, "lora": 2}
    assert rename_old_options({"lora": 2}, ["lora", "lora_rank"]) == {"lora": 2}


LAYERS = "because it trains with its own layers: leave out one of them"


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"engine": "ipex", "fast_path": False}, f"--engine ipex excludes --no-fast-path, {LAYERS}"),
        ({"engine": "deepspeed", "compile": True}, f"--engine deepspeed excludes --compile, {LAYERS}"),
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
            "--engine ort cannot train --task text, because it masks the same positions in every batch: leave out one of them",
        ),
        (
            {"sync_schedule": "quadratic"},
            "--sync-schedule quadratic changes nothing by itself: add --sync-every 4, or leave it out",
        ),
        (
            {"shard": "optimizer", "sync_every": 2},
            "--sync-every lets each rank update all parameters by itself, and --shard lets it update only its share: leave out one of them",
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
                f"--precision int8 needs the fast path, which excludes {format_flag(name, value)}: leave out one of them",
            )
            for name, value in {"engine": "ipex", "fast_path": False, "compile": True, "lora_rank": 16}.items()
        ),
        (
            {"task": "mrpc", "label_type": "number"},
            "--label-type number is only for --task files, and the type of the labels of --task mrpc is known: leave out --label-type",
        ),
        (
            {"lora_merge": True},
            "--lora-merge merges LoRA adapters, and there are none: add --lora-rank 16, or leave it out",
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
            CpuftError, match=f"--interruption-notice needs checkpoints, and --engine {engine} writes none: leave"
        ):
            check_engine_for_launch(engine, has_notice=True, is_independent=False)
    check_engine_for_launch("torch", has_notice=True, is_independent=True)
    with pytest.raises(
        CpuftError, match="--ideal trains every rank independently, which --engine deepspeed cannot: leave"
    ):
        check_engine_for_launch("deepspeed", has_notice=False, is_independent=True)


def test_a_removed_compression_is_answered_with_what_to_give_instead() -> None:
    answer = (
        "--grad-compression late was removed, because it cost too much accuracy: give --grad-compression int8, which "
        "sends as many bytes"
    )
    assert describe_unknown_value("--grad-compression", "late", COMPRESSIONS) == answer
    with pytest.raises(CpuftError) as refused:
        refuse_conflicts(TrainConfig(grad_compression="late"))
    assert str(refused.value) == answer
