"""What a fast layer computes: post-norm layers like BERT's, and pre-norm layers like Llama's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from cpuft.train.fast.architectures import LayerParts
from cpuft.train.fast.attention import attention
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.disentangled import Distances, disentangled_attention
from cpuft.train.fast.elementwise import (
    GATES,
    NO_MASK,
    Mask,
    add_norm,
    apply_norm,
    draw_mask,
    dropout,
    dropout_add_norm,
    gelu,
    glu,
    is_exact_gelu,
    read_norm,
)
from cpuft.train.fast.encoder_layer import attention_half, can_run_halves, feed_forward_half
from cpuft.train.fast.gradient_checkpointing import ForwardPass, run_once, run_with_recompute
from cpuft.train.fast.layout import Layout
from cpuft.train.fast.projection import can_feed_forward, feed_forward, linear, product
from cpuft.train.fast.rotary import Angles, HeadNorms, rotate

_Masks = tuple[Mask, Mask, Mask]
"""Masks of the dropouts of attention, of its output and of feed-forward."""
_Run = Callable[..., Any]
"""`run_once` or `run_with_recompute`."""


@without_autocast
def run_layer(parts: LayerParts, x: Tensor, layout: Layout, is_last: bool, given: Mapping[str, Any]) -> Tensor:
    """Return the output of one patched layer: (tokens, hidden) -> (tokens, hidden), in the dtype of `x`.

    If it `is_last` and the layout is `first_only`, the output is (batch, hidden). `x` has the dtype of the linear
    weights. `given` is what transformers passes to the layer by name: of this, `position_embeddings` (rotary positions)
    and `rel_embeddings` (of disentangled attention, (embeddings, hidden), fp32) are read.
    """
    training = parts.attention_module.training
    run = run_with_recompute if parts.recomputes and training else run_once
    dropouts = (parts.attention_dropout, parts.attention_output_dropout, parts.outer_dropout)
    masks = (_draw_mask(dropouts[0], training), _draw_mask(dropouts[1], training), _draw_mask(dropouts[2], training))
    if parts.is_pre_norm:
        angles = layout.read_angles(given["position_embeddings"]) if parts.is_rotated else None
        return _run_pre_norm(parts, x, layout, angles, masks, run)
    first_only = is_last and layout.first_only
    return _run_post_norm(parts, x, layout, first_only, given.get("rel_embeddings"), masks, run)


def _draw_mask(module: nn.Module | float | None, training: bool) -> Mask:
    """Draw the mask of a dropout, or of its rate in `training`; torch.nn.Identity, like None, drops nothing."""
    if isinstance(module, nn.Module):
        return draw_mask(getattr(module, "p", 0.0), module.training)
    return NO_MASK if module is None else draw_mask(module, training)


def _run_post_norm(
    parts: LayerParts,
    x: Tensor,
    layout: Layout,
    first_only: bool,
    embeddings: Tensor | None,
    masks: _Masks,
    run: _Run,
) -> Tensor:
    if can_run_halves(parts, x) and not first_only and layout.positions is None:
        x = attention_half(parts, x, layout.grid, layout.bias, masks[0], masks[1])
        return feed_forward_half(parts, x, masks[2])
    inputs = [x]
    if parts.positions is not None and isinstance(layout.positions, Distances) and embeddings is not None:
        inputs.append(parts.positions.dropout(layout.positions.select(embeddings)).to(x.dtype))
    attended, x = run(partial(_attend, parts, layout, first_only, masks[0]), *inputs)
    context = product(parts.attention_output, attended, parts.int8)
    if first_only:
        x = x[layout.first_rows]
    outer, x = run(partial(_feed_forward, parts, masks[1]), context, x)
    return dropout_add_norm(outer, parts.outer.bias, x, parts.outer_norm, masks[2])


def _attend(
    parts: LayerParts,
    layout: Layout,
    first_only: bool,
    mask: Mask,
    forward_pass: ForwardPass,
    x: Tensor,
    embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run projections and attention, which gradient checkpointing recomputes, and return `x` for what follows, too."""
    assert parts.packed is not None
    packed, x = parts.packed.branch(x, int(first_only), parts.int8)
    query = linear(parts.projections[0], x[layout.first_rows], parts.int8) if first_only else None
    rest, distances = (layout.bias, parts.heads, mask, layout.grid, forward_pass), layout.positions
    if not isinstance(distances, Distances) or parts.positions is None or embeddings is None:
        bias = distances if isinstance(distances, Tensor) else None
        return attention(query, packed, *rest, position_bias=bias), x
    keys = linear(parts.positions.key, embeddings, parts.int8).index_select(0, distances.for_keys)
    queries = linear(parts.positions.query, embeddings, parts.int8).index_select(0, distances.for_queries)
    return disentangled_attention(query, packed, keys, queries, *rest), x


def _feed_forward(
    parts: LayerParts, mask: Mask, forward_pass: ForwardPass, context: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the second part: from the attention's output to the two operands of the last norm."""
    (inner,) = parts.inner
    x = dropout_add_norm(context, parts.attention_output.bias, x, parts.attention_norm, mask)
    if is_exact_gelu(parts.activation) and not parts.int8 and can_feed_forward(inner, parts.outer, x):
        return feed_forward(x, inner, parts.outer, forward_pass)
    activated = _activate(parts.activation, product(inner, x, parts.int8), inner.bias)
    return product(parts.outer, activated, parts.int8, forward_pass), x


def _activate(activation: Callable[[Tensor], Tensor], x: Tensor, bias: Tensor) -> Tensor:
    if is_exact_gelu(activation):
        return gelu(x, bias)
    # The approximation as transformers writes it takes eight passes, and keeps a tensor for each.
    is_tanh_gelu = type(activation).__name__ in ("NewGELUActivation", "GELUTanh")
    return nn.functional.gelu(x + bias, approximate="tanh") if is_tanh_gelu else activation(x + bias)


def _run_pre_norm(
    parts: LayerParts, x: Tensor, layout: Layout, angles: Angles | None, masks: _Masks, run: _Run
) -> Tensor:
    x, added = run(partial(_run_blocks, parts, layout, angles, masks), x)
    if parts.outer.bias is not None:
        added = added + parts.outer.bias
    return x + _norm(parts.outer_norm, added)


def _run_blocks(
    parts: LayerParts,
    layout: Layout,
    angles: Angles | None,
    masks: _Masks,
    forward_pass: ForwardPass,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run a pre-norm layer up to its last product; return the residual stream and that product without its bias."""
    assert parts.packed is not None
    assert parts.packed_inner is not None
    packed = parts.packed(_norm(parts.attention_norm, x), int8=parts.int8)
    packed = rotate(packed, angles, parts.heads, HeadNorms(read_norm(parts.query_norm), read_norm(parts.key_norm)))
    context = attention(None, packed, None, parts.heads, masks[0], layout.grid)
    added = _norm(parts.attention_end_norm, linear(parts.attention_output, context, parts.int8))
    norm = read_norm(parts.feed_forward_norm)
    assert norm is not None
    x, normed = add_norm(added, x, norm, masks[1])
    inner = dropout(glu(parts.packed_inner(normed, int8=parts.int8), GATES[parts.activation]), masks[2])
    return x, product(parts.outer, inner, parts.int8, forward_pass)


def _norm(module: nn.Module | None, x: Tensor) -> Tensor:
    norm = read_norm(module)
    return x if norm is None else apply_norm(x, norm)
