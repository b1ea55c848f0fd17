"""Watch a run while its ranks work: detect lost hosts, ranks that wait in vain, and ranks that do not start."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cpuft.execute import Say
from cpuft.hosts.transport import Transport
from cpuft.launch.failures import list_error_logs
from cpuft.launch.stack_dumps import LONG_SECONDS, NO_WAIT, diagnose_run
from cpuft.launch.stop_request import StopRequest
from cpuft.rank.diagnostics import HANG_MARK, WAIT_SECONDS
from cpuft.rank.interruption import HEARTBEAT_FILE
from cpuft.rank.process import ENDED_MARK, FAILED_MARK, STARTED_MARK, WAITS_MARK
from cpuft.terminal import print_message

_HOST_LOST = ("Error: Downstream from host", "assert (!closed) failed")
"""What Hydra's mpirun prints when it has lost a host and ended all ranks. In a Slurm job it exits minutes later."""
_CHECK_SECONDS = 0.5
_END_SECONDS = 25.0
"""How long mpirun may run on after a rank has failed: other ranks may be saving something."""
_HEARTBEAT_SECONDS = 30.0
"""How long ranks, which give a heartbeat every 5 s, may give none before the hosts are asked whether they answer."""
_STARTS_SECONDS, _STARTS_SECONDS_PER_RANK = 5.0, 0.1
"""How long ranks may take to start before the hosts are asked."""
_ENDS_SECONDS = 5.0
"""How long ranks may run on after the first has ended before the hosts are asked."""
_FAILURE_SECONDS = 0.5
"""Time from the failure of a rank until the hosts are asked, because a host that shuts down may still answer before."""
_NEXT_CHECK_SECONDS = 10.0
"""Time until the hosts are asked again after all of them have answered."""
_MARK_BYTES = 4096
_LOOKS_FOR_ENDS = 20


class StuckError(Exception):
    """mpirun does not end although a rank has failed or a host is lost, ranks wait in vain, or no rank starts."""


