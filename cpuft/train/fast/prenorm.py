"""Fast pre-norm layers with rotary positions and gated feed-forward: those of ModernBERT, Llama and their kin.

Hooks on the module that holds the layers find out which tokens a batch has. The first layer packs them, so that no
layer computes padding, and the last one puts them back to their positions. The layers keep their modules and
parameters; their class becomes a subclass with another `forward`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cpuft.train.fast.architectures import PreNormParts, find_pre_norm_architecture
from cpuft.train.fast.attention import Grid, attention
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.elementwise import GATES, Mask, add_norm, apply_norm, draw_mask, dropout, glu, read_norm
from cpuft.train.fast.gradient_checkpointing import ForwardPass, run_once, run_with_recompute
from cpuft.train.fast.projection import PackedLinear, can_pack, is_adapted, is_plain, linear, product
from cpuft.train.fast.rotary import Angles, HeadNorms, rotate

_NO_MASK_NEEDED = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask of four dimensions: transformers passes it to the layers as it is, and makes none of its own."""


@dataclass(frozen=True)
class PackedLayout:
    """How the (tokens, hidden) rows inside the layers map to the (batch, length) positions that the model sees."""

    grid: Grid
    """Which rows attend to each other: examples, and the positions of their tokens. Sequences that were packed into one
    row of the batch are examples of their own here."""
    batch: int
    length: int
    sources: Tensor | None
    """(tokens,) int64: number of the position, b * length + p, from which each row comes. None: all, in order."""
    _angles: list[tuple[Tensor, Angles]] = field(default_factory=list, init=False, repr=False, compare=False)
    """The cosines that the layers of this batch got, and the angles of its rows."""

    def pack(self, hidden: Tensor) -> Tensor:
        """Return the rows of the tokens: (batch, length, width) -> (tokens, width).

        A copy if positions are left out, else a view where the strides allow it. A batch of size 1 holds for all.
        """
        flat = hidden.expand(self.batch, self.length, -1).reshape(self.batch * self.length, -1)
        return flat if self.sources is None else flat.index_select(0, self.sources)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return the rows at their positions, (tokens, width) -> (batch, length, width), zero where there is no row."""
        if self.sources is not None:
            blank = rows.new_zeros(self.batch * self.length, rows.shape[-1])
            rows = blank.index_copy(0, self.sources, rows)
        return rows.view(self.batch, self.length, -1)

    def read_angles(self, embeddings: tuple[Tensor, Tensor]) -> Angles:
        """Return the angles of the rows of this batch. All layers that get the same ones share them.

        `embeddings`: the cosines and sines of the model's rotary embedding, (batch or 1, length, size), whose second
            half repeats the first one.
        """
        cosines, sines = embeddings
        known = next((angles for given, angles in self._angles if given is cosines), None)
        if known is None:
            half = cosines.shape[-1] // 2
            known = Angles(*(self.pack(one[..., :half]).float().contiguous() for one in (cosines, sines)))
            self._angles.append((cosines, known))
        return known


def make_layout(batch: int, length: int, mask: Tensor | None, position_ids: Tensor | None) -> PackedLayout | None:
    """Return the layout of a batch; None if there is padding between the tokens of an example.

    Parameters
    ----------
    mask: (batch, length), 0 for padding, which is left out; None if there is no padding.
    position_ids: (batch or 1, length); without a mask, a new sequence begins wherever a number is not one more than the
        number before it, as in transformers. None for positions in order.
    """
    if mask is not None:
        seen = mask != 0
        if bool(seen.all()):
            return PackedLayout(Grid(batch, length), batch, length, None)
        # Attention excludes no position before an example's last token, so that the first one has to be position 0.
        first = seen.int().argmax(1, keepdim=True)
        positions = torch.arange(length)
        is_between = (positions >= first) & (positions < first + seen.sum(1, keepdim=True))
        if bool((seen != is_between).any()):
            return None
        sources = seen.view(-1).nonzero().squeeze(1)
        places = sources - first.expand(-1, length).reshape(-1)[sources]
        return PackedLayout(Grid.of(batch, length, places), batch, length, sources)
    starts = _find_starts(position_ids.expand(batch, -1)) if position_ids is not None else None
    if starts is None or len(starts) == batch:
        return PackedLayout(Grid(batch, length), batch, length, None)
    positions = torch.arange(batch * length)
    sizes = torch.diff(starts, append=torch.tensor([batch * length]))
    longest = int(sizes.max())
    sequence = torch.repeat_interleave(torch.arange(len(starts)), sizes)
    places = sequence * longest + positions - starts[sequence]
    return PackedLayout(Grid.of(len(starts), longest, places), batch, length, None)


def _find_starts(position_ids: Tensor) -> Tensor:
    """Return where sequences begin, as numbers b * length + p in ascending order; each row begins one."""
    is_start = torch.ones(position_ids.shape, dtype=torch.bool)
    is_start[:, 1:] = torch.diff(position_ids, dim=1) != 1
    return is_start.view(-1).nonzero().squeeze(1)


def read_parts(layer: nn.Module, is_first: bool, is_last: bool) -> PreNormParts | None:
    """Return the parts of a layer of `PRE_NORM_ARCHITECTURES`; None for any other layer, also one that is patched."""
    architecture = find_pre_norm_architecture(layer)
    return None if architecture is None else architecture.read_layer(layer, is_first, is_last)


def find_obstacle(parts: PreNormParts, adapters: bool) -> str:
    """Return what the fast path cannot compute in a layer, such as `the activation relu2`; empty if it can.

    `adapters`: allow linear layers with a LoRA adapter of peft for which `is_adapted` holds.
    """
    if parts.activation not in GATES:
        return f"the activation {parts.activation}"
    norm = next((norm for norm in parts.norms if read_norm(norm) is None), None)
    if norm is not None:
        return f"the norm {type(norm).__name__}"
    for layer in parts.linears:
        if not is_plain(layer) and not (adapters and is_adapted(layer)):
            return f"the linear layer {type(layer).__name__}, or the form of its adapter"
    if not (can_pack(parts.projections, adapters) and can_pack(parts.inner, adapters)):
        return "linear layers of which some are trained, have adapters or have a bias, and others are not or have none"
    return ""


def _dropout_mask(module: nn.Module | None) -> Mask:
    return draw_mask(module.p, module.training) if isinstance(module, nn.Dropout) else draw_mask(0.0, False)


def _norm(module: nn.Module | None, x: Tensor) -> Tensor:
    norm = None if module is None else read_norm(module)
    return x if norm is None else apply_norm(x, norm)


def _attend(parts: PreNormParts, layout: PackedLayout, angles: Angles | None, mask: Mask, x: Tensor) -> Tensor:
    """Return the context of attention, (tokens, heads * head size): projections, rotation and attention."""
    assert parts.packed_projections is not None
    packed = parts.packed_projections(x, int8=parts.int8)
    norms = None
    if parts.query_norm is not None and parts.key_norm is not None:
        norms = HeadNorms(read_norm(parts.query_norm), read_norm(parts.key_norm))
    if angles is not None or norms is not None:
        packed = rotate(packed, angles, parts.heads, norms)
    return attention(None, packed, None, parts.heads, mask, layout.grid)


def _run_blocks(
    parts: PreNormParts,
    layout: PackedLayout,
    angles: Angles | None,
    masks: tuple[Mask, Mask, Mask],
    forward_pass: ForwardPass,
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run what gradient checkpointing recomputes: the whole layer up to its last product.

    Returns the residual stream after attention, and the product of feed-forward without its bias.

    `masks`: of the dropouts of attention, of its output and of feed-forward.
    """
    attention_mask, output_mask, inner_mask = masks
    context = _attend(parts, layout, angles, attention_mask, _norm(parts.attention_norm, x))
    added = _norm(parts.attention_end_norm, linear(parts.attention_output, context, parts.int8))
    norm = read_norm(parts.feed_forward_norm)
    assert norm is not None
    assert parts.packed_inner is not None
    x, normed = add_norm(added, x, norm, output_mask)
    inner = dropout(glu(parts.packed_inner(normed, int8=parts.int8), GATES[parts.activation]), inner_mask)
    return x, product(parts.outer, inner, parts.int8, forward_pass)


