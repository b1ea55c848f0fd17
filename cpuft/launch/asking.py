"""How a launch asks its ranks to save a checkpoint and end: Ctrl-C, SIGUSR1, or SIGTERM with a grace period."""

from __future__ import annotations

import math
import signal
import sys
import time
from dataclasses import dataclass

from cpuft import execute
from cpuft.errors import Interrupted
from cpuft.plan import Plan, Step
from cpuft.rank.notice import ASKED

TRAINING_SECONDS = 120.0
"""How long a training may take to end after the first Ctrl-C: the current update, and a checkpoint."""
SCRIPT_SECONDS = 30.0
"""The same for a Python script of the user's: most do not listen, and then the user need not wait for long."""
_TELL_SECONDS = 20.0


@dataclass
class StopRequest:
    """Asks the ranks once, by a file in the run's directory on the head host, because mpirun passes no signal on."""

    run_dir: str
    """The run's directory as the ranks see it."""
    master: str
    ways: dict[str, tuple[str, ...]]
    """As `cpuft.plan.Plan.ways`."""
    grace: float
    """Seconds from SIGTERM until the ranks are killed; with 0, SIGTERM kills them at once."""
    patience: float = 0.0
    """Seconds from the first Ctrl-C until the ranks are killed; with 0, Ctrl-C kills them at once."""
    signal_number: int = 0
    end: float = math.inf
    told: bool = False

    def takes(self, signal_number: int) -> bool:
        """Whether a signal only asks the ranks to end. Called in the signal's handler."""
        first = math.isinf(self.end) and not self.signal_number
        seconds = 0.0
        if signal_number == signal.SIGTERM and math.isinf(self.end):
            seconds = self.grace
        elif signal_number == signal.SIGINT and first:
            seconds = self.patience
        if seconds > 0:
            self.end = time.monotonic() + seconds
        if seconds > 0 or signal_number == signal.SIGUSR1:
            self.signal_number = self.signal_number or signal_number
            return True
        return False

    def check(self) -> None:
        """Pass a request on to the ranks. Called now and then while they run.

        Raises Interrupted: the time that the ranks had to end has passed.
        """
        if self.signal_number and not self.told:
            self.told = True
            name = signal.Signals(self.signal_number).name
            if self.signal_number == signal.SIGINT:
                _say(
                    f"the ranks are asked to save a checkpoint and end, within {self.patience:.0f} s; "
                    "press Ctrl-C again to end them at once"
                )
            answer = execute.run_quietly(self.plan_telling(name).command, _TELL_SECONDS)
            if answer.exit_code:
                _say(f"ranks cannot be told of {name} ({answer.said.strip()})")
        if time.monotonic() > self.end:
            raise Interrupted(signal.SIGINT if self.signal_number == signal.SIGINT else signal.SIGTERM)

    def plan_telling(self, name: str) -> Step:
        """The step that writes the file, as this machine runs it."""
        path = f"{self.run_dir}/{ASKED}"
        words = ("sh", "-c", 'echo "$1" >"$0.new" && mv "$0.new" "$0"', path, name)
        return Plan(ways=self.ways).here(Step("ask ranks to end", words, host=self.master))


def _say(line: str) -> None:
    print(f"cpuft: {line}", file=sys.stderr, flush=True)
