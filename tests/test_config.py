"""Options that the launcher, the ranks and the record share, under the names of this version and of earlier ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cpuft.cli import main
from cpuft.cli.launch import launch
from cpuft.cli.options import read_config
from cpuft.config import (
    OLD_NAMES,
    LaunchConfig,
    TrainConfig,
    format_flag,
    option_names,
    parse_arguments,
    rename_old_options,
)
from cpuft.record import format_line, parse_record
from tests.conftest import run_cpuft
from tests.records import make_record

KNOWN = [*option_names(TrainConfig), *option_names(LaunchConfig)]
BOOLEANS = {"recompute": True, "whole_words": True, "plain": True}
"""Old options that are switched on or off."""


def test_every_new_name_is_an_option_and_no_old_one_is() -> None:
    assert {new.removeprefix("no_") for new in OLD_NAMES.values()} <= set(KNOWN)
    assert not set(OLD_NAMES) & set(KNOWN)


@pytest.mark.parametrize("old", sorted(OLD_NAMES))
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
    assert not {format_flag(old) for old in OLD_NAMES} & set(told)


def test_a_plan_of_an_earlier_version_still_runs() -> None:
    config = parse_arguments(TrainConfig, ["--accumulation=2", "--plain=True", "--recompute=False", "--lora", "8"])
    assert config == TrainConfig(gradient_accumulation=2, fast_path=False, lora_rank=8)


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
