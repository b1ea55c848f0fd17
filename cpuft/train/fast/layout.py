"""Which tokens of a batch have a row inside the fast layers, and which rows attend to each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cpuft.train.fast.attention import Grid, make_bias
from cpuft.train.fast.disentangled import Distances
from cpuft.train.fast.rotary import Angles

MIN_PADDING = 0.05
"""Share of padding in a batch above which post-norm layers get packed tokens. With less, packing costs as much as
padding does: with MiniLM and 32 examples of 64 positions on a CPU with AVX512_BF16, both cost the same at 2 to 9 %."""


class _PickRows(torch.autograd.Function):
    """The rows with these numbers, and zeros for the number of all rows; `back` are those of which the gradient is one.
    torch copies, and adds up for the gradient, the rows of another tensor one by one on one thread."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, back: Tensor) -> Tensor:
        ctx.numbers, ctx.back = numbers, back
        if len(numbers) > len(x):  # only then, some may be missing
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
        return x.index_select(0, numbers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _pick_rows(grad, ctx.back, ctx.numbers), None, None


_pick_rows: Callable[..., Tensor] = _PickRows.apply


@dataclass(frozen=True)
class Layout:
    """How the (tokens, hidden) rows inside the layers map to the (batch, length) positions that the model sees."""

    batch: int
    length: int
    grid: Grid
    """Which rows attend to each other. Sequences that were packed into one row of the batch are examples here."""
    sources: Tensor | None = None
    """(tokens,) int64: number of the position, b * length + p, from which each row comes. None: all, in order."""
    bias: Tensor | None = None
    """Added to the attention scores: fp32, (batch or 1, heads or 1, queries or 1, length); None for nothing."""
    first_only: bool = False
    """Whether the last layer has to compute only the first token of each example."""
    positions: Tensor | Distances | None = None
    """What attention is told about distances, see `architectures.EncoderPositions`; None for nothing."""
    _angles: list[tuple[Tensor, Angles]] = field(default_factory=list, repr=False, compare=False)
    """The cosines that the layers of this batch got, and the angles of its rows."""

    @property
    def first_rows(self) -> Tensor | slice:
        """Index of examples' first tokens in (tokens, hidden), -1 where there is none; not for packed sequences."""
        rows = self.grid.rows
        return slice(None, None, self.length) if rows is None else rows[:: self.length]

    @functools.cached_property
    def _targets(self) -> Tensor:
        """(batch * length,) int64: the row that comes from a position, or the number of rows where there is none."""
        assert self.sources is not None
        rows = self.grid.rows if self.sources is self.grid.places else None
        if rows is None:
            count = self.sources.numel()
            rows = torch.full((self.batch * self.length,), -1).index_copy_(0, self.sources, torch.arange(count))
        return rows.remainder(self.sources.numel() + 1)

    def pack(self, hidden: Tensor) -> Tensor:
        """Return the rows of the tokens, a copy or a view: (batch or 1, length, width) -> (tokens, width)."""
        flat = hidden.expand(self.batch, self.length, -1).reshape(self.batch * self.length, -1)
        return flat if self.sources is None else _pick_rows(flat, self.sources, self._targets)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return the rows at their positions, (tokens, width) -> (batch, length, width), zero where there is no row."""
        if self.sources is not None:
            rows = _pick_rows(rows, self._targets, self.sources)
        return rows.view(self.batch, self.length, -1)

    def read_angles(self, embeddings: tuple[Tensor, Tensor]) -> Angles:
        """Return the angles of this batch's rows for the model's cosines and sines, (batch or 1, length, size), of
        which the second half of `size` repeats the first.
        """
        cosines, sines = embeddings
        known = next((angles for given, angles in self._angles if given is cosines), None)
        if known is None:
            half = cosines.shape[-1] // 2
            known = Angles(*(self.pack(one[..., :half]).float().contiguous() for one in (cosines, sines)))
            self._angles.append((cosines, known))
        return known


def make_biased_layout(
    batch: int, length: int, mask: Tensor | None, first_only: bool, positions: Tensor | Distances | None
) -> Layout:
    """Return the layout of a batch for post-norm layers, whose attention excludes keys by a bias.

    If more than `MIN_PADDING` of the batch may be seen by no query, these tokens are left out, which changes no other
    token's result. That takes a mask with one row for each example, the same for all heads and queries, which keeps all
    first tokens. `mask` is (batch or 1, heads or 1, queries or 1, length), bool (true: may be looked at) or float
    (added to the scores). A masked first token makes `first_only` False.
    """
    if mask is not None and mask.shape[2] > 1:
        # numpy compares ten times as fast as torch, which has no vectors for bools; it does not know bf16.
        rows = (mask.float() if mask.dtype == torch.bfloat16 else mask).detach().numpy()
        mask = mask[:, :, :1] if (rows[:, :, 1:] == rows[:, :, :-1]).all() else mask
    bias = make_bias(mask)
    if bias is not None and not bool(bias.any()):
        bias = None
    places = None
    if bias is not None and bias.shape[:3] == (batch, 1, 1):
        seen = bias[:, 0, 0] > torch.finfo(torch.float32).min / 2
        keeps_first = bool(seen[:, 0].all())
        first_only &= keeps_first
        found = seen.reshape(-1).nonzero().squeeze(1)
        places = found if keeps_first and found.numel() < (1.0 - MIN_PADDING) * seen.numel() else None
    return Layout(batch, length, Grid.of(batch, length, places), places, bias, first_only, positions)


def make_shifted_layout(batch: int, length: int, mask: Tensor | None, position_ids: Tensor | None) -> Layout | None:
    """Return the layout of a batch for pre-norm layers, of which each example begins at position 0 of the grid.

    None if there is padding between the tokens of an example, or the mask is not (batch, length), 0 for padding.
    Without a mask, a new sequence begins wherever a number of `position_ids`, (batch or 1, length), is not one more
    than the number before it, as in transformers.
    """
    if mask is not None:
        if tuple(mask.shape) != (batch, length):
            return None
        seen = mask != 0
        if bool(seen.all()):
            return Layout(batch, length, Grid(batch, length))
        # Attention excludes no position before an example's last token, so that the first one has to be position 0.
        first = seen.int().argmax(1, keepdim=True)
        positions = torch.arange(length)
        is_between = (positions >= first) & (positions < first + seen.sum(1, keepdim=True))
        if bool((seen != is_between).any()):
            return None
        sources = seen.view(-1).nonzero().squeeze(1)
        places = sources - first.expand(-1, length).reshape(-1)[sources]
        return Layout(batch, length, Grid.of(batch, length, places), sources)
    starts = _find_starts(position_ids.expand(batch, -1)) if position_ids is not None else None
    if starts is None or len(starts) == batch:
        return Layout(batch, length, Grid(batch, length))
    positions = torch.arange(batch * length)
    sizes = torch.diff(starts, append=torch.tensor([batch * length]))
    longest = int(sizes.max())
    sequence = torch.repeat_interleave(torch.arange(len(starts)), sizes)
    places = sequence * longest + positions - starts[sequence]
    return Layout(batch, length, Grid.of(len(starts), longest, places))


def _find_starts(position_ids: Tensor) -> Tensor:
    """Return where sequences begin, as numbers b * length + p in ascending order; each row begins one."""
    is_start = torch.ones(position_ids.shape, dtype=torch.bool)
    is_start[:, 1:] = torch.diff(position_ids, dim=1) != 1
    return is_start.view(-1).nonzero().squeeze(1)
