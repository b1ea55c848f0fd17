"""A token embedding whose gradient costs what an update's tokens do, and the sum of all embeddings with its norm.

The gradient is kept in one buffer, of which only the rows of an update's tokens are written and cleared; the gradient's
norm is taken from them; and AdamW skips rows that no update has touched yet, whose moments are zero.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpuft.comm.compression.embedding_rows import find_embedding
from cpuft.kernels import kernels_for, need_kernels
from cpuft.train.fast.elementwise import FastDropout, apply_norm, draw_mask, read_norm

_MOMENTS = ("exp_avg", "exp_avg_sq")


class EmbeddingGradient:
    """The gradient of one embedding, and which of its rows may be other than zero; unknown, until the next gradient, if
    anything writes to it by torch's operators, because that changes its version.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        self._embedding = embedding
        self._buffer: Tensor | None = None
        self._rows: Tensor | None = None
        """The rows of the buffer that may not be zero: ascending, int64, each once."""
        self._version = 0
        """Version of the buffer for which `_rows` holds. It is one more than the present version after `accumulate` has
        returned a sparse gradient that autograd has not added yet."""
        self._touched: Tensor | None = None
        self._moments: tuple[object, ...] = ()
        """Addresses and versions of the moments for which `_touched` holds."""

    @property
    def weight(self) -> Tensor:
        """The embedding's current weight, (vocabulary, width)."""
        return self._embedding.weight

    @property
    def rows(self) -> Tensor | None:
        """Rows outside of which the gradient is zero: (rows,) int64, ascending, each once; None if unknown."""
        return self._known_rows() if self._is_ours() else None

    def set_rows(self, rows: Tensor) -> None:
        """State that the gradient is zero outside of these rows, int64, ascending, each once, which must contain those
        known before. Does nothing before the first gradient.
        """
        if self._buffer is not None:
            self._rows, self._version = rows, self._buffer._version

    def nonzero_part(self, grad: Tensor) -> Tensor:
        """Return a copy of the rows of the gradient that may not be zero; `grad` itself if these are unknown."""
        return grad if (rows := self.rows) is None else grad.index_select(0, rows)

    def touched_rows(self, state: dict[str, Any]) -> Tensor | None:
        """Return (vocabulary,) uint8, to read only: 0 only in rows where the gradient and both moments in `state`,
        exp_avg and exp_avg_sq, are 0; None if the gradient's rows are unknown.
        """
        if (rows := self.rows) is None:
            self._touched = None
            return None
        # The kernel writes moments without raising their version: a new version means that something else wrote.
        moments = tuple((state[name].data_ptr(), state[name]._version) for name in _MOMENTS)
        if self._touched is None or moments != self._moments:
            self._touched = torch.stack([(state[name] != 0).any(1) for name in _MOMENTS]).any(0).to(torch.uint8)
            self._moments = moments
        self._touched[rows] = 1
        return self._touched

    def accumulate(self, sums: _RowSums) -> Tensor:
        """Return what backward has to return for the weight, and record which rows its gradient has then: the buffer,
        or if there is a gradient a sparse tensor, which autograd adds to it.
        """
        rows = sums.rows
        if self.weight.grad is None:
            buffer = self._buffer = self._cleared_buffer()
            sums.write_to(buffer)
            self.set_rows(rows)
            return buffer.detach()  # a new tensor object: autograd would copy one that is referenced elsewhere
        # Autograd adds the sparse gradients of all look-ups of a backward pass at once, so a second look-up finds the
        # rows of the first one recorded for a version that the buffer does not have yet.
        is_added_later = self._buffer is not None and self._version == self._buffer._version + 1
        if self._is_ours() and self._rows is not None and (is_added_later or self._known_rows() is not None):
            assert self._buffer is not None
            both = torch.cat([self._rows, rows])
            self._rows, self._version = torch.unique(both), self._buffer._version + 1
        else:
            self._rows = None
        return torch.sparse_coo_tensor(
            rows[None], sums.values, self.weight.shape, is_coalesced=True, check_invariants=False
        )

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the embedding of tokens, (...) int32 or int64 -> (..., width): the module's forward after patching.
        Without kernels, the gradient is torch's own.
        """
        own = self._embedding
        if not (torch.is_grad_enabled() and own.weight.requires_grad and kernels_for(own.weight)):
            return nn.functional.embedding(tokens, own.weight, own.padding_idx)
        return _look_up(tokens, own.weight, self, own.padding_idx)

    def _is_ours(self) -> bool:
        grad = self.weight.grad
        return grad is not None and self._buffer is not None and grad.data_ptr() == self._buffer.data_ptr()

    def _known_rows(self) -> Tensor | None:
        return self._rows if self._buffer is not None and self._buffer._version == self._version else None

    def _cleared_buffer(self) -> Tensor:
        """Return zeros like the weight: new memory if something uses the buffer, as in a second look-up's backward."""
        weight = self.weight
        if self._buffer is None or self._buffer.dtype != weight.dtype or _count_users(self._buffer) > 1:
            return torch.zeros_like(weight)
        if (known := self._known_rows()) is None:
            return self._buffer.zero_()
        return self._buffer.index_fill_(0, known, 0.0)


