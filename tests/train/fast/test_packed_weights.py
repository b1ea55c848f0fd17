"""Products with packed weights are those of the weights, which are packed once."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from cpuft.train.fast import packed_weights, projection
from cpuft.train.fast.packed_weights import PackedWeights, _can_pack, uses_packed_weights
from cpuft.train.fast.projection import PackedLinear, can_feed_forward, linear, product
from tests.train.fast.encoders import relative_error

pytestmark = pytest.mark.usefixtures("one_thread")
CAN_PACK = _can_pack()


def make_layers(count: int, bias: bool = True, dtype: torch.dtype = torch.bfloat16) -> list[nn.Linear]:
    torch.manual_seed(7)
    return [nn.Linear(48, 40 + number, bias).to(dtype) for number in range(count)]


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product with packed weights."""
    seen = list[int]()
    multiply = packed_weights.multiply_packed

    def count(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(x))
        return multiply(x, *rest)

    monkeypatch.setattr(projection, "multiply_packed", count)
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 17, 1023, 1024])
def test_a_product_is_that_of_the_weights(rows: int, bias: bool, packings: list[int]) -> None:
    layers, x = make_layers(3, bias), torch.randn(rows, 48).bfloat16()
    plain = [deepcopy(layer).double()(x.double()) for layer in layers]
    packed = PackedLinear(list(layers))
    with torch.inference_mode(), PackedWeights():
        assert relative_error(packed(x), torch.cat(plain, 1)) < 2 / 256
        assert relative_error(packed(x, 1), torch.cat(plain[1:], 1)) < 2 / 256
        assert relative_error(linear(layers[0], x), plain[0]) < 2 / 256
        assert relative_error(product(layers[0], x), plain[0] - (layers[0].bias.double() if bias else 0)) < 2 / 256
    assert packings == ([rows] * 4 if CAN_PACK and rows < 1024 else [])


def test_weights_are_packed_once_until_they_change(packings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    (layer,) = make_layers(1)
    x, packs, weights = torch.ones(2, 48).bfloat16(), list[Any](), PackedWeights()
    if CAN_PACK:
        pack = torch.ops.mkldnn._reorder_linear_weight

        def count(*given: Any) -> Any:
            packs.append(given)
            return pack(*given)

        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", count)
    with torch.inference_mode():
        for _ in range(2):
            with weights:
                before = linear(layer, x)
        assert len(packs) == CAN_PACK
        layer.weight.mul_(2)
        layer.bias.mul_(2)
        with PackedWeights():
            assert torch.equal(linear(layer, x), 2 * before)
    assert len(packs) == 2 * CAN_PACK
    assert not uses_packed_weights(x)
    assert packings == [2, 2, 2] * CAN_PACK


def test_only_few_rows_in_bf16_have_packed_weights() -> None:
    (layer,) = make_layers(1, dtype=torch.float32)
    assert not uses_packed_weights(torch.ones(2, 48).bfloat16())
    with torch.inference_mode(), PackedWeights():
        assert uses_packed_weights(torch.ones(2, 48).bfloat16()) == CAN_PACK
        assert not uses_packed_weights(torch.ones(1024, 48).bfloat16())
        assert not uses_packed_weights(torch.ones(2, 48))
        assert relative_error(linear(layer, torch.ones(2, 48)), layer(torch.ones(2, 48))) < 1e-5


def test_feed_forward_multiplies_layer_by_layer(each_way: None) -> None:
    inner, outer = nn.Linear(64, 96).bfloat16(), nn.Linear(96, 64).bfloat16()
    few, many = torch.randn(3, 64).bfloat16(), torch.randn(1024, 64).bfloat16()
    fused = can_feed_forward(inner, outer, few)
    with PackedWeights():
        assert can_feed_forward(inner, outer, few) == (fused and not CAN_PACK)
        assert can_feed_forward(inner, outer, many) == fused
