"""The watchdog: no collective waits for ever, and the line on stderr says for whom it waited."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from torch._C._distributed_c10d import Store

from cpuft.comm.watch.liveness import Line
from cpuft.comm.watch.operations import Operation, Register, describe_absence, describe_failure, find_overdue
from cpuft.errors import AGAIN
from cpuft.rank.process import abort_job, format_failure, remove_shared_memory
from cpuft.rank.reporting import hold
from cpuft.rank.world import parse_world

_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 2.0
_PARTING_SECONDS = 0.5
_MISSED_SECONDS = 2.0
_LOST_WORDS = ("connection", "peer", "socket", "timed out", "unreachable", "process failed")


class Watch:
    """Ends the process when an operation is overdue, having asked all other ranks how far they came.

    It ends with os._exit: destroying a pending oneCCL event blocks, and so does finalizing MPI without a peer.
    """

    def __init__(self, register: Register, leave: Callable[[str, Collection[int], bool], None] | None = None) -> None:
        self.register = register
        self._leave = leave or _leave
        self._rank = 0
        self._line: Line | None = None
        self._gone: dict[int, float] = {}
        self._answers: dict[int, tuple[float, dict[str, tuple[int, str]]]] = {}
        self._gave_up: set[int] = set()
        self._ending = threading.Lock()
        self._closed = threading.Event()

    def join(self, store: Store, rank: int, ranks: tuple[int, ...], first: bool) -> None:
        """Meet the other `ranks` and start to watch. `first` is true on exactly one rank, which runs the hub."""
        self._rank = rank
        if len(ranks) > 1:
            self._line = Line(store, rank, ranks, first, self._heard)
            # The hub's thread must answer all of them before MPI_Init, which keeps the GIL until the others are there.
            self._line.wait_for_all()
        threading.Thread(target=self._run, name="cpuft-comm-watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching: the process is done with communication."""
        self._closed.set()
        if self._line:
            self._line.close()

    def blame_the_gone(self, operation: Operation, error: BaseException) -> None:
        """Called when an operation fails: if a rank of it has left, that is the story, and this process ends.

        A library may notice before the hub does, so an error that speaks of a connection is given a moment.
        """
        lost = any(word in str(error).lower() for word in _LOST_WORDS)
        deadline = time.monotonic() + (_MISSED_SECONDS if lost else 0.0)
        while not self._closed.is_set():
            if any(rank in self._gone for rank in operation.ranks):
                self._give_up(operation)
            if time.monotonic() >= deadline:
                return
            time.sleep(0.05)

    def _run(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            overdue = find_overdue(self.register.snapshot(), self._gone, time.monotonic())
            if overdue:
                self._give_up(overdue)

    def _give_up(self, operation: Operation) -> None:
        with self._ending:
            self._ask(operation)
            absent = self._find_absent(operation)
            text = describe_failure(operation, self._rank, absent, time.monotonic())
            if self._line:
                why = f"{operation.name} #{operation.sequence}"
                self._line.say({"end": self._rank, "why": why, "missed": sorted(absent)})
            self._leave(text, absent, not self._gone)

    def _find_absent(self, operation: Operation) -> dict[int, str]:
        """Who keeps the operation from ending, by the last answers: not those who have given up and left since."""
        recent = time.monotonic() - 2 * _ANSWER_SECONDS
        answers = {rank: progress for rank, (when, progress) in self._answers.items() if when >= recent}
        absent = describe_absence(operation, self._rank, answers, self._gone)
        return {rank: state for rank, state in absent.items() if rank not in self._gave_up} or absent

    def _ask(self, operation: Operation) -> None:
        """Have each rank of the operation say how far it is, and wait for that, but not long."""
        asked = time.monotonic()
        if self._line:
            self._line.say({"ask": self._rank})
        wanted = {*operation.ranks, self._rank}
        while time.monotonic() - asked < _ANSWER_SECONDS and 0 not in self._gone:
            fresh = {rank for rank, (when, _) in self._answers.items() if when >= asked}
            if wanted <= fresh | set(self._gone):
                break
            time.sleep(0.05)

    def _heard(self, message: dict[str, Any]) -> None:
        """A message from the hub, on the line's own thread, which never waits."""
        if self._closed.is_set():
            return
        if "gone" in message:
            self._gone[int(message["gone"])] = time.monotonic()
        elif "ask" in message and self._line:
            self._line.say({"answer": self._rank, "progress": self.register.reached()})
        elif "answer" in message:
            progress = {channel: (int(seq), str(name)) for channel, (seq, name) in message["progress"].items()}
            self._answers[int(message["answer"])] = (time.monotonic(), progress)
        elif "hub" in message:
            self._gone.setdefault(0, time.monotonic())
        elif "end" in message and message["end"] != self._rank:
            self._gave_up.add(int(message["end"]))
            threading.Thread(target=self._follow, args=(message,), daemon=True).start()

    def _follow(self, message: dict[str, Any]) -> None:
        """Another rank has given up, and all have answered it. This one says what it was doing itself, and ends too."""
        if not self._ending.acquire(blocking=False):
            return  # already on its way out, with a line of its own
        pending = min(self.register.snapshot(), key=lambda operation: operation.started, default=None)
        if pending:
            absent = self._find_absent(pending)
            text = describe_failure(pending, self._rank, absent, time.monotonic())
            self._leave(text, absent, not self._gone)
        reason = f"rank {message['end']} gave up {message['why']}"
        missed = set(message["missed"]) - {self._rank}
        text = f"cpuft comm: rank {self._rank}: ended because {reason}, which this rank had not joined."
        self._leave(text, missed, not self._gone)


def _leave(text: str, missed: Collection[int], hangs: bool) -> None:
    """End this process. Where no rank is gone, and so all hang, they are looked at first, if anybody does."""
    # The mark of cpuft.rank, too: mpirun may end that before it can write it.
    mark = format_failure(parse_world(os.environ), socket.gethostname(), AGAIN, missed)
    with contextlib.suppress(OSError):
        if hangs:
            hold(f"{text}\n{mark}\n")
        else:
            os.write(2, f"{text}\n{mark}\n".encode())
    # On a thread: whoever is stuck may hold the lock of stdout.
    threading.Thread(target=sys.stdout.flush, daemon=True).start()
    # mpirun kills all ranks when the first one ends: the others need a moment for a line of their own.
    time.sleep(_PARTING_SECONDS)
    abort_job(os.environ, AGAIN)
    remove_shared_memory(os.getpid())
    os._exit(AGAIN)
