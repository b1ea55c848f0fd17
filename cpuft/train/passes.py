"""The forward and backward passes of an update, and the clock that measures its phases."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cpuft.comm import take_traffic
from cpuft.record import StepLine


class Clock:
    """Measures the seconds of one step by phase; `last_laps` has the start and end of each phase's last lap."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("data", "forward", "backward", "update", "communication"), 0.0)
        self.last_laps: dict[str, tuple[float, float]] = {}
        self.start = self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap, or the start, to `phase`. Raises KeyError: it is no key of `seconds`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last_laps[phase] = (self.last, now)
        self.last = now

    def make_line(
        self, update: int, learning_rate: float, loss_sum: float, examples: int, tokens: int, waited: float
    ) -> StepLine:
        """Return the line of an update that ends now, with this rank's numbers and the bytes that were sent since the
        last `take_traffic`; `waited` seconds are moved from the backward pass to communication.
        """
        seconds = self.seconds
        return StepLine(
            step=update,
            loss=loss_sum,
            learning_rate=learning_rate,
            samples=examples,
            tokens=tokens,
            data_seconds=seconds["data"],
            forward_seconds=seconds["forward"],
            backward_seconds=max(0.0, seconds["backward"] - waited),
            communication_seconds=seconds["communication"] + waited,
            update_seconds=seconds["update"],
            step_seconds=time.perf_counter() - self.start,
            bytes_sent=take_traffic(),
            compute_seconds=[sum(seconds.values()) - seconds["communication"] - waited],
        )


@dataclass(frozen=True)
class Passes:
    """The forward and backward passes of one rank for one update."""

    functions: list[Callable[[float, bool, Clock], float]]
    """Functions, as many on every rank, that each run a forward and a backward pass, and return the sum of the
    examples' losses. They multiply the gradient by the first argument, and add it to the gradients that are there. The
    second argument says whether the pass is the last one of the update, in which gradients are sent."""
    tokens: int
    """Number of tokens of this rank's examples, without padding."""
