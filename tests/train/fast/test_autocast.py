"""Models that were accelerated in fp32, under autocast to bf16, as the Trainer with --bf16 runs them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.autocast import without_autocast
from tests.train.fast import encoders, families
from tests.train.fast.encoders import make_optimizer, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")  # kernels on several have tests of their own

LENGTHS = (17, 9, 5, 3)
TOLERANCE = 0.05


def make_pair(kind: str, precision: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A plain model, an accelerated copy of it, and a batch."""
    module: Any = encoders if kind in encoders.KINDS else families
    plain = module.make_model(kind)
    fast = copy.deepcopy(plain)
    accelerate(fast, make_optimizer(fast), precision=precision)
    return plain, fast, module.make_batch(LENGTHS)


def compute_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    loss: torch.Tensor = output[0].float()
    return loss if loss.dim() == 0 else loss[batch["attention_mask"].bool()].square().mean()


@pytest.mark.parametrize("kind", [*encoders.KINDS, *families.FAMILIES])
@pytest.mark.parametrize("where", ["forward", "both"])
def test_values_and_gradients_are_those_without_autocast(kind: str, where: str, each_way: None) -> None:
    plain, fast, batch = make_pair(kind, "fp32")
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            evaluated = compute_loss(fast, batch)
        torch.clear_autocast_cache()  # torch 2.10 would go on with its casts of weights, which have no gradient
        found = compute_loss(fast, batch)
        if where == "both":
            torch.autograd.backward(found)
    if where == "forward":
        torch.autograd.backward(found)
    wanted = compute_loss(plain, batch)
    torch.autograd.backward(wanted)
    assert relative_error(evaluated, wanted) < TOLERANCE
    assert relative_error(found, wanted) < TOLERANCE
    gradients = [
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]) for model in (fast, plain)
    ]
    assert relative_error(*gradients) < TOLERANCE


@pytest.mark.parametrize("kind", ["bert", "electra", "albert"])
def test_a_model_trains_on_after_its_hidden_states_were_asked_for(kind: str) -> None:
    _, model, batch = make_pair(kind, "fp32")
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(**batch, output_hidden_states=number == 1).loss for number in range(3)]
    assert [one.item() for one in losses[1:]] == [pytest.approx(losses[0].item(), rel=TOLERANCE)] * 2


def test_autocast_is_switched_off_for_one_function() -> None:
    @without_autocast
    def read_state(before: int, *, after: int) -> tuple[int, bool, int]:
        return before, torch.is_autocast_enabled("cpu"), after

    with torch.autocast("cpu", torch.bfloat16):
        assert read_state(1, after=2) == (1, False, 2)
        assert torch.is_autocast_enabled("cpu")
    assert read_state(1, after=2) == (1, False, 2)
