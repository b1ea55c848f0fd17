"""Weights in bf16, prepared for oneDNN once where otherwise every product does it."""

from __future__ import annotations

import functools
import platform
import threading
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

_MOST_ROWS = 1024
"""Rows from which the kernel for AMX is as fast. MiniLM embeds 1, 8 and 32 texts 1.11, 1.14 and 1.12 times as fast with
packed weights on two cores of a Xeon with AMX (`scripts/bench-embed --against unpacked`); fp32 gains nothing."""
_ROWS = 256
"""Rows for which oneDNN chooses the form; the same for all, so that sums do not depend on the first batch."""
_in_use = threading.local()


class PackedWeights:
    """A second copy of linear layers' weights, for forward passes in which these do not change, such as an evaluation.

    While it is in use (`with PackedWeights():`, on this thread), `multiply_packed` fills it. After a weight has changed
    or its model has gone, another one is needed.
    """

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], Tensor] = {}
        """The form of weights side by side, by their addresses."""

    def __enter__(self) -> None:
        _in_use.weights = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _in_use.weights = None

    def find(self, weights: Sequence[Tensor]) -> Tensor:
        """Return the weights of layers with the same input, (outputs, inputs) each, side by side in oneDNN's form."""
        addresses = tuple(weight.data_ptr() for weight in weights)
        if addresses not in self._packed:
            joined = weights[0] if len(weights) == 1 else torch.cat([*weights])
            self._packed[addresses] = torch.ops.mkldnn._reorder_linear_weight(joined.detach(), _ROWS)
        return self._packed[addresses]


def uses_packed_weights(x: Tensor) -> bool:
    """Return whether `multiply_packed` may be called with this left factor, (rows, inputs), now."""
    in_use = getattr(_in_use, "weights", None) is not None
    return in_use and x.dtype == torch.bfloat16 and len(x) < _MOST_ROWS and _can_pack()


@functools.cache
def _can_pack() -> bool:
    """Return whether oneDNN multiplies bf16 here, which needs AVX-512: a small product is tried."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    try:
        torch.ops.mkldnn._linear_pointwise(
            one, torch.ops.mkldnn._reorder_linear_weight(one, _ROWS), None, "none", [], ""
        )
    except (AttributeError, RuntimeError):  # torch without oneDNN, or a CPU without the instructions
        return False
    return platform.machine() == "x86_64"  # not measured on Arm


def multiply_packed(x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Return x W^T + bias, bf16 like all factors: (rows, inputs) -> (rows, outputs).

    W are the weights of layers side by side, and `bias` their biases. No gradient is kept. `uses_packed_weights` must
    hold for `x`.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, _in_use.weights.find(weights), bias, "none", [], "")
    return product
