"""Rented hosts end themselves with their lease: while a run lasts, it goes on, as far as the hosts let it."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cpuft.config import is_count
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.transport import attempt

_EVERY_SECONDS = 300.0
_ANSWER_SECONDS = 20.0
Run = Callable[[str, tuple[str, ...], float], Answer]
"""Runs a command on a host, for so many seconds at most."""


def describe_renewal(words: tuple[str, ...]) -> tuple[str, ...]:
    """What a plan's notes tell of it: no script of steps does that."""
    if not words:
        return ()
    return (f"while ranks run, for the lease to go on, every {_EVERY_SECONDS:.0f} s on each host: {shlex.join(words)}",)


@dataclass
class Renewal:
    """Has the hosts of a run renew their leases, side by side and beside what waits for the ranks."""

    words: tuple[str, ...]
    hosts: tuple[str, ...]
    run: Run
    say: Callable[[str], None]
    now: Callable[[], float] = time.monotonic
    _next: float = 0.0
    _said: set[str] = field(default_factory=set)

    def check(self) -> None:
        """Called now and then while ranks run."""
        if self.words and self.now() >= self._next:
            self._next = self.now() + _EVERY_SECONDS
            threading.Thread(target=self.renew, daemon=True).start()

    def renew(self) -> None:
        """Renew them now; say each limit and each trouble once."""
        answers = attempt(lambda host: self.run(host, self.words, _ANSWER_SECONDS), self.hosts)
        for host, answer in zip(self.hosts, answers):
            line = _describe(host, answer)
            if line not in self._said:
                self._said.add(line)
                self.say(line)


def _describe(host: str, answer: Answer | CpuftError) -> str:
    """The limit, the same for all hosts of a lease; or why a host goes as its lease was."""
    words = [] if isinstance(answer, CpuftError) else answer.output.partition("\n")[0].split()
    if isinstance(answer, Answer) and not answer.exit_code and len(words) == 2 and is_count(words[1]):
        limit = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(int(words[1])))
        return f"the lease of the hosts goes on while the run does, to {limit} at most"
    said = str(answer) if isinstance(answer, CpuftError) else answer.said.strip()[-200:]
    return f"the lease of {host} cannot be renewed ({said}): look at it with cpuft provision status"
