"""Where a batch's tokens are while they pass through an encoder: padded as they came, or packed without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpuft.train.fast.attention import mask_bias

# Below this share of padding, gathering the tokens and scattering them at every attention layer costs about what the
# padding does: batch 32 of 64 places, MiniLM, broke even between 2 and 9 % (a noisy machine with AVX512_BF16).
LEAST_PADDING = 0.05


@dataclass(frozen=True)
class Layout:
    """How (tokens, hidden) rows inside the encoder map to (batch, length) places of the batch."""

    batch: int
    length: int
    bias: Tensor | None
    """What attention adds to its scores, see `attention.attention`."""
    places: Tensor | None = None
    """(tokens,) place in batch * length of each packed token; None: every place has its row."""
    first_only: bool = False
    """The last layer has to give each row's first token only: nothing reads the others."""

    @property
    def first_rows(self) -> Tensor | slice:
        """Which rows are the first tokens."""
        if self.places is None:
            return slice(None, None, self.length)
        return (self.places % self.length == 0).nonzero().squeeze(1)

    def enter(self, hidden: Tensor) -> Tensor:
        """(batch, length, hidden) -> (tokens, hidden)."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat if self.places is None else flat.index_select(0, self.places)

    def padded(self, rows: Tensor) -> Tensor:
        """(tokens, width) -> (batch, length, width), zero where there is no token."""
        if self.places is not None:
            blank = rows.new_zeros(self.batch * self.length, rows.shape[-1])
            rows = blank.index_copy(0, self.places, rows)
        return rows.view(self.batch, self.length, -1)

    def packed(self, rows: Tensor) -> Tensor:
        """(batch, length, width) -> (tokens, width): the reverse of `padded`."""
        return self.enter(rows)


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
        return Layout(batch, length, bias, None, first_only)
    seen = bias[:, 0, 0] > torch.finfo(torch.float32).min / 2
    if not bool(seen[:, 0].all()):
        return Layout(batch, length, bias, None, False)
    places = seen.reshape(-1).nonzero().squeeze(1)
    packs = may_pack and places.numel() < (1.0 - LEAST_PADDING) * seen.numel()
    return Layout(batch, length, bias, places if packs else None, first_only)