def _count_users(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # `storage` itself


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, gradient: EmbeddingGradient, padding: int | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.gradient, ctx.padding = gradient, padding
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return None, ctx.gradient.accumulate(_RowSums(grad, tokens, len(ctx.gradient.weight), ctx.padding)), None, None


_look_up: Callable[..., Tensor] = _LookUp.apply


class _RowSums:
    """The gradients of the rows that were looked up in a table of `size` rows, without that of the row `padding`, from
    the gradient of what was looked up, (..., width).
    """

    def __init__(self, grad: Tensor, ids: Tensor, size: int, padding: int | None) -> None:
        self._grad, ids, left_out = grad.contiguous(), ids.long().contiguous(), -1 if padding is None else padding
        self._order, self._starts, rows = (torch.empty(ids.numel() + 1, dtype=torch.int64) for _ in range(3))
        found = torch.empty(1, dtype=torch.int64)
        arrays = (ids, self._order, self._starts, rows, found)
        need_kernels(grad).run("group_rows", grad.dtype, *arrays, ids.numel(), size, left_out)
        self.rows = rows[: int(found)]
        """(rows,) int64, ascending, each once."""

    @property
    def values(self) -> Tensor:
        """The gradients of these rows, (rows, width)."""
        values = self._grad.new_empty(len(self.rows), self._grad.shape[-1])
        self._add_up(values, None)
        return values

    def write_to(self, table: Tensor) -> None:
        """Write the gradients to these rows of a table of the gradient's dtype, (size, width)."""
        self._add_up(table, self.rows)

    def _add_up(self, y: Tensor, places: Tensor | None) -> None:
        assert y.dtype == self._grad.dtype
        arrays = (self._grad, self._order, self._starts, places, y)
        need_kernels(y).run("sum_table_rows", y.dtype, *arrays, len(self.rows), y.shape[-1])


class _SumOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, ids: list[Tensor], owner: FusedEmbeddings, *tables: Tensor) -> Tensor:
        ctx.save_for_backward(*ids)
        ctx.owner = owner
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        owner: FusedEmbeddings = ctx.owner
        grads = list[Tensor | None]()
        for ids, table, is_wanted in zip(ctx.saved_tensors, owner.tables, ctx.needs_input_grad[3:], strict=True):
            if not is_wanted:
                grads.append(None)
                continue
            sums = _RowSums(grad, ids, len(table.weight), table.padding_idx)
            if table.weight is owner.gradient.weight:
                grads.append(owner.gradient.accumulate(sums))
            else:
                gradient = torch.zeros_like(table.weight)
                sums.write_to(gradient)
                grads.append(gradient)
        return None, None, None, *grads


_sum_of_rows: Callable[..., Tensor] = _SumOfRows.apply


def _count_positions(ids: Tensor, padding: int | None) -> Tensor:
    """Return positions, (batch, length) int64, from 0; with `padding`, as in RoBERTa, padding tokens do not count."""
    if padding is None:
        return torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
    is_token = ids != padding
    return is_token.cumsum(1) * is_token + padding


_COUNTS_ALL_POSITIONS = {
    "BertEmbeddings": True,
    "ElectraEmbeddings": True,
    "Embeddings": True,
    "RobertaEmbeddings": False,
    "XLMRobertaEmbeddings": False,
    "CamembertEmbeddings": False,
    "MPNetEmbeddings": False,
}
"""Classes of transformers that `FusedEmbeddings` knows (Embeddings: DistilBERT's) -> whether padding has positions."""


