"""Faults, drawn at random, and how a run must name them: pure functions."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

HOSTS = ("kill worker", "pause worker", "cut worker", "kill master", "pause master", "cut master")
TWO = ("kill two",)
"""Two workers at the same moment, of which one may be the second host with checkpoints."""
RANKS = ("SIGKILL rank", "SIGSTOP rank")
PROCESSES = ("SIGKILL ssh", "SIGKILL supervisor", "SIGKILL mpirun", "SIGKILL proxy")
KINDS = (*HOSTS, *TWO, *RANKS, *PROCESSES)
STAGES = ("prepare", "start", "train", "checkpoint", "evaluate", "save", "fetch", "restart")
"""Of a run, in their order; `restart`: while it starts again after another fault."""
WITH_RANKS = ("train", "checkpoint", "evaluate")
"""Stages in which every rank and mpirun are surely there."""


@dataclass(frozen=True)
class Fault:
    """What is done to a run."""

    kind: str
    number: int
    """Of the rank or host, from 0; one rank runs on each host, the master is 0."""
    step: int
    """After so many updates, in the stages `train` and `checkpoint`; 0: as soon as ranks start."""
    stage: str = "train"

    @property
    def numbers(self) -> tuple[int, ...]:
        """All hosts that are hit."""
        return (1, self.number) if self.kind in TWO else (self.number,)

    def describe(self) -> str:
        """For the table."""
        number = "" if self.kind in PROCESSES or "master" in self.kind else f" {self.number}"
        return f"{self.kind}{number}, {self.stage}"


@dataclass(frozen=True)
class Target:
    """Who was hit, in the words that lines may use."""

    host: str = ""
    """Empty where no host and no rank was: any line that says something will do, if it blames no host."""
    rank: int = -1
    others: tuple[str, ...] = ()
    """Hosts that must not be blamed."""


def draw_faults(
    count: int,
    seed: int,
    nodes: int,
    steps: int,
    kinds: Sequence[str] = KINDS,
    stages: Sequence[str] = STAGES,
) -> list[Fault]:
    """So many faults: every stage about as often, and in each stage the kinds that can happen there in any order."""
    chance = random.Random(seed)
    left = {stage: list[str]() for stage in stages}
    drawn: list[Fault] = []
    while len(drawn) < count:
        for stage in stages:
            possible = [kind for kind in kinds if stage in WITH_RANKS or kind in (*HOSTS, *TWO)]
            if not possible:
                continue
            left[stage] = left[stage] or chance.sample(possible, len(possible))
            kind = left[stage].pop()
            moment = chance.choice(range(1, steps * 3 // 4))
            drawn.append(Fault(kind, _draw_number(kind, nodes, chance), moment, stage))
    return drawn[:count]


def _draw_number(kind: str, nodes: int, chance: random.Random) -> int:
    if kind in TWO:
        return chance.randrange(2, nodes)
    return 0 if "master" in kind else chance.randrange(1 if "worker" in kind else 0, nodes)


def was_named(target: Target, lines: Sequence[str]) -> bool:
    """Whether the lines of a launch name who was hit, and nobody else as lost or stopped."""
    marks = ("does not answer", "did not answer", "failed", "lost", "others wait for")
    text = "\n".join(line for line in lines if any(mark in line for mark in marks))
    blamed = [host for host in target.others if f"host {host} does not answer" in text]
    if not target.host:
        return bool(text) and not blamed
    own = rf"(?<![\w.-]){re.escape(target.host)}(?!\w)" if target.rank < 0 else rf"\brank {target.rank} on\b"
    return not blamed and bool(re.search(own, text))
