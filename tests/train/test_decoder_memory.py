"""The estimate of a decoder's memory, against what autograd keeps and models have."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cpuft.config.train import TrainConfig
from cpuft.train.data.archive import Prepared
from cpuft.train.fast.acceleration import patch_model
from cpuft.train.lora import add_adapters
from cpuft.train.memory_estimate import (
    CHUNK_LOGITS,
    LargestBatch,
    estimate_rank,
    find_batches,
    head_bytes,
    measure_activations,
    measure_layer,
)
from cpuft.train.model_shape import FAST_DECODERS, ModelShape, read_decoder_shape
from cpuft.train.precision import autocast
from tests.train.decoders import FAMILIES
from tests.train.tokens import make_tokens

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 160, "vocab_size": 64, "max_position_embeddings": 1024}
ROWS, LENGTH = 2, 256
BATCH = LargestBatch(ROWS, LENGTH, ROWS * LENGTH)


def make_model(family: str, layers: int) -> Any:
    kinds = {"layer_types": ["full_attention"] * layers} if family == "gemma3_text" else {}
    settings = {**FAMILIES[family], **SIZES, "num_hidden_layers": layers, "head_dim": 16, **kinds}
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **settings)).train()


def read(model: Any) -> ModelShape:
    shape = read_decoder_shape(model.config.to_dict())
    assert shape
    return shape


def count_kept(
    family: str, layers: int, precision: str, adapts: bool, masks: bool, fast: bool = False, again: bool = False
) -> int:
    """Bytes that autograd holds once the layers have run, weights left out; `again`: with gradient checkpointing."""
    model = make_model(family, layers)
    decoder = model.model
    if adapts:
        model = add_adapters(model, 2, "", ())
    for layer in decoder.layers if again else ():
        layer.gradient_checkpointing = True
    if fast:
        patch_model(model, precision, adapters=adapts)
    weights = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    positions = torch.arange(LENGTH)[None].repeat(ROWS, 1) % (LENGTH // 2 if masks else LENGTH)
    plain = "fp32" if fast else precision
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(plain):
        decoder(input_ids=torch.zeros(ROWS, LENGTH, dtype=torch.int64), position_ids=positions, use_cache=False)
    return sum(storage.nbytes() for place, storage in kept.items() if place not in weights)


@pytest.mark.parametrize("masks", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_keeps_what_is_estimated(family: str, precision: str, adapts: bool, masks: bool) -> None:
    counted = count_kept(family, 4, precision, adapts, masks) - count_kept(family, 3, precision, adapts, masks)
    config = TrainConfig(precision=precision, fast_path=False, pack=masks, lora_rank=2 * adapts)
    found = measure_layer(read(make_model(family, 1)), config, BATCH).kept
    assert found == pytest.approx(counted, rel=0.12)


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("adapts", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAST_DECODERS)
def test_a_fast_layer_keeps_what_is_estimated(family: str, precision: str, adapts: bool, again: bool) -> None:
    three, four = (count_kept(family, layers, precision, adapts, True, True, again) for layers in (3, 4))
    config = TrainConfig(precision=precision, lora_rank=2 * adapts)
    layer = measure_layer(read(make_model(family, 1)), config, BATCH)
    assert (layer.inputs if again else layer.kept) == pytest.approx(four - three, rel=0.12)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_has_as_many_parameters_as_its_model_and_its_adapters(family: str) -> None:
    model = make_model(family, 3)
    shape = read(model)
    assert shape.linear_parameters + shape.other_parameters == pytest.approx(model.num_parameters(), rel=0.01)
    adapted = add_adapters(model, 4, "", ())
    trained = sum(one.numel() for one in adapted.parameters() if one.requires_grad)
    tokens = make_tokens([8] * 2)
    prepared = Prepared((), (), "", 0, tokens, {"": tokens}, "causal")
    assert (
        estimate_rank(shape, TrainConfig(precision="fp32", lora_rank=4), prepared, 1, False)["moments"] == 8 * trained
    )


def test_other_configurations_have_no_shape() -> None:
    settings = make_model("llama", 1).config.to_dict()
    assert read_decoder_shape(settings | {"hidden_size": "many"}) is None
    assert read_decoder_shape({name: one for name, one in settings.items() if name != "num_key_value_heads"}) is None


SHAPE = ModelShape(440_401_920, 155_642_880, 28, 1024, 3072, 2048, 1024, 151_936, norms=2, norms_heads=True)
"""Qwen3-0.6B."""
ADAPTERS, WHOLE = (TrainConfig(precision="fp32", lora_rank=rank) for rank in (16, 0))


def test_the_head_needs_one_chunk_of_logits_however_many_tokens_there_are() -> None:
    counts = (10, 1000, 10_000)
    logits = {count: head_bytes(SHAPE, ADAPTERS, count) - 4 * count * SHAPE.hidden for count in counts}
    assert logits == {10: 8 * 10 * SHAPE.vocab_size, 1000: 8 * CHUNK_LOGITS, 10_000: 8 * CHUNK_LOGITS}
    whole = head_bytes(SHAPE, WHOLE, 1000) - head_bytes(SHAPE, ADAPTERS, 1000)
    assert whole == 4 * SHAPE.vocab_size * SHAPE.hidden
    assert head_bytes(SHAPE, WHOLE, 0) == 0


def test_gradient_checkpointing_saves_most_of_the_activations() -> None:
    def measure(**options: Any) -> int:
        config = dataclasses.replace(ADAPTERS, **options)
        return measure_activations(SHAPE, config, LargestBatch(16, 512, 8192, True))[1]

    assert measure(gradient_checkpointing=True) < 0.15 * measure()


def test_only_what_the_assistant_says_has_logits() -> None:
    tokens = make_tokens([100] * 8)
    said = dataclasses.replace(tokens, labels=np.repeat([0, 1, 0, 0], 200).astype(np.int8))
    batches = [
        find_batches(Prepared((), (), "", 0, one, {"": tokens}, kind), TrainConfig(batch_size=8), 1)[0]
        for one, kind in ((said, "chat"), (tokens, "causal"))
    ]
    assert [batch.targets for batch in batches] == [200, 800]
