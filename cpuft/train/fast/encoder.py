"""The fast encoder: tokens packed without padding, and post-norm layers like BERT's made of the fast pieces.

Hooks on the encoder convert and pack hidden states on the way in, and unpack them on the way out. The layers keep their
modules and parameters; their class becomes a subclass with another `forward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpuft.train.fast.architectures import ARCHITECTURES, Architecture, LayerParts, SharedLayers, find_architecture
from cpuft.train.fast.attention import Grid, attention, make_bias
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.disentangled import Distances, disentangled_attention
from cpuft.train.fast.elementwise import Mask, draw_mask, dropout_add_norm, gelu, is_exact_gelu
from cpuft.train.fast.encoder_layer import attention_half, can_run_halves, feed_forward_half
from cpuft.train.fast.gradient_checkpointing import ForwardPass, run_once, run_with_recompute
from cpuft.train.fast.projection import (
    PackedLinear,
    can_feed_forward,
    can_pack,
    feed_forward,
    is_adapted,
    is_plain,
    linear,
    product,
)

MIN_PADDING = 0.05
"""Share of padding in a batch above which its tokens are packed. With less, packing the tokens at the encoder's entry
and around every attention costs about as much as the padding does. With MiniLM and 32 examples of 64 positions on a CPU
with AVX512_BF16, both cost the same at 2 to 9 %."""


@dataclass(frozen=True)
class Layout:
    """How the (tokens, hidden) rows inside the encoder map to the (batch, length) positions of the batch."""

    grid: Grid
    """The batch and length of the batch, and which positions have a row."""
    bias: Tensor | None
    """What is added to the attention scores: fp32, (batch or 1, heads or 1, queries or 1, length); None for nothing."""
    first_only: bool = False
    """Whether the last layer has to compute only the first token of each example, because nothing reads the others."""
    position_bias: Tensor | None = None
    """What is added to the attention scores by head and distance, see `architectures.PositionBias.by_distance`; None
    for nothing."""
    distances: Distances | None = None
    """Which relative embedding stands for each distance, for disentangled attention; None for another attention."""

    @property
    def first_rows(self) -> Tensor | slice:
        """The rows of the examples' first tokens, to index (tokens, hidden) with.

        A slice if every position has its row, else (batch,) int64, with -1 for an example whose first position has
        none.
        """
        length, rows = self.grid.length, self.grid.rows
        return slice(None, None, length) if rows is None else rows[::length]

    def pack(self, hidden: Tensor) -> Tensor:
        """Return the rows of the positions in the grid: (batch, length, hidden) -> (tokens, hidden).

        A copy if the grid leaves positions out, else a view where the strides allow it.
        """
        flat = hidden.reshape(-1, hidden.shape[-1])
        return flat if self.grid.places is None else flat.index_select(0, self.grid.places)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return the rows at their positions: (tokens, width) -> (batch, length, width), zero where there is no row.

        A view if every position has its row, else a new tensor.
        """
        grid = self.grid
        if grid.places is not None:
            blank = rows.new_zeros(grid.batch * grid.length, rows.shape[-1])
            rows = blank.index_copy(0, grid.places, rows)
        return rows.view(grid.batch, grid.length, -1)


def make_layout(hidden: Tensor, mask: Tensor | None, *, may_pack: bool, first_only: bool) -> Layout:
    """Return the layout for hidden states (batch, length, hidden) and the mask that transformers passes to its layers.

    All positions have their row, in order, unless tokens are packed.

    Parameters
    ----------
    mask: (batch or 1, heads or 1, queries or 1, length), bool (true: may be looked at) or float (added to the scores);
        None for no mask.
    may_pack: leave out tokens that no query may look at, if they are more than `MIN_PADDING` of the batch, the mask
        has one row for each example (the same for all heads and queries), and each example keeps its first token. That
        changes no other token's result.
    first_only: of the layout; with a mask of one row for each example, it becomes False if it masks a first token.
    """
    batch, length, _ = hidden.shape
    bias = make_bias(mask)
    if bias is not None and bias.shape[2] > 1 and bool((bias == bias[:, :, :1]).all()):
        bias = bias[:, :, :1].contiguous()
    if bias is None or bias.shape[1:3] != (1, 1) or bias.shape[0] != batch:
        return Layout(Grid(batch, length), bias, first_only)
    seen = bias[:, 0, 0] > torch.finfo(torch.float32).min / 2
    if not bool(seen[:, 0].all()):
        return Layout(Grid(batch, length), bias, False)
    places = seen.reshape(-1).nonzero().squeeze(1)
    packs = may_pack and places.numel() < (1.0 - MIN_PADDING) * seen.numel()
    return Layout(Grid.of(batch, length, places if packs else None), bias, first_only)


