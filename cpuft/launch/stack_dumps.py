"""Stack dumps: gather what the ranks of a run are doing, and find the rank that the others wait for."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.cluster import FROM_STDIN, Access
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport, attempt
from cpuft.rank import dump_stacks
from cpuft.serialization import load, parse_json

GONE, SILENT = "gone", "silent"
"""In the place of a state of proc(5): the rank's host knows no such process, or does not answer."""

_TOLD = 3
STALE_SECONDS = 3.0
"""A rank reports twice a second, unless its threads get no turn."""

_FRAME = re.compile(r'^  File "(.*)", line ([0-9]{1,9}) in (.*)$', re.MULTILINE)
_OTHERS = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3[^/]*/|/cpuft/(comm|rank)/|/cpuft/argv\.py$")
_TRAINING = re.compile(r"/cpuft/(train|bench)/")
_WAITING = re.compile(r"/torch/distributed/|/torch/autograd/graph\.py$|/cpuft/comm/|/mpi4py/")
_SENT = re.compile(r"^/var/tmp/cpuft-\d+/inputs/[0-9a-f]+/")


@dataclass(frozen=True)
class Frame:
    """A line that a thread stands on, or that called it."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class PendingOperation:
    """An operation that has not ended."""

    channel: str
    sequence: int
    name: str
    seconds: float
    """How long, so far."""
    ranks: tuple[int, ...] = ()
    """All that take part; empty where that is not known, and all have to be asked."""

    @property
    def text(self) -> str:
        """As every line calls it."""
        return f"{self.name} #{self.sequence} of {self.channel}"


@dataclass(frozen=True)
class RankDump:
    """A rank, as it was seen."""

    rank: int
    host: str
    state: str
    """Letter of proc(5), GONE or SILENT."""
    pid: int = 0
    wchan: str = ""
    """The kernel's function that it waits in."""
    frames: tuple[Frame, ...] = ()
    """Of its main thread, the innermost first; of one that is stopped, as they were half a second before at most."""
    waits: tuple[PendingOperation, ...] = ()
    """The longest first."""
    progress: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Last operation it has started, by channel: sequence number and name."""
    holds_gil: bool = False
    """Whether it computes and its other threads get no turn: in C code, outside of all collectives."""
    dump: str = ""
    """All its threads, as faulthandler writes them."""

    @property
    def place(self) -> str:
        """Where it stands in the user's code, or cpuft's training: file:line in function; "" if that is unknown."""
        own = (one for one in self.frames if _TRAINING.search(one.file) or not _OTHERS.search(one.file))
        frame = next(own, self.frames[0] if self.frames else None)
        return f"{_shorten(frame.file)}:{frame.line} in {frame.function}" if frame else ""

    @property
    def is_in_collective(self) -> bool:
        """Whether its main thread is in code that waits for other ranks, as far as its stack shows."""
        return any(_WAITING.search(frame.file) for frame in self.frames)

    @property
    def last(self) -> str:
        """The operations that it has started last, in the groups that it has used first; none between two ranks."""
        groups = [(channel, *last) for channel, last in self.progress.items() if " from " not in channel]
        told = [f"{name} #{number} of {channel}" for channel, number, name in groups]
        return ", ".join(told[:_TOLD] + ["..."] * (len(told) > _TOLD))


def _shorten(path: str) -> str:
    """A path as a user knows it: from where they are, or without the folder of a host's that it was sent to."""
    sent = _SENT.sub("", path)
    here = os.path.relpath(path or ".")
    return sent if sent != path else path if here.startswith("..") else here


def parse_dump(text: str) -> tuple[Frame, ...]:
    """The main thread's frames of faulthandler's text: of the thread that got the signal, or else of the oldest one.

    The kernel gives a process's signals to its main thread, and faulthandler tells of the oldest thread last.
    """
    blocks = re.split(r"\n(?=(?:Current )?[Tt]hread 0x)", text)
    main = next((block for block in blocks if block.startswith("Current thread")), blocks[-1])
    return tuple(Frame(file, int(line), function) for file, line, function in _FRAME.findall(main))


@dataclass(frozen=True)
class _Found:
    """What looking on a host tells of a rank: `cpuft.rank.dump_stacks.dump_stacks`."""

    rank: int
    pid: int
    state: str
    wchan: str
    report: str
    age: float
    stack: str


