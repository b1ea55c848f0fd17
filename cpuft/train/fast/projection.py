"""Linear layers: one product for several layers with the same input (query, key, value), and cheap bias gradients.

With a LoRA adapter only the two small factors are trained, so a third of a step's multiplications is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cpuft.kernels import kernels_for
from cpuft.train.fast.autocast import without_autocast
from cpuft.train.fast.frozen import FrozenLinear, FrozenWeight, frozen_linear
from cpuft.train.fast.gradient_checkpointing import ForwardPass
from cpuft.train.fast.gradient_places import take_place
from cpuft.train.fast.int8_products import MIN_ROWS, multiply, quantise_rows
from cpuft.train.fast.packed_weights import multiply_packed, uses_packed_weights
from cpuft.train.fast.products import gelu_product, matrix_product, slope_product


def column_sums(x: Tensor) -> Tensor:
    """Return the sum over the rows of `x`, (rows, columns) -> (columns,), in its dtype; bf16 is added up in fp32."""
    if kernels := kernels_for(x):
        x = x.contiguous()
        sums = torch.zeros(x.shape[1], dtype=torch.float32)
        kernels.run("column_sums", x.dtype, x, sums, *x.shape)
        return sums.to(x.dtype)
    return x.sum(0)


class _PackedLinear(torch.autograd.Function):
    """x W^T + bias, and x itself for what else needs it, see `PackedLinear.branch`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        forward_pass: ForwardPass,
        int8: bool,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        count = len(parameters) // (1 if bias is None else 2)
        ctx.weights, ctx.biased = parameters[:count], bias is not None
        weight, scales = quantise_rows(weight) if int8 else (weight, None)
        # Backward of a frozen layer does not need the input.
        ctx.save_for_backward(x if any(ctx.needs_input_grad[5:]) else None, weight, scales)
        if forward_pass is ForwardPass.RECOMPUTE:
            return x.new_empty(len(x), len(weight)), x
        if int8:
            return multiply(quantise_rows(x), weight.t(), scales, bias), x
        return matrix_product(x, weight, bias, right_transposed=True), x

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor | None, other_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return other_grad, *(None,) * (len(ctx.needs_input_grad) - 1)
        x, weight, scales = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0] and scales is None:
            dx = matrix_product(grad, weight, addend=other_grad)
        elif ctx.needs_input_grad[0]:
            dx = multiply(quantise_rows(grad, scales), weight)
            dx = dx if other_grad is None else dx.add_(other_grad)
        dweights: tuple[Tensor | None, ...] = (None,) * (len(ctx.weights) * (1 + ctx.biased))
        if any(ctx.needs_input_grad[5:]):
            sizes, place = [len(parameter) for parameter in ctx.weights], take_place(ctx.weights)
            dweights = torch.split(matrix_product(grad, x, left_transposed=True, place=place), sizes)
            dweights += torch.split(column_sums(grad), sizes) if ctx.biased else ()
        return dx, None, None, None, None, *dweights


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + (x A^T) B^T + bias, of which only A and B are trained."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | FrozenWeight,
        bias: Tensor | None,
        forward_pass: ForwardPass,
        down: Tensor,
        up: Tensor,
    ) -> Tensor:
        narrow = functional.linear(x, down)
        # A FrozenWeight is expanded again in backward, because it shares the buffer of all layers.
        ctx.frozen = weight if isinstance(weight, FrozenWeight) else None
        ctx.save_for_backward(x, narrow, None if isinstance(weight, FrozenWeight) else weight, down, up)
        if forward_pass is ForwardPass.RECOMPUTE:
            return x.new_empty(len(x), len(up))
        whole = weight.expand(x.dtype) if isinstance(weight, FrozenWeight) else weight
        return matrix_product(x, whole, bias, right_transposed=True).addmm_(narrow, up.t())

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, weight, down, up = ctx.saved_tensors
        dnarrow, dx = grad @ up, None
        if ctx.needs_input_grad[0]:
            whole = ctx.frozen.expand(grad.dtype) if ctx.frozen else weight
            dx = matrix_product(grad, whole).addmm_(dnarrow, down)
        return dx, None, None, None, dnarrow.t() @ x, grad.t() @ narrow