@without_autocast
def run_layer(parts: PreNormParts, x: Tensor, layout: PackedLayout, angles: Angles | None) -> Tensor:
    """Return the output of one patched layer: (tokens, hidden) -> (tokens, hidden), in the dtype of `x`.

    Dropout masks are drawn from torch's generator. With `parts.recomputes`, in training, activations are recomputed in
    backward: a layer then keeps `x`, and what a norm at its end needs.

    Parameters
    ----------
    parts: with `packed_projections` and `packed_inner` set, by `patch_layer`.
    x: in the dtype of the layer's linear weights.
    angles: of the rows; None for a layer without rotation.
    """
    training = parts.attention_module.training
    attention_mask = draw_mask(parts.attention_dropout, training)
    output_mask, inner_mask = map(_dropout_mask, (parts.attention_output_dropout, parts.inner_dropout))
    run = run_with_recompute if parts.recomputes and training else run_once
    masks = (attention_mask, output_mask, inner_mask)
    x, added = run(partial(_run_blocks, parts, layout, angles, masks), x)
    if parts.outer.bias is not None:
        added = added + parts.outer.bias
    return x + _norm(parts.outer_norm, added)


class FastPreNormLayer:
    """Mixed in before a layer's own class: `forward` runs the fast pieces where the stack's hook has made a layout."""

    fast_parts: PreNormParts
    """The modules of this layer."""
    fast_stack: FastStack
    """The layers to which this one belongs."""
    own_forward: Callable[..., Tensor]
    """The forward of the model's own class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the layout of this batch among its arguments.

        Gradient checkpointing of transformers keeps the arguments, and runs the layer again in backward, when the stack
        has no layout any more, or that of another batch.
        """
        if self.fast_stack.layout is not None:
            kwargs["fast_layout"] = self.fast_stack.layout
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(
        self, hidden_states: Tensor, *args: Any, fast_layout: PackedLayout | None = None, **kwargs: Any
    ) -> Tensor:
        """Return the layer's output.

        With a layout it is (tokens, hidden) in the dtype of the linear weights, or from the last layer (batch, length,
        hidden) in the dtype of the norms, with zeros for padding. Without one, it is what the forward of the model's
        own class returns.

        Parameters
        ----------
        hidden_states: (batch, length, hidden), or with a layout (tokens, hidden), except for the first layer.
        fast_layout: the layout of the batch; None for the model's own class.
        args, kwargs: for the model's own class; with a layout, only position_embeddings among kwargs is read.
        """
        parts, layout = self.fast_parts, fast_layout
        if layout is None:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.fast_stack.dtype == torch.bfloat16):
                return self.own_forward(hidden_states, *args, **kwargs)
        if parts.is_first:
            hidden_states = layout.pack(hidden_states).to(self.fast_stack.dtype)
        angles = layout.read_angles(kwargs["position_embeddings"]) if parts.is_rotated else None
        rows = run_layer(parts, hidden_states, layout, angles)
        return layout.unpack(rows).to(self.fast_stack.output_dtype) if parts.is_last else rows


