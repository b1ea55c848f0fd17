"""The encoder around the layers: bf16 and packing on the way in, fp32 and padding on the way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cpuft.errors import counted
from cpuft.train.fast.layer import FastForward, LayerParts, has_reader, quicken, read_parts
from cpuft.train.fast.layout import Layout, layout_of

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
            quicken(layer, parts)
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