@dataclass(frozen=True)
class _Report:
    """What a rank tells of itself: `cpuft.rank.diagnostics`."""

    pending: list[PendingOperation] = field(default_factory=list)
    progress: dict[str, list[Any]] = field(default_factory=dict)
    raised: list[list[Any]] = field(default_factory=list)
    main: list[list[Any]] = field(default_factory=list)


def parse_rank_dump(told: Any, host: str) -> RankDump:
    """One of the objects that a host's looking gave. What a rank was about to write is taken for nothing.

    Raises ValueError: it is none.
    """
    found = load(_Found, told)
    try:
        report = load(_Report, parse_json(found.report or "{}"))
        progress = {channel: _pair(last) for channel, last in report.progress.items()}
        # A rank that torch's own deadline has thrown out of an operation had waited in it.
        raised, main = tuple(map(_frame, report.raised)), tuple(map(_frame, report.main))
    except ValueError:
        report, progress, raised, main = _Report(), {}, (), ()
    waits = report.pending
    if raised and not waits:
        waits = [PendingOperation(channel, number, name, 0.0) for channel, (number, name) in progress.items()]
    waits = sorted(waits, key=lambda one: -one.seconds)
    holds_gil = found.state == "R" and found.age > STALE_SECONDS
    frames = raised or parse_dump(found.stack) or main
    place = found.rank, host, found.state, found.pid, found.wchan
    return RankDump(*place, frames, () if holds_gil else tuple(waits), progress, holds_gil, found.stack)


def _pair(last: list[Any]) -> tuple[int, str]:
    number, name = last
    return load(int, number), load(str, name)


def _frame(place: list[Any]) -> Frame:
    file, line, function = place
    return Frame(load(str, file), load(int, line), load(str, function))


def complete_dumps(seen: Iterable[RankDump], hosts: tuple[str, ...], silent: Iterable[str]) -> tuple[RankDump, ...]:
    """All ranks in turn; `hosts` has the host of each, `silent` those that do not answer."""
    found, lost = {dump.rank: dump for dump in seen}, set(silent)
    return tuple(
        found.get(rank) or RankDump(rank, host, SILENT if host in lost else GONE) for rank, host in enumerate(hosts)
    )


def format_rank_dump(dump: RankDump) -> str:
    """All of it, for a file."""
    lines = [f"rank {dump.rank} on {dump.host}, process {dump.pid}"]
    lines += [f"state: {describe_state(dump)}"]
    lines += [f"in operation: {wait.text}, for {wait.seconds:.1f} s" for wait in dump.waits] or ["in no operation"]
    lines += [f"last operation: {dump.last}"] if dump.last else []
    lines += [f"stands at: {dump.place}"] if dump.place else []
    return "\n".join([*lines, "", dump.dump.rstrip() or "no Python stack could be had", ""])


_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waiting for a device (D)",
    "T": "stopped (T)",
    "t": "stopped by a debugger (t)",
    "Z": "ended (Z)",
    GONE: "no such process",
    SILENT: "its host does not answer",
}


def describe_state(dump: RankDump) -> str:
    """What the kernel says of it, in words."""
    where = f" in {dump.wchan}" if dump.wchan and dump.state in ("S", "D") else ""
    where += " in C code that keeps the GIL" if dump.holds_gil else ""
    return _STATES.get(dump.state, f"state {dump.state}") + where


LONG_SECONDS = 2.0
"""An operation that has taken so long may hang."""
_STILL = (GONE, SILENT, "T", "t", "Z")
_NAMED = 3


@dataclass(frozen=True)
class Diagnosis:
    """Who is to blame, and the line that says so."""

    culprits: tuple[int, ...]
    text: str