def read_parts(layer: nn.Module, is_last: bool, adapters: bool = False) -> LayerParts | None:
    """Return the parts of a layer that the fast path can replace; None for any other layer. The layer stays as it is.

    None is returned for a layer that is no encoder layer of `ARCHITECTURES`, is patched already, or is a decoder's; and
    for one that has cross-attention, chunked feed-forward, a linear layer without bias, another module in the place of
    a linear layer, an adapter of another form, or a layer norm without weights.

    Parameters
    ----------
    is_last: whether it is the last layer of its encoder.
    adapters: allow linear layers with a LoRA adapter of peft for which `is_adapted` holds.
    """
    architecture = find_architecture(layer)
    if architecture is None or getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
        return None
    feed_forward = getattr(layer, "ffn", None)
    if getattr(layer, "chunk_size_feed_forward", 0) or getattr(feed_forward, "chunk_size_feed_forward", 0):
        return None
    parts = architecture.read_layer(layer, is_last)
    known = all(
        (is_plain(linear) or (adapters and is_adapted(linear))) and linear.bias is not None for linear in parts.linears
    )
    known &= can_pack((parts.query, parts.key, parts.value), adapters)
    norms = (parts.attention_norm, parts.outer_norm)
    known &= all(type(norm) is nn.LayerNorm and norm.elementwise_affine for norm in norms)
    return parts if known else None


def _is_tanh_gelu(activation: Callable[[Tensor], Tensor]) -> bool:
    return type(activation).__name__ in ("NewGELUActivation", "GELUTanh")


def _activate(activation: Callable[[Tensor], Tensor], x: Tensor, bias: Tensor) -> Tensor:
    """Return the activation of `x + bias`, (tokens, inner)."""
    if is_exact_gelu(activation):
        return gelu(x, bias)
    # The approximation as transformers writes it takes eight passes, and keeps a tensor for each.
    return nn.functional.gelu(x + bias, approximate="tanh") if _is_tanh_gelu(activation) else activation(x + bias)


def _dropout_rate(dropout: nn.Dropout | None) -> float:
    return dropout.p if dropout is not None and dropout.training else 0.0


