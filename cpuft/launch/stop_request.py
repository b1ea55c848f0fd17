"""Ask the ranks to save a checkpoint and end, after a signal to the launcher."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass

from cpuft import execute
from cpuft.argv import make_shell_line
from cpuft.errors import Interrupted
from cpuft.rank.interruption import REQUEST_FILE
from cpuft.terminal import print_message

TRAINING_STOP_SECONDS = 120.0
"""How long a training may take after the first Ctrl-C to finish one or two updates and save a checkpoint."""
SCRIPT_STOP_SECONDS = 30.0
"""How long a user's script may take after the first Ctrl-C. Most ignore the request, and users should not wait long."""
_STOP_REQUEST_SECONDS = 20.0
_STOP_REQUEST_TRIES = 3


@dataclass
class StopRequest:
    """Asks the ranks to save a checkpoint and end after Ctrl-C, SIGUSR1, or SIGTERM with a grace period. The request is
    a file in the run folder on the head host, because mpirun does not forward signals.
    """

    grace: float | None = None
    """Seconds from SIGTERM until the ranks are killed; with 0, at once. None: no signal asks the ranks first."""
    ctrl_c_seconds: float = 0.0
    """Seconds from the first Ctrl-C until the ranks are killed; with 0, at once."""
    run_dir: str = ""
    """The run folder of this attempt as the ranks see it."""
    prefix: tuple[str, ...] = ()
    """What to put before a shell line to run it on the head host, if that is not this machine."""
    signal_number: int = 0
    """The first signal that requested the end; 0 for none yet."""
    deadline: float = math.inf
    """When the ranks are killed, in seconds of the monotonic clock."""
    is_sent: bool = False

    def handle_signal(self, signal_number: int) -> bool:
        """Return True and record the signal for `check` if it asks the ranks to end; False if they are to be killed.
        SIGUSR1 asks, SIGTERM if no deadline is set and `grace` is above 0, and SIGINT as the first signal if
        `ctrl_c_seconds` is above 0. With `grace` None, no signal asks.
        """
        if self.grace is None:
            return False
        is_first = math.isinf(self.deadline) and not self.signal_number
        seconds = 0.0
        if signal_number == signal.SIGTERM and math.isinf(self.deadline):
            seconds = self.grace
        elif signal_number == signal.SIGINT and is_first:
            seconds = self.ctrl_c_seconds
        if seconds > 0:
            self.deadline = time.monotonic() + seconds
        if seconds > 0 or signal.Signals(signal_number).name == "SIGUSR1":
            self.signal_number = self.signal_number or signal_number
            return True
        return False

    def check(self) -> None:
        """Pass a recorded signal on to the ranks, once, and raise Interrupted if the deadline has passed. The sending
        may take up to 20 s, three times if the connection fails.
        """
        if self.signal_number and not self.is_sent:
            self.is_sent = True
            name = signal.Signals(self.signal_number).name
            if self.signal_number == signal.SIGINT:
                print_message(
                    f"asked the ranks to save a checkpoint and end within {self.ctrl_c_seconds:.0f} s; "
                    "a second Ctrl-C or cpuft stop ends them at once"
                )
            for _ in range(_STOP_REQUEST_TRIES):
                answer = execute.run_command(self.plan_command(name), _STOP_REQUEST_SECONDS)
                if answer.exit_code != execute.SSH_FAILED:
                    break
            if answer.exit_code:
                print_message(f"{name} could not be passed on to the ranks ({answer.text.strip()})")
        if time.monotonic() > self.deadline:
            raise Interrupted(signal.SIGINT if self.signal_number == signal.SIGINT else signal.SIGTERM)

    def plan_command(self, name: str) -> tuple[str, ...]:
        """Return the argv with which this machine writes a signal's name as the request on the head host."""
        path = f"{self.run_dir}/{REQUEST_FILE}"
        command = ("sh", "-c", 'echo "$1" >"$0.new" && mv "$0.new" "$0"', path, name)
        return (*self.prefix, make_shell_line(command)) if self.prefix else command