def diagnose(dumps: Sequence[RankDump], least_seconds: float = LONG_SECONDS) -> Diagnosis:
    """The ranks, all of a run in turn, that the others wait for; operations count that have taken `least_seconds`.

    Whom others wait for and who waits for nobody is to blame. Where all wait for each other, because they are in
    different operations or at different lines, those few are that differ from most. Lines count only where no operation
    is known of any rank: in a run that goes on all stand somewhere else.
    """
    waiting = {one.rank for one in dumps if _waits(one, least_seconds)}
    behind = {rank: find_behind(dumps, dumps[rank]) for rank in waiting}
    missed = {other for others in behind.values() for other in others}
    still = {one.rank for one in dumps if one.state in _STILL}
    if still or missed - waiting:
        return _blame(dumps, still or missed - waiting, waiting)
    if missed:
        longest = {rank: dumps[rank].waits[0] for rank in sorted(waiting)}
        odd = _find_odd(dumps, sorted(waiting), lambda one: longest[one.rank].text)
        return _blame(dumps, odd, waiting) if odd else Diagnosis((), _tell_apart(dumps, sorted(waiting)))
    if waiting:
        return Diagnosis((), _tell_stuck(dumps, waiting))
    if any(one.progress for one in dumps):
        return Diagnosis((), "no rank has waited for long in an operation: the run goes on")
    return _judge_by_stacks(dumps)


def find_behind(dumps: Sequence[RankDump], dump: RankDump) -> set[int]:
    """The ranks that keep the oldest operation of `dump` from ending: not there yet, or in another of its number."""
    wait = dump.waits[0]
    behind = set()
    for other in dumps:
        takes_part = other.rank in wait.ranks or (not wait.ranks and _may_take_part(other, wait.channel))
        sequence, name = other.progress.get(wait.channel, (0, ""))
        if other.rank != dump.rank and takes_part and (sequence, name) != (wait.sequence, wait.name):
            behind |= {other.rank} if sequence <= wait.sequence else set()
    return behind


def _may_take_part(dump: RankDump, channel: str) -> bool:
    """Whether it is in a group of which nobody says who else is; of a rank that keeps the GIL not all is known."""
    known = channel == "the world" or channel in dump.progress or dump.holds_gil
    return known and "between two" not in channel


def _waits(dump: RankDump, least_seconds: float) -> bool:
    """Whether it is in an operation, long since or thrown out of it, and is not stopped itself."""
    return bool(dump.waits) and dump.state not in _STILL and not 0 < dump.waits[0].seconds < least_seconds


def _judge_by_stacks(dumps: Sequence[RankDump]) -> Diagnosis:
    inside = {one.rank for one in dumps if one.is_in_collective}
    outside = {one.rank for one in dumps if one.frames} - inside
    if inside and 0 < len(outside) <= len(inside):
        return _blame(dumps, outside, inside)
    ranks = [one.rank for one in dumps]
    odd = _find_odd(dumps, ranks, lambda one: one.place)
    if odd and any(dump.frames for dump in dumps):
        return _blame(dumps, odd, set(ranks) - odd)
    return Diagnosis((), "no rank waits for another one that could be seen: the run goes on, or all do the same")


def _find_odd(dumps: Sequence[RankDump], ranks: Sequence[int], kind: Callable[[RankDump], Hashable]) -> set[int]:
    """The ranks that are not of the kind of most; none where no kind has more than half of them."""
    kinds = {rank: kind(dumps[rank]) for rank in ranks}
    ((most, count),) = Counter(kinds.values()).most_common(1)
    return {rank for rank in ranks if kinds[rank] != most} if 2 * count > len(ranks) else set()


def _blame(dumps: Sequence[RankDump], culprits: set[int], waiting: set[int]) -> Diagnosis:
    named = sorted(culprits)
    others = sorted(waiting - culprits)
    for_what = dumps[others[0]].waits[0].text if others and dumps[others[0]].waits else ""
    who = f"{_ranks(others)} {'waits' if len(others) == 1 else 'wait'}" if others else ""
    held = f" holds up the others ({who}{f' in {for_what}' if for_what else ''})" if others else ""
    texts = [f"rank {rank} on {dumps[rank].host}{held}: {_describe(dumps[rank])}" for rank in named[:_NAMED]]
    more = [f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else []
    return Diagnosis(tuple(named), "; ".join(texts + more))


def _describe(dump: RankDump) -> str:
    """What a rank does that others wait for."""
    at = f"at {dump.place}" if dump.place else "at an unknown line: it shows no Python stack"
    if dump.state in ("T", "t"):
        last = "".join(f", last {how} {what}" for how, what in (("at", dump.place), ("in", dump.last)) if what)
        return f"it is {describe_state(dump)}{last}; kill -CONT {dump.pid} there lets it go on"
    if dump.state in _STILL:
        return {GONE: "it has ended", "Z": "it has ended"}.get(dump.state, describe_state(dump))
    if dump.waits:
        return f"it is in {dump.waits[0].text}, {at}"
    return f"it stands {at}, {describe_state(dump)}"


def _tell_apart(dumps: Sequence[RankDump], ranks: Sequence[int]) -> str:
    texts = [
        f"rank {rank} in {dumps[rank].waits[0].text} at {dumps[rank].place or 'an unknown line'}" for rank in ranks
    ]
    return f"ranks wait for each other: {'; '.join(texts[: 2 * _NAMED])}"


def _tell_stuck(dumps: Sequence[RankDump], waiting: set[int]) -> str:
    dump = dumps[min(waiting)]
    return (
        f"all ranks have arrived at {dump.waits[0].text}, which does not end: look at the network between the hosts; "
        f"rank {dump.rank} stands at {dump.place or 'an unknown line'}"
    )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, numbers))}"


