"""Stack dumps: gather what the ranks of a run are doing, and find the rank that the others wait for."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cpuft.errors import CpuftError, last_line
from cpuft.hosts.cluster import Access
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import Transport, try_hosts
from cpuft.rank import dump_stacks
from cpuft.serialization import load, parse_json

GONE, UNREACHABLE = "gone", "unreachable"
"""States beside those of proc(5): the host has no such process, or the host does not answer."""
STALE_SECONDS = 3.0
"""Age of a report that shows that the rank's threads cannot run. Otherwise a rank reports twice a second."""
DUMP_SECONDS = 3.0
"""How long the ranks of a host may take to write their stacks. They need some milliseconds."""
LONG_SECONDS = 2.0
"""An operation that takes longer than this may hang."""
NO_WAIT = "no rank has waited long in an operation: the run is probably making progress"
_ANSWER_SECONDS = 15.0
_MOST_OPERATIONS = 3
"""Number of last operations in a message."""
_MOST_CULPRITS = 3
"""Number of ranks that a message describes."""
_WRITE_FILES = """import json, os, sys
for path, text in json.load(sys.stdin).items():
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write(text)
"""
_FRAME = re.compile(r'^  File "(.*)", line ([0-9]{1,9}) in (.*)$', re.MULTILINE)
_LIBRARIES = re.compile(r"^<|/(site|dist)-packages/|/lib(64)?/python3[^/]*/|/cpuft/(comm|rank)/|/cpuft/argv\.py$")
_TRAINING = re.compile(r"/cpuft/train/")
_WAITING = re.compile(r"/torch/distributed/|/torch/autograd/graph\.py$|/cpuft/comm/|/mpi4py/")
_BUNDLE = re.compile(r"^/var/tmp/cpuft-\d+/inputs/[0-9a-f]+/")
_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waiting for a device (D)",
    "T": "stopped (T)",
    "t": "stopped by a debugger (t)",
    "Z": "ended (Z)",
    GONE: "no such process",
    UNREACHABLE: "its host does not answer",
}
_INACTIVE = (GONE, UNREACHABLE, "T", "t", "Z")


@dataclass(frozen=True)
class ActiveRun:
    """Where a run is active."""

    work: str
    """The run folder as the ranks see it."""
    hosts: tuple[Host, ...]
    """The host of each rank."""
    access: Access


@dataclass(frozen=True)
class Frame:
    """One entry of a call stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class PendingOperation:
    """A collective or point-to-point operation that has not finished."""

    channel: str
    """The process group of the operation, such as "the world" or "group 1". An operation between two ranks has a
    channel of its own: "the world, between two" (torch) or "the world from 0 to 1 (tag 3)" (cpuft.comm)."""
    sequence: int
    """Number of the operation in its channel."""
    name: str
    seconds: float
    """How long the operation has taken so far."""
    ranks: tuple[int, ...] = ()
    """The ranks that take part; empty if unknown."""

    @property
    def text(self) -> str:
        """For example "all_reduce #6 of the world"."""
        return f"{self.name} #{self.sequence} of {self.channel}"


@dataclass(frozen=True)
class RankDump:
    """What one rank is doing."""

    rank: int
    host: str
    state: str
    """The process state as a letter of proc(5), such as "R" or "S", or GONE or UNREACHABLE."""
    pid: int = 0
    wchan: str = ""
    """The kernel function in which the process sleeps."""
    frames: tuple[Frame, ...] = ()
    """Call stack of the main thread, innermost first. Of a stopped rank it is up to half a second old."""
    pending: tuple[PendingOperation, ...] = ()
    """The longest first."""
    progress: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """For each channel the sequence number and name of the last operation that the rank started."""
    holds_gil: bool = False
    """Whether the rank runs C code outside of collectives that keeps its other threads from running."""
    stacks: str = ""
    has_raised: bool = False
    """Whether an error ended the rank's script, whose place `frames` is."""

    @property
    def location(self) -> str:
        """Innermost place in the user's or cpuft's training code, else in any: "file:line in function"; "" for none."""
        own = (one for one in self.frames if _TRAINING.search(one.file) or not _LIBRARIES.search(one.file))
        frame = next(own, self.frames[0] if self.frames else None)
        return f"{_shorten(frame.file)}:{frame.line} in {frame.function}" if frame else ""

    @property
    def is_in_collective(self) -> bool:
        """Whether the main thread's stack has a frame of torch.distributed, autograd's graph, cpuft.comm or mpi4py."""
        return any(_WAITING.search(frame.file) for frame in self.frames)

    @property
    def last_operations(self) -> str:
        """The last operations of up to three channels, "all_reduce #6 of the world, ..."; "" for none. Those between
        two ranks of cpuft.comm are left out.
        """
        groups = [(channel, *last) for channel, last in self.progress.items() if " from " not in channel]
        texts = [f"{name} #{number} of {channel}" for channel, number, name in groups]
        return ", ".join(texts[:_MOST_OPERATIONS] + ["..."] * (len(texts) > _MOST_OPERATIONS))


