"""The layers of a model that the fast path replaces: finding them, patching them, and packing their tokens.

Hooks find out which tokens a batch has. The first layer packs them, so that no layer computes padding, and the last one
puts them back. The layers keep their modules and parameters, and get another `forward`, see `layers.run_layer`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from cpuft.train.fast.architectures import POST_NORM_ARCHITECTURES, Architecture, LayerParts, find_architecture
from cpuft.train.fast.elementwise import GATES, read_norm
from cpuft.train.fast.layers import run_layer
from cpuft.train.fast.layout import Layout, make_biased_layout, make_shifted_layout
from cpuft.train.fast.projection import PackedLinear, can_pack, is_adapted, is_plain

_NO_MASK_NEEDED = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask of four dimensions: transformers passes it to the layers as it is, and makes none of its own."""


class FastLayer:
    """Mixed in before a layer's own class: `forward` runs the fast layer where the stack's hook has made a layout."""

    fast_parts: LayerParts
    fast_stack: Stack

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the layout of this batch among its arguments, which gradient checkpointing of transformers
        keeps for backward, when the stack has no layout any more, or that of another batch.
        """
        stack = self.fast_stack
        if stack.layout is not None:
            stack.runs_left -= 1
            kwargs.update(fast_layout=stack.layout, is_last_run=stack.runs_left == 0)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        fast_layout: Layout | None = None,
        is_last_run: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the layer's output, with `more_outputs` of its parts in a tuple, as its own class returns it.

        With a layout this is (tokens, hidden) in the dtype of the linear weights, or from the last run (batch, length,
        hidden) in the dtype of the norms, zero for padding, or (batch, 1, hidden) if the layout is `first_only`.
        """
        stack, parts = self.fast_stack, self.fast_parts
        if fast_layout is None:
            with torch.autocast("cpu", torch.bfloat16, enabled=stack.dtype == torch.bfloat16):
                return super().forward(hidden_states.to(stack.output_dtype), *args, **kwargs)  # type: ignore[misc]
        rows = hidden_states.to(stack.dtype)
        rows = fast_layout.pack(rows) if rows.dim() == 3 else rows
        rows = run_layer(parts, rows, fast_layout, is_last_run, kwargs)
        if is_last_run:
            rows = rows.to(stack.output_dtype)
            rows = rows.unsqueeze(1) if fast_layout.first_only else fast_layout.unpack(rows)
        return rows if parts.more_outputs is None else (rows, *parts.more_outputs)


