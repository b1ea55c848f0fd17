"""Faults, drawn at random, and how a run must name them: pure functions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

HOSTS = ("kill worker", "pause worker", "cut worker", "kill master", "pause master", "cut master")
RANKS = ("SIGKILL rank", "SIGSTOP rank")
PROCESSES = ("SIGKILL ssh", "SIGKILL supervisor", "SIGKILL mpirun", "SIGKILL proxy")
KINDS = (*HOSTS, *RANKS, *PROCESSES)


@dataclass(frozen=True)
class Fault:
    """What is done to a run."""

    kind: str
    number: int
    """Of the rank or host, from 0; one rank runs on each host, the master is 0."""
    step: int
    """After so many updates; 0: as soon as ranks start."""

    def describe(self) -> str:
        """For the table."""
        return self.kind if self.kind in PROCESSES or "master" in self.kind else f"{self.kind} {self.number}"


@dataclass(frozen=True)
class Target:
    """Who was hit, in the words that lines may use."""

    host: str = ""
    """Empty where no host and no rank was: any line that says something will do, if it blames no host."""
    rank: int = -1
    others: tuple[str, ...] = ()
    """Hosts that must not be blamed."""


def draw_faults(count: int, seed: int, nodes: int, steps: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """So many faults, of every kind about as many, in any order and at any moment but the last updates."""
    chance = random.Random(seed)
    drawn: list[Fault] = []
    while len(drawn) < count:
        for kind in chance.sample(list(kinds), len(kinds)):
            moment = chance.choice([0, *range(1, steps * 3 // 4)])
            drawn.append(Fault(kind, _draw_number(kind, nodes, chance), moment))
    return drawn[:count]


def _draw_number(kind: str, nodes: int, chance: random.Random) -> int:
    return 0 if "master" in kind else chance.randrange(1 if "worker" in kind else 0, nodes)


def was_named(target: Target, lines: Sequence[str]) -> bool:
    """Whether the lines of a launch name who was hit, and nobody else as lost or stopped."""
    text = "\n".join(line for line in lines if "does not answer" in line or "failed" in line or "lost" in line)
    text += "\n".join(line for line in lines if "did not answer the others" in line or "others wait for" in line)
    blamed = [host for host in target.others if f"host {host} does not answer" in text]
    if not target.host:
        return bool(text) and not blamed
    own = rf"(?<![\w.-]){re.escape(target.host)}(?!\w)" if target.rank < 0 else rf"\brank {target.rank} on\b"
    return not blamed and bool(re.search(own, text))
