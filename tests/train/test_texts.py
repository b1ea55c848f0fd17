"""Masked language modelling on texts of the user's own, from files to a model that learns another task."""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import Record, read_record
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.prepare import prepare
from cpuft.train.data.texts import NEVER_MASKED, WORD_CONTINUATION, WORD_START
from cpuft.train.loop import train
from cpuft.train.objective.table import make_objective
from cpuft.train.setup import TrainingSetup
from tests.conftest import TEXTS, needs_texts, run_cpuft
from tests.train.tiny import save_tiny

WORDS = "the quick brown fox jumps over a lazy dog while seven small birds watch from their warm nest"
TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
"""Of an untrained BERT."""
CONFIG = TrainConfig(task="text", train_file="a.txt", model="tiny", max_length=32, batch_size=16, dropout=0.0)


UNTRAINED = {"from_config": "tiny.json"}


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path) -> None:
    """A text of which each line has a word of its own, that the model soon finds in the context; and the model."""
    chosen = random.Random(0).choices(WORDS.split(), k=600)
    (tmp_path / "a.txt").write_text("\n".join(" ".join([word] * 40) for word in chosen))
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    save_tiny(tmp_path / "tiny")


def entropy(run: str) -> float:
    """Of the words of a run by themselves, in nats: the loss of who knows how often each comes, and no context."""
    prepared = read_prepared(f"{run}/data.npz")
    counts = np.bincount(prepared.train.ids[prepared.token_kinds[prepared.train.ids] != NEVER_MASKED]).astype(float)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def launch(run: str, *words: str, seconds: float = 300) -> Record:
    done = run_cpuft("launch", "--run-dir", run, "--no-check", *words, seconds=seconds)
    assert done.returncode == 0, done.stderr
    return read_record(run)


def test_texts_are_prepared_once_and_what_masks_them_is_no_matter(own_cache: None) -> None:
    path = prepare(CONFIG)
    assert prepare(replace(CONFIG, mlm_probability=0.3, whole_word_mask=True, seed=1)) == path
    prepared = read_prepared(str(path))
    assert (len(prepared.token_kinds), prepared.mask_id, prepared.kind) == (30522, 103, "masked")
    assert {*prepared.token_kinds.tolist()} == {WORD_START, WORD_CONTINUATION, NEVER_MASKED}
    assert isinstance(prepared.train.ids, np.memmap)
    assert set(prepared.train.lengths[:-1]) == {32}
    sizes = [len(tokens.ids) for tokens in (prepared.train, prepared.validation[""])]
    assert sizes[1] / sum(sizes) == pytest.approx(0.1, abs=0.01)
    others = [
        replace(CONFIG, **change)
        for change in ({"max_length": 16}, {"validation_split": 0.2}, {"max_train_samples": 9})
    ]
    paths = [prepare(other) for other in others]
    assert len({path, *paths}) == 4
    assert len(read_prepared(str(paths[2])).train) == 9


@pytest.mark.parametrize(
    "change, message",
    [
        ({"train_file": ""}, "--task text needs --train-file: name text files, JSON lines, or a folder of them"),
        ({"train_file": "b.txt"}, "there is no file b.txt: check --train-file"),
        ({"validation_file": "b.txt"}, "there is no file b.txt: check --validation-file"),
        ({"train_file": "tiny.json,a.txt"}, "tiny.json is one JSON object, and cpuft reads JSON lines"),
        (
            UNTRAINED | {"tokenizer": "tiny"},
            "the tokenizer has 30522 tokens, and tiny.json embeds only 300: leave --tokenizer",
        ),
        (
            UNTRAINED | {"max_length": 1024},
            "tiny.json has 512 positions: give --max-length 512 or less",
        ),
        (
            {"from_config": "bert-bse"},
            "'bert-bse' is not a value of --from-config: give a JSON file, or one of bert-base, bert-large, bert-1.5b",
        ),
        ({"from_config": "bad.json"}, "no model can be made of bad.json (The hidden size (10) is not a multiple of"),
        ({"from_config": "a.txt"}, "no model can be made of a.txt ("),
        (
            {"train_file": "one.txt"},
            "one.txt has 1 line, too few to take some for validation: name more texts, or other texts",
        ),
    ],
)
def test_what_cannot_be_trained_is_said_before(change: dict[str, Any], message: str, own_cache: None) -> None:
    Path("one.txt").write_text("One line.")
    Path("bad.json").write_text(json.dumps({"hidden_size": 10, "num_attention_heads": 3}))
    with pytest.raises(CpuftError) as error:
        prepare(replace(CONFIG, **change))
    assert str(error.value).startswith(message)


def test_a_model_that_does_not_fit_is_refused_where_its_rows_are_there_already(own_cache: None) -> None:
    prepare(CONFIG)
    with pytest.raises(CpuftError, match=r"the tokenizer has 30522 tokens, and tiny\.json embeds only 300"):
        prepare(replace(CONFIG, from_config="tiny.json", tokenizer="tiny"))


