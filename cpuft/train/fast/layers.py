"""What a fast layer computes: post-norm layers like BERT's, and pre-norm layers like Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from cpuft.train.fast.architectures import LayerParts
from cpuft.train.fast.attention import attention
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.disentangled import Distances, disentangled_attention
from cpuft.train.fast.elementwise import (
    GATES,
    Mask,
    add_norm,
    apply_norm,
    draw_masks,
    dropout,
    dropout_add_norm,
    gelu,
    glu,
    is_exact_gelu,
    read_norm,
)
from cpuft.train.fast.encoder_layer import attention_half, can_run_halves, feed_forward_half, run_halves
from cpuft.train.fast.first_token import can_run_first_token_half, first_token_half
from cpuft.train.fast.gradient_checkpointing import ForwardPass, run_with_recompute
from cpuft.train.fast.layout import Layout
from cpuft.train.fast.projection import can_feed_forward, feed_forward, linear, product
from cpuft.train.fast.rotary import Angles, rotate


@without_autocast
def run_layer(parts: LayerParts, x: Tensor, layout: Layout, is_last: bool, given: Mapping[str, Any]) -> Tensor:
    """Return the output of one patched layer: (tokens, hidden) -> (tokens, hidden), in the dtype of `x`.

    If it `is_last` and the layout is `first_only`, the output is (batch, hidden). `x` has the dtype of the linear
    weights. `given` is what transformers passes to the layer by name, such as `position_embeddings` (rotary) and
    `rel_embeddings` (of disentangled attention, (embeddings, hidden), fp32).
    """
    training = parts.attention_module.training
    dropouts = (parts.attention_dropout, parts.attention_output_dropout, parts.outer_dropout)
    run = _Run(
        parts, layout, is_last and layout.first_only, *draw_masks([_read_rate(one, training) for one in dropouts])
    )
    if not parts.is_pre_norm:
        return run.post_norm(x, given.get("rel_embeddings"))
    return run.pre_norm(x, layout.read_angles(given["position_embeddings"]) if parts.is_rotated else None)


def _read_rate(module: nn.Module | float | None, training: bool) -> float:
    """Return the rate of a dropout now, or its rate in `training`; torch.nn.Identity, like None, drops nothing."""
    if isinstance(module, nn.Module):
        return getattr(module, "p", 0.0) if module.training else 0.0
    return module if module is not None and training else 0.0


@dataclass(frozen=True)
class _Run:
    """One run of a patched layer."""

    parts: LayerParts
    layout: Layout
    first_only: bool
    attention_mask: Mask
    output_mask: Mask
    """Of the dropout of the attention's output."""
    outer_mask: Mask
    """Of the dropout of feed-forward."""

    def checkpoint(self, part: Callable[..., Any], *tensors: Any) -> Any:
        """Run a part, which gets its `ForwardPass` first, as often as gradient checkpointing needs it."""
        recomputes = self.parts.recomputes and self.parts.attention_module.training
        return run_with_recompute(part, *tensors) if recomputes else part(ForwardPass.ONLY, *tensors)

    def post_norm(self, x: Tensor, embeddings: Tensor | None) -> Tensor:
        parts, layout = self.parts, self.layout
        if can_run_halves(parts, x) and not self.first_only and layout.positions is None:
            first = attention_half(parts, x, layout.grid, layout.bias, self.attention_mask, self.output_mask)
            return run_halves(x, first, feed_forward_half(parts, x, self.outer_mask))
        if self.first_only and layout.positions is None and can_run_first_token_half(parts, x):
            x = first_token_half(parts, x, layout.grid, layout.bias, self.attention_mask, self.output_mask)
            if can_run_halves(parts, x, few=True):
                return run_halves(x, feed_forward_half(parts, x, self.outer_mask))
            outer, x = self.expand(ForwardPass.ONLY, x)
            return dropout_add_norm(outer, parts.outer.bias, x, parts.outer_norm, self.outer_mask)
        inputs = [x]
        if parts.positions is not None and isinstance(layout.positions, Distances) and embeddings is not None:
            inputs.append(parts.positions.dropout(layout.positions.select(embeddings)).to(x.dtype))
        attended, x = self.checkpoint(self.attend, *inputs)
        context = product(parts.attention_output, attended, parts.int8)
        if self.first_only:
            x = x[layout.first_rows]
        outer, x = self.checkpoint(self.feed_forward, context, x)
        return dropout_add_norm(outer, parts.outer.bias, x, parts.outer_norm, self.outer_mask)

    def attend(self, forward_pass: ForwardPass, x: Tensor, embeddings: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run projections and attention, and return `x` for what follows, too."""
        parts, layout, distances = self.parts, self.layout, self.layout.positions
        packed, x = parts.packed.branch(x, int(self.first_only), parts.int8)
        query = linear(parts.projections[0], x[layout.first_rows], parts.int8) if self.first_only else None
        rest = (layout.bias, parts.heads, self.attention_mask, layout.grid, forward_pass)
        if not isinstance(distances, Distances) or parts.positions is None or embeddings is None:
            bias = distances if isinstance(distances, Tensor) else None
            return attention(query, packed, *rest, position_bias=bias), x
        keys = linear(parts.positions.key, embeddings, parts.int8).index_select(0, distances.for_keys)
        queries = linear(parts.positions.query, embeddings, parts.int8).index_select(0, distances.for_queries)
        return disentangled_attention(query, packed, keys, queries, *rest), x

    def feed_forward(self, forward_pass: ForwardPass, context: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the second part: from the attention's output to the two operands of the last norm."""
        parts = self.parts
        x = dropout_add_norm(context, parts.attention_output.bias, x, parts.attention_norm, self.output_mask)
        return self.expand(forward_pass, x)

    def expand(self, forward_pass: ForwardPass, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run the products of feed-forward, and return `x` for the residual connection, too."""
        parts, (inner,) = self.parts, self.parts.inner
        if is_exact_gelu(parts.activation) and not parts.int8 and can_feed_forward(inner, parts.outer, x):
            return feed_forward(x, inner, parts.outer, forward_pass)
        activated = _activate(parts.activation, product(inner, x, parts.int8), inner.bias)
        return product(parts.outer, activated, parts.int8, forward_pass), x

    def pre_norm(self, x: Tensor, angles: Angles | None) -> Tensor:
        x, added = self.checkpoint(partial(self.blocks, angles), x)
        if self.parts.outer.bias is not None:
            added = added + self.parts.outer.bias
        return x + _norm(self.parts.outer_norm, added)

    def blocks(self, angles: Angles | None, forward_pass: ForwardPass, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run a pre-norm layer up to its last product; return the residual stream and that product without its bias."""
        parts, norm = self.parts, read_norm(self.parts.feed_forward_norm)
        assert norm is not None
        packed = parts.packed(_norm(parts.attention_norm, x), int8=parts.int8)
        packed = rotate(packed, angles, parts.heads, (read_norm(parts.query_norm), read_norm(parts.key_norm)))
        context = attention(None, packed, None, parts.heads, self.attention_mask, self.layout.grid)
        added = _norm(parts.attention_end_norm, linear(parts.attention_output, context, parts.int8))
        x, normed = add_norm(added, x, norm, self.output_mask)
        gated = glu(parts.packed_inner(normed, int8=parts.int8), GATES[parts.activation])
        return x, product(parts.outer, dropout(gated, self.outer_mask), parts.int8, forward_pass)


def _activate(activation: Callable[[Tensor], Tensor], x: Tensor, bias: Tensor) -> Tensor:
    if is_exact_gelu(activation):
        return gelu(x, bias)
    # The approximation as transformers writes it takes eight passes, and keeps a tensor for each.
    is_tanh_gelu = type(activation).__name__ in ("NewGELUActivation", "GELUTanh")
    return nn.functional.gelu(x + bias, approximate="tanh") if is_tanh_gelu else activation(x + bias)


def _norm(module: nn.Module | None, x: Tensor) -> Tensor:
    norm = read_norm(module)
    return x if norm is None else apply_norm(x, norm)