class FastStack:
    """The layers of one model, and hooks on the module that holds them.

    The hooks are methods, so that a deep copy of the model copies them along.

    Parameters
    ----------
    owner: the module that holds the layers, such as LlamaModel.
    layers: in their order.
    parts: those of each layer, from `read_parts`.
    keeps_sequences_apart: of the architecture.
    """

    def __init__(
        self, owner: nn.Module, layers: list[Any], parts: list[PreNormParts], keeps_sequences_apart: bool
    ) -> None:
        self.owner = owner
        self.keeps_sequences_apart = keeps_sequences_apart
        self.layers = layers
        self.parts = parts
        self.precision_dtype = torch.float32
        """In which hidden states are computed inside the layers while their norms are fp32."""
        self.layout: PackedLayout | None = None
        """The layout of the batch while the owner is running and the fast layers can compute it; else None."""

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the last layer's output, that of the norms: fp32, unless the whole model has been converted."""
        weight = self.parts[-1].feed_forward_norm.weight
        return weight.dtype if isinstance(weight, Tensor) else torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """In which hidden states are computed inside the layers, that of the linear weights."""
        return self.precision_dtype if self.output_dtype == torch.float32 else self.output_dtype

    @property
    def linears(self) -> list[Any]:
        """The linear layers of all layers, in their order."""
        return [layer for parts in self.parts for layer in parts.linears]

    def install(self, precision: str) -> None:
        """Patch the layers, and register hooks on the module that holds them. Call it once.

        `precision`: bf16, fp32 or int8. For bf16, the linear weights must be bf16 already, else fp32.
        """
        self.precision_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for layer, parts in zip(self.layers, self.parts, strict=True):
            parts.int8 = precision == "int8"
            patch_layer(layer, parts, self)
        self.owner.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.owner.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self._leave()
        # By name: decorators of transformers look among the keywords, and add some.
        names = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
        given = {**dict(zip(names, args)), **kwargs}
        found = given.get("input_ids")
        found = given.get("inputs_embeds") if found is None else found
        if found is None or self._needs_own_layers(module, given):
            return None
        batch, length = found.shape[:2]
        mask, position_ids = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and tuple(mask.shape) != (batch, length):
            return None
        self.layout = make_layout(batch, length, mask, position_ids if self.keeps_sequences_apart else None)
        if self.layout is None:
            return None
        return (), {**given, "attention_mask": _NO_MASK_NEEDED}

    def _needs_own_layers(self, module: Any, given: dict[str, Any]) -> bool:
        """Return whether the caller asks for what only the model's own layers give.

        These are hidden states or attentions of all layers, keys and values of earlier tokens, those of these tokens
        for later ones, or masks of a form of the caller's own.
        """
        settings = module.config
        for name in ("output_hidden_states", "output_attentions"):
            if given.get(name) or (given.get(name) is None and getattr(settings, name, False)):
                return True
        if any(parts.attention_module._forward_hooks for parts in self.parts):
            return True
        mask, use_cache = given.get("attention_mask"), given.get("use_cache")
        if given.get("past_key_values") is not None or (mask is not None and not isinstance(mask, Tensor)):
            return True
        wants_cache = getattr(settings, "use_cache", False) if use_cache is None else use_cache
        # In training nobody reads the keys and values, though the configuration asks for them.
        return bool(wants_cache) and not (module.training and use_cache is None)

    def _leave(self, *call: Any) -> None:
        self.layout = None