def _shorten(path: str) -> str:
    """Return a path relative to the working directory, or to the folder on a host to which it was sent."""
    sent = _BUNDLE.sub("", path)
    relative = os.path.relpath(path or ".")
    return sent if sent != path else path if relative.startswith("..") else relative


def describe_state(dump: RankDump) -> str:
    """Return the state of a rank's process in words: "running", "asleep in futex_wait_queue", "stopped (T)", or
    "running in C code that keeps the GIL".
    """
    where = f" in {dump.wchan}" if dump.wchan and dump.state in ("S", "D") else ""
    where += " in C code that keeps the GIL" if dump.holds_gil else ""
    return _STATES.get(dump.state, f"state {dump.state}") + where


def format_rank_dump(dump: RankDump) -> str:
    """Return the text of a rank's `.stack` file: lines on process, state, operations and location, then the stacks."""
    lines = [f"rank {dump.rank} on {dump.host}, process {dump.pid}"]
    lines += [f"state: {describe_state(dump)}"]
    lines += [f"in operation: {one.text}, for {one.seconds:.1f} s" for one in dump.pending] or ["in no operation"]
    lines += [f"last operation: {dump.last_operations}"] if dump.last_operations else []
    lines += [f"location: {dump.location}"] if dump.location else []
    return "\n".join([*lines, "", dump.stacks.rstrip() or "no Python stack is available", ""])


def parse_stack(text: str) -> tuple[Frame, ...]:
    """Return the frames of the main thread from faulthandler's text, innermost first: of the thread that got the
    signal, else of the oldest one, which is last; () without frames.
    """
    blocks = re.split(r"\n(?=(?:Current )?[Tt]hread 0x)", text)
    main = next((block for block in blocks if block.startswith("Current thread")), blocks[-1])
    return tuple(Frame(file, int(line), function) for file, line, function in _FRAME.findall(main))


@dataclass(frozen=True)
class _Found:
    """What `cpuft.rank.dump_stacks` prints about a rank."""

    rank: int
    pid: int
    state: str
    wchan: str
    report: str
    age: float
    stack: str


@dataclass(frozen=True)
class _Report:
    """What a rank reports about itself with `cpuft.rank.diagnostics`."""

    pending: tuple[PendingOperation, ...] = ()
    progress: dict[str, list[Any]] = field(default_factory=dict)
    raised: tuple[Frame, ...] = ()
    failed: tuple[PendingOperation, ...] = ()
    main: tuple[Frame, ...] = ()


def parse_rank_dump(found_json: Any, host: str) -> RankDump:
    """Parse what `cpuft.rank.dump_stacks` printed about one rank. A report that the rank was just writing is ignored.

    A running process whose report is older than 3 s holds the GIL, and `pending` is empty. If a timeout ended the
    rank's operation, `pending` has it with 0 seconds, and `frames` is where the error was raised. Raises ValueError:
    `found_json` has another form.
    """
    found = load(_Found, found_json)
    try:
        report = load(_Report, parse_json(found.report or "{}"))
        progress = {
            channel: (load(int, number), load(str, name)) for channel, (number, name) in report.progress.items()
        }
    except ValueError:
        report, progress = _Report(), {}
    pending = report.pending or report.failed
    holds_gil = found.state == "R" and found.age > STALE_SECONDS
    return RankDump(
        found.rank,
        host,
        found.state,
        found.pid,
        found.wchan,
        frames=report.raised or parse_stack(found.stack) or report.main,
        pending=() if holds_gil else tuple(sorted(pending, key=lambda one: -one.seconds)),
        progress=progress,
        holds_gil=holds_gil,
        stacks=found.stack,
        has_raised=bool(report.raised),
    )


def complete_dumps(
    found: Iterable[RankDump], hosts: tuple[str, ...], unreachable: Collection[str]
) -> tuple[RankDump, ...]:
    """Return the dumps of all ranks, by rank; one without a dump is UNREACHABLE on an unreachable host, else GONE."""
    by_rank = {dump.rank: dump for dump in found}
    return tuple(
        by_rank.get(rank) or RankDump(rank, host, UNREACHABLE if host in unreachable else GONE)
        for rank, host in enumerate(hosts)
    )


