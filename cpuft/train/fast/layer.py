"""An encoder layer put together from the fast pieces, for post-norm layers in the manner of BERT."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from cpuft.train.fast.attention import Heads, attention
from cpuft.train.fast.elementwise import Mask, draw_mask, dropout_add_norm, gelu
from cpuft.train.fast.gradient_checkpointing import Turn, in_one_turn, in_two_turns
from cpuft.train.fast.layout import Layout, layout_of
from cpuft.train.fast.projection import PackedLinear, is_adapted, linear, product


@dataclass
class LayerParts:
    """The modules of one encoder layer, by what they do. They stay in the model; this only knows where they are.

    Linear layers are torch's, or have peft's adapters, see `projection.is_adapted`.
    """

    heads: Heads
    attention_module: nn.Module
    query: Any
    key: Any
    value: Any
    attention_dropout: nn.Dropout
    attention_output: Any
    attention_output_dropout: nn.Dropout | None
    attention_norm: nn.LayerNorm
    inner: Any
    activation: Callable[[Tensor], Tensor]
    outer: Any
    outer_dropout: nn.Dropout
    outer_norm: nn.LayerNorm
    is_last: bool
    packed: PackedLinear | None = None
    int8: bool = False
    """Products are in 8 bits while the layer is in training."""
    recomputes: bool = False
    """In training its scores, and what is between its products, are computed again in backward, and not kept."""

    @property
    def linears(self) -> list[Any]:
        """The layer's linear layers."""
        return [self.query, self.key, self.value, self.attention_output, self.inner, self.outer]

    def pack(self) -> None:
        """Make one tensor of the query, key and value weights, in the dtype that they have now."""
        self.packed = PackedLinear([self.query, self.key, self.value])


def _bert_parts(layer: Any, is_last: bool) -> LayerParts:
    inside, attended = layer.attention.self, layer.attention.output
    return LayerParts(
        heads=Heads(inside.num_attention_heads, inside.attention_head_size, inside.attention_head_size**-0.5),
        attention_module=inside,
        query=inside.query,
        key=inside.key,
        value=inside.value,
        attention_dropout=inside.dropout,
        attention_output=attended.dense,
        attention_output_dropout=attended.dropout,
        attention_norm=attended.LayerNorm,
        inner=layer.intermediate.dense,
        activation=layer.intermediate.intermediate_act_fn,
        outer=layer.output.dense,
        outer_dropout=layer.output.dropout,
        outer_norm=layer.output.LayerNorm,
        is_last=is_last,
    )


