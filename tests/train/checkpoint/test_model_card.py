"""The model card: what it says of a run, and what it keeps for itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cpuft.config.train import TrainConfig
from cpuft.record import BaselineLine
from cpuft.train.checkpoint.model_card import format_model_card
from tests.records import make_record

RECORD = make_record(2)
HEADER = replace(RECORD.header, options=vars(TrainConfig(task="mrpc", learning_rate=1e-4, train_file="/home/me/x.csv")))


def card(**changes: Any) -> str:
    assert RECORD.footer is not None
    return format_model_card(replace(HEADER, **changes), RECORD.evaluations[-1], RECORD.footer)


def test_a_card_has_task_metrics_recipe_speed_and_versions() -> None:
    text = card(task="mrpc", model="org/encoder")
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "org/encoder"
    assert yaml.safe_load(front)["metrics"] == list(RECORD.metrics)
    for name, value in RECORD.metrics.items():
        assert f"| {name} | {value:.4f} |" in body
    assert "| --learning-rate | 0.0001 |" in body
    assert "2 ranks on" in body
    assert f"| torch | {HEADER.versions['torch']} |" in body


def test_a_card_has_the_baseline() -> None:
    assert RECORD.footer is not None
    text = format_model_card(HEADER, RECORD.evaluations[-1], RECORD.footer, BaselineLine("BM25", {"map": 0.25}, 2.0))
    assert "\nFor comparison, without a model: baseline (BM25, 2.0 s): map 0.2500.\n" in text
    assert "without a model" not in card()


@pytest.mark.parametrize("model", ["/home/me/model", "./me/model", "mine/model", "mine/model/"])
def test_names_of_hosts_and_local_paths_stay_at_home(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of a folder that was removed while the run trained."""
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    text = card(model=model)
    assert model not in text
    assert not any(host in text for host in HEADER.hosts)
    assert "base_model" not in text


def test_an_untrained_model_has_no_base() -> None:
    assert "base_model" not in card(model="bert-base", options={**HEADER.options, "from_config": "bert-base"})


@pytest.mark.parametrize(("task", "pipeline"), [("rerank", "text-ranking"), ("pairs", "sentence-similarity")])
def test_a_card_says_which_library_loads_the_model_and_for_what(task: str, pipeline: str) -> None:
    options = vars(TrainConfig(task=task, hard_negatives=3, mining_model="/home/me/model"))
    text = card(task=task, options=options)
    front = yaml.safe_load(text.split("---\n", 2)[1])
    assert (front["library_name"], front["pipeline_tag"]) == ("sentence-transformers", pipeline)
    assert "| --hard-negatives | 3 |" in text
    assert "/home/me" not in text


@pytest.mark.parametrize("name", ["[click](http://x.example)", "![](//x.example)", "HTTP://x.example", "www.x.example"])
def test_a_name_is_no_link(name: str) -> None:
    text = card(versions={name: name}, cpu_model=name, task=name)
    assert not any(mark in text for mark in ("://", "](", "www."))


def test_a_name_with_a_line_break_ends_neither_the_header_nor_a_row() -> None:
    text = card(model="a\n---\nb", versions={"x|y": "1\n2"})
    assert yaml.safe_load(text.split("---\n", 2)[1])["library_name"] == "transformers"
    assert "| x?y | 1?2 |" in text


@pytest.mark.parametrize(
    ("step", "words"), [(0, "after the last update"), (30, "after update 30, the best evaluation")]
)
def test_a_card_says_which_weights_were_saved(step: int, words: str) -> None:
    assert RECORD.footer is not None
    text = format_model_card(HEADER, RECORD.evaluations[-1], replace(RECORD.footer, saved_step=step))
    assert f"The weights are those {words}." in text
