"""Parts of a layer that are run once more in backward, and keep nothing for it until then but what they are given.

torch's checkpoint runs all of a part again. Here a part knows in which turn it is, and leaves out what no gradient
needs: its last product, which is a third of what a layer multiplies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch.utils.checkpoint import checkpoint


class Turn(Enum):
    """In which turn a part runs, and so what it has to do."""

    ONLY = "the only one: the result, and what backward needs is kept"
    FIRST = "the first of two: the result"
    AGAIN = "the second: what backward needs. Of the result the shape is enough"


def in_one_turn(part: Callable[..., Any], *tensors: Any) -> Any:
    """What `part(turn, *tensors)` returns."""
    return part(Turn.ONLY, *tensors)


def in_two_turns(part: Callable[..., Any], *tensors: Any) -> Any:
    """The same, of which only `tensors` are kept until backward runs the part again. It must draw no random numbers.

    Not re-entrant, as DistributedDataParallel needs it.
    """
    turns = itertools.chain([Turn.FIRST], itertools.repeat(Turn.AGAIN))
    return checkpoint(lambda *given: part(next(turns), *given), *tensors, use_reentrant=False, preserve_rng_state=False)