def patch_layer(layer: Any, parts: PreNormParts, stack: FastStack) -> None:
    """Give `layer` the fast forward, in place.

    Its class becomes a subclass of its own class, so that isinstance still holds. Weights of linear layers with the
    same input become views of one tensor. Gradient checkpointing by transformers, if it is on, is replaced by the
    layer's own. Call this once for each layer.

    Parameters
    ----------
    layer: its linear weights have the dtype in which they will compute.
    parts: of this layer, without an obstacle (see `find_obstacle`); the packed products and `recomputes` are set.
    stack: to which the layer belongs.
    """
    own = type(layer)
    parts.packed_projections, parts.packed_inner = PackedLinear(parts.projections), PackedLinear(parts.inner)
    parts.recomputes = bool(getattr(layer, "gradient_checkpointing", False))
    layer.gradient_checkpointing = False
    layer.fast_parts, layer.fast_stack = parts, stack
    attributes = {"__module__": __name__, "own_forward": own.forward}
    layer.__class__ = type(f"Fast{own.__name__}", (FastPreNormLayer, own), attributes)


def find_stacks(model: nn.Module, adapters: bool = False) -> list[FastStack]:
    """Return the pre-norm layers of `model` that the fast path can compute, in module order. Nothing is installed yet.

    The list is empty if there are none, if one layer has an obstacle (see `find_obstacle`), or if the model is patched
    already.

    `adapters`: accept layers with LoRA adapters of peft, too.
    """
    found = []
    for module in model.modules():
        layers = module._modules.get("layers")  # getattr would look through peft's wrappers
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            continue
        read = [read_parts(one, one is layers[0], one is layers[-1]) for one in layers]
        parts = [one for one in read if one is not None]
        if len(parts) == len(read) and not any(find_obstacle(one, adapters) for one in parts):
            architecture = find_pre_norm_architecture(layers[0])
            assert architecture is not None
            found.append(FastStack(module, list(layers), parts, architecture.keeps_sequences_apart))
    return found
