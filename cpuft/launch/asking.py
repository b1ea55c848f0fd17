"""How a launch asks its ranks to end after a checkpoint, instead of ending them: on SIGUSR1, on SIGTERM with grace."""

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

_TELL_SECONDS = 20.0


@dataclass
class Asking:
    """Asks once, by a file in the run's directory on the master, because mpirun passes no signal on."""

    run_dir: str
    """Where the ranks work on the run."""
    master: str
    ways: dict[str, tuple[str, ...]]
    """As `cpuft.plan.Plan.ways`."""
    grace: float
    """Seconds that SIGTERM leaves for it; with 0, it ends the ranks at once."""
    signal_number: int = 0
    end: float = math.inf
    told: bool = False

    def takes(self, signal_number: int) -> bool:
        """Called in a signal's handler: whether the signal asks, and ends nothing by itself."""
        gently = signal_number == signal.SIGTERM and self.grace > 0 and math.isinf(self.end)
        if gently:
            self.end = time.monotonic() + self.grace
        if gently or signal_number == signal.SIGUSR1:
            self.signal_number = self.signal_number or signal_number
            return True
        return False

    def check(self) -> None:
        """Called now and then while ranks run. Raises Interrupted when a grace has passed."""
        if self.signal_number and not self.told:
            self.told = True
            name = signal.Signals(self.signal_number).name
            answer = execute.run_quietly(self.plan_telling(name).command, _TELL_SECONDS)
            if answer.exit_code:
                print(f"cpuft: ranks cannot be told of {name} ({answer.said.strip()})", file=sys.stderr, flush=True)
        if time.monotonic() > self.end:
            raise Interrupted(signal.SIGTERM)

    def plan_telling(self, name: str) -> Step:
        """Write the file, from here."""
        path = f"{self.run_dir}/{ASKED}"
        words = ("sh", "-c", 'echo "$1" >"$0.new" && mv "$0.new" "$0"', path, name)
        return Plan(ways=self.ways).here(Step("ask ranks to end", words, host=self.master))