def _attend(
    parts: LayerParts,
    layout: Layout,
    mask: Mask,
    forward_pass: ForwardPass,
    x: Tensor,
    embeddings: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The first part that gradient checkpointing recomputes: projections and attention; and x for what follows.

    `embeddings`: the relative embeddings of the layout's distances after dropout, for disentangled attention.
    """
    assert parts.packed is not None
    first_only = parts.is_last and layout.first_only
    packed, x = parts.packed.branch(x, int(first_only), parts.int8)
    query = linear(parts.query, x[layout.first_rows], parts.int8) if first_only else None
    rest = (layout.bias, parts.heads, mask, layout.grid, forward_pass)
    if parts.positions is None or layout.distances is None or embeddings is None:
        return attention(query, packed, *rest, position_bias=layout.position_bias), x
    keys = linear(parts.positions.key, embeddings, parts.int8).index_select(0, layout.distances.for_keys)
    queries = linear(parts.positions.query, embeddings, parts.int8).index_select(0, layout.distances.for_queries)
    return disentangled_attention(query, packed, keys, queries, *rest), x


def _feed_forward(
    parts: LayerParts, mask: Mask, forward_pass: ForwardPass, context: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """The second part: from the attention's output to the two operands of the last norm."""
    x = dropout_add_norm(context, parts.attention_output.bias, x, parts.attention_norm, mask)
    if is_exact_gelu(parts.activation) and not parts.int8 and can_feed_forward(parts.inner, parts.outer, x):
        return feed_forward(x, parts.inner, parts.outer, forward_pass)
    inner = _activate(parts.activation, product(parts.inner, x, parts.int8), parts.inner.bias)
    return product(parts.outer, inner, parts.int8, forward_pass), x


@without_autocast
def run_layer(parts: LayerParts, x: Tensor, layout: Layout, embeddings: Tensor | None = None) -> Tensor:
    """Return the output of one patched encoder layer: (tokens, hidden) -> (tokens, hidden), in the dtype of `x`.

    Of the last layer with a layout that is `first_only`, the output is (batch, hidden), the first tokens. Dropout masks
    are drawn from torch's generator. With `parts.recomputes`, in training, activations are recomputed in backward.

    Parameters
    ----------
    parts: with `packed` set, by `patch_layer`.
    x: in the dtype of the layer's linear weights.
    embeddings: all relative embeddings of the encoder, (embeddings, hidden), for a layer that has `parts.positions`.
    """
    dropouts = (parts.attention_dropout, parts.attention_output_dropout, parts.outer_dropout)
    masks = [draw_mask(_dropout_rate(dropout), True) for dropout in dropouts]
    run = run_with_recompute if parts.recomputes and parts.attention_module.training else run_once
    first_only = parts.is_last and layout.first_only
    if can_run_halves(parts, x) and not first_only and layout.position_bias is None:
        x = attention_half(parts, x, layout.grid, layout.bias, masks[0], masks[1])
        return feed_forward_half(parts, x, masks[2])
    inputs = [x]
    if parts.positions is not None and layout.distances is not None and embeddings is not None:
        inputs.append(parts.positions.dropout(layout.distances.select(embeddings)).to(x.dtype))
    attended, x = run(partial(_attend, parts, layout, masks[0]), *inputs)
    context = product(parts.attention_output, attended, parts.int8)
    if first_only:
        x = x[layout.first_rows]
    outer, x = run(partial(_feed_forward, parts, masks[1]), context, x)
    return dropout_add_norm(outer, parts.outer.bias, x, parts.outer_norm, masks[2])


class FastLayer:
    """Mixed in before a layer's own class: `forward` runs the fast pieces unless hooks look inside the layer."""

    fast_parts: LayerParts
    """The modules of this layer."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output, a tensor of the shape of `hidden_states`, in the dtype of the linear weights.

        If `more_outputs` of the layer's parts is not None, it is in a tuple with these, as its own class returns it.
        When the encoder's hook has run, there is a `Layout`, hidden states are (tokens, hidden), and so is the output,
        or (batch, hidden) from the last layer if the layout is `first_only`. If there is no layout, and the attention
        module has forward hooks or the layer `needs_encoder`, the forward of the model's own class runs instead, and
        its result is returned, whatever that is.

        Parameters
        ----------
        hidden_states: (batch, length, hidden), or (tokens, hidden) with a layout.
        attention_mask: as transformers passes it to its layers, (batch or 1, heads or 1, queries or 1, length); a
            `Layout`; or None.
        args: for the model's own class; ignored otherwise.
        kwargs: the same, but with disentangled attention `relative_pos` may be the layout, and `rel_embeddings` are the
            encoder's relative embeddings, (embeddings, hidden), fp32.
        """
        parts = self.fast_parts
        embeddings = kwargs.get("rel_embeddings")
        for layout in (attention_mask, kwargs.get("relative_pos")):
            if isinstance(layout, Layout):
                output = run_layer(parts, hidden_states, layout, embeddings)
                return output if parts.more_outputs is None else (output, *parts.more_outputs)
        dtype = parts.inner.bias.dtype  # a frozen weight may have another one than activations
        if parts.attention_module._forward_hooks or parts.needs_encoder:
            if embeddings is not None:
                kwargs = {**kwargs, "rel_embeddings": embeddings.to(dtype)}
            return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]
        layout = make_layout(hidden_states, attention_mask, may_pack=False, first_only=False)
        return run_layer(parts, layout.pack(hidden_states).to(dtype), layout).view(hidden_states.shape)


