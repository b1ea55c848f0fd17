"""A rank tells what it is doing to whoever looks from outside (`cpuft.rank.dump_stacks`), stuck or not.

Its stacks are written by faulthandler's own signal handler, also while C code holds the GIL. Its operations are written
twice a second by a thread: what a stopped rank was at is known without it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from cpuft.rank.dump_stacks import REPORT, SIGNAL, STACK
from cpuft.rank.process import FAILURE

HANGS = f"{FAILURE} hangs"
"""The line by which a rank asks the supervisor to look at all ranks before any is ended."""
SUPERVISED = "CPUFT_SUPERVISED"
"""Set where a supervisor heeds that line."""
HOLD_SECONDS = 25.0
"""How long a rank waits for it at most: a host that is lost answers nobody for ten seconds."""
RECORDER = ("TORCH_FR_BUFFER_SIZE", "64")
"""Has torch's gloo groups keep their last operations. At most one reading a second, of some kilobytes."""
_POLL_SECONDS = 0.5
_MOST_FRAMES = 40

Source = Callable[[], Mapping[str, Any]]
Place = tuple[str, int, str]
"""File, line and function."""


class _Reporter:
    """The two files in memory, the handler and the thread of a process."""

    def __init__(self) -> None:
        self.source: Source = read_recorder
        self.raised: list[Place] = []
        self._lock = threading.Lock()
        self._length = 0
        self._stack, self._report = os.memfd_create(STACK), os.memfd_create(REPORT)
        faulthandler.register(SIGNAL, file=self._stack, all_threads=True, chain=False)
        threading.Thread(target=self._run, name="cpuft-report", daemon=True).start()

    def write(self) -> None:
        """Write what is known now, in one piece over what was there."""
        with self._lock:
            found = {name: value for name, value in self.source().items() if name in ("pending", "progress")}
            text = json.dumps({**found, "raised": self.raised, "main": _find_main()}).encode()
            os.pwrite(self._report, text.ljust(self._length), 0)
            self._length = len(text)

    def _run(self) -> None:
        while True:
            self.write()
            time.sleep(_POLL_SECONDS)


_reporter: _Reporter | None = None


def start_reporting(source: Source | None = None) -> None:
    """Let this process be looked at from now on; `source` tells its operations, as `read_recorder` does by default."""
    global _reporter
    _reporter = _reporter or _Reporter()
    _reporter.source = source or _reporter.source


def report_operations() -> Mapping[str, Any]:
    """The report of this process's source of operations: `progress`, `pending` and for groups of cpuft.comm `names`."""
    return _reporter.source() if _reporter else {}


def hold(words: str = "", raised: TracebackType | None = None) -> None:
    """Write `words`, and wait to be looked at and ended, if anybody will: this rank has waited in vain for others.

    Parameters
    ----------
    raised: of what ended the wait, when its frames are left by now.
    """
    supervised = bool(os.environ.get(SUPERVISED)) and _reporter is not None
    os.write(2, (words + (f"{HANGS}\n" if supervised else "")).encode())
    if supervised and _reporter:
        frames = reversed(traceback.extract_tb(raised))
        _reporter.raised = [(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
        _reporter.write()
        time.sleep(HOLD_SECONDS)


def _find_main() -> list[Place]:
    """Where the main thread is, innermost first: known by this of a rank that is stopped then."""
    frame, found = sys._current_frames().get(threading.main_thread().ident or 0), list[Place]()
    while frame and len(found) < _MOST_FRAMES:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def read_recorder() -> dict[str, Any]:
    """Operations of torch's own groups, by its flight recorder; none where that is off, or torch is not there yet."""
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(module, "_dump_fr_trace_json", None)
    try:
        return parse_recorder(json.loads(dump(True, False)), time.time_ns()) if dump else {}
    except (ValueError, RuntimeError):
        return {}


def parse_recorder(found: Mapping[str, Any], now: int) -> dict[str, Any]:
    """The recorder's entries as a report: `pending` operations, `progress` by channel.

    Parameters
    ----------
    now: nanoseconds since 1970.
    """
    pending, progress = [], dict[str, tuple[int, str]]()
    for entry in found.get("entries", ()):
        name, description = entry["process_group"]
        channel = "the world" if description == "default_pg" else f"group {name}"
        sequence, operation = entry["collective_seq_id"], entry["profiling_name"].rpartition(":")[2]
        if entry["is_p2p"]:
            channel, sequence = f"{channel}, between two", entry["p2p_seq_id"]
        progress[channel] = max(progress.get(channel, (0, "")), (sequence, operation))
        if not entry["retired"]:
            seconds = (now - entry["time_created_ns"]) / 1e9
            pending.append({"channel": channel, "sequence": sequence, "name": operation, "seconds": seconds})
    return {"pending": pending, "progress": progress}