class Stack:
    """The layers of one encoder or decoder, as often as they run, and hooks which make the layout of each batch.

    `owner` gets the hooks: the `holder` of the layers, or the model around it, see `Architecture.is_entered_at_model`.
    Hooks are methods, so that a deep copy of the model copies them along.
    """

    def __init__(self, owner: nn.Module, holder: nn.Module, runs: list[Any], architecture: Architecture) -> None:
        self.owner: Any = owner
        self.holder = holder
        self.runs = runs
        self.layers = list(dict.fromkeys(runs))
        self.parts = [architecture.read_layer(layer) for layer in self.layers]
        self.is_pre_norm = self.parts[0].is_pre_norm
        self.architecture = architecture
        self.precision_dtype = torch.float32
        """In which hidden states are computed inside the layers while their norms are fp32."""
        self.head_is_running = False
        """Whether a model that `watch_head` watches is in its forward."""
        self.layout: Layout | None = None
        """The layout of the batch while the owner is running and the fast layers can compute it; else None."""
        self.runs_left = 0
        """How many runs of layers are left for this batch."""

    @property
    def output_dtype(self) -> torch.dtype:
        """The dtype of the last layer's output, that of the norms: fp32, unless the whole model has been converted."""
        parts = self.parts[-1]
        weight = (parts.feed_forward_norm if self.is_pre_norm else parts.outer_norm).weight
        return weight.dtype if isinstance(weight, Tensor) else torch.float32

    @property
    def dtype(self) -> torch.dtype:
        """In which hidden states are computed inside the layers, that of the linear weights."""
        return self.precision_dtype if self.output_dtype == torch.float32 else self.output_dtype

    @property
    def linears(self) -> list[Any]:
        """The linear layers of all layers, in the order of the layers."""
        return [linear for parts in self.parts for linear in parts.linears]

    def find_obstacle(self, adapters: bool) -> str:
        """Return what the fast path cannot compute, such as `the activation relu2` or a linear layer with a LoRA
        adapter of peft (with `adapters`, only one with dropout, a bias or a variant, or with a trained base); "" if it
        can compute all layers.
        """
        if self.architecture.is_entered_at_model and self.owner is self.holder:
            return f"a {type(self.holder).__name__} without its model around it"
        unknown = self.architecture.find_unknown(self.holder)
        both = zip(self.layers, self.parts, strict=True)
        return unknown or next(filter(None, (_find_obstacle(layer, parts, adapters) for layer, parts in both)), "")

    def install(self, precision: str) -> None:
        """Patch layers and register hooks, once. `precision`: fp32, int8, or bf16, which linear weights must be
        already.
        """
        self.precision_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for layer, parts in zip(self.layers, self.parts, strict=True):
            own = type(layer)
            parts.packed, parts.packed_inner = PackedLinear(parts.projections), PackedLinear(parts.inner)
            parts.int8 = precision == "int8"
            # The layer's own gradient checkpointing replaces that of transformers.
            parts.recomputes = bool(getattr(layer, "gradient_checkpointing", False))
            layer.gradient_checkpointing = False
            layer.fast_parts, layer.fast_stack = parts, self
            layer.__class__ = type(f"Fast{own.__name__}", (FastLayer, own), {"__module__": __name__})
        self.owner.register_forward_pre_hook(self._enter, with_kwargs=True)
        self.owner.register_forward_hook(self._leave, always_call=True)
        if self.architecture.positions is not None:
            vars(self.holder)[self.architecture.positions.method] = self._make_all_positions
        if self.architecture.shared_layers is not None:
            getattr(self.holder, self.architecture.shared_layers.projection).register_forward_pre_hook(self._pack)

    def watch_head(self, model: nn.Module) -> None:
        """Register hooks on `model`, whose head reads only first tokens, so that the last layer computes no others."""
        model.register_forward_pre_hook(self._head_starts)
        model.register_forward_hook(self._head_ends, always_call=True)

    def _head_starts(self, *call: Any) -> None:
        self.head_is_running = True

    def _head_ends(self, *call: Any) -> None:
        self.head_is_running = False

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self._leave()
        # By name: decorators of transformers look among the keywords, and add some.
        kind: Any = type(module)
        given = {**dict(zip(_list_arguments(kind), args)), **kwargs}
        inputs = (given.get(name) for name in ("hidden_states", "input_ids", "inputs_embeds"))
        found = next((one for one in inputs if one is not None), None)
        if found is None or self._needs_own_layers(given):
            return None
        mask = given.get("attention_mask")
        if mask is not None and self.architecture.is_entered_at_model:
            mask = mask.bool() if mask.dim() == 4 else mask.bool()[:, None, None]
        batch, length = found.shape[:2]
        self.layout, self.runs_left = self._make_layout(batch, length, mask, given), len(_list_runs(self.holder))
        if self.layout is None:
            return None
        return (), {**given, "attention_mask": _NO_MASK_NEEDED if self.is_pre_norm or mask is None else mask}

    def _make_layout(self, batch: int, length: int, mask: Tensor | None, given: dict[str, Any]) -> Layout | None:
        if self.is_pre_norm:
            position_ids = given.get("position_ids") if self.architecture.keeps_sequences_apart else None
            return make_shifted_layout(batch, length, mask, position_ids)
        positions = self.architecture.positions
        known = None if positions is None else positions.read(self.holder, length)
        return make_biased_layout(batch, length, mask, self.head_is_running, known)

    def _needs_own_layers(self, given: dict[str, Any]) -> bool:
        settings = getattr(self.owner, "config", None)
        for name in ("output_hidden_states", "output_attentions"):
            if given.get(name) or (given.get(name) is None and getattr(settings, name, False)):
                return True
        # transformers has hooks on layers where it collects their outputs.
        modules = [*self.layers, *(parts.attention_module for parts in self.parts)]
        if any(module._forward_hooks for module in modules) or getattr(self.owner, "z_steps", 0) > 1:
            return True
        mask, use_cache = given.get("attention_mask"), given.get("use_cache")
        if given.get("past_key_values") is not None or (mask is not None and not isinstance(mask, Tensor)):
            return True
        wants_cache = getattr(settings, "use_cache", False) if use_cache is None else use_cache
        # In training nobody reads the keys and values, though the configuration asks for them.
        return self.is_pre_norm and bool(wants_cache) and not (self.owner.training and use_cache is None)

    def _leave(self, *call: Any) -> None:
        self.layout = None

    def _make_all_positions(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the encoder's method of this purpose: if fast layers run, the layout has the positions."""
        assert self.architecture.positions is not None
        own = getattr(type(self.holder), self.architecture.positions.method)
        return own(self.holder, *args, **kwargs) if self.layout is None else None

    def _pack(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Pack tokens before the projection to the hidden size, which the encoder runs before the first layer."""
        return args if self.layout is None else (self.layout.pack(args[0]),)


@functools.cache
def _list_arguments(kind: Any) -> list[str]:
    """Return the names of the arguments of a module's forward; finding them out takes longer than a small kernel."""
    return [name for name in inspect.signature(kind.forward).parameters if name != "self"]


def _find_obstacle(layer: Any, parts: LayerParts, adapters: bool) -> str:
    if getattr(layer, "is_decoder", False) or getattr(layer, "add_cross_attention", False):
        return "decoders with layers like BERT's"
    if any(getattr(one, "chunk_size_feed_forward", 0) for one in (layer, getattr(layer, "ffn", None))):
        return "chunked feed-forward"
    if parts.is_pre_norm and parts.activation not in GATES:
        return f"the activation {parts.activation}"
    for module in parts.norms:
        norm = read_norm(module)
        if norm is None or (norm.weight is None and not parts.is_pre_norm):
            return f"the norm {type(module).__name__}"
    for linear in parts.linears:
        if not is_plain(linear) and not (adapters and is_adapted(linear)):
            return f"the linear layer {type(linear).__name__}, or the form of its adapter"
        if linear.bias is None and not parts.is_pre_norm:
            return "linear layers without bias"
    if not (can_pack(parts.projections, adapters) and can_pack(parts.inner, adapters)):
        return "linear layers of which some are trained, have adapters or have a bias, and others are not or have none"
    return ""


def list_stacks(model: nn.Module) -> list[Stack]:
    """Return the stacks of a known architecture, not patched yet, in module order, also those with an obstacle."""
    found = []
    for holder in model.modules():
        runs = _list_runs(holder)
        architectures = [find_architecture(layer) for layer in dict.fromkeys(runs)]
        if not runs or architectures[0] is None or len({*architectures}) != 1:
            continue
        owner: nn.Module = holder
        if architectures[0].is_entered_at_model:
            owner = next((one for one in model.modules() if one._modules.get("encoder") is holder), holder)
        found.append(Stack(owner, holder, runs, architectures[0]))
    return found


def find_stacks(model: nn.Module, adapters: bool = False) -> list[Stack]:
    """Return the stacks of `list_stacks` for which `find_obstacle(adapters)` finds none."""
    return [stack for stack in list_stacks(model) if not stack.find_obstacle(adapters)]


def _list_runs(module: nn.Module) -> list[Any]:
    for name in ("layer", "layers"):
        layers = module._modules.get(name)  # getattr would look through peft's wrappers
        if isinstance(layers, nn.ModuleList):
            return list(layers)
    shared = (architecture.shared_layers for architecture in POST_NORM_ARCHITECTURES)
    mine = next((one for one in shared if one is not None and one.encoder_class == type(module).__name__), None)
    return [] if mine is None else mine.list_runs(module)