def patch_layer(layer: Any, parts: LayerParts) -> None:
    """Give `layer` the fast forward, in place.

    Its class becomes a subclass of its own class, so that isinstance still holds. Weights of query, key and value
    become views of one tensor. Gradient checkpointing by transformers, if it is on, is replaced by the layer's own.
    Call this once for each layer.

    Parameters
    ----------
    layer: its linear weights have the dtype in which they will compute.
    parts: of this layer, from `read_parts`; its `packed` and `recomputes` are set.
    """
    own = type(layer)
    parts.packed = PackedLinear([parts.query, parts.key, parts.value])
    parts.recomputes = bool(getattr(layer, "gradient_checkpointing", False))
    layer.gradient_checkpointing = False
    layer.fast_parts = parts
    layer.__class__ = type(f"Fast{own.__name__}", (FastLayer, own), {"__module__": __name__})


def reads_first_token(model: Any) -> bool:
    """Return whether a model's output depends only on the first token of the encoder's output.

    True for the sequence classifiers of `ARCHITECTURES` in transformers, such as BertForSequenceClassification, also
    inside of a model of peft or of the module `Transformer` that a CrossEncoder of sentence-transformers has. False for
    any other class, also for subclasses that are defined elsewhere.
    """
    if type(model).__name__ == "Transformer" and type(model).__module__.startswith("sentence_transformers."):
        model = getattr(model, "model", model)  # the module calls its forward without hooks
    kind = type(model.get_base_model() if hasattr(model, "get_base_model") else model)
    heads = {architecture.first_token_head for architecture in ARCHITECTURES}
    return kind.__name__ in heads and kind.__module__.startswith("transformers.")


def _make_full_mask(mask: Tensor | None) -> Tensor | None:
    """Return a mask of DeBERTa's encoder in the form of `make_layout`: bool, with four dimensions; None for no mask.

    `mask`: 1 where there is something to see, (batch, length), (batch, queries, length) or with four dimensions; None
        for no mask.
    """
    seen = torch.ones(()) if mask is None else mask.bool()
    if bool(seen.all()):
        return None
    return seen if seen.dim() > 3 else seen.view(len(seen), 1, -1, seen.shape[-1])


def _replace_mask(args: tuple[Any, ...], kwargs: dict[str, Any], mask: Any) -> tuple[Any, Any]:
    """Return the arguments of an encoder or a group of layers with another attention mask, their second parameter."""
    if len(args) > 1:
        return (args[0], mask, *args[2:]), kwargs
    return args, {**kwargs, "attention_mask": mask}


