"""Frozen weights in bf16, fp32 or 8 bits, which are converted for one product at a time.

Weights below LoRA adapters are only read, so that ranks of one host can share a mapped file of them. A buffer, which
all layers use in turn, gets the weights of one product in the type of the activations, in forward and in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cpuft.kernels import kernels_for
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.gradient_checkpointing import ForwardPass

_HEAD_ROWS = 2048
"""Rows of a head's weight that are converted at a time: 8 MB in fp32 at 1,024 inputs, which stays in the cache."""
_LAYER_RATIO = 8
"""A linear layer with more outputs for each input is the head of a language model, which has one for each token."""
_buffers = threading.local()


class FrozenLinear(nn.Linear):
    """A linear layer whose frozen weight may be of another type than its inputs and outputs; see `freeze_linear`."""

    scales: Tensor | None
    """Of an int8 weight, the factor of each output, fp32, (outputs,); else None."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x W^T + bias, (..., inputs) -> (..., outputs), in the type of autocast if that is on, else of x."""
        if torch.is_autocast_enabled("cpu"):
            input = input.to(torch.get_autocast_dtype("cpu"))
        flat = input.reshape(-1, self.in_features)
        output = frozen_linear(flat, FrozenWeight((self,)), self.bias)
        return output.view(*input.shape[:-1], self.out_features)


class FrozenEmbedding(nn.Embedding):
    """A token embedding whose weight is frozen, and whose outputs are fp32, whatever the type of the weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of tokens, times the factor that Gemma's embedding has: (...) -> (..., width), fp32."""
        rows = functional.embedding(input, self.weight.detach()).float()
        factor = getattr(self, "embed_scale", None)
        return rows if factor is None else rows * factor


def freeze_linear(layer: nn.Linear, scales: Tensor | None = None) -> None:
    """Make a torch.nn.Linear a FrozenLinear in place, without gradients. Its weight must be of its final type before,
    int8 with `scales`, fp32, (outputs,), and of a float type without.
    """
    layer.requires_grad_(False)
    layer.__class__ = FrozenLinear
    assert isinstance(layer, FrozenLinear)
    layer.scales = scales


def can_freeze_embedding(module: Any) -> bool:
    """Return whether this is a torch.nn.Embedding, or Gemma 3's in transformers, without max_norm."""
    is_plain = isinstance(module, nn.Embedding) and module.max_norm is None
    return is_plain and (type(module) is nn.Embedding or type(module).__name__ == "Gemma3TextScaledWordEmbedding")


def freeze_embedding(module: nn.Embedding) -> None:
    """Make an embedding for which `can_freeze_embedding` is true a FrozenEmbedding in place: its weight gets no
    gradient, and its outputs are fp32. Its class stays a subclass of the model's own.
    """
    module.weight.requires_grad_(False)
    own = type(module)
    bases = (FrozenEmbedding,) if own is nn.Embedding else (FrozenEmbedding, own)
    module.__class__ = type(f"Frozen{own.__name__}", bases, {"__module__": __name__})


