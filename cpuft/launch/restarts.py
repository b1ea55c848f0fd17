"""Whether a run that ended before its time is started again, and on which hosts: decisions only, no host is asked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from cpuft.errors import AGAIN, FULL, counted
from cpuft.hosts.hostfile import Host
from cpuft.launch.failures import Failure, describe_exit

DEFAULT = 3
"""Restarts of a run on several hosts, where nobody asked for a number."""
_IN_VAIN = {2: "refused its options or data", FULL: "found a full disk"}
"""What an exit code says of a process that ended with one line, and would do so again."""
_FROM_OUTSIDE = (137, 143)
"""SIGKILL and SIGTERM: no program does that to itself."""
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Ended:
    """How a start of a run ended, as far as it can be told from here."""

    code: int
    failures: tuple[Failure, ...] = ()
    """Whom to blame first stands first."""
    silent: frozenset[str] = frozenset()
    """Its hosts that do not answer."""
    update: int = 0
    """The last one recorded; 0 for none, and for a script."""
    cut: bool = False
    """Whether the connection to the master was lost."""
    leaving: frozenset[str] = frozenset()
    """Its hosts that were told that they are about to go."""
    unreached: str = ""
    """Which way to a host failed before ranks started, though the host answers."""
    hosts: tuple[str, ...] = ()
    """Of each rank."""


@dataclass(frozen=True)
class Verdict:
    """What to do about it."""

    again: bool
    why: str
    """What was lost, or why another start would be in vain."""
    mark: str = ""
    """By which the same error is known when it comes again; empty for what can come any number of times."""


def count_restarts(asked: int, hosts: int) -> int:
    """How often a run on so many hosts may be started again; `asked` is below 0 where nobody said so."""
    return asked if asked >= 0 else DEFAULT * (hosts > 1)


def judge(ended: Ended, earlier: Collection[str]) -> Verdict:
    """Whether to start again what ended with another exit code than 0; `earlier`: the marks of starts before."""
    for names, how in ((sorted(ended.silent), "lost"), (sorted(ended.leaving), "told to go")):
        if names:
            return Verdict(True, f"host{'s' * (len(names) > 1)} {', '.join(names)} {_were(names)} {how}")
    if ended.cut:
        return Verdict(True, "the connection to the master was lost")
    if ended.unreached:
        return Verdict(True, ended.unreached)
    if not ended.failures:
        if ended.code in _IN_VAIN:
            return Verdict(False, "a disk was full" if ended.code == FULL else "its options or data were refused")
        return _judge_error(ended, "mpirun failed", f"mpirun {ended.code}", earlier)
    first = ended.failures[0]
    blame = f"rank {first.rank} on {first.host}"
    if first.missed:
        where = dict(enumerate(ended.hosts))
        told = ", ".join(f"rank {rank} on {where.get(rank, 'its host')}" for rank in sorted(first.missed))
        return _judge_error(ended, f"{told} did not answer the others", _last_line(first.text), earlier)
    if first.code == AGAIN:
        return Verdict(False, f"{blame} was interrupted")  # who told it to end wants its hosts, or takes them away
    if first.ran_out_of_memory:
        return _judge_error(ended, f"{blame} ran out of memory", "out of memory", earlier)
    if first.code in _FROM_OUTSIDE or first.lost_its_peer:
        how = describe_exit(first.code).partition(" (")[0]
        return Verdict(True, f"{blame} was {how}" if first.code > 128 else f"{blame} lost another rank")
    if first.code in _IN_VAIN:
        return Verdict(False, f"{blame} {_IN_VAIN[first.code]}")
    return _judge_error(ended, f"{blame} failed ({describe_exit(first.code)})", _find_mark(first), earlier)


def _judge_error(ended: Ended, what: str, mark: str, earlier: Collection[str]) -> Verdict:
    """An error that may be the job's own: it is, when it comes again at the same update."""
    mark = f"{ended.update} {mark}"
    if mark in earlier:
        where = f" at update {ended.update}" if ended.update else ""
        return Verdict(False, f"{what}, as it had before{where}", mark)
    return Verdict(True, what, mark)


def _find_mark(failure: Failure) -> str:
    """What a rank's last traceback says, without addresses of memory."""
    start = failure.text.rfind(_TRACEBACK)
    said = failure.text[start:].strip() if start >= 0 else ""
    return f"{failure.code} {re.sub('0x[0-9a-f]+', '0x', said)}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def choose_hosts(
    hosts: Sequence[Host], silent: Collection[str], before: Mapping[str, int], np: int
) -> tuple[tuple[Host, ...], int]:
    """The hosts that answer, in the order of the hostfile, and the ranks to start on them: `np` at most.

    No host gets more than it had: `before` has the ranks of each host of the first start; one that had none gets as
    many as the fullest.
    """
    left = tuple(host for host in hosts if host.name not in silent)
    most = max(before.values())
    room = [before.get(host.name) or min(most, host.slots or most) for host in left]
    return left, min(np, sum(room))


def describe_restart(number: int, limit: int, why: str, hosts: Sequence[str], ranks: int, update: int) -> str:
    """The line that a user sees when a run is started again; `update`: the last one that is kept, 0 for none."""
    plural = "s" * (ranks == 1)
    start = f"continue{plural} after update {update}"
    if update <= 0:
        start = f"start{plural} from the beginning, because no checkpoint had been saved yet"
    return f"restart {number} of {limit}: {why}; {counted(ranks, 'rank')} on {', '.join(hosts)} {start}"


def _were(names: Collection[str]) -> str:
    return "were" if len(names) > 1 else "was"
