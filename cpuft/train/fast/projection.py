"""Linear layers: several of one input as one product (query, key and value), and a bias gradient that costs little.

Of layers with peft's LoRA only the two narrow factors beside the weight are trained: no product for a gradient of the
weight, which is a third of all that a step multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cpuft.train.fast.gradient_checkpointing import Turn
from cpuft.train.fast.int8 import LEAST_ROWS, multiply, quantise_rows
from cpuft.train.fast.kernels import kernels_for


def column_sums(x: Tensor) -> Tensor:
    """The sum of all rows of `x`, (rows, columns) -> (columns,), in its dtype; added up in fp32."""
    if kernels := kernels_for(x):
        x = x.contiguous()
        sums = torch.zeros(x.shape[1], dtype=torch.float32)
        kernels.run("column_sums", x.dtype, x, sums, *x.shape)
        return sums.to(x.dtype)
    return x.sum(0)


class _PackedLinear(torch.autograd.Function):
    """x W^T and a bias, if any, with `int8` in 8 bits, as the input's gradient then is; the weight's never is."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turn: Turn, int8: bool, *parameters: Tensor
    ) -> Tensor:
        ctx.count, ctx.biased = len(parameters) // (1 if bias is None else 2), bias is not None
        weight, scales = quantise_rows(weight) if int8 else (weight, None)
        # A frozen layer's input is no longer needed.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[5:]) else None, weight, scales)
        if turn is Turn.AGAIN:
            return x.new_empty(len(x), len(weight))
        return multiply(quantise_rows(x), weight.t(), scales, bias) if int8 else functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scales = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grad @ weight if scales is None else multiply(quantise_rows(grad, scales), weight)
        dweights: tuple[Tensor | None, ...] = (None,) * (2 * ctx.count)
        if any(ctx.needs_input_grad[5:]):
            dweights = (grad.t() @ x).chunk(ctx.count)
            dweights += column_sums(grad).chunk(ctx.count) if ctx.biased else ()
        return dx, None, None, None, None, *dweights


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + (x A^T) B^T and a bias, if any, of which A and B are trained."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, turn: Turn, down: Tensor, up: Tensor
    ) -> Tensor:
        narrow = functional.linear(x, down)
        ctx.save_for_backward(x, narrow, weight, down, up)
        if turn is Turn.AGAIN:
            return x.new_empty(len(x), len(weight))
        return functional.linear(x, weight, bias).addmm_(narrow, up.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, weight, down, up = ctx.saved_tensors
        dnarrow = grad @ up
        dx = (grad @ weight).addmm_(dnarrow, down) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, dnarrow.t() @ x, grad.t() @ narrow


_packed_linear: Callable[..., Tensor] = _PackedLinear.apply
_adapted_linear: Callable[..., Tensor] = _AdaptedLinear.apply
_block_diagonal: Callable[..., Tensor] = torch.block_diag


def is_adapted(layer: Any) -> bool:
    """Whether this is a linear layer with one of peft's LoRA adapters in its plain form, which alone is trained."""
    if (type(layer).__module__, type(layer).__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    names, base = layer.active_adapters, layer.base_layer
    plain = len(names) == 1 and not (layer.lora_variant or layer.merged or layer.disable_adapters)
    frozen = type(base) is nn.Linear and not any(parameter.requires_grad for parameter in base.parameters())
    return plain and frozen and type(layer.lora_dropout[names[0]]) is nn.Identity and not layer.lora_bias[names[0]]


def _factors(layer: Any) -> tuple[Tensor, Tensor]:
    """An adapted layer's A, (rank, inputs), and B, (outputs, rank), with the adapter's scale in it."""
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight * layer.scaling[name]


def _project(x: Tensor, layers: Sequence[Any], weight: Tensor, bias: Tensor | None, turn: Turn, int8: bool) -> Tensor:
    """What layers give for `x` side by side, whose weights and biases are these. All are adapted, or none is."""
    if type(layers[0]) is nn.Linear:
        int8 = int8 and layers[0].training and len(x) >= LEAST_ROWS
        parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers if bias is not None]
        return _packed_linear(x, weight, bias, turn, int8, *parameters)
    downs, ups = zip(*map(_factors, layers))
    return _adapted_linear(x, weight, bias, turn, torch.cat(downs), _block_diagonal(*ups))


def linear(layer: Any, x: Tensor, int8: bool = False) -> Tensor:
    """What `layer`, which has a bias, gives for `x`: (tokens, inputs) -> (tokens, outputs).

    It is a torch.nn.Linear, or one of which `is_adapted` holds. `int8`: in 8 bits while a plain one is in training.
    """
    return _project(x, [layer], layer.weight.detach(), layer.bias.detach(), Turn.ONLY, int8)


def product(layer: Any, x: Tensor, int8: bool = False, turn: Turn = Turn.ONLY) -> Tensor:
    """The same without the bias, for a next pass that adds it on its way, as the end of a `turn`."""
    return _project(x, [layer], layer.weight.detach(), None, turn, int8)


class PackedLinear:
    """Linear layers of equal shape whose weights are made views of one tensor, so that one product serves all.

    The layers stay where they are, with their parameters and names; an optimizer that writes to their weights writes
    to the packed tensor. Weights may be moved, all together. If something gives one of them other storage, they are
    concatenated at each call instead.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._pack([layer.weight for layer in layers])
        self._pack([layer.bias for layer in layers])

    @staticmethod
    @torch.no_grad()
    def _pack(parameters: Sequence[Tensor]) -> None:
        packed = torch.cat([p.detach() for p in parameters])
        for parameter, view in zip(parameters, packed.chunk(len(parameters)), strict=True):
            parameter.data = view

    @staticmethod
    def _current(parameters: Sequence[Tensor]) -> Tensor:
        """All of them in one tensor: the one that they are views of, where they lie in it one after another."""
        first, block = parameters[0].detach(), parameters[0].untyped_storage().data_ptr()
        places = range(first.data_ptr(), first.data_ptr() + len(parameters) * first.nbytes, first.nbytes)
        if all(
            p.data_ptr() == place and p.untyped_storage().data_ptr() == block and p.dtype == first.dtype
            for p, place in zip(parameters, places, strict=True)
        ):
            return first.as_strided((len(parameters) * first.shape[0], *first.shape[1:]), first.stride())
        return torch.cat([p.detach() for p in parameters])

    def __call__(self, x: Tensor, first: int = 0, int8: bool = False) -> Tensor:
        """(tokens, inputs) -> (tokens, layers * outputs): what the layers from number `first` give, side by side."""
        layers = self.layers[first:]
        weight, bias = self._current([layer.weight for layer in layers]), self._current([one.bias for one in layers])
        return _project(x, layers, weight, bias, Turn.ONLY, int8)
