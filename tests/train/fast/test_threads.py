"""Steps on more threads than the machine has cores: what they compute does not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cpuft
from cpuft.train.fast import products
from cpuft.train.fast.adamw import clip_gradients
from tests.train.fast.encoders import make_batch, make_model, make_optimizer, relative_error

THREADS = (3, 8, 16, 32, 64)
LENGTHS = (40, 33, 17, 9, 5)
TOLERANCE = {"fp32": 1e-5, "bf16": 4e-3}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def find_gradients(model: Any) -> dict[str, Tensor]:
    """The loss and the gradients of a step with always the same dropout."""
    torch.manual_seed(5)
    model.zero_grad()
    loss = model(**make_batch(LENGTHS)).loss
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {"loss": loss.detach(), **found}


def check_threads(kind: str, precision: str, same_bits: bool) -> None:
    """Compare steps with those of two threads, to the bit in layers' weights if `same_bits`; and updates to the bit,
    because ranks with different numbers of threads need the same weights."""
    model = make_model(kind, 0.1, hidden_size=64, intermediate_size=128, num_attention_heads=2)
    optimizer = make_optimizer(model, weight_decay=0.1)
    model, optimizer = cpuft.accelerate(model, optimizer, precision=precision, first_token=False)
    torch.set_num_threads(2)
    wanted, parameters = find_gradients(model), dict(model.named_parameters())
    start = {name: one.detach().clone() for name, one in model.state_dict().items()}
    updated: dict[str, Tensor] = {}
    for threads in (2, *THREADS):
        torch.set_num_threads(threads)
        for name, gradient in find_gradients(model).items():
            is_tiny = name.endswith("key.bias")  # the gradient of a key's bias is zero but for rounding
            assert is_tiny or relative_error(gradient, wanted[name]) < TOLERANCE[precision], (threads, name)
            if same_bits and "layer." in name and gradient.dim() == 2:
                assert gradient.equal(wanted[name]), (threads, name)
        for name, parameter in parameters.items():
            parameter.grad = wanted[name].clone() if name in wanted else None
        norm = clip_gradients(optimizer, model.parameters(), 1.0)
        optimizer.step()
        found = {"norm": torch.tensor(norm), **{name: one.clone() for name, one in model.state_dict().items()}}
        updated = updated or found
        assert all(one.equal(updated[name]) for name, one in found.items()), threads
        model.load_state_dict(start)
        optimizer.state.clear()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["bert", "deberta-v2"])
def test_steps_are_the_same_with_any_number_of_threads(
    kind: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_MIN_ROWS", "_MIN_TOKENS", "_MIN_WORK"):
        monkeypatch.setattr(products, limit, 0)
    check_threads(kind, precision, same_bits=False)
