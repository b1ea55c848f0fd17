"""The sums of several threads: the same bits each time, whichever thread ends first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from cpuft.kernels import kernels_for
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.elementwise import Mask, Norm, dropout_add_norm, gelu
from cpuft.train.fast.projection import column_sums
from cpuft.train.fast.rotary import Angles, rotate

ROWS, COLUMNS, REPEATS = 500, 96, 60


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(5)  # the order of two threads makes no difference, because a + b is b + a
    yield
    torch.set_num_threads(before)


def gradients_of(make: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    result = make(*leaves)
    generator = torch.Generator().manual_seed(1)
    return list(torch.autograd.grad(result, leaves, torch.randn(result.shape, generator=generator)))


def norm_gradients(x: Tensor) -> list[Tensor]:
    norm, shift = nn.LayerNorm(COLUMNS), torch.zeros(COLUMNS, requires_grad=True)
    y = dropout_add_norm(x, shift, x, norm, Mask(seed=9, threshold=6554))
    return list(torch.autograd.grad(y.square().sum(), [shift, *norm.parameters()]))


def rotary_gradients(x: Tensor) -> list[Tensor]:
    size, half = COLUMNS // 3, COLUMNS // 6
    turns = torch.arange(ROWS * half).view(ROWS, half) / 100.0
    angles = Angles(turns.cos(), turns.sin())

    def turn(packed: Tensor, query: Tensor, key: Tensor) -> Tensor:
        norms = tuple(Norm(weight, None, 1e-6, is_centred=False) for weight in (query, key))
        return rotate(packed.clone(), angles, Heads(count=1, size=size, factor=1.0), norms)

    return gradients_of(turn, x, torch.ones(size), torch.ones(size))[1:]


SUMS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "norm": norm_gradients,
    "columns": lambda x: [column_sums(x)],
    "gelu": lambda x: gradients_of(gelu, x, torch.zeros(COLUMNS))[1:],
    "rotary": rotary_gradients,
}


@pytest.mark.parametrize("kind", SUMS)
def test_sums_of_threads_repeat_bit_by_bit(kind: str) -> None:
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    assert kernels_for(x)
    first = SUMS[kind](x)
    for _ in range(REPEATS):
        assert all(torch.equal(one, other) for one, other in zip(first, SUMS[kind](x), strict=True))
