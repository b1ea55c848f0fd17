"""What was seen of a rank, from the texts that `cpuft.rank.looking` brings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpuft.serialization import load, parse_json

GONE, SILENT = "gone", "silent"
"""In the place of a state of proc(5): the rank's host knows no such process, or does not answer."""

_TOLD = 3
STALE_SECONDS = 3.0
"""A rank reports twice a second, unless its threads get no turn."""

_FRAME = re.compile(r'^  File "(.*)", line ([0-9]{1,9}) in (.*)$', re.MULTILINE)
_OTHERS = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3[^/]*/|/cpuft/(comm|rank)/|/cpuft/words\.py$")
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
class Wait:
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
class Sight:
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
    waits: tuple[Wait, ...] = ()
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
    """What looking on a host tells of a rank: `cpuft.rank.looking.look`."""

    rank: int
    pid: int
    state: str
    wchan: str
    report: str
    age: float
    stack: str


@dataclass(frozen=True)
class _Report:
    """What a rank tells of itself: `cpuft.rank.reporting`."""

    pending: list[Wait] = field(default_factory=list)
    progress: dict[str, list[Any]] = field(default_factory=dict)
    raised: list[list[Any]] = field(default_factory=list)
    main: list[list[Any]] = field(default_factory=list)


def parse_sight(told: Any, host: str) -> Sight:
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
        waits = [Wait(channel, number, name, 0.0) for channel, (number, name) in progress.items()]
    waits = sorted(waits, key=lambda one: -one.seconds)
    holds_gil = found.state == "R" and found.age > STALE_SECONDS
    frames = raised or parse_dump(found.stack) or main
    place = found.rank, host, found.state, found.pid, found.wchan
    return Sight(*place, frames, () if holds_gil else tuple(waits), progress, holds_gil, found.stack)


def _pair(last: list[Any]) -> tuple[int, str]:
    number, name = last
    return load(int, number), load(str, name)


def _frame(place: list[Any]) -> Frame:
    file, line, function = place
    return Frame(load(str, file), load(int, line), load(str, function))


def fill_gaps(seen: Iterable[Sight], hosts: tuple[str, ...], silent: Iterable[str]) -> tuple[Sight, ...]:
    """All ranks in turn; `hosts` has the host of each, `silent` those that do not answer."""
    found, lost = {sight.rank: sight for sight in seen}, set(silent)
    return tuple(
        found.get(rank) or Sight(rank, host, SILENT if host in lost else GONE) for rank, host in enumerate(hosts)
    )


def format_sight(sight: Sight) -> str:
    """All of it, for a file."""
    lines = [f"rank {sight.rank} on {sight.host}, process {sight.pid}"]
    lines += [f"state: {describe_state(sight)}"]
    lines += [f"in operation: {wait.text}, for {wait.seconds:.1f} s" for wait in sight.waits] or ["in no operation"]
    lines += [f"last operation: {sight.last}"] if sight.last else []
    lines += [f"stands at: {sight.place}"] if sight.place else []
    return "\n".join([*lines, "", sight.dump.rstrip() or "no Python stack could be had", ""])


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


def describe_state(sight: Sight) -> str:
    """What the kernel says of it, in words."""
    where = f" in {sight.wchan}" if sight.wchan and sight.state in ("S", "D") else ""
    where += " in C code that keeps the GIL" if sight.holds_gil else ""
    return _STATES.get(sight.state, f"state {sight.state}") + where