class FastEncoder:
    """Hooks on one encoder and its layers. They are methods, so that a deep copy of the model copies them along.

    Parameters
    ----------
    encoder: the module that holds the layers.
    layers: each once, in their order.
    parts: those of each layer, from `read_parts`.
    architecture: of the layers.
    model: the module that runs the encoder as its attribute `encoder`; None if there is none.
    """

    def __init__(
        self,
        encoder: nn.Module,
        layers: list[nn.Module],
        parts: list[LayerParts],
        architecture: Architecture,
        model: nn.Module | None = None,
    ) -> None:
        self.encoder = encoder
        self.layers = layers
        self.parts = parts
        self.position_bias = architecture.position_bias
        self.shared_layers = architecture.shared_layers
        self.relative_embeddings = architecture.relative_embeddings
        self.model = model
        self.precision_dtype = torch.float32
        """In which hidden states are computed inside the encoder while its norms are fp32."""
        self.head_is_running = False
        """Whether a model that `watch_head` watches is in its forward."""
        self.layout: Layout | None = None
        """The layout of the batch while the encoder is running; else None."""
        self.groups_left = 0
        """How many groups of shared layers the encoder has still to run for this batch."""
        self.states_are_wanted: bool | None = None
        """While the model of an encoder with relative embeddings is in its forward: whether the caller wants the hidden
        states of all layers. Such a model asks its encoder for them in any case."""
        self.returns_states = False
        """Whether the output of this call of an encoder with relative embeddings has hidden states of all layers."""

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the encoder's output, that of its norms: fp32, unless the whole model has been converted."""
        dtype: torch.dtype = self.parts[-1].outer_norm.weight.dtype
        return dtype

    @property
    def dtype(self) -> torch.dtype:
        """In which hidden states are computed inside the encoder, that of the linear weights."""
        return self.precision_dtype if self.output_dtype == torch.float32 else self.output_dtype

    @property
    def runs(self) -> list[nn.Module]:
        """The layers in the order in which the encoder runs them, each as often as it does."""
        return self.layers if self.shared_layers is None else _list_runs(self.encoder, self.shared_layers)

    @property
    def linears(self) -> list[Any]:
        """The linear layers of all encoder layers, in the order of the layers."""
        return [linear for parts in self.parts for linear in parts.linears]

    def install(self, precision: str) -> None:
        """Patch the layers, and register hooks on the encoder, which then packs tokens. Call it once.

        `precision`: "bf16", "fp32" or "int8". For bf16, the linear weights must be bf16 already, else fp32.
        """
        self.precision_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for layer, parts in zip(self.layers, self.parts, strict=True):
            parts.int8 = precision == "int8"
            patch_layer(layer, parts)
        self.encoder.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.encoder.register_forward_hook(self._leave)
        if self.position_bias is not None:
            vars(self.encoder)[self.position_bias.method] = self._make_position_bias
        if self.shared_layers is not None:
            getattr(self.encoder, self.shared_layers.projection).register_forward_hook(self._leave_projection)
            for group in dict.fromkeys(self.shared_layers.list_groups(self.encoder)):
                group.register_forward_pre_hook(self._enter_group, with_kwargs=True)

        if self.relative_embeddings is not None and self.model is not None:
            self.model.register_forward_pre_hook(self._model_starts, with_kwargs=True)
            self.model.register_forward_hook(self._model_ends, always_call=True)

    def watch_head(self, model: nn.Module) -> None:
        """Register hooks on `model`, whose head reads only first tokens, so that the last layer computes no others.

        While `model` is in its forward, the encoder's last hidden state is (batch, 1, hidden), unless hooks on layers
        want it whole or an example's first token is masked.
        """
        model.register_forward_pre_hook(self._head_starts)
        model.register_forward_hook(self._head_ends, always_call=True)

    def _head_starts(self, *call: Any) -> None:
        self.head_is_running = True

    def _head_ends(self, *call: Any) -> None:
        self.head_is_running = False

    def _model_starts(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
        wanted = given.get("output_hidden_states")
        wanted = model.config.output_hidden_states if wanted is None else wanted
        self.states_are_wanted = bool(wanted or model.z_steps > 1)  # more runs of the last layer read them, too

    def _model_ends(self, *call: Any) -> None:
        self.states_are_wanted = None

    def _make_position_bias(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the encoder's method of this purpose: if fast layers run, the layout has the bias."""
        assert self.position_bias is not None
        own = getattr(type(self.encoder), self.position_bias.method)
        return own(self.encoder, *args, **kwargs) if self.layout is None else None

    def _leave_projection(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.to(self.dtype)

    def _enter_group(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Let the layer that is the last one compute all tokens unless this is its last run for the batch."""
        self.groups_left -= 1
        if self.layout is None or self.groups_left == 0:
            return args, kwargs
        return _replace_mask(args, kwargs, replace(self.layout, first_only=False))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        # transformers hooks the layers, or tells the encoder, when the caller asks for hidden states or attentions:
        # then everything needs its usual shape.
        watched = any(layer._forward_hooks for layer in self.layers)
        watched |= any(parts.attention_module._forward_hooks for parts in self.parts)
        watched |= self._wants_more(args, kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        self.layout = None
        if not watched and self.relative_embeddings is not None:
            layout = make_layout(hidden, _make_full_mask(mask), may_pack=True, first_only=self.head_is_running)
            distances = self.relative_embeddings.find_distances(module, hidden.shape[1])
            self.layout = layout = replace(layout, distances=distances)
            # The encoder calls methods of its mask, and leaves one with four dimensions as it is.
            args, kwargs = _replace_mask(args, {**kwargs, "relative_pos": layout}, torch.ones(1, 1, 1, 1))
            hidden = layout.pack(hidden)
        elif not watched:
            layout = make_layout(hidden, mask, may_pack=True, first_only=self.head_is_running)
            if self.position_bias is not None:
                layout = replace(layout, position_bias=self.position_bias.by_distance(module, hidden.shape[1]))
            self.layout = layout
            args, kwargs = _replace_mask(args, kwargs, layout)
            hidden = layout.pack(hidden)
        elif mask is not None and mask.is_floating_point():
            # The model's own attention multiplies what this mask is added to with bf16 values.
            args, kwargs = _replace_mask(args, kwargs, mask.to(self.dtype).clamp_min(torch.finfo(self.dtype).min))
        if self.shared_layers is None:
            hidden = hidden.to(self.dtype)
        else:
            self.groups_left = len(self.shared_layers.list_groups(module))
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": hidden}

    def _wants_more(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the caller of the encoder wants what fast layers do not compute."""
        if self.relative_embeddings is None:
            return bool(kwargs.get("output_hidden_states") or kwargs.get("output_attentions"))
        self.returns_states = bool(args[2] if len(args) > 2 else kwargs.get("output_hidden_states", True))
        states = self.returns_states if self.states_are_wanted is None else self.states_are_wanted
        others = kwargs.get("query_states") is not None or kwargs.get("relative_pos") is not None or len(args) > 3
        return bool(states or others or kwargs.get("output_attentions"))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        hidden: Tensor = output[0].to(self.output_dtype)
        layout, self.layout = self.layout, None
        if layout is not None:
            hidden = hidden.unsqueeze(1) if layout.first_only else layout.unpack(hidden)
        if self.relative_embeddings is not None and self.returns_states:
            # The model takes the last one of these. Fast layers have packed the others, which nobody wants.
            states = output[1] if layout is None else ()
            output = self._replace_states(output, (*states[:-1], hidden))
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    @staticmethod
    def _replace_states(output: Any, states: tuple[Tensor, ...]) -> Any:
        if isinstance(output, tuple):
            return (output[0], states, *output[2:])
        output.hidden_states = states
        return output


def find_encoders(model: nn.Module, adapters: bool = False) -> list[FastEncoder]:
    """Return the encoders of `model` of which the fast path knows every layer (see `read_parts`), in module order.

    The list is empty if there are none, or if the model is patched already. An encoder is left out if `find_unknown` of
    its architecture names a part of it. Nothing is installed yet.

    `adapters`: accept layers with LoRA adapters of peft, too.
    """
    found = []
    for module in model.modules():
        layers = list(dict.fromkeys(_list_layers(module)))
        if not layers or _find_unknown(module, layers[0]):
            continue
        parts = [read_parts(layer, is_last=layer is layers[-1], adapters=adapters) for layer in layers]
        known = [p for p in parts if p is not None]
        architecture = find_architecture(layers[0])
        if architecture is not None and len(known) == len(parts):
            runs_it = next((one for one in model.modules() if getattr(one, "encoder", None) is module), None)
            found.append(FastEncoder(module, layers, known, architecture, runs_it))
    return found


def find_unknown(model: nn.Module) -> str:
    """Return what the fast path does not know of a model's encoders, apart from their layers; empty for nothing."""
    encoders = [(module, _list_layers(module)) for module in model.modules()]
    return next(filter(None, (_find_unknown(encoder, own[0]) for encoder, own in encoders if own)), "")


def _find_unknown(encoder: nn.Module, layer: nn.Module) -> str:
    """What the fast path does not know of the encoder of this layer; empty if there is nothing, or for other layers."""
    architecture = find_architecture(layer)
    return architecture.find_unknown(encoder) if architecture else ""


def _list_layers(module: nn.Module) -> list[nn.Module]:
    """The layers of an encoder in the order in which it runs them; none for another module."""
    layers = getattr(module, "layer", None)
    if isinstance(layers, nn.ModuleList):
        return list(layers)
    shared = (architecture.shared_layers for architecture in ARCHITECTURES)
    mine = next((one for one in shared if one is not None and one.encoder_class == type(module).__name__), None)
    return [] if mine is None else _list_runs(module, mine)


def _list_runs(encoder: nn.Module, shared: SharedLayers) -> list[nn.Module]:
    return [layer for group in shared.list_groups(encoder) for layer in getattr(group, shared.layers)]