class _FeedForward(torch.autograd.Function):
    """gelu(x W^T + bias) V^T, and x itself for the residual connection, see `feed_forward`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, inner_weight: Tensor, bias: Tensor, outer_weight: Tensor, forward_pass: ForwardPass
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.weights = inner_weight, outer_weight  # what is saved may be copied by gradient checkpointing
        wants_x, wants_inner, wants_bias, wants_outer, _ = ctx.needs_input_grad
        inner, slope = gelu_product(x, inner_weight, bias, wants_x or wants_inner or wants_bias)
        # Backward of a frozen layer does not need its input.
        kept_inputs = x if wants_inner else None, inner if wants_outer else None
        ctx.save_for_backward(*kept_inputs, inner_weight, outer_weight, slope)
        if forward_pass is ForwardPass.RECOMPUTE:
            return x.new_empty(len(x), len(outer_weight)), x
        return matrix_product(inner, outer_weight, right_transposed=True), x

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, grad: Tensor | None, residual_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return residual_grad, None, None, None, None
        x, inner, inner_weight, outer_weight, slope = ctx.saved_tensors
        wants_x, wants_inner, wants_bias, wants_outer, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        douter = dinner = dx = None
        if wants_outer:
            douter = matrix_product(grad, inner, left_transposed=True, place=take_place(ctx.weights[1:]))
        if slope is None:
            return residual_grad, None, None, douter, None
        before, sums = slope_product(grad, outer_weight, slope)
        if wants_inner:
            dinner = matrix_product(before, x, left_transposed=True, place=take_place(ctx.weights[:1]))
        if wants_x:
            dx = matrix_product(before, inner_weight, addend=residual_grad)
        return dx, dinner, sums.to(grad.dtype) if wants_bias else None, douter, None


_packed_linear: Callable[..., tuple[Tensor, Tensor]] = _PackedLinear.apply
_feed_forward: Callable[..., tuple[Tensor, Tensor]] = _FeedForward.apply
_adapted_linear: Callable[..., Tensor] = _AdaptedLinear.apply
_block_diagonal: Callable[..., Tensor] = torch.block_diag


def is_plain(layer: Any) -> bool:
    """Return whether this is exactly a torch.nn.Linear, or one with a frozen weight of any type, without an adapter."""
    return type(layer) in (nn.Linear, FrozenLinear)


def is_adapted(layer: Any) -> bool:
    """Return whether this is a frozen linear layer with one active, unmerged LoRA of peft, without dropout or bias."""
    if (type(layer).__module__, type(layer).__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    names, base = layer.active_adapters, layer.base_layer
    plain = len(names) == 1 and not (layer.lora_variant or layer.merged or layer.disable_adapters)
    frozen = is_plain(base) and not any(parameter.requires_grad for parameter in base.parameters())
    return plain and frozen and type(layer.lora_dropout[names[0]]) is nn.Identity and not layer.lora_bias[names[0]]


def can_pack(layers: Sequence[Any], adapters: bool) -> bool:
    """Return whether the outputs of these linear layers, which have the same input, can be one product.

    All or none have a bias, and all or none are a FrozenLinear. All are plain, or with `adapters` some are adapted, and
    the plain ones beside them frozen.
    """
    if len({layer.bias is None for layer in layers if hasattr(layer, "bias")}) != 1:
        return False
    if len({isinstance(_base_of(layer), FrozenLinear) for layer in layers}) != 1:
        return False
    plain = [layer for layer in layers if is_plain(layer)]
    if len(plain) == len(layers):
        return True
    frozen = not any(parameter.requires_grad for layer in plain for parameter in layer.parameters())
    return adapters and frozen and all(is_adapted(layer) for layer in layers if layer not in plain)


def _base_of(layer: Any) -> Any:
    return getattr(layer, "base_layer", layer)


def _find_weight(layers: Sequence[Any]) -> Tensor | FrozenWeight:
    """Return the weights of layers, one after another, without gradients."""
    bases = [_base_of(layer) for layer in layers]
    return FrozenWeight(bases) if isinstance(bases[0], FrozenLinear) else _join([layer.weight for layer in layers])


def _find_bias(layers: Sequence[Any]) -> Tensor | None:
    return None if layers[0].bias is None else _join([layer.bias for layer in layers])


def _join(parameters: Sequence[Tensor]) -> Tensor:
    """Return all parameters as one tensor: a view of their memory if they lie there in this order, else a copy."""
    first, block = parameters[0].detach(), parameters[0].untyped_storage().data_ptr()
    addresses = itertools.accumulate((p.nbytes for p in parameters[:-1]), initial=first.data_ptr())
    if all(
        p.data_ptr() == address and p.untyped_storage().data_ptr() == block and p.dtype == first.dtype
        for p, address in zip(parameters, addresses, strict=True)
    ):
        return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    return torch.cat([p.detach() for p in parameters])


def _lora_factors(layer: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A, (rank, inputs), and B times the adapter's scale, (outputs, rank); rank 0 without an adapter."""
    if is_plain(layer):
        return torch.empty(0, layer.in_features, dtype=dtype), torch.empty(layer.out_features, 0, dtype=dtype)
    (name,) = layer.active_adapters
    return layer.lora_A[name].weight, layer.lora_B[name].weight * layer.scaling[name]


