"""Word embeddings whose gradient costs what an update's tokens do, not what the vocabulary does.

A word embedding is half of a small encoder's numbers, and an update names a fiftieth of its rows. Its gradient is kept
in memory, of which only rows that were named are written and cleared; its norm is taken of those; and of its rows AdamW
passes over those that were never named: their moments are zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpuft.comm.gradients.embedding_rows import find_embedding

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Words:
    """An embedding's gradient, and which of its rows may be other than zero.

    Whoever writes to the gradient by torch's operators is noticed, by the version that torch counts for it: nothing is
    known of its rows then.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        self._embedding = embedding
        self._memory: Tensor | None = None
        self._rows: Tensor | None = None
        """Of the memory, all that may not be zero: rising, int64, each once."""
        self._version = 0
        """Of the memory, when those were all."""
        self._awake: Tensor | None = None
        self._moments: tuple[object, ...] = ()
        """What moments `_awake` is of."""

    @property
    def weight(self) -> Tensor:
        """(vocabulary, width), as it is now."""
        return self._embedding.weight

    @property
    def rows(self) -> Tensor | None:
        """The rows of the weight's gradient outside of which it is zero; None where that is not known."""
        grad = self.weight.grad
        ours = grad is not None and self._memory is not None and grad.data_ptr() == self._memory.data_ptr()
        return self._known() if ours else None

    def note(self, rows: Tensor) -> None:
        """Rows, int64, rising, each once: all that were written to, among them those that were known before."""
        if self._memory is not None:
            self._rows, self._version = rows, self._memory._version

    def part(self, grad: Tensor) -> Tensor:
        """All of the weight's gradient that is not zero: so many rows of it, or the whole."""
        return grad if (rows := self.rows) is None else grad.index_select(0, rows)

    def awake(self, state: dict[str, Any]) -> Tensor | None:
        """(vocabulary,) uint8, zero for rows whose gradient and moments, those in `state`, are zero. None: unknown."""
        if (rows := self.rows) is None:
            self._awake = None
            return None
        # The kernel writes moments out of torch's sight: their version is that of whoever else did.
        moments = tuple((state[name].data_ptr(), state[name]._version) for name in _MOMENTS)
        if self._awake is None or moments != self._moments:
            self._awake = torch.stack([(state[name] != 0).any(1) for name in _MOMENTS]).any(0).to(torch.uint8)
            self._moments = moments
        self._awake[rows] = 1
        return self._awake

    def accumulate(self, rows: Tensor, values: Tensor) -> Tensor:
        """What backward has to give for `values`, the gradient of these rows: memory that becomes the gradient, or
        what is added to the one that is there."""
        if self.weight.grad is None:
            memory = self._memory = self._cleared()
            memory.index_copy_(0, rows, values)
            self.note(rows)
            return memory.detach()  # Another tensor, or autograd would copy what somebody else has, too.
        if (known := self.rows) is not None and self._memory is not None:
            both = torch.cat([known, rows])
            self._rows, self._version = torch.unique(both), self._memory._version + 1
        return torch.sparse_coo_tensor(rows[None], values, self.weight.shape, is_coalesced=True, check_invariants=False)

    def look_up(self, tokens: Tensor) -> Tensor:
        """The embedding's forward: (...) int64 -> (..., width)."""
        own = self._embedding
        if not (torch.is_grad_enabled() and own.weight.requires_grad):
            return nn.functional.embedding(tokens, own.weight)
        return _look_up(tokens, own.weight, self, own.padding_idx)

    def _known(self) -> Tensor | None:
        return self._rows if self._memory is not None and self._memory._version == self._version else None

    def _cleared(self) -> Tensor:
        """Zeros: the memory, unless somebody still has it, as backward does that goes through two look-ups."""
        if self._memory is None or _holders(self._memory) > 1:
            return torch.zeros_like(self.weight)
        if (known := self._known()) is None:
            return self._memory.zero_()
        return self._memory.index_fill_(0, known, 0.0)


def _holders(tensor: Tensor) -> int:
    """How many tensors have this memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the storage that we look through


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, words: Words, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.words, ctx.padding = words, padding
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        rows, places = tokens.unique(return_inverse=True)
        values = torch.ops.aten.embedding_dense_backward(grad, places, len(rows), -1, False)
        if ctx.padding is not None:
            kept = rows != ctx.padding
            rows, values = rows[kept], values[kept]
        return None, ctx.words.accumulate(rows, values), None, None


_look_up: Callable[..., Tensor] = _LookUp.apply


def quicken_words(model: nn.Module) -> Words | None:
    """Make a model's word embedding a fast one, where nothing else reads its weight; None: it has no such.

    The module stays what it is, with another `forward`: a method, so that a deep copy of the model copies it along.
    """
    embedding = find_embedding(model)
    if embedding is None or embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return None
    words = Words(embedding)
    vars(embedding)["forward"] = words.look_up
    return words
