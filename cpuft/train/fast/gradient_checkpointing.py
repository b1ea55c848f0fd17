"""Gradient checkpointing of parts of a fast layer: backward runs a part again instead of keeping its activations.

Unlike with torch's checkpoint, a part knows that it is being recomputed, and leaves out its last product, which no
gradient needs: a third of a layer's multiplications.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch.utils.checkpoint import checkpoint


class ForwardPass(Enum):
    """Which forward pass of a part is running, and so what it has to compute."""

    ONLY = "the only one: compute the result and keep what backward needs"
    FIRST = "the first of two: compute the result"
    RECOMPUTE = "the second, during backward: keep what backward needs; of the result only the shape matters"


def run_with_recompute(part: Callable[..., Any], *tensors: Any) -> Any:
    """Return `part(ForwardPass.FIRST, *tensors)`, and keep only `tensors` until backward, which calls
    `part(ForwardPass.RECOMPUTE, *tensors)`. The part must draw no random numbers, as no generator is reset.
    """
    passes = itertools.chain([ForwardPass.FIRST], itertools.repeat(ForwardPass.RECOMPUTE))
    return checkpoint(
        lambda *given: part(next(passes), *given), *tensors, use_reentrant=False, preserve_rng_state=False
    )