def list_frozen_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of FrozenLinear and FrozenEmbedding modules in the order of `model.modules()`, themselves."""
    return [one.weight for one in model.modules() if isinstance(one, (FrozenLinear, FrozenEmbedding))]


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest int8 weight, (outputs, inputs), and the factor of each output, fp32, (outputs,): 1/127 of its
    largest magnitude, as in LLM.int8 (Dettmers and others 2022, arXiv 2208.07339), or 1 if that is 0.
    """
    wide = weight.detach().float()
    scales = wide.abs().amax(1) / 127
    scales = torch.where(scales > 0, scales, 1.0)
    return (wide / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def dequantise(weight: Tensor, scales: Tensor | None, out: Tensor) -> None:
    """Write a weight, (outputs, inputs), to `out`, fp32 or bf16 of that shape; int8 times `scales`, (outputs,), or for
    None any type as it is.
    """
    if scales is None:
        out.copy_(weight)
    elif kernels := kernels_for(out):
        kernels.run("dequantise_rows", out.dtype, weight, scales, out, *out.shape)
    else:
        out.copy_(weight.float() * scales[:, None])


def _take_buffer(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return (rows, columns) of memory that the next call in this thread returns again."""
    known: Tensor | None = getattr(_buffers, str(dtype), None)
    if known is None or known.numel() < rows * columns:
        known = torch.empty(rows * columns, dtype=dtype)
        setattr(_buffers, str(dtype), known)
    return known[: rows * columns].view(rows, columns)


@dataclass(frozen=True)
class FrozenWeight:
    """The weights of frozen layers with the same input, whose outputs are side by side."""

    layers: Sequence[FrozenLinear]

    def expand(self, dtype: torch.dtype) -> Tensor:
        """Return the weights as one matrix, (outputs, inputs), to read only, and only until this thread's next call of
        this, of `multiply_rows` or of `multiply_columns` for any frozen weight.
        """
        first = self.layers[0]
        if len(self.layers) == 1 and first.scales is None and first.weight.dtype == dtype:
            return first.weight.detach()
        sizes = [len(layer.weight) for layer in self.layers]
        whole = _take_buffer(sum(sizes), first.in_features, dtype)
        for layer, part in zip(self.layers, torch.split(whole, sizes), strict=True):
            dequantise(layer.weight.detach(), layer.scales, part)
        return whole

    def find_head(self) -> Tensor | None:
        """Return the weight if it looks like a language model's head, whose expanded copy would be large: one layer,
        not int8, with more than 2,048 outputs and more than 8 for each input. Else None.
        """
        first = self.layers[0]
        is_head = len(first.weight) > max(_HEAD_ROWS, _LAYER_RATIO * first.in_features)
        return first.weight.detach() if is_head and len(self.layers) == 1 and first.scales is None else None

    @property
    def outputs(self) -> int:
        """The number of outputs of all layers."""
        return sum(len(layer.weight) for layer in self.layers)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight, bias: Tensor | None, forward_pass: ForwardPass) -> Tensor:
        ctx.weight = weight
        output = x.new_empty(len(x), weight.outputs)
        if forward_pass is ForwardPass.RECOMPUTE:
            return output
        if (head := weight.find_head()) is None:
            return functional.linear(x, weight.expand(x.dtype), bias)
        multiply_rows(x, head, output)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if (head := ctx.weight.find_head()) is None:
            return grad @ ctx.weight.expand(grad.dtype), None, None, None
        dx = grad.new_empty(len(grad), head.shape[1])
        multiply_columns(grad, head, dx)
        return dx, None, None, None


_run_frozen_linear: Callable[..., Tensor] = _FrozenLinear.apply


def frozen_linear(
    x: Tensor, weight: FrozenWeight, bias: Tensor | None, forward_pass: ForwardPass = ForwardPass.ONLY
) -> Tensor:
    """Return x W^T + bias, (tokens, inputs) -> (tokens, outputs), in the type of x, of which alone it has a gradient.
    In the pass RECOMPUTE, values are undefined.
    """
    bias = None if bias is None else bias.detach().to(x.dtype)
    return _run_frozen_linear(x, weight, bias, forward_pass)


def multiply_rows(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write x W^T to `out`, (tokens, outputs), converting a few rows of the weight, (outputs, inputs), at a time."""
    for start in range(0, len(weight), _HEAD_ROWS):
        rows = weight[start : start + _HEAD_ROWS]
        part = _take_buffer(len(rows), rows.shape[1], x.dtype).copy_(rows)
        torch.mm(x, part.t(), out=out[:, start : start + len(rows)])


def multiply_columns(grad: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write grad W to `out`, (tokens, inputs), converting like `multiply_rows`: grad is (tokens, outputs)."""
    out.zero_()
    for start in range(0, len(weight), _HEAD_ROWS):
        rows = weight[start : start + _HEAD_ROWS]
        out.addmm_(grad[:, start : start + len(rows)], _take_buffer(len(rows), rows.shape[1], grad.dtype).copy_(rows))
