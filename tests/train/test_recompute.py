"""Activations that are computed again: the same gradients, and less that is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig
from cpuft.train.optimizer import make_optimizer, recompute_layers
from cpuft.train.precision import autocast
from tests.train.fast.encoders import KINDS, make_batch, make_model
from tests.train.kept import count_kept, make_encoder, make_full_batch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of several threads are added in the order in which they come."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def find_gradients(kind: str, config: TrainConfig) -> dict[str, torch.Tensor]:
    """Of an update with dropout."""
    model = make_model(kind, dropout=0.1)
    make_optimizer(model, config, config.precision)
    torch.manual_seed(5)
    with autocast(config.precision):
        loss = model(**make_batch()).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
def test_gradients_are_the_same_to_the_bit(kind: str, precision: str, plain: bool, one_thread: None) -> None:
    config = TrainConfig(precision=precision, plain=plain)
    wanted, found = (find_gradients(kind, replace(config, recompute=again)) for again in (False, True))
    assert found.keys() == wanted.keys()
    assert [name for name, gradient in wanted.items() if not torch.equal(found[name], gradient)] == []


def test_masks_differ_from_one_forward_pass_to_the_next(one_thread: None) -> None:
    model = make_model("bert", dropout=0.1)
    make_optimizer(model, TrainConfig(recompute=True), "fp32")
    losses = [float(model(**make_batch()).loss.detach()) for _ in range(2)]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
def test_activations_at_their_peak_are_at_most_half(precision: str, plain: bool) -> None:
    def keep(recompute: bool, layers: int) -> int:
        config = TrainConfig(recompute=recompute, plain=plain, precision=precision)
        return count_kept(make_encoder(layers), make_full_batch(2, 512), config)

    one_layer = keep(False, 6) - keep(False, 5)
    assert keep(True, 6) + one_layer <= 0.5 * keep(False, 6)


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(CpuftError, match="--recompute finds no layers in Linear that can compute again"):
        recompute_layers(nn.Linear(2, 2))