def _project(
    x: Tensor, layers: Sequence[Any], int8: bool, forward_pass: ForwardPass = ForwardPass.ONLY, adds_bias: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the outputs of `layers` side by side, and `x`, as `PackedLinear.branch` does."""
    bias = _find_bias(layers) if adds_bias else None
    if uses_packed_weights(x) and all(type(layer) is nn.Linear for layer in layers):
        return multiply_packed(x, [layer.weight for layer in layers], bias), x
    weight = _find_weight(layers)
    if all(map(is_plain, layers)):
        if isinstance(weight, FrozenWeight):
            return frozen_linear(x, weight, bias, forward_pass), x
        int8 = int8 and layers[0].training and len(x) >= MIN_ROWS
        parameters = [layer.weight for layer in layers] + [layer.bias for layer in layers if bias is not None]
        return _packed_linear(x, weight, bias, forward_pass, int8, *parameters)
    downs, ups = zip(*(_lora_factors(layer, x.dtype) for layer in layers))
    return _adapted_linear(x, weight, bias, forward_pass, torch.cat(downs), _block_diagonal(*ups)), x


def linear(layer: Any, x: Tensor, int8: bool = False) -> Tensor:
    """Return the output of one plain or adapted layer, with its bias: (tokens, inputs) -> (tokens, outputs).

    `x` has the dtype of the layer's weight, unless that is a FrozenLinear's. `int8` multiplies 8-bit numbers, if the
    layer is a torch.nn.Linear in training with fp32 weights and there are at least `MIN_ROWS` tokens.
    """
    return _project(x, [layer], int8)[0]


def product(layer: Any, x: Tensor, int8: bool = False, forward_pass: ForwardPass = ForwardPass.ONLY) -> Tensor:
    """Return the output of one plain or adapted layer without the bias, which the next pass over the activations adds:
    (tokens, inputs) -> (tokens, outputs), with `int8` as in `linear`.

    A part that gives its `forward_pass` must end with this product, which is undefined in the pass RECOMPUTE.
    """
    return _project(x, [layer], int8, forward_pass, adds_bias=False)[0]


def can_feed_forward(inner: Any, outer: Any, x: Tensor) -> bool:
    """Return whether `feed_forward` can compute two layers: both torch.nn.Linear, with kernels for `x` and `inner`. It
    does not use packed weights.
    """
    fits = type(inner) is nn.Linear and type(outer) is nn.Linear and not uses_packed_weights(x)
    return fits and kernels_for(x, inner.weight) is not None


def feed_forward(x: Tensor, inner: nn.Linear, outer: nn.Linear, forward_pass: ForwardPass) -> tuple[Tensor, Tensor]:
    """Return gelu(inner(x)) W^T, where W is the weight of `outer`, and `x` for the residual connection.

    Both are (tokens, hidden); `can_feed_forward` must hold. The exact GELU and its slope belong to the products before
    and after it, and so does the sum of both gradients of `x`, if the second result is used instead of `x`. The next
    pass adds the bias of `outer`. `forward_pass`: see `product`.
    """
    return _feed_forward(x, inner.weight, inner.bias, outer.weight, forward_pass)


class PackedLinear:
    """Linear layers with the same input whose weights become views of one tensor, so that one product serves all.

    `can_pack` must hold. Weights that get other storage are concatenated at each call, and those of FrozenLinear
    layers, which may be in a mapped file, are expanded into one buffer.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._addresses: list[int] = []
        """Addresses of the parameters from which `current` has made `_joined`."""
        self._joined: tuple[Tensor, ...] = ()
        if len(layers) > 1:
            if not isinstance(_base_of(layers[0]), FrozenLinear):
                self._pack([layer.weight for layer in layers])
            if layers[0].bias is not None:
                self._pack([layer.bias for layer in layers])

    @staticmethod
    @torch.no_grad()
    def _pack(parameters: Sequence[Tensor]) -> None:
        packed = torch.cat([p.detach() for p in parameters])
        for parameter, view in zip(parameters, torch.split(packed, [len(p) for p in parameters]), strict=True):
            parameter.data = view

    def __call__(self, x: Tensor, first: int = 0, int8: bool = False) -> Tensor:
        """Return the outputs, side by side, of the layers from number `first` on; for `x` and `int8` see `linear`."""
        return self.branch(x, first, int8)[0]

    def branch(self, x: Tensor, first: int = 0, int8: bool = False) -> tuple[Tensor, Tensor]:
        """Return what calling this object returns, (tokens, outputs), and `x` for others, like a residual connection.

        The product that makes the gradient of `x` adds that of the second result, which takes no pass over memory.
        """
        return _project(x, self.layers[first:], int8)

    def current(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the weights, and the biases, as one tensor each without gradients, and the parameters: all weights,
        then all biases. The layers must be torch.nn.Linear with biases.
        """
        parameters: list[Any] = [layer._parameters[name] for name in ("weight", "bias") for layer in self.layers]
        addresses, count = [parameter.data_ptr() for parameter in parameters], len(self.layers)
        # A view keeps its memory from being used again, so the same addresses mean the same memory.
        is_known = addresses == self._addresses and all(one.dtype == parameters[0].dtype for one in self._joined)
        if not is_known or [one.data_ptr() for one in self._joined] != [addresses[0], addresses[count]]:
            self._addresses, self._joined = addresses, (_join(parameters[:count]), _join(parameters[count:]))
        weight, bias = self._joined
        return weight, bias, parameters
