"""Products of large matrices against those in fp64: by the kernel with tiles, where the CPU has them, and by torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cpuft.kernels import kernels_for
from cpuft.train.fast import products
from cpuft.train.fast.products import matrix_product
from cpuft.train.fast.projection import linear
from tests.train.fast.encoders import relative_error

pytestmark = pytest.mark.usefixtures("each_way")

SIZES = [(1, 1, 32), (33, 31, 64), (100, 80, 1088), (70, 420, 416), (1030, 96, 384), (40, 33, 45)]
"""Rows, columns and numbers to sum over: with and without whole tiles, and with sums that are split."""


def make_factors(rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    factors = torch.randn(rows, inner), torch.randn(inner, columns), torch.randn(columns)
    left, right, bias = (one.bfloat16() for one in factors)
    return left, right, bias


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_products_are_those_of_fp64(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_MIN_ROWS", "_MIN_WORK"):
        monkeypatch.setattr(products, limit, 0)
    left, right, bias = make_factors(*sizes)
    exact = left.double() @ right.double()
    given_left = left.t().contiguous() if transposed[0] else left
    given_right = right.t().contiguous() if transposed[1] else right
    for added, wanted in ((None, exact), (bias, exact + bias.double())):
        found = matrix_product(
            given_left, given_right, added, left_transposed=transposed[0], right_transposed=transposed[1]
        )
        assert relative_error(found, wanted) < 4e-3


@pytest.mark.parametrize("sizes", SIZES)
def test_nothing_is_written_beside_the_product(sizes: tuple[int, int, int]) -> None:
    if (kernels := kernels_for(torch.empty(0))) is None:
        return
    rows, columns, inner = sizes
    left, right, _ = make_factors(*sizes)
    room = torch.full((rows * columns + 128,), 7.0, dtype=torch.bfloat16)
    done = torch.zeros(1, dtype=torch.int64)
    kernels.run("matrix_product", torch.bfloat16, left, right, None, room[64:], done, rows, columns, inner, 0, 0)
    assert (room[:64] == 7).all()
    assert (room[64 + rows * columns :] == 7).all()
    if done:
        assert relative_error(room[64:-64].view(rows, columns), left.double() @ right.double()) < 4e-3


def test_the_kernel_leaves_to_torch_what_it_cannot_multiply() -> None:
    if (kernels := kernels_for(torch.empty(0))) is None:
        return
    done = torch.ones(1, dtype=torch.int64)
    left, right, _ = make_factors(40, 33, 45)
    result = torch.empty(40, 33, dtype=torch.bfloat16)
    kernels.run("matrix_product", torch.bfloat16, left, right, None, result, done, 40, 33, 45, 0, 0)
    assert not done


def test_a_large_layer_and_its_gradients_are_those_of_fp64() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(64, 96).bfloat16()
    x, grad = torch.randn(1100, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(1100, 96).bfloat16()
    y = linear(layer, x)
    dx, dweight = torch.autograd.grad(y, [x, layer.weight], grad)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    assert relative_error(y, x.detach().double() @ weight.t() + bias) < 4e-3
    assert relative_error(dx, grad.double() @ weight) < 4e-3
    assert relative_error(dweight, grad.double().t() @ x.detach().double()) < 4e-3
