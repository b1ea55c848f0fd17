"""Activations that are computed again: the same gradients, and less that is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.lora import add_adapters
from cpuft.train.optimizer import checkpoint_gradients, make_optimizer
from cpuft.train.precision import autocast
from tests.train.fast.encoders import KINDS, LENGTHS, make_batch, make_model
from tests.train.kept import count_kept, make_encoder, make_full_batch


def find_gradients(kind: str, config: TrainConfig) -> dict[str, torch.Tensor]:
    """Of an update with dropout."""
    model = make_model(kind, dropout=0.1)
    if config.lora_rank > 0:
        model = add_adapters(model, config.lora_rank, "", ()).train()
        for _, factor in filter(lambda named: "lora_B" in named[0], model.named_parameters()):
            nn.init.ones_(factor)
    make_optimizer(model, config, config.precision)
    torch.manual_seed(5)
    with autocast(config.precision):
        loss = model(**make_batch(4 * LENGTHS)).loss  # tokens enough for products of 8 bits
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


EVERY = [
    (kind, TrainConfig(precision=precision, fast_path=not plain))
    for kind in KINDS
    for precision in ("bf16", "fp32")
    for plain in (True, False)
    if kind not in ("mpnet", "albert") or not plain  # whose own layers cannot recompute
]


@pytest.mark.parametrize(
    ("kind", "config"), [*EVERY, ("bert", TrainConfig(precision="int8")), ("bert", TrainConfig(lora_rank=4))]
)
def test_gradients_are_the_same_to_the_bit(kind: str, config: TrainConfig, one_thread: None) -> None:
    wanted, found = (find_gradients(kind, replace(config, gradient_checkpointing=again)) for again in (False, True))
    assert found.keys() == wanted.keys()
    assert [name for name, gradient in wanted.items() if not torch.equal(found[name], gradient)] == []


def test_masks_differ_from_one_forward_pass_to_the_next(one_thread: None) -> None:
    model = make_model("bert", dropout=0.1)
    make_optimizer(model, TrainConfig(gradient_checkpointing=True), "fp32")
    losses = [float(model(**make_batch()).loss.detach()) for _ in range(2)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
def test_activations_at_their_peak_are_at_most_half(precision: str, plain: bool) -> None:
    def keep(recompute: bool, layers: int) -> int:
        config = TrainConfig(gradient_checkpointing=recompute, fast_path=not plain, precision=precision)
        return count_kept(make_encoder(layers), make_full_batch(2, 512), config)

    one_layer = keep(False, 6) - keep(False, 5)
    assert keep(True, 6) + one_layer <= 0.5 * keep(False, 6)


def test_products_whose_results_no_gradient_needs_are_not_computed_again() -> None:
    """All of a layer again would be a third more. A layer has the proportions of BERT-base's at length 512."""

    def count(recompute: bool) -> int:
        model, batch = make_encoder(8), make_full_batch(2, 43)
        make_optimizer(model, TrainConfig(gradient_checkpointing=recompute), "fp32")
        with FlopCounterMode(display=False) as counter:
            model(**batch, labels=torch.zeros(2, dtype=torch.int64)).loss.backward()
        return int(counter.get_total_flops())

    assert 1.1 < count(True) / count(False) < 1.2


@pytest.mark.parametrize(("kind", "name"), [("mpnet", "MPNet"), ("albert", "Albert")])
def test_layers_that_only_the_fast_path_can_recompute_are_refused_without_it(kind: str, name: str) -> None:
    message = f"--gradient-checkpointing finds no layers in {name}ForSequenceClassification"
    with pytest.raises(CpuftError, match=message):
        make_optimizer(make_model(kind), TrainConfig(gradient_checkpointing=True, fast_path=False), "fp32")


def test_a_layer_that_runs_several_times_recomputes_in_each_run() -> None:
    config = TrainConfig(precision="fp32", gradient_checkpointing=True)
    batch = make_batch((32,) * 4)

    def keep(recompute: bool) -> int:
        model = make_model("albert", dropout=0.1, num_hidden_layers=8)
        return count_kept(model, batch, replace(config, gradient_checkpointing=recompute))

    assert keep(True) < 0.5 * keep(False)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(CpuftError, match="--gradient-checkpointing finds no layers in Linear that can compute again"):
        checkpoint_gradients(nn.Linear(2, 2))
