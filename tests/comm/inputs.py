"""Inputs of collectives in tests, and their reductions computed in one process."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
import torch.distributed as dist


class Inputs:
    """Tensors that any rank can compute for any rank. Their values are small, so that sums are exact in bf16."""

    def __init__(self, dtype: torch.dtype, strided: bool) -> None:
        self.dtype = dtype
        self.strided = strided
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def of(self, rank: int, rows: int = 3, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * salt + rank)
        least = 0 if self.dtype in (torch.uint8, torch.bool) else -2
        values = torch.randint(least, 3, (rows, 4), generator=generator).to(self.dtype)
        return self.lay(values)

    def all(self, rows: int = 3, salt: int = 0) -> list[torch.Tensor]:
        return [self.of(rank, rows, salt) for rank in range(self.size)]

    def blank(self, rows: int = 3) -> torch.Tensor:
        return self.lay(torch.zeros(rows, 4, dtype=self.dtype))

    def lay(self, values: torch.Tensor) -> torch.Tensor:
        if not self.strided:
            return values
        wide = torch.zeros(values.shape[0], 8, dtype=values.dtype)
        wide[:, ::2] = values
        return wide[:, ::2]


def fold(tensors: list[torch.Tensor], name: str) -> torch.Tensor:
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "SUM": operator.add,
        "AVG": operator.add,
        "PRODUCT": operator.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": operator.and_,
        "BOR": operator.or_,
        "BXOR": operator.xor,
    }
    total = functools.reduce(functions[name], tensors)
    return total / len(tensors) if name == "AVG" else total
