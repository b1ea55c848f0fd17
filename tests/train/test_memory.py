"""What a rank will hold, against what is counted and what models have."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from cpuft.config import TrainConfig
from cpuft.train.memory import Largest, Shape, find_shape, foretell, kept_bytes
from tests.train.fast.encoders import KINDS, make_model
from tests.train.kept import SIZES, count_kept, make_encoder, make_full_batch

ENGINES: dict[str, dict[str, Any]] = {
    "fast": {},
    "plain": {"fast_path": False},
    "again": {"gradient_checkpointing": True},
    "plain again": {"fast_path": False, "gradient_checkpointing": True},
}
"""Options by what they are called here."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("length", "layers", "dropout"), [(128, 3, 0.1), (64, 2, 0.1), (128, 3, 0.0)])
def test_activations_are_those_that_autograd_keeps(
    engine: str, precision: str, length: int, layers: int, dropout: float
) -> None:
    config = TrainConfig(precision=precision, dropout=dropout, **ENGINES[engine])
    model = make_encoder(layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    shape = find_shape(model.config.to_dict(), dropout)
    assert shape
    batch = Largest(4, length, 4 * length)
    kept, most = kept_bytes(
        shape, config.fast_path, config.gradient_checkpointing, 2 if precision == "bf16" else 4, batch
    )
    assert kept == pytest.approx(count_kept(model, make_full_batch(4, length), config), rel=0.02, abs=20_000)
    assert (most > kept) == (config.gradient_checkpointing and config.fast_path)


def shape_of(layers: int) -> Shape:
    settings: dict[str, Any] = {"model_type": "bert", "num_hidden_layers": layers, "type_vocab_size": 2, **SIZES}
    shape = find_shape(settings)
    assert shape
    return shape


def test_padding_is_left_out_of_what_is_packed() -> None:
    shape, config = shape_of(3), TrainConfig(precision="fp32")
    batch = make_full_batch(4, 128, padding=64)
    tokens = int(batch["attention_mask"].sum())
    counted = count_kept(make_encoder(3), batch, config)
    assert kept_bytes(shape, True, False, 4, Largest(4, 128, tokens))[0] == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_has_the_numbers_of_its_model(kind: str) -> None:
    model = make_model(kind)
    shape = find_shape(model.config.to_dict())
    assert shape
    classifier = sum(
        p.numel() for name, p in model.named_parameters() if "out_proj" in name or name.startswith("classifier.weight")
    )
    wanted = sum(parameter.numel() for parameter in model.parameters()) - classifier
    assert shape.linears + shape.others == pytest.approx(wanted, rel=0.02)


def test_a_kind_that_is_not_known_has_no_shape() -> None:
    settings = {"model_type": "bert", "num_hidden_layers": 3, "type_vocab_size": 2, **SIZES}
    assert find_shape(settings | {"model_type": "albert"}) is None
    assert find_shape(settings | {"hidden_size": "many"}) is None
    assert find_shape({}) is None


def test_of_a_model_of_no_known_shape_the_rest_is_told() -> None:
    config = TrainConfig(precision="bf16", fast_path=False, gradient_checkpointing=True)
    told = foretell(Shape(1000, 10), config, "bf16", BATCH, BATCH, 1, False)
    assert (told["weights"], told["moments"], told["activations"]) == (4040, 8080, 0)


BERT = Shape(85_054_464, 24_428_544, 12, 768, 3072, 12)
BATCH = Largest(8, 128, 1024)


@pytest.mark.parametrize(
    ("options", "ranks", "keeps", "parts"),
    [
        ({}, 1, True, {"weights": 267.8, "masters": 340.2, "moments": 875.9, "gradients": 267.8}),
        ({}, 2, False, {"weights": 267.8, "masters": 340.2, "gradients": 267.8, "checkpoint's copy": 0, "buffers": 64}),
        ({"precision": "fp32"}, 2, False, {"weights": 437.9, "masters": 0, "moments": 875.9, "gradients": 437.9}),
        ({"fast_path": False}, 2, False, {"weights": 437.9, "masters": 0, "gradients": 437.9}),
        ({}, 1, True, {"checkpoint's copy": 1313.8}),
        ({"checkpoint_every": 0.0}, 1, True, {"checkpoint's copy": 0}),
        ({"grad_compression": "int8"}, 2, False, {"buffers": 501.9}),
        ({"sync_every": 4}, 2, False, {"buffers": 1815.7}),
        ({"shard": "optimizer"}, 1, True, {"masters": 340.2, "moments": 875.9, "gradients": 267.8}),
        ({"shard": "optimizer"}, 4, False, {"weights": 267.8, "masters": 85.1, "moments": 219.0, "gradients": 377.3}),
        ({"shard": "optimizer"}, 4, True, {"checkpoint's copy": 1313.8}),
        ({"lora_rank": 16}, 1, True, {"weights": 267.8, "masters": 0, "moments": 14.2, "checkpoint's copy": 21.2}),
    ],
)
def test_parts(options: dict[str, Any], ranks: int, keeps: bool, parts: dict[str, float]) -> None:
    config = TrainConfig(**{"precision": "bf16", **options})
    told = foretell(BERT, config, config.precision, BATCH, BATCH, ranks, keeps)
    assert {name: round(told[name] / 1e6, 1) for name in parts} == parts


def test_logits_of_all_words_count_where_some_are_guessed() -> None:
    def told(guessed: int, **options: Any) -> int:
        config = TrainConfig(precision="bf16", **options)
        batch = Largest(8, 128, 1024, True, guessed)
        return foretell(words, config, "bf16", batch, Largest(1, 8, 8), 1, False)["activations"]

    words = dataclasses.replace(BERT, words=30522)
    assert told(2000) - told(1000) == 12 * 1000 * 30522
    assert told(1000, gradient_checkpointing=True) > 12 * 1000 * 30522


def test_layers_that_compute_again_leave_pieces() -> None:
    def told(**options: Any) -> float:
        config = TrainConfig(precision="bf16", **options)
        parts = foretell(BERT, config, "bf16", BATCH, BATCH, 1, False)
        return parts["process"] - 0.15 * (parts["moments"] + parts["gradients"] + parts["activations"])

    inner = 2 * (2 * 1024 * 768 + 2 * 1024 * 3072) + 8 * 1024
    assert told(gradient_checkpointing=True) - told() == pytest.approx(
        2 * inner + 2 * 1024 * (3072 + 3 * 768), rel=0.01
    )


def test_what_grows_and_what_does_not() -> None:
    def told(rows: int, **options: Any) -> int:
        config = TrainConfig(precision="bf16", **options)
        batch = Largest(rows, 512, rows * 512)
        return foretell(BERT, config, "bf16", batch, Largest(1, 8, 8), 2, False)["activations"]

    assert told(16) == pytest.approx(2 * told(8), rel=0.01)
    assert told(8, gradient_checkpointing=True) < 0.5 * told(8)
    eight, whole = (foretell(BERT, TrainConfig(), name, BATCH, BATCH, 1, False) for name in ("int8", "fp32"))
    assert eight["activations"] - whole["activations"] == BERT.linears
    assert foretell(Shape(0, 1000), TrainConfig(), "bf16", BATCH, BATCH, 2, False)["activations"] == 0