def gather_dumps(run: ActiveRun, without: Collection[str] = ()) -> tuple[tuple[RankDump, ...], dict[str, str]]:
    """Return the dumps of all ranks, indexed by rank, and by host name the errors of hosts without a readable answer.
    All but those in `without` are asked at once, up to 15 s. Ranks on those or hosts with an error are UNREACHABLE.
    """

    def ask(host: Host) -> list[RankDump]:
        answer = run.access.run_module(host, dump_stacks, run.work, str(DUMP_SECONDS), seconds=_ANSWER_SECONDS)
        try:
            return [parse_rank_dump(found, host.name) for found in load(list[Any], parse_json(answer.output))]
        except ValueError:
            reason = last_line(answer.errors, "no message")
            raise CpuftError(
                f"the stacks of the ranks on host {host.name} could not be read ({reason}): log in and look at them"
            ) from None

    hosts = [host for host in dict.fromkeys(run.hosts) if host.name not in without]
    answers = dict(zip((host.name for host in hosts), try_hosts(ask, hosts)))
    unreachable = {name: str(answer) for name, answer in answers.items() if isinstance(answer, CpuftError)}
    found = [dump for answer in answers.values() if not isinstance(answer, CpuftError) for dump in answer]
    return complete_dumps(found, tuple(host.name for host in run.hosts), {*unreachable, *without}), unreachable


def write_dumps(run: ActiveRun, dumps: tuple[RankDump, ...]) -> None:
    """Write each rank's dump to logs/rank-N.stack in the run folder on the head host; CpuftError if it cannot."""
    files = {f"{run.work}/logs/rank-{dump.rank}.stack": format_rank_dump(dump) for dump in dumps}
    head_host = run.hosts[0]
    command = run.access.any_python("-c", _WRITE_FILES)
    answer = run.access.transport.run(head_host, command, json.dumps(files), _ANSWER_SECONDS)
    if answer.exit_code:
        reason = last_line(answer.errors, "no message")
        raise CpuftError(f"host {head_host.name} could not store the stacks ({reason}): check its disk")


def diagnose_run(
    run_dir: str, hosts: tuple[str, ...], transport: Transport, say: Callable[[str], None], least_seconds: float = 0.0
) -> tuple[str, set[str]]:
    """Gather the dumps of all ranks, on `hosts` (one for each), and write them to the head host; return what `diagnose`
    says, and the names of the hosts that do not answer. `say` tells where the dumps are, or why they are not stored.
    """
    run = ActiveRun(run_dir, tuple(map(transport.find_host, hosts)), Access(transport))
    # A login to a host that is frozen takes longer than to find out that it is.
    unreachable = transport.find_unreachable([host.name for host in dict.fromkeys(run.hosts)])
    dumps, others = gather_dumps(run, unreachable)
    try:
        write_dumps(run, dumps)
        say(f"stacks of all ranks: {run_dir}/logs/rank-N.stack")
    except CpuftError as error:
        say(str(error))
    return diagnose(dumps, least_seconds), unreachable.union(others)


def diagnose(dumps: Sequence[RankDump], least_seconds: float = LONG_SECONDS) -> str:
    """Return a line that names the ranks that the others wait for, in operations that have taken `least_seconds` or
    more, or says why none can be named. For example "rank 1 on node2 blocks the others (rank 0 waits in all_reduce #6
    of the world): it is at train.py:12 in step, running".

    A rank is named if it has ended, is stopped or its host does not answer, or otherwise if others wait for it and it
    waits for none. If all wait for each other, because they are in different operations or at different lines, the
    minority is named. Lines count only if no operation of any rank is known, because the ranks of a healthy run are at
    different lines. If all ranks are in the same operation, that points to the network.
    """
    waiting = {dump.rank for dump in dumps if _is_waiting(dump, least_seconds)}
    missed = {other for rank in waiting for other in _find_behind(dumps, dumps[rank])}
    inactive = {dump.rank for dump in dumps if dump.state in _INACTIVE}
    if inactive or missed - waiting:
        return _blame(dumps, inactive or missed - waiting, waiting)
    if missed:
        longest = {rank: dumps[rank].pending[0] for rank in sorted(waiting)}
        minority = _find_minority(dumps, sorted(waiting), lambda dump: longest[dump.rank].text)
        return _blame(dumps, minority, waiting) if minority else _describe_deadlock(dumps, sorted(waiting))
    if waiting:
        dump = dumps[min(waiting)]
        return (
            f"all ranks have started {dump.pending[0].text}, which does not finish: check the network between the "
            f"hosts; rank {dump.rank} is at {dump.location or 'an unknown line'}"
        )
    if raised := [dump for dump in dumps if dump.has_raised]:
        where = "; ".join(f"rank {one.rank} on {one.host} at {one.location}" for one in raised[:_MOST_CULPRITS])
        return f"no rank waits for another one, and the script ended with an error: {where}"
    return NO_WAIT if any(dump.progress for dump in dumps) else _diagnose_by_stacks(dumps)


