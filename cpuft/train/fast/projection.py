"""Linear layers: several of one input as one product (query, key and value), and a bias gradient that costs little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

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
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.count = len(parameters) // 2
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        dweights: tuple[Tensor | None, ...] = (None,) * (2 * ctx.count)
        if any(ctx.needs_input_grad[3:]):
            dweights = (*(grad.t() @ x).chunk(ctx.count), *column_sums(grad).chunk(ctx.count))
        return dx, None, None, *dweights


_packed_linear: Callable[..., Tensor] = _PackedLinear.apply


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """What `layer`, which has a bias, gives for `x`: (tokens, inputs) -> (tokens, outputs)."""
    weight, bias = layer.weight, layer.bias
    return _packed_linear(x, weight.detach(), bias.detach(), weight, bias)


class PackedLinear:
    """Linear layers of equal shape whose weights are made views of one tensor, so that one product serves all.

    The layers stay where they are, with their parameters and names; an optimizer that writes to their weights writes
    to the packed tensor. If something gives a weight other storage, the weights are concatenated at each call instead.
    """

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self.weight = self._pack([layer.weight for layer in layers])
        self.bias = self._pack([layer.bias for layer in layers])

    @staticmethod
    @torch.no_grad()
    def _pack(parameters: Sequence[Tensor]) -> Tensor:
        packed = torch.cat([p.detach() for p in parameters])
        for parameter, view in zip(parameters, packed.chunk(len(parameters)), strict=True):
            parameter.data = view
        return packed

    @staticmethod
    def _current(packed: Tensor, parameters: Sequence[Tensor], first: int) -> Tensor:
        views = packed.chunk(len(parameters))
        if all(p.data_ptr() == v.data_ptr() and p.dtype == v.dtype for p, v in zip(parameters, views, strict=True)):
            return packed[views[0].shape[0] * first :]
        return torch.cat([p.detach() for p in parameters[first:]])

    def __call__(self, x: Tensor, first: int = 0) -> Tensor:
        """(tokens, inputs) -> (tokens, layers * outputs): what the layers from number `first` give, side by side."""
        weights, biases = [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]
        weight, bias = self._current(self.weight, weights, first), self._current(self.bias, biases, first)
        return _packed_linear(x, weight, bias, *weights[first:], *biases[first:])
