"""Where a batch's tokens are while they pass through an encoder: padded as they came, or packed without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpuft.errors import counted
from cpuft.train.fast.attention import Grid, Heads, attention, mask_bias
from cpuft.train.fast.elementwise import Mask, draw_mask, dropout_add_norm, gelu
from cpuft.train.fast.gradient_checkpointing import Turn, in_one_turn, in_two_turns
from cpuft.train.fast.projection import PackedLinear, is_adapted, linear, product

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


def patch_layer(layer: Any, parts: LayerParts) -> None:
    """Give `layer` the fast forward. Its class becomes a subclass of what it was, so that isinstance still holds.

    One that transformers is to compute again in backward does so in its own way from now on.
    """
    own = type(layer)
    parts.pack()
    parts.recomputes = bool(getattr(layer, "gradient_checkpointing", False))
    layer.gradient_checkpointing = False
    layer.fast_parts = parts
    layer.__class__ = type(f"Fast{own.__name__}", (FastForward, own), {"__module__": __name__})


# Heads that read the first token alone, pooled or not, in transformers' own classes.
_FIRST_TOKEN_HEADS = frozenset(
    f"{kind}ForSequenceClassification"
    for kind in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "DistilBert")
)

_KNOWN = "BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA and DistilBERT"


def reads_first_token(model: Any) -> bool:
    """Whether a model's output depends on the first token of the encoder's output only; also one that peft holds."""
    kind = type(model.get_base_model() if hasattr(model, "get_base_model") else model)
    return kind.__name__ in _FIRST_TOKEN_HEADS and kind.__module__.startswith("transformers.")


class FastEncoder:
    """Hooks on one encoder and its layers. They are methods, so that a deep copy of the model copies them along."""

    def __init__(self, encoder: nn.Module, layers: list[nn.Module], parts: list[LayerParts]) -> None:
        self.encoder = encoder
        self.layers = layers
        self.parts = parts
        self.dtype = torch.float32
        self.head_is_running = False
        self.layout: Layout | None = None

    @property
    def linears(self) -> list[Any]:
        """The linear layers of all encoder layers."""
        return [linear for parts in self.parts for linear in parts.linears]

    def install(self, precision: str) -> None:
        """Quicken the layers, whose linear weights have the dtype that they are to compute in by now."""
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for layer, parts in zip(self.layers, self.parts, strict=True):
            parts.int8 = precision == "int8"
            patch_layer(layer, parts)
        self.encoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.encoder.register_forward_hook(self._leave)

    def watch_head(self, model: nn.Module) -> None:
        """While `model`, a head that reads first tokens, runs, the last layer computes those only."""
        model.register_forward_pre_hook(self._head_starts)
        model.register_forward_hook(self._head_ends, always_call=True)

    def _head_starts(self, *call: Any) -> None:
        self.head_is_running = True

    def _head_ends(self, *call: Any) -> None:
        self.head_is_running = False

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        # transformers hooks the layers when hidden states or attentions are asked for: then everything has to have
        # its usual shape.
        watched = any(layer._forward_hooks for layer in self.layers)
        watched |= any(parts.attention_module._forward_hooks for parts in self.parts)
        hidden = args[0] if args else kwargs["hidden_states"]
        self.layout = None
        if not watched:
            mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
            self.layout = layout_of(hidden, mask, may_pack=True, first_only=self.head_is_running)
            kwargs = {**kwargs, "attention_mask": self.layout}
            args = args[:1]
            hidden = self.layout.enter(hidden)
        hidden = hidden.to(self.dtype)
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        hidden: Tensor = output[0].float()
        layout, self.layout = self.layout, None
        if layout is not None:
            hidden = hidden.unsqueeze(1) if layout.first_only else layout.padded(hidden)
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output


def find_encoders(model: nn.Module, adapters: bool = False) -> list[FastEncoder]:
    """The encoders in `model` all of whose layers the fast path can stand in for, see `layer.read_parts`."""
    found = []
    for module in model.modules():
        layers = getattr(module, "layer", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            continue
        parts = [read_parts(layer, is_last=layer is layers[-1], adapters=adapters) for layer in layers]
        known = [p for p in parts if p is not None]
        if len(known) == len(parts):
            found.append(FastEncoder(module, list(layers), known))
    return found


def describe_layers(model: nn.Module) -> str:
    """How many of a model's layers `accelerate` has replaced, such as `6 of 6 layers replaced`, and why it has not."""
    layers = _find_layers(model)
    replaced = sum(isinstance(layer, FastForward) for layer in layers)
    counts = f"{replaced} of {counted(len(layers), 'layer')} replaced"
    if replaced:
        return counts
    if any(has_reader(layer) for layer in layers):
        why = "they have parts that it does not know (a decoder, chunked feed-forward, or adapters with dropout)"
    else:
        names = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers)) or type(model).__name__
        why = f"it does not know {names} (it knows the layers of {_KNOWN})"
    return f"{counts}, because {why}"


def _find_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model: members of a list, by their class a layer or a block, and not inside another layer."""
    found, inside = list[nn.Module](), set[nn.Module]()
    for module in model.modules():
        for layer in module if isinstance(module, nn.ModuleList) and module not in inside else ():
            if type(layer).__name__.endswith(("Layer", "Block")):
                found.append(layer)
                inside.update(layer.modules())
    return found
