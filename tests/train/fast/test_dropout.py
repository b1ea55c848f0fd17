from __future__ import annotations

import math

import pytest
import torch

from cpuft.kernels import plain_torch
from cpuft.train.fast.elementwise import FastDropout, Mask, draw_mask, draw_masks, kept_elements, masked
from tests.train.fast.conftest import need_kernels

COUNT = 1 << 20


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_share_of_dropped_elements_is_p(p: float) -> None:
    torch.manual_seed(3)
    kept = kept_elements(draw_mask(p, True), (COUNT,)).double().mean().item()
    # Five standard deviations of a binomial's share.
    assert abs(kept - (1 - p)) < 5 * math.sqrt(p * (1 - p) / COUNT)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_mean_and_variance_are_those_of_dropout(p: float) -> None:
    torch.manual_seed(4)
    y = masked(torch.ones(COUNT), draw_mask(p, True)).double()
    variance = p / (1 - p)
    assert abs(y.mean().item() - 1) < 5 * math.sqrt(variance / COUNT)
    assert y.var().item() == pytest.approx(variance, rel=0.02)


@pytest.mark.parametrize("distance", [1, 2, 3, 4, 5, 8, 16, 64, 384, 768])
def test_elements_are_independent_of_their_neighbours(distance: int) -> None:
    torch.manual_seed(5)
    kept = kept_elements(draw_mask(0.5, True), (COUNT,)).double() - 0.5
    correlation = (kept[:-distance] * kept[distance:]).mean().item() / 0.25
    assert abs(correlation) < 5 / math.sqrt(COUNT)


def test_each_lane_of_a_word_is_uniform() -> None:
    torch.manual_seed(6)
    kept = kept_elements(draw_mask(0.9, True), (COUNT // 4, 4)).double().mean(0)
    assert torch.all((kept - 0.1).abs() < 5 * math.sqrt(0.09 / (COUNT // 4)))


def test_masks_are_independent_of_each_other() -> None:
    torch.manual_seed(7)
    first, second = (kept_elements(draw_mask(0.5, True), (COUNT,)).double() - 0.5 for _ in range(2))
    assert abs((first * second).mean().item() / 0.25) < 5 / math.sqrt(COUNT)


def test_torch_seed_repeats_a_mask() -> None:
    torch.manual_seed(8)
    first = draw_mask(0.1, True)
    torch.manual_seed(8)
    assert draw_mask(0.1, True) == first


def test_masks_drawn_together_are_those_drawn_one_by_one() -> None:
    torch.manual_seed(8)
    wanted = [draw_mask(rate, True) for rate in (0.1, 0.0, 0.5, 0.1)]
    torch.manual_seed(8)
    assert draw_masks([0.1, 0.0, 0.5, 0.1]) == wanted


def test_no_mask_outside_training_or_at_zero() -> None:
    assert draw_mask(0.1, False).threshold == draw_mask(0.0, True).threshold == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (1023,), (1025,), (4, 33, 17)])
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_kernel_and_torch_make_the_same_mask(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> None:
    x = torch.randn(shape).to(dtype)
    need_kernels()
    mask = Mask(seed, 20000)
    fast = masked(x, mask)
    with plain_torch():
        torch.testing.assert_close(fast, masked(x, mask))


def test_module_gives_the_gradient_of_its_own_mask() -> None:
    torch.manual_seed(9)
    x = torch.randn(64, 40, requires_grad=True)
    y = FastDropout(0.3)(x)
    y.sum().backward()
    scale = Mask(0, round(0.3 * 65536)).scale
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (y != 0) * scale)
    torch.testing.assert_close(y, x.detach() * x.grad)


def test_module_has_second_derivatives(each_way: None) -> None:
    torch.manual_seed(10)
    x = torch.randn(6, 5, dtype=torch.float32, requires_grad=True)
    y = FastDropout(0.3)(x)
    factor = (y / x).detach()
    (slope,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(slope, 3 * factor**3 * x**2)
    (found,) = torch.autograd.grad(slope.sum(), x)
    torch.testing.assert_close(found, 6 * factor**3 * x)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_module_at_the_ends_is_torch_s(p: float) -> None:
    x = torch.randn(5, 5)
    torch.testing.assert_close(FastDropout(p)(x), x * (1 - p))


def test_module_leaves_evaluation_alone() -> None:
    x = torch.randn(5, 5)
    assert FastDropout(0.5).eval()(x) is x