def _is_waiting(dump: RankDump, least_seconds: float) -> bool:
    """Whether a rank that can run has waited long in an operation, or was ended in one by a timeout (0 s)."""
    return bool(dump.pending) and dump.state not in _INACTIVE and not 0 < dump.pending[0].seconds < least_seconds


def _find_behind(dumps: Sequence[RankDump], waiting: RankDump) -> set[int]:
    """Return the ranks that have not started the oldest operation of a waiting rank, or another one with its number."""
    operation = waiting.pending[0]
    behind = set()
    for other in dumps:
        takes_part = other.rank in operation.ranks or (not operation.ranks and _may_take_part(other, operation.channel))
        sequence, name = other.progress.get(operation.channel, (0, ""))
        if other.rank != waiting.rank and takes_part and (sequence, name) != (operation.sequence, operation.name):
            behind |= {other.rank} if sequence <= operation.sequence else set()
    return behind


def _may_take_part(dump: RankDump, channel: str) -> bool:
    """Whether a rank may be in a group of unknown members. Of a rank that holds the GIL, not all groups are known."""
    is_known = channel == "the world" or channel in dump.progress or dump.holds_gil
    return is_known and "between two" not in channel


def _diagnose_by_stacks(dumps: Sequence[RankDump]) -> str:
    inside = {dump.rank for dump in dumps if dump.is_in_collective}
    outside = {dump.rank for dump in dumps if dump.frames} - inside
    if inside and 0 < len(outside) <= len(inside):
        return _blame(dumps, outside, inside)
    ranks = [dump.rank for dump in dumps]
    minority = _find_minority(dumps, ranks, lambda dump: dump.location)
    if minority and any(dump.frames for dump in dumps):
        return _blame(dumps, minority, set(ranks) - minority)
    return "no rank is seen to wait for another one: the run makes progress, or all are at the same line"


def _find_minority(dumps: Sequence[RankDump], ranks: Sequence[int], kind: Callable[[RankDump], Hashable]) -> set[int]:
    kinds = {rank: kind(dumps[rank]) for rank in ranks}
    ((most, count),) = Counter(kinds.values()).most_common(1)
    return {rank for rank in ranks if kinds[rank] != most} if 2 * count > len(ranks) else set()


def _blame(dumps: Sequence[RankDump], culprits: set[int], waiting: set[int]) -> str:
    named, others = sorted(culprits), sorted(waiting - culprits)
    blocks = ""
    if others:
        operation = f" in {dumps[others[0]].pending[0].text}" if dumps[others[0]].pending else ""
        who = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} {'wait' if len(others) > 1 else 'waits'}"
        blocks = f" blocks the others ({who}{operation})"
    texts = [f"rank {rank} on {dumps[rank].host}{blocks}: {_describe(dumps[rank])}" for rank in named[:_MOST_CULPRITS]]
    more = [f"and {len(named) - _MOST_CULPRITS} more"] if len(named) > _MOST_CULPRITS else []
    return "; ".join(texts + more)


def _describe(dump: RankDump) -> str:
    location = f"at {dump.location}" if dump.location else "at an unknown line, because it shows no Python stack"
    if dump.state in ("T", "t"):
        last = "".join(
            f", last {how} {what}" for how, what in (("at", dump.location), ("in", dump.last_operations)) if what
        )
        return f"it is {describe_state(dump)}{last}; let it continue with kill -CONT {dump.pid} on its host"
    if dump.state in _INACTIVE:
        return {GONE: "it has ended", "Z": "it has ended"}.get(dump.state, describe_state(dump))
    if any(frame.function == "end_process" for frame in dump.frames):
        return "its script has ended"
    if dump.has_raised and not dump.pending:
        return f"an error ended its script {location}"
    if dump.pending:
        return f"it is in {dump.pending[0].text}, {location}"
    return f"it is {location}, {describe_state(dump)}"


def _describe_deadlock(dumps: Sequence[RankDump], ranks: Sequence[int]) -> str:
    texts = [
        f"rank {rank} in {dumps[rank].pending[0].text} at {dumps[rank].location or 'an unknown line'}" for rank in ranks
    ]
    return f"ranks wait for each other: {'; '.join(texts[: 2 * _MOST_CULPRITS])}"