def test_an_untrained_model_embeds_the_words_of_a_tokenizer_made_for_it(own_cache: None) -> None:
    config = replace(CONFIG, from_config="bert-base", vocab_size=80)
    prepared = read_prepared(str(prepare(config)))
    assert int(prepared.train.ids.max()) < prepared.vocab_size == len(prepared.token_kinds) <= 80
    assert json.loads(prepared.tokenizer)["model"]["type"] == "WordPiece"
    assert prepare(config) != prepare(replace(config, vocab_size=90))
    model = make_objective(config, prepared).load_model(config)
    assert model.get_input_embeddings().weight.shape == (prepared.vocab_size, 768)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    rows = read_prepared(str(prepare(replace(config, task="demo"))))
    assert (rows.kind, rows.vocab_size <= 80) == ("class", True)


def losses_of_both(config: TrainConfig) -> tuple[list[float], list[float]]:
    """Of our updates, and of the Hugging Face Trainer's on the same model, rows and masks."""
    from tests.train.masked_trainer import make_batches
    from tests.train.masked_trainer import train as train_theirs

    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    torch.manual_seed(0)
    model = objective.load_model(config)
    theirs, _ = train_theirs(copy.deepcopy(model), make_batches(prepared, config), config.learning_rate)
    loop = TrainingSetup(model, objective, config, prepared, "fp32", World(0, 1, 0, 1))
    return [line.loss for line in train(loop)], theirs


@pytest.mark.usefixtures("alone", "plain")
@pytest.mark.parametrize("fast_path", [False, True])
def test_the_trainer_has_the_same_losses(fast_path: bool) -> None:
    ours, theirs = losses_of_both(replace(CONFIG, max_steps=5, fast_path=fast_path, learning_rate=3e-3))
    assert len(ours) == len(theirs) == 5
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0] - 0.2


@needs_texts
@pytest.mark.proof
@pytest.mark.usefixtures("alone", "plain")
def test_the_trainer_has_the_same_curve_on_a_book() -> None:
    usual: dict[str, Any] = {"model": "minilm", "max_length": 128, "batch_size": 8}
    config = replace(CONFIG, train_file=str(TEXTS), max_steps=50, learning_rate=1e-4, **usual)
    ours, theirs = losses_of_both(config)
    assert len(ours) == 50
    assert max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) < 1e-3


@pytest.mark.proof
def test_a_model_made_of_nothing_on_two_ranks_learns_and_then_learns_another_task() -> None:
    words = ("--task", "text", "--train-file", "a.txt", "--from-config", "tiny.json", "--max-length", "32")
    sizes = ("--batch-size", "16", "--max-steps", "90", "--learning-rate", "3e-3", "--warmup-ratio", "0.1")
    record = launch("run", "--np", "2", *words, *sizes, "--precision", "fp32", "--backend", "gloo")
    assert (record.header.model, record.header.world_size, record.steps[0].samples) == ("tiny.json", 2, 32)
    assert record.steps[0].loss > entropy("run") > record.steps[-1].loss
    assert math.log(record.metrics["perplexity"]) < entropy("run")
    assert record.metrics.keys() == {"perplexity", "masked_accuracy"}
    again = launch("next", "--model", "run/model", "--task", "demo", "--max-train-samples", "32", "--max-steps", "1")
    assert again.metrics.keys() == {"accuracy", "f1"}


@pytest.mark.proof
def test_adapters_learn_words_on_ranks_that_are_compared_and_foretold() -> None:
    words = ("--task", "text", "--train-file", "a.txt", "--model", "tiny", "--max-length", "32", "--lora-rank", "4")
    compared = run_cpuft("compare", "--np", "1,2", *words, "--max-steps", "4", "--no-check", "--run-dir", "both")
    assert compared.returncode == 0, compared.stderr
    assert "perplexity" in compared.stdout
    foretold = run_cpuft("estimate", "both/np-1", "--bandwidth", "1gbit")
    assert foretold.returncode == 0, foretold.stderr
    assert foretold.stdout.startswith("text with tiny on hosts of")


@needs_texts
@pytest.mark.proof
def test_a_small_bert_made_of_nothing_beats_the_books_unigrams() -> None:
    Path("small.json").write_text(json.dumps(TINY | {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 8000}))
    words = ("--task", "text", "--train-file", str(TEXTS), "--from-config", "small.json", "--max-length", "64")
    steps = ("--learning-rate", "2e-3", "--warmup-ratio", "0.1", "--epochs", "8", "--no-save-model")
    record = launch("run", "--np", "2", *words, *steps, seconds=1500)
    assert math.log(record.metrics["perplexity"]) < entropy("run")


@needs_texts
@pytest.mark.proof
def test_a_model_adapts_to_a_book() -> None:
    words = ("--task", "text", "--train-file", str(TEXTS), "--learning-rate", "2e-4")
    before = launch("before", *words, "--epochs", "0", "--no-save-model")
    after = launch("after", *words, "--epochs", "1", "--no-save-model", seconds=1500)
    assert after.metrics["perplexity"] < before.metrics["perplexity"] / 20
