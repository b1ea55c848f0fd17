"""The halves of an encoder layer, each as one call of C++ in forward and one in backward, with no Python in between.

`encoder_layer.h` lists their steps, which `layers.run_layer` runs one by one for other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpuft.kernels import Kernels, int64_array, need_kernels
from cpuft.train.fast.architectures import LayerParts
from cpuft.train.fast.attention import Grid, bias_strides
from cpuft.train.fast.elementwise import Mask, is_exact_gelu
from cpuft.train.fast.gradient_places import make_gradient
from cpuft.train.fast.products import can_multiply

_STATISTICS = (2, 2)
"""The mean of each token and one over its standard deviation, both fp32, in bf16 numbers."""


@dataclass(frozen=True)
class Half:
    """A half of a layer, with its tensors in the order of its struct in encoder_layer.h."""

    kernels: Kernels
    name: str
    """That of its kernels."""
    inputs: Sequence[Tensor | None]
    """What the kernels read, without the half's input."""
    groups: Sequence[tuple[Tensor, Sequence[Tensor]]]
    """Parameters of which the gradients lie one after another, each group behind a tensor of the shape of these."""
    kept: Sequence[int]
    """For each array that forward keeps, in one block of memory: how many bf16 numbers it has per token."""
    scratch: Sequence[int]
    """The same for those that backward needs meanwhile."""
    arguments: Sequence[int | float]
    """Those of the kernels after the shape of the half's input."""

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters."""
        return [parameter for _, group in self.groups for parameter in group]

    def find_arrays(self, x: Tensor, block: Tensor, y: Tensor | None) -> list[int]:
        """Return addresses: of `x`, `inputs`, `kept` in `block`, `y` (0 for None), and two statistics in `block`."""
        *kept, mean, deviation, _end = _divide(block, x, self.kept)
        return [*_find(x, *self.inputs), *kept, *_find(y), mean, deviation]

    def make_gradients(self) -> list[Tensor]:
        """Return memory for the gradients of each group. Kernels add to those of norms, the only ones in fp32."""
        return [
            torch.zeros_like(like) if like.dtype == torch.float32 else make_gradient(like, group)
            for like, group in self.groups
        ]

    def divide_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of each parameter, in the order of `parameters`, as views of the groups' gradients."""
        divided: list[Tensor] = []
        for gradient, (_, group) in zip(gradients, self.groups, strict=True):
            divided += [gradient] if len(group) == 1 else torch.split(gradient, len(gradient) // len(group))
        return divided

    def run(self, direction: str, x: Tensor, addresses: Sequence[int]) -> None:
        """Run the kernel "forward" or "backward" for `x`, (tokens, hidden). MemoryError: its buffers do not fit."""
        done = int64_array([0])
        self.kernels.run(f"{self.name}_{direction}", x.dtype, int64_array(addresses), done, *x.shape, *self.arguments)
        if not done[0]:
            raise MemoryError("there is not enough memory for the buffers of a product: give a smaller --batch-size")


def _find(*tensors: Tensor | None) -> list[int]:
    """Return the addresses of tensors, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _divide(block: Tensor, x: Tensor, columns: Sequence[int]) -> list[int]:
    """Return the addresses of arrays with so many bf16 numbers per token in a block of memory, and that of its end."""
    return list(accumulate((2 * len(x) * count for count in columns), initial=block.data_ptr()))


class _Halves(torch.autograd.Function):
    """Halves that run one after another. Python makes all tensors before the first kernel runs: the cores wait for it,
    and after a kernel, which has replaced what the caches held, it takes four times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, halves: Sequence[Half], *parameters: Tensor) -> Tensor:
        tensors, calls = [x], []
        for half in halves:
            tensors += [x.new_empty(len(x) * sum(half.kept)), torch.empty_like(x)]
            calls.append(half.find_arrays(*tensors[-3:]))
        for half, addresses in zip(halves, calls, strict=True):
            half.run("forward", x, addresses)
        *kept, y = tensors
        ctx.halves = halves
        ctx.save_for_backward(*kept, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        halves, tensors = ctx.halves, ctx.saved_tensors
        x, calls = tensors[0], []
        dxs: list[Tensor | None] = [dy.contiguous()]
        gradients: list[Tensor] = []
        scratch = x.new_empty(len(x) * max(sum(half.scratch) for half in halves))
        for number, half in reversed(list(enumerate(halves))):
            dxs.append(torch.empty_like(x) if number or ctx.needs_input_grad[0] else None)
            own = half.make_gradients()
            arrays = half.find_arrays(*tensors[2 * number : 2 * number + 2], None)
            calls.append((half, [*arrays, *_find(*dxs[-2:], *own), *_divide(scratch, x, half.scratch)]))
            gradients[:0] = half.divide_gradients(own)
        for half, addresses in calls:
            half.run("backward", x, addresses)
        return dxs[-1], None, *gradients


_run_halves: Callable[..., Tensor] = _Halves.apply


def can_run_halves(parts: LayerParts, x: Tensor, few: bool = False) -> bool:
    """Return whether `attention_half` and `feed_forward_half` can compute this layer for `x`, (tokens, hidden).

    The caller has to check that the layout has no bias by distance. `few`: `x` has one row for each example. False also
    where autograd is off or a parameter is frozen.
    """
    if parts.int8 or parts.recomputes or not torch.is_grad_enabled() or not can_multiply(x, parts.inner[0].weight, few):
        return False
    heads, linears = parts.heads, (*parts.projections, parts.attention_output, *parts.inner, parts.outer)
    is_simple = heads.back < 0 and heads.ahead < 0 and heads.keys == heads.count and parts.positions is None
    is_simple = is_simple and heads.count * heads.size == x.shape[1] and is_exact_gelu(parts.activation)
    is_simple = is_simple and all(type(one) is nn.Linear for one in linears)
    modules = (*linears, parts.attention_norm, parts.outer_norm)
    # Attributes of a module take ten times as long, and this is asked for each layer of each batch.
    return is_simple and all(one.requires_grad for module in modules for one in module._parameters.values())


def attention_half(parts: LayerParts, x: Tensor, grid: Grid, bias: Tensor | None, score_mask: Mask, mask: Mask) -> Half:
    """Return the half `norm(x + dropout(attention(x)))` of a layer for which `can_run_halves` holds.

    `grid` and `bias` are those of `attention.attention`, `score_mask` is the dropout of its probabilities, and `mask`
    that of the output of the linear layer after attention.
    """
    norm, output, packed, heads = parts.attention_norm, parts.attention_output, parts.packed, parts.heads
    hidden = x.shape[1]
    *joined, projections = packed.current()
    rest = (output.weight, output.bias, norm.weight.float(), norm.bias.float())  # the kernel reads fp32
    groups = [(joined[0], projections[:3]), (joined[1], projections[3:]), *((one, [one]) for one in rest)]
    masks = (*score_mask.kernel_arguments, *mask.kernel_arguments)
    arguments = (grid.batch, grid.length, heads.count, *bias_strides(bias), heads.factor, norm.eps, *masks)
    kept, scratch = (3 * hidden, hidden, hidden, *_STATISTICS), (hidden, hidden, hidden, 3 * hidden)
    return Half(need_kernels(x), "attention_half", [*joined, *rest, bias, grid.rows], groups, kept, scratch, arguments)


def feed_forward_half(parts: LayerParts, x: Tensor, mask: Mask) -> Half:
    """Return the half `norm(x + dropout(feed_forward(x)))` of a layer for which `can_run_halves` holds."""
    (inner,), outer, norm = parts.inner, parts.outer, parts.outer_norm
    hidden, columns = x.shape[1], len(inner.weight)
    norm_parameters = (norm.weight.float(), norm.bias.float())  # the kernel reads fp32
    parameters = (inner.weight, inner.bias, outer.weight, outer.bias, *norm_parameters)
    groups, arguments = [(one, [one]) for one in parameters], (columns, norm.eps, *mask.kernel_arguments)
    kept, scratch = (columns, columns, hidden, *_STATISTICS), (hidden, hidden, columns)
    return Half(need_kernels(x), "feed_forward_half", parameters, groups, kept, scratch, arguments)


def run_halves(x: Tensor, *halves: Half) -> Tensor:
    """Run halves one after another: (tokens, hidden) -> (tokens, hidden), bf16. Raises MemoryError: there is not enough
    for the buffers of a product.
    """
    return _run_halves(x.contiguous(), halves, *(parameter for half in halves for parameter in half.parameters))
