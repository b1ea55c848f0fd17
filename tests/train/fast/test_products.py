"""Products of large matrices against those in fp64: by the kernel, where the CPU multiplies bf16, and by torch."""

from __future__ import annotations

import platform
from itertools import accumulate, cycle
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from cpuft.kernels import kernels_for
from cpuft.train.fast import products
from cpuft.train.fast.products import gelu_product, matrix_product, slope_product
from cpuft.train.fast.projection import linear
from tests.train.fast.encoders import relative_error

pytestmark = pytest.mark.usefixtures("each_way")

SIZES = [
    *((1, 1, 32), (33, 31, 64), (100, 80, 1088), (70, 420, 416), (1030, 96, 384), (270, 550, 2400), (40, 33, 45)),
    (1030, 20, 4128),
]
"""Rows, columns and numbers to sum over: with and without whole tiles; for the sixth, not all columns of the right
factor fit into the second-level cache; sums of the last are split on all CPUs, with AMX also those of others."""


MOST_ERROR = 4e-3 if platform.machine() == "x86_64" else 1e-2
"""On Arm, torch's product rounds its sums to bf16 after each part: in emulation, the error grows with the square root
of the length of the sums, from 0.0023 (416 numbers) to 0.0065 (4,800), where one rounding has 0.0017."""


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
    for limit in ("_MIN_ROWS", "_MIN_TOKENS", "_MIN_WORK"):
        monkeypatch.setattr(products, limit, 0)
    left, right, bias = make_factors(*sizes)
    exact = left.double() @ right.double()
    given_left = left.t().contiguous() if transposed[0] else left
    given_right = right.t().contiguous() if transposed[1] else right
    for added, wanted in ((None, exact), (bias, exact + bias.double())):
        found = matrix_product(
            given_left, given_right, added, left_transposed=transposed[0], right_transposed=transposed[1]
        )
        assert relative_error(found, wanted) < MOST_ERROR


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("limit", [0, 1 << 62], ids=["kernel", "torch"])
def test_products_and_what_follows_them_are_those_of_fp64(
    sizes: tuple[int, int, int], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels_for(torch.empty(0)) is None:
        return
    monkeypatch.setattr(products, "_MIN_WORK", limit)
    monkeypatch.setattr(products, "_MIN_ROWS", 0)
    rows, columns, inner = sizes
    left, right, bias = make_factors(*sizes)
    addend = torch.randn(rows, columns).bfloat16()
    exact = left.double() @ right.double()
    assert relative_error(matrix_product(left, right, addend=addend), exact + addend.double()) < 8e-3
    assert relative_error(matrix_product(left, right, bias, addend=addend), exact + bias.double() + addend) < 8e-3

    right = (right.float() / inner**0.5).bfloat16()
    before = (left.double() @ right.double() + bias.double()).requires_grad_()
    wanted = nn.functional.gelu(before)
    (wanted_slope,) = torch.autograd.grad(wanted.sum(), before)
    weight = right.t().contiguous()
    value, slope = gelu_product(left, weight, bias, True)
    assert slope is not None
    for found, what in ((value, wanted.detach()), (slope, wanted_slope)):
        largest = 1e-2 if platform.machine() == "x86_64" or not limit else 5e-2
        torch.testing.assert_close(found.double(), what, rtol=2e-2, atol=largest)
        assert relative_error(found, what) < 8e-3
    assert torch.equal(gelu_product(left, weight, bias, False)[0], value)
    assert gelu_product(left, weight, bias, False)[1] is None

    wanted = left.double() @ right.double() * slope.double()
    found, sums = slope_product(left, right, slope)
    assert relative_error(found, wanted) < 8e-3
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums.double(), wanted.sum(0), rtol=1e-2, atol=2e-2 * rows**0.5)


@pytest.mark.parametrize("sizes", SIZES)
def test_nothing_is_written_beside_the_product(sizes: tuple[int, int, int]) -> None:
    if (kernels := kernels_for(torch.empty(0))) is None:
        return
    rows, columns, inner = sizes
    left, right, _ = make_factors(*sizes)
    room = torch.full((rows * columns + 128,), 7.0, dtype=torch.bfloat16)
    done = torch.zeros(1, dtype=torch.int64)
    slopes, sums = room.clone(), torch.full((columns + 32,), 7.0)
    arrays = (left, right, None, None, None, sums[16:], slopes[64:], room[64:], done)
    kernels.run("matrix_product", torch.bfloat16, *arrays, rows, columns, inner, 0, 0, 0)
    for written in (room, slopes):
        assert (written[:64] == 7).all()
        assert (written[64 + rows * columns :] == 7).all()
    assert (sums[:16] == 7).all()
    assert (sums[16 + columns :] == 7).all()
    if done:
        assert relative_error(room[64:-64].view(rows, columns), left.double() @ right.double()) < 4e-3


def test_the_kernel_leaves_to_torch_what_it_cannot_multiply() -> None:
    if (kernels := kernels_for(torch.empty(0))) is None:
        return
    done = torch.ones(1, dtype=torch.int64)
    left, right, _ = make_factors(40, 33, 45)
    result = torch.empty(40, 33, dtype=torch.bfloat16)
    arrays = (left, right, None, None, None, None, None, result, done)
    kernels.run("matrix_product", torch.bfloat16, *arrays, 40, 33, 45, 0, 0, 0)
    assert not done


def test_a_large_layer_and_its_gradients_are_those_of_fp64() -> None:
    torch.manual_seed(1)
    layer = nn.Linear(64, 96).bfloat16()
    x, grad = torch.randn(1100, 64, dtype=torch.bfloat16, requires_grad=True), torch.randn(1100, 96).bfloat16()
    y = linear(layer, x)
    dx, dweight = torch.autograd.grad(y, [x, layer.weight], grad)
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    assert relative_error(y, x.detach().double() @ weight.t() + bias) < MOST_ERROR
    assert relative_error(dx, grad.double() @ weight) < MOST_ERROR
    assert relative_error(dweight, grad.double().t() @ x.detach().double()) < MOST_ERROR


@pytest.mark.parametrize("own, is_own", [(0.9, True), (1.1, False)])
def test_on_arm_the_faster_library_multiplies(own: float, is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of what conftest.py sets
    ticks = accumulate(cycle([0.0, own, 0.0, 1.0]))  # torch takes a second
    monkeypatch.setattr(products, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(products, "_is_done", lambda *given: True)
    assert products._has_products.__wrapped__(None) == is_own
