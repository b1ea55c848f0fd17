"""Where a batch's tokens are while they pass through an encoder: padded as they came, or packed without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpuft.train.fast.attention import Grid, mask_bias

# Below this share of padding, gathering the tokens and scattering them at every attention layer costs about what the
# padding does: batch 32 of 64 places, MiniLM, broke even between 2 and 9 % (a noisy machine with AVX512_BF16).
LEAST_PADDING = 0.05


@dataclass(frozen=True)
class Layout:
    """How (tokens, hidden) rows inside the encoder map to (batch, length) places of the batch."""

    grid: Grid
    bias: Tensor | None
    """What attention adds to its scores, see `attention.attention`."""
    first_only: bool = False
    """The last layer has to give each row's first token only: nothing reads the others."""

    @property
    def first_rows(self) -> Tensor | slice:
        """Which rows are the first tokens."""
        length, rows = self.grid.length, self.grid.rows
        return slice(None, None, length) if rows is None else rows[::length]

    def enter(self, hidden: Tensor) -> Tensor:
        """(batch, length, hidden) -> (tokens, hidden)."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat if self.grid.places is None else flat.index_select(0, self.grid.places)

    def padded(self, rows: Tensor) -> Tensor:
        """(tokens, width) -> (batch, length, width), zero where there is no token."""
        grid = self.grid
        if grid.places is not None:
            blank = rows.new_zeros(grid.batch * grid.length, rows.shape[-1])
            rows = blank.index_copy(0, grid.places, rows)
        return rows.view(grid.batch, grid.length, -1)


def layout_of(hidden: Tensor, mask: Tensor | None, *, may_pack: bool, first_only: bool) -> Layout:
    """The layout for hidden states (batch, length, hidden) and the mask that transformers made for its layers.

    `may_pack`: tokens that no query may look at may be left out, as they change no other token's result. It is done
    when they are more than `LEAST_PADDING` of the batch, and each row keeps its first token.
    """
    batch, length, _ = hidden.shape
    bias = mask_bias(mask)
    if bias is not None and bias.shape[2] > 1 and bool((bias == bias[:, :, :1]).all()):
        bias = bias[:, :, :1].contiguous()
    if bias is None or bias.shape[1:3] != (1, 1) or bias.shape[0] != batch:
        return Layout(Grid(batch, length), bias, first_only)
    seen = bias[:, 0, 0] > torch.finfo(torch.float32).min / 2
    if not bool(seen[:, 0].all()):
        return Layout(Grid(batch, length), bias, False)
    places = seen.reshape(-1).nonzero().squeeze(1)
    packs = may_pack and places.numel() < (1.0 - LEAST_PADDING) * seen.numel()
    return Layout(Grid.of(batch, length, places if packs else None), bias, first_only)