def _distilbert_parts(layer: Any, is_last: bool) -> LayerParts:
    inside, forward = layer.attention, layer.ffn
    return LayerParts(
        heads=Heads(inside.n_heads, inside.dim // inside.n_heads, (inside.dim // inside.n_heads) ** -0.5),
        attention_module=inside,
        query=inside.q_lin,
        key=inside.k_lin,
        value=inside.v_lin,
        attention_dropout=inside.dropout,
        attention_output=inside.out_lin,
        attention_output_dropout=None,
        attention_norm=layer.sa_layer_norm,
        inner=forward.lin1,
        activation=forward.activation,
        outer=forward.lin2,
        outer_dropout=forward.dropout,
        outer_norm=layer.output_layer_norm,
        is_last=is_last,
    )


_READERS: dict[tuple[str, str], Callable[[Any, bool], LayerParts]] = {
    ("bert", "BertLayer"): _bert_parts,
    ("roberta", "RobertaLayer"): _bert_parts,
    ("electra", "ElectraLayer"): _bert_parts,
    ("xlm_roberta", "XLMRobertaLayer"): _bert_parts,
    ("camembert", "CamembertLayer"): _bert_parts,
    ("distilbert", "TransformerBlock"): _distilbert_parts,
}


def read_parts(layer: nn.Module, is_last: bool, adapters: bool = False) -> LayerParts | None:
    """The parts of a layer that the fast path can stand in for; None for any other.

    A layer qualifies by its class and by what it is made of: decoders, cross-attention, linear layers without bias and
    chunked feed-forward run unchanged, and other modules in the place of linear layers: peft's LoRA, too, unless
    `adapters` are asked for.
    """
    module = type(layer).__module__.split(".")
    reader = _READERS.get((module[-2] if len(module) > 1 else "", type(layer).__name__))
    if reader is None or module[0] != "transformers":
        return None
    if getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
        return None
    chunk = getattr(layer, "chunk_size_feed_forward", 0) or getattr(
        getattr(layer, "ffn", None), "chunk_size_feed_forward", 0
    )
    parts = reader(layer, is_last)
    known = all(_is_linear(linear, adapters) and linear.bias is not None for linear in parts.linears)
    known &= len({type(linear) for linear in (parts.query, parts.key, parts.value)}) == 1
    norms = (parts.attention_norm, parts.outer_norm)
    return (
        parts if known and not chunk and all(type(n) is nn.LayerNorm and n.elementwise_affine for n in norms) else None
    )


def has_reader(layer: nn.Module) -> bool:
    """Whether a layer's class is one that the fast path can stand in for."""
    module = type(layer).__module__.split(".")
    return module[0] == "transformers" and (module[-2], type(layer).__name__) in _READERS


def _is_linear(layer: nn.Module, adapters: bool) -> bool:
    return type(layer) is nn.Linear or (adapters and is_adapted(layer))


def _is_exact_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    return type(activation).__name__ == "GELUActivation" or activation is nn.functional.gelu


def _rate(dropout: nn.Dropout | None) -> float:
    return dropout.p if dropout is not None and dropout.training else 0.0


def _attend(parts: LayerParts, layout: Layout, mask: Mask, turn: Turn, x: Tensor) -> Tensor:
    assert parts.packed is not None
    first = parts.is_last and layout.first_only
    packed = parts.packed(x, int(first), parts.int8)
    query = linear(parts.query, x[layout.first_rows], parts.int8) if first else None
    return attention(query, packed, layout.bias, parts.heads, mask, layout.grid, turn)


def _transform(parts: LayerParts, mask: Mask, turn: Turn, context: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last norm adds up."""
    x = dropout_add_norm(context, parts.attention_output.bias, x, parts.attention_norm, mask)
    inner, bias = product(parts.inner, x, parts.int8), parts.inner.bias
    inner = gelu(inner, bias) if _is_exact_gelu(parts.activation) else parts.activation(inner + bias)
    return product(parts.outer, inner, parts.int8, turn), x


def run_layer(parts: LayerParts, x: Tensor, layout: Layout) -> Tensor:
    """One encoder layer: (tokens, hidden) -> (tokens, hidden), or (batch, hidden) where first tokens are enough."""
    dropouts = (parts.attention_dropout, parts.attention_output_dropout, parts.outer_dropout)
    masks = [draw_mask(_rate(dropout), True) for dropout in dropouts]
    run = in_two_turns if parts.recomputes and parts.attention_module.training else in_one_turn
    context = product(parts.attention_output, run(partial(_attend, parts, layout, masks[0]), x), parts.int8)
    if parts.is_last and layout.first_only:
        x = x[layout.first_rows]
    outer, x = run(partial(_transform, parts, masks[1]), context, x)
    return dropout_add_norm(outer, parts.outer.bias, x, parts.outer_norm, masks[2])


class FastForward:
    """Mixed in before a layer's own class: `forward` runs the fast pieces where nobody looks inside."""

    fast_parts: LayerParts

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own class returns, from hidden states (batch, length, hidden) and its attention mask.

        `attention_mask` is a `Layout` when the encoder's hook has run; hidden states are then (tokens, hidden).
        """
        parts = self.fast_parts
        if isinstance(attention_mask, Layout):
            return run_layer(parts, hidden_states, attention_mask)
        if parts.attention_module._forward_hooks:
            return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
        layout = layout_of(hidden_states, attention_mask, may_pack=False, first_only=False)
        dtype = parts.inner.weight.dtype
        return run_layer(parts, layout.enter(hidden_states).to(dtype), layout).view(hidden_states.shape)


def quicken(layer: Any, parts: LayerParts) -> None:
    """Give `layer` the fast forward. Its class becomes a subclass of what it was, so that isinstance still holds.

    One that transformers is to compute again in backward does so in its own way from now on.
    """
    own = type(layer)
    parts.pack()
    parts.recomputes = bool(getattr(layer, "gradient_checkpointing", False))
    layer.gradient_checkpointing = False
    layer.fast_parts = parts
    layer.__class__ = type(f"Fast{own.__name__}", (FastForward, own), {"__module__": __name__})