@functools.cache
def _read_signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


class FusedEmbeddings:
    """A module of transformers that adds word, position and token type embeddings, with its norm and dropout: its own
    forward makes eight passes over memory in fp32, and torch's backward of each embedding is serial.
    """

    def __init__(self, module: nn.Module, gradient: EmbeddingGradient) -> None:
        self.module: Any = module
        self.gradient = gradient
        self._counts_all = _COUNTS_ALL_POSITIONS[type(module).__name__]

    @property
    def tables(self) -> list[Any]:
        """The embeddings of words, of positions and, if there is one, of token types."""
        own = self.module
        types = getattr(own, "token_type_embeddings", None)
        return [own.word_embeddings, own.position_embeddings, *([] if types is None else [types])]

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward does, (batch, length, width); that one runs where kernels cannot."""
        kind: Any = type(self.module)
        given = dict(_read_signature(kind).bind(self.module, *args, **kwargs).arguments)
        del given["self"]
        words = given.pop("input_ids", None)
        asked = (given.pop("position_ids", None), given.pop("token_type_ids", None))
        has_more = any(isinstance(value, Tensor) or value not in (None, 0, {}) for value in given.values())
        total = None
        if not has_more and words is not None and words.dim() == 2 and self._can_run():
            total = self._add(words, *asked)
        if total is None:
            return kind.forward(self.module, *args, **kwargs)
        norm, after = read_norm(self.module.LayerNorm), self.module.dropout
        assert norm is not None
        if type(after) is FastDropout and after.p < 1.0:
            return apply_norm(total, norm, draw_mask(after.p, after.training))
        return after(apply_norm(total, norm))

    def _can_run(self) -> bool:
        norm, tables = self.module.LayerNorm, self.tables
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        plain = not any(getattr(one, name) for one in (*tables, norm, self.module.dropout) for name in hooks)
        plain = plain and all(type(one) is nn.Embedding and one.weight.dtype == torch.float32 for one in tables)
        plain = plain and all(one.weight.is_contiguous() for one in tables) and read_norm(norm) is not None
        plain = plain and getattr(self.module, "position_embedding_type", "absolute") == "absolute"
        return plain and torch.is_grad_enabled() and kernels_for(self.gradient.weight) is not None

    def _add(self, words: Tensor, positions: Tensor | None, types: Tensor | None) -> Tensor | None:
        """Return the sum of all embeddings, or None if an id is no row: the own forward then raises IndexError."""
        tables = self.tables
        if positions is None:
            positions = _count_positions(words, None if self._counts_all else self.module.padding_idx)
        types = torch.zeros_like(words) if types is None else types
        ids = [one.expand(words.shape).contiguous().long() for one in (words, positions, types)[: len(tables)]]
        weights = [one.weight for one in tables]
        total = weights[0].new_empty(*words.shape, weights[0].shape[1])
        outside, missing = torch.zeros(1, dtype=torch.int64), [None] * (3 - len(weights))
        sizes = (words.numel(), total.shape[-1], *map(len, weights), *(0 for _ in missing))
        arrays = (*weights, *missing, *ids, *missing, total, outside)
        need_kernels(total).run("add_table_rows", total.dtype, *arrays, *sizes)
        return None if outside.item() else _sum_of_rows(total, ids, self, *weights)


def patch_embedding(model: nn.Module) -> EmbeddingGradient | None:
    """Give a model's token embedding, and the module around it if `FusedEmbeddings` knows that, the fast look-up, and
    return the object that keeps the gradient; None, and no change, if `find_embedding` finds none or it has max_norm,
    scale_grad_by_freq or sparse. A deep copy of the model copies the new `forward`, a bound method, along.
    """
    embedding = find_embedding(model)
    if embedding is None or embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse:
        return None
    gradient = EmbeddingGradient(embedding)
    vars(embedding)["forward"] = gradient.look_up
    for module in model.modules():
        kind = type(module)
        is_known = kind.__name__ in _COUNTS_ALL_POSITIONS and kind.__module__.startswith("transformers.")
        if is_known and getattr(module, "word_embeddings", None) is embedding:
            vars(module)["forward"] = FusedEmbeddings(module, gradient).embed
    return gradient
