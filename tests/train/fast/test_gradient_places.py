"""Gradients that kernels write where they are sent from."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from cpuft.train.arena import GradientBuckets
from cpuft.train.exchange.data_parallel import make_buckets
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.gradient_places import offer_place, take_place, withdraw_place
from tests.train.fast import encoders, families

SHARED = {"albert": "albert_layers", "deberta-v2": "(query|key|value)_proj|embed"}
"""Matrices of layers whose gradients torch adds up elsewhere: they have several in a pass, or are packed with one that
has."""


def make_model(kind: str, precision: str) -> Any:
    model = encoders.make_model(kind, intermediate_size=64) if kind in encoders.KINDS else families.make_model(kind)
    return accelerate(model, SGD(model.parameters()), precision=precision)[0]


def backward(model: Any, kind: str, seed: int) -> None:
    batch = encoders.make_batch() if kind in encoders.KINDS else families.make_batch(encoders.LENGTHS)
    output = model(**batch)[0]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    torch.autograd.backward((output * weights).sum())


def check_places(kind: str, precision: str) -> None:
    """Two updates of two passes each: matrices of fast layers are written once into buckets, and then added to."""
    model, plain = make_model(kind, precision), make_model(kind, precision)
    layers = [one for one in model.parameters() if one.requires_grad]
    buckets = make_buckets(layers, [], "none", 2)
    written: dict[torch.Tensor, int] = {}

    def note_written(parameter: Any) -> None:
        written.setdefault(parameter, parameter.grad.data_ptr())

    for parameter in layers:  # these hooks run before those of the buckets
        untyped: Any = parameter
        untyped.register_post_accumulate_grad_hook(note_written)
    gradients = GradientBuckets(buckets, lambda bucket: None)
    places = {
        parameter: view.data_ptr()
        for bucket in buckets
        for parameter, view in zip(bucket.parameters(), bucket.split(bucket.buffer()), strict=True)
    }
    for _ in range(2):  # what the update before has left in the buckets does no harm
        written.clear()
        gradients.clear()
        plain.zero_grad()
        for seed in range(2):
            gradients.begin_pass(is_last=seed == 1)
            backward(model, kind, seed)
            backward(plain, kind, seed)
        gradients.send_rest()
        for parameter, other in zip(layers, plain.parameters(), strict=True):
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == places[parameter]
            assert torch.equal(parameter.grad, torch.zeros_like(other) if other.grad is None else other.grad)
    names = {parameter: name for name, parameter in model.named_parameters()}
    elsewhere = {names[one] for one in layers if one.ndim == 2 and written.get(one) != places[one]}
    assert {name for name in elsewhere if "layer" in name and not re.search(SHARED.get(kind, "embed"), name)} == set()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["bert", "albert", "deberta-v2", "modernbert", "llama"])
def test_matrices_of_fast_layers_are_written_into_buckets(kind: str, precision: str) -> None:
    check_places(kind, precision)


def test_a_pass_through_other_layers_leaves_no_place_to_the_next_one() -> None:
    model, plain = make_model("llama", "fp32"), make_model("llama", "fp32")
    gradients = GradientBuckets(make_buckets([*model.parameters()], [], "none", 2), lambda bucket: None)
    batch = families.make_batch(encoders.LENGTHS)
    with_hole = {**batch, "attention_mask": batch["attention_mask"].clone()}
    with_hole["attention_mask"][0, 3] = 0  # the fast layers know no such mask
    for number, one in enumerate((with_hole, batch)):
        gradients.begin_pass(is_last=number == 1)
        for some in (model, plain):
            torch.autograd.backward(families.compute_loss(some, one))
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert other.grad is not None
        assert torch.equal(parameter.grad, other.grad)


def test_only_neighbours_have_one_place_and_each_place_is_taken_once() -> None:
    memory = torch.zeros(20)
    first, second, third = (nn.Parameter(torch.zeros(rows, 2)) for rows in (2, 3, 4))
    offer_place(first, memory[:4].view(2, 2))
    offer_place(second, memory[4:10].view(3, 2))
    place = take_place([first, second])
    assert place is not None
    assert (place.shape, place.data_ptr(), place.is_contiguous()) == ((5, 2), memory.data_ptr(), True)
    assert take_place([first]) is take_place([second]) is None
    offer_place(first, memory[:4].view(2, 2))
    offer_place(third, memory[12:].view(4, 2))
    assert take_place([first, third]) is None
    assert take_place([first]) is None
    offer_place(first, memory[:4].view(2, 2))
    withdraw_place(first)
    assert take_place([first]) is None