@dataclass
class RunMonitor:
    """Detects that a run cannot finish, because mpirun and srun wait without limit for a host that is lost. All hosts
    are asked whether they answer whenever something looks wrong.
    """

    logs: Path
    hosts: tuple[str, ...]
    """The host of each rank."""
    transport: Transport
    start_limit: float = 0.0
    """Seconds within which the first rank has to start; 0 for no limit."""
    stop_request: StopRequest = field(default_factory=StopRequest)
    check_state: Callable[[], None] = lambda: None
    """Updates the run state. Raises LaterStartError if another launcher has started the run again."""
    diagnosis: str = ""
    has_hang: bool = False
    """Whether a rank has reported that it waited in vain. `check` does nothing after that, even if a signal interrupts
    the diagnosis: by then the ranks are ended."""
    waits: set[bytes] = field(default_factory=set)
    begun: float = field(default_factory=time.monotonic)
    """In seconds of the monotonic clock, as all times here that have no other unit."""
    failed_at: float = 0.0
    """When the first failure of a rank was seen; 0 for none."""
    ended_at: float = 0.0
    """When the first successful end of a rank was seen; 0 for none."""
    checked_at: float = 0.0
    heartbeat: int = 0
    """Time of the last heartbeat, in ns as the file system of the run folder gives it."""
    heartbeat_seen_at: float = 0.0
    started: int = 0
    unreachable: set[str] | None = None
    """Hosts that did not answer; None if they have not been asked."""
    host_check: Future[set[str]] | None = None
    """Nothing waits for this answer."""
    suspicion: str = "a host is lost"
    next_host_check: float = 0.0
    """The hosts are not asked again before, because all answered a moment ago."""

    def check(self) -> None:
        """Look at logs and heartbeats, at most every 0.5 s. Hosts are asked on a thread, and a later call sees the
        answer; a hang that a rank reports is diagnosed at once. Raises StuckError: the ranks must be ended; and
        what `StopRequest.check` and `check_state` raise.
        """
        now = time.monotonic()
        if now - self.checked_at < _CHECK_SECONDS or self.has_hang:
            return
        self.checked_at = now
        self.stop_request.check()
        self.check_state()
        ends, mpirun_log = [_read_end(log) for log in list_error_logs(self.logs)], self.logs.parent.glob(HEARTBEAT_FILE)
        if not self.failed_at and (_has_mark(ends, FAILED_MARK) or _has_mark(map(_read_end, mpirun_log), *_HOST_LOST)):
            self.failed_at = now
        if _has_mark(ends, HANG_MARK):
            self.has_hang = True
            self.diagnosis, self.unreachable = self._diagnose(print_message)
            raise StuckError("ended the ranks, because some of them waited in vain for others")
        if waits := {wait for end in ends for wait in re.findall(WAITS_MARK.encode() + b"[^\n]*", end)} - self.waits:
            self.waits |= waits
            threading.Thread(target=self.report_wait, daemon=True).start()
        since_failure = now - self.failed_at if self.failed_at else 0.0
        suspicion = self._find_suspicion(now, ends)
        must_ask = since_failure > _FAILURE_SECONDS or bool(suspicion and now > self.next_host_check)
        if must_ask and self.unreachable is None and self.host_check is None:
            self.host_check, self.suspicion = _start_thread(self._ask_hosts), suspicion or self.suspicion
        if self.host_check and self.host_check.done():
            self.unreachable = self.host_check.result()
        if self.unreachable or since_failure > _END_SECONDS:
            why = f"{since_failure:.0f} s after a rank had failed" if since_failure else f"although {self.suspicion}"
            raise StuckError(f"ended mpirun, which was still running {why}")
        if self.unreachable is not None and not since_failure:
            # All hosts answer. Ranks whose run folder is on another disk give no heartbeat here.
            self.unreachable, self.host_check, self.heartbeat_seen_at = None, None, now
            self.next_host_check = now + _NEXT_CHECK_SECONDS
        is_late = self.start_limit and not since_failure and now - self.begun > self.start_limit
        if is_late and not self.started and not any(log.stat().st_size for log in list_error_logs(self.logs)):
            raise StuckError(
                f"no rank started within {self.start_limit:.0f} s: another program may be connecting to mpirun's port; "
                "cpuft doctor looks for ports that are open to other machines"
            )

    def _find_suspicion(self, now: float, ends: Sequence[bytes]) -> str:
        if self._misses_heartbeat(now):
            return "no rank gives a heartbeat"
        ranks = len(self.hosts)
        if self.started < ranks:
            self.started = 0
            for log in list_error_logs(self.logs):
                self.started += _has_mark([_read_begin(log)], STARTED_MARK)
            if self.started < ranks and now - self.begun > _STARTS_SECONDS + _STARTS_SECONDS_PER_RANK * ranks:
                return f"{ranks - self.started} of {ranks} ranks have not started"
            return ""
        ended = sum(ENDED_MARK.encode() in end for end in ends)
        if 0 < ended < ranks:
            self.ended_at = self.ended_at or now
            if now - self.ended_at > _ENDS_SECONDS:
                return f"{ranks - ended} of {ranks} ranks have not ended"
        return ""

    def find_cut_off(self) -> str:
        """Return a line on the ranks that began and have not ended although mpirun reports success; "" for none. What
        other hosts have written may take some seconds to be seen here.
        """
        cut_off = [log for log in list_error_logs(self.logs) if _has_mark([_read_begin(log)], STARTED_MARK)]
        for _ in range(_LOOKS_FOR_ENDS):
            cut_off = [log for log in cut_off if not _has_ended(log)]
            if not cut_off:
                break
            time.sleep(_CHECK_SECONDS)
        said = f"mpirun reports success, and {len(cut_off)} of {len(self.hosts)} ranks were killed before their end"
        return f"{said}: see {cut_off[0]}" if cut_off else ""

    def _diagnose(self, say: Say, least_seconds: float = 0.0) -> tuple[str, set[str]]:
        return diagnose_run(str(self.logs.parent), self.hosts, self.transport, say, least_seconds)

    def report_wait(self) -> None:
        """Print the line of `diagnose` on which ranks the others have been waiting for; nothing if it is `NO_WAIT`."""
        known = set(self.transport.unreachable)
        diagnosis, _ = self._diagnose(lambda line: None, LONG_SECONDS)
        if diagnosis != NO_WAIT:  # it has not ended meanwhile
            print_message(f"ranks have been waiting for {WAIT_SECONDS:.0f} s: {diagnosis}")
        self.transport.unreachable.intersection_update(known)  # a host that was only busy goes on

    def _ask_hosts(self) -> set[str]:
        return self.transport.find_unreachable(sorted(set(self.hosts)))

    def _misses_heartbeat(self, now: float) -> bool:
        with suppress(OSError):
            heartbeat = (self.logs.parent / HEARTBEAT_FILE).stat().st_mtime_ns
            if heartbeat != self.heartbeat:
                self.heartbeat, self.heartbeat_seen_at = heartbeat, now
        return bool(self.heartbeat) and now - self.heartbeat_seen_at > _HEARTBEAT_SECONDS

    def find_unreachable(self) -> set[str]:
        """Return the names of the hosts that do not answer. If `check` has found none, all are asked once more."""
        if self.host_check and not self.unreachable:
            self.unreachable = self.host_check.result()
        self.unreachable = self.unreachable or self._ask_hosts()
        return self.unreachable


def _start_thread(function: Callable[[], set[str]]) -> Future[set[str]]:
    """Call a function on a thread that does not keep this process from exiting."""
    future = Future[set[str]]()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def _has_ended(log: Path) -> bool:
    return any(_has_mark([read(log)], ENDED_MARK, FAILED_MARK) for read in (_read_end, Path.read_bytes))


def _read_begin(log: Path) -> bytes:
    with log.open("rb") as file:
        return file.read(_MARK_BYTES)


def _read_end(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _MARK_BYTES))
        return file.read()


def _has_mark(texts: Iterable[bytes], *marks: str) -> bool:
    return any(mark.encode() in text for text in texts for mark in marks)
