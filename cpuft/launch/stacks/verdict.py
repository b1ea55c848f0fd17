"""Which rank do the others wait for: from their operations where these are known, else from where they stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from cpuft.launch.stacks.sights import GONE, SILENT, Sight, describe_state

LONG_SECONDS = 2.0
"""An operation that has taken so long may hang."""
_STILL = (GONE, SILENT, "T", "t", "Z")
_NAMED = 3


@dataclass(frozen=True)
class Verdict:
    """Who is to blame, and the line that says so."""

    culprits: tuple[int, ...]
    text: str


def judge(sights: Sequence[Sight], least_seconds: float = LONG_SECONDS) -> Verdict:
    """The ranks, all of a run in turn, that the others wait for; operations count that have taken `least_seconds`.

    Whom others wait for and who waits for nobody is to blame. Where all wait for each other, because they are in
    different operations or at different lines, those few are that differ from most. Lines count only where no operation
    is known of any rank: in a run that goes on all stand somewhere else.
    """
    waiting = {one.rank for one in sights if _waits(one, least_seconds)}
    behind = {rank: find_behind(sights, sights[rank]) for rank in waiting}
    missed = {other for others in behind.values() for other in others}
    still = {one.rank for one in sights if one.state in _STILL}
    if still or missed - waiting:
        return _blame(sights, still or missed - waiting, waiting)
    if missed:
        longest = {rank: sights[rank].waits[0] for rank in sorted(waiting)}
        odd = _find_odd(sights, sorted(waiting), lambda one: longest[one.rank].text)
        return _blame(sights, odd, waiting) if odd else Verdict((), _tell_apart(sights, sorted(waiting)))
    if waiting:
        return Verdict((), _tell_stuck(sights, waiting))
    if any(one.progress for one in sights):
        return Verdict((), "no rank has waited for long in an operation: the run goes on")
    return _judge_by_stacks(sights)


def find_behind(sights: Sequence[Sight], sight: Sight) -> set[int]:
    """The ranks that keep the oldest operation of `sight` from ending: not there yet, or in another of its number."""
    wait = sight.waits[0]
    behind = set()
    for other in sights:
        takes_part = other.rank in wait.ranks or (not wait.ranks and _may_take_part(other, wait.channel))
        sequence, name = other.progress.get(wait.channel, (0, ""))
        if other.rank != sight.rank and takes_part and (sequence, name) != (wait.sequence, wait.name):
            behind |= {other.rank} if sequence <= wait.sequence else set()
    return behind


def _may_take_part(sight: Sight, channel: str) -> bool:
    """Whether it is in a group of which nobody says who else is; of a rank that keeps the GIL not all is known."""
    known = channel == "the world" or channel in sight.progress or sight.holds_gil
    return known and "between two" not in channel


def _waits(sight: Sight, least_seconds: float) -> bool:
    """Whether it is in an operation, long since or thrown out of it, and is not stopped itself."""
    return bool(sight.waits) and sight.state not in _STILL and not 0 < sight.waits[0].seconds < least_seconds


def _judge_by_stacks(sights: Sequence[Sight]) -> Verdict:
    inside = {one.rank for one in sights if one.is_in_collective}
    outside = {one.rank for one in sights if one.frames} - inside
    if inside and 0 < len(outside) <= len(inside):
        return _blame(sights, outside, inside)
    ranks = [one.rank for one in sights]
    odd = _find_odd(sights, ranks, lambda one: one.place)
    if odd and any(sight.frames for sight in sights):
        return _blame(sights, odd, set(ranks) - odd)
    return Verdict((), "no rank waits for another one that could be seen: the run goes on, or all do the same")


def _find_odd(sights: Sequence[Sight], ranks: Sequence[int], kind: Callable[[Sight], Hashable]) -> set[int]:
    """The ranks that are not of the kind of most; none where no kind has more than half of them."""
    kinds = {rank: kind(sights[rank]) for rank in ranks}
    ((most, count),) = Counter(kinds.values()).most_common(1)
    return {rank for rank in ranks if kinds[rank] != most} if 2 * count > len(ranks) else set()


def _blame(sights: Sequence[Sight], culprits: set[int], waiting: set[int]) -> Verdict:
    named = sorted(culprits)
    others = sorted(waiting - culprits)
    for_what = sights[others[0]].waits[0].text if others and sights[others[0]].waits else ""
    who = f"{_ranks(others)} {'waits' if len(others) == 1 else 'wait'}" if others else ""
    held = f" holds up the others ({who}{f' in {for_what}' if for_what else ''})" if others else ""
    texts = [f"rank {rank} on {sights[rank].host}{held}: {_describe(sights[rank])}" for rank in named[:_NAMED]]
    more = [f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else []
    return Verdict(tuple(named), "; ".join(texts + more))


def _describe(sight: Sight) -> str:
    """What a rank does that others wait for."""
    at = f"at {sight.place}" if sight.place else "at an unknown line: it shows no Python stack"
    if sight.state in ("T", "t"):
        last = "".join(f", last {how} {what}" for how, what in (("at", sight.place), ("in", sight.last)) if what)
        return f"it is {describe_state(sight)}{last}; kill -CONT {sight.pid} there lets it go on"
    if sight.state in _STILL:
        return {GONE: "it has ended", "Z": "it has ended"}.get(sight.state, describe_state(sight))
    if sight.waits:
        return f"it is in {sight.waits[0].text}, {at}"
    return f"it stands {at}, {describe_state(sight)}"


def _tell_apart(sights: Sequence[Sight], ranks: Sequence[int]) -> str:
    texts = [
        f"rank {rank} in {sights[rank].waits[0].text} at {sights[rank].place or 'an unknown line'}" for rank in ranks
    ]
    return f"ranks wait for each other: {'; '.join(texts[: 2 * _NAMED])}"


def _tell_stuck(sights: Sequence[Sight], waiting: set[int]) -> str:
    sight = sights[min(waiting)]
    return (
        f"all ranks have arrived at {sight.waits[0].text}, which does not end: look at the network between the hosts; "
        f"rank {sight.rank} stands at {sight.place or 'an unknown line'}"
    )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, numbers))}"