LOOK_SECONDS = 3.0
"""How long a host's ranks may take to write their stacks; they need some milliseconds."""
_ANSWER_SECONDS = 15.0
_WRITE = "import json, sys; [open(path, 'w').write(text) for path, text in json.load(sys.stdin).items()]"


@dataclass(frozen=True)
class ActiveRun:
    """Where a run goes on."""

    work: str
    """Its folder, as its ranks know it."""
    hosts: tuple[Host, ...]
    """Of each rank."""
    access: Access


def gather_dumps(place: ActiveRun) -> tuple[tuple[RankDump, ...], dict[str, str]]:
    """All ranks, and which hosts do not answer, each with the reason. All hosts are asked at once."""
    source = Path(dump_stacks.__file__).read_text(encoding="utf-8")
    words = place.access.any_python("-c", FROM_STDIN, place.work, str(LOOK_SECONDS))

    def ask(host: Host) -> list[RankDump]:
        answer = place.access.transport.run(host, words, source, _ANSWER_SECONDS)
        try:
            return [parse_rank_dump(found, host.name) for found in load(list[Any], parse_json(answer.output))]
        except ValueError:
            said = (answer.errors.strip().splitlines() or ["it said nothing"])[-1]
            raise CpuftError(f"host {host.name} could not tell what its ranks do ({said}): log in and look") from None

    hosts = list(dict.fromkeys(place.hosts))
    answers = dict(zip((host.name for host in hosts), attempt(ask, hosts)))
    silent = {name: str(answer) for name, answer in answers.items() if isinstance(answer, CpuftError)}
    seen = [dump for answer in answers.values() if not isinstance(answer, CpuftError) for dump in answer]
    return complete_dumps(seen, tuple(host.name for host in place.hosts), silent), silent


def write_dumps(place: ActiveRun, dumps: tuple[RankDump, ...]) -> None:
    """Keep what was seen, a file for each rank, in the run's logs, which are on the master.

    Raises CpuftError: the master does not take them.
    """
    files = {f"{place.work}/logs/rank-{dump.rank}.stack": format_rank_dump(dump) for dump in dumps}
    master = place.hosts[0]
    if place.access.transport.is_here(master):
        for path, text in files.items():
            write_text(Path(path), text)
        return
    answer = place.access.transport.run(
        master, place.access.any_python("-c", _WRITE), json.dumps(files), _ANSWER_SECONDS
    )
    if answer.exit_code:
        said = (answer.errors.strip().splitlines() or ["it said nothing"])[-1]
        raise CpuftError(f"host {master.name} could not keep the stacks ({said}): look at its disk")


def diagnose_run(
    run_dir: str, hosts: tuple[str, ...], transport: Transport, say: Callable[[str], None]
) -> tuple[Diagnosis, set[str]]:
    """Ranks have waited in vain: look at all, before any is ended. Whom they wait for; hosts that do not answer.

    `hosts` names that of each rank, as mpirun knows it from here.
    """
    place = ActiveRun(run_dir, tuple(map(Host, hosts)), Access(transport, sys.executable))
    dumps, silent = gather_dumps(place)
    write_dumps(place, dumps)
    say(f"stacks of all ranks: {run_dir}/logs/rank-N.stack")
    return diagnose(dumps, 0.0), set(silent)
