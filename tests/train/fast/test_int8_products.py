"""Products in 8 bits against those of the rounded numbers in fp64, with the kernels and with plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cpuft.train.fast import int8_products
from cpuft.train.fast.int8_products import MIN_ROWS, multiply, quantise_rows
from cpuft.train.fast.projection import linear
from tests.train.fast.encoders import relative_error

pytestmark = pytest.mark.usefixtures("each_way")


def plain_int8(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b of both rounded by rows to 8 bits, in fp64."""

    def rounded(rows: Tensor) -> Tensor:
        scale = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scale).round() * scale

    return rounded(x) @ rounded(weight).t() + bias


def int8_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Of that product's input: the output's gradient takes in the weight's scales, and is rounded then."""
    scales = weight.abs().amax(1) / 127
    rows = grad * scales
    scale = rows.abs().amax(1, keepdim=True) / 127
    return (rows / scale).round() * scale @ (weight / scales[:, None]).round()


def test_int8_products_are_those_of_rounded_numbers() -> None:
    torch.manual_seed(0)
    layer, x, grad = nn.Linear(37, 21), torch.randn(MIN_ROWS, 37, requires_grad=True), torch.randn(MIN_ROWS, 21)
    weight, bias = (p.detach().double() for p in (layer.weight, layer.bias))
    y = linear(layer, x, int8=True)
    y.backward(grad)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert layer.weight.grad is not None
    # What lies between two of the 255 numbers may go either way.
    assert relative_error(y, plain_int8(x.detach().double(), weight, bias)) < 1e-3
    assert relative_error(x.grad, int8_gradient(grad.double(), weight)) < 1e-3
    assert 1e-3 < relative_error(y, functional.linear(x, layer.weight, layer.bias)) < 2e-2
    torch.testing.assert_close(layer.weight.grad, grad.t() @ x.detach())


@pytest.mark.parametrize("rows, columns, inner", [(1, 1, 1), (7, 9, 15), (8, 8, 16), (70, 66, 40), (33, 200, 130)])
def test_sums_of_products_are_exact(rows: int, columns: int, inner: int) -> None:
    torch.manual_seed(rows)
    left, right = (torch.randint(-127, 128, size, dtype=torch.int8) for size in ((rows, inner), (columns, inner)))
    expected = left.double() @ right.t().double()
    scales, column_scales, bias = torch.rand(rows), torch.rand(columns), torch.randn(columns)
    for given in (right.t(), right.t().contiguous()):
        assert torch.equal(multiply((left, torch.ones(rows)), given).double(), expected)
        scaled = multiply((left, scales), given, column_scales, bias)
        assert relative_error(scaled, expected * scales[:, None] * column_scales + bias) < 1e-6


@pytest.mark.parametrize("is_own", [True, False])
def test_on_arm_the_faster_library_multiplies(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_products, "_is_done", lambda *given: True)

    def times(own: Callable[[], object], other: Callable[[], object]) -> list[float]:
        assert own() is True
        assert other() is not None
        return [1.0, 2.0] if is_own else [2.0, 1.0]

    monkeypatch.setattr(int8_products, "time_in_turn", times)
    assert int8_products._has_products.__wrapped__(None) == is_own


@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
def test_a_row_of_nothing_gives_nothing_and_one_that_is_no_number_says_so(odd: float) -> None:
    x = torch.ones(3, 20)
    x[1] = 0.0
    x[1, 18] = odd
    right = torch.ones(20, 4, dtype=torch.int8)
    found = multiply(quantise_rows(x), right, torch.ones(4))
    torch.testing.assert_close(found[::2], torch.full((2, 4), 20.0))
    assert found[1].isfinite().tolist() == [math.isfinite(odd)] * 4
    assert not found[1].nan_to_num(0.0, 0.0, 0.0).any()


def test_int8_is_for_training_and_for_many_rows() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 8), torch.randn(MIN_ROWS, 32)
    few = x[: MIN_ROWS - 1]
    assert torch.equal(linear(layer, few, int8=True), layer(few))
    assert not torch.equal(linear(layer, x, int8=True), layer(x))
    assert torch.equal(linear(layer.eval(), x, int8=True), layer(x))
