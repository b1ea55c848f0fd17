"""What a rank offers to stack dumps (`cpuft.rank.dump_stacks`), even while it hangs: its stacks and its operations.

faulthandler's signal handler writes the stacks, also while C code holds the GIL. A thread writes the operations twice a
second, so that those of a rank that is then stopped are known. Those of cpuft.comm's groups come from its own register,
and those of torch's own gloo groups from torch's flight recorder, which knows no groups written in Python.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from cpuft.argv import SUPERVISED_VARIABLE
from cpuft.rank.dump_stacks import REPORT_FILE, SIGNAL, STACK_FILE
from cpuft.rank.process import FAILED_MARK, WAITS_MARK

HANG_MARK = f"{FAILED_MARK} hangs"
"""The line with which a rank asks the supervisor to dump the stacks of all ranks before it ends any of them."""
MAX_WAIT_SECONDS = 25.0
"""How long a rank waits for the stack dump: a lost host delays it by ten seconds."""
RECORDER = ("TORCH_FR_BUFFER_SIZE", "64")
"""Variable and value that let torch's gloo groups record their last operations, which are read twice a second."""
WAIT_SECONDS = 20.0
"""How long a rank of a script waits in an operation until it asks for a diagnosis. Later waits must be twice as long as
the one before, because ranks may wait regularly while one of them evaluates."""
_POLL_SECONDS = 0.5
_MAX_FRAMES = 40

OperationSource = Callable[[], Mapping[str, Any]]
"""Returns `pending` and `progress` as `read_recorder` does; for groups of cpuft.comm also the `names` of operations."""


class _Reporter:
    def __init__(self) -> None:
        self.source: OperationSource = read_recorder
        self.raised, self.failed = list[dict[str, Any]](), list[dict[str, Any]]()
        self.wait_limit = math.inf
        self._lock = threading.Lock()
        self._length = 0
        self._stack, self._report = os.memfd_create(STACK_FILE), os.memfd_create(REPORT_FILE)
        faulthandler.register(SIGNAL, file=self._stack, all_threads=True, chain=False)
        threading.Thread(target=self._run, name="cpuft-report", daemon=True).start()

    def write(self) -> None:
        """Write the current report over the previous one with a single call."""
        with self._lock:
            found = {name: value for name, value in self.source().items() if name in ("pending", "progress")}
            own = {"raised": self.raised, "failed": self.failed, "main": _list_main_frames()}
            text = json.dumps(found | own).encode()
            os.pwrite(self._report, text.ljust(self._length), 0)
            self._length = len(text)
        # A message between two ranks may be expected long before it is sent.
        waits = [one for one in found.get("pending", ()) if not re.search(" from |between two", one["channel"])]
        if (longest := max((one["seconds"] for one in waits), default=0.0)) > self.wait_limit:
            self.wait_limit = 2 * longest
            operation = next(one for one in waits if one["seconds"] == longest)
            os.write(2, f"{WAITS_MARK} {operation['name']} #{operation['sequence']}\n".encode())

    def _run(self) -> None:
        while True:
            self.write()
            time.sleep(_POLL_SECONDS)


_reporter: _Reporter | None = None


def start_reporting(source: OperationSource | None = None, reports_waits: bool = False) -> None:
    """Let this process's stacks and operations be dumped from now on; later calls may change the `source` (None: no
    change). With `reports_waits`, this process asks a supervisor for a diagnosis when it has waited for 20 s. On
    macOS, which has no memfd, nothing is reported.
    """
    global _reporter
    if sys.platform != "linux":
        return
    _reporter = _reporter or _Reporter()
    _reporter.source = source or _reporter.source
    if reports_waits and os.environ.get(SUPERVISED_VARIABLE):
        _reporter.wait_limit = WAIT_SECONDS
    _reporter.write()  # the thread writes only when it gets the GIL, which the user's code may hold from now on


def read_operations() -> Mapping[str, Any]:
    """Return what this process's source of operations returns (`OperationSource`); {} before `start_reporting`."""
    return _reporter.source() if _reporter else {}


def wait_for_stack_dump(text: str = "", error: BaseException | None = None) -> None:
    """Write `text`, which ends with a line break, to standard error after waiting in vain for other ranks. If there is
    a supervisor, wait until it has dumped the stacks and ends this rank, at most 25 s; else return at once. Reports the
    traceback of `error`, which ended the wait, and if it is of torch's gloo, the operation that was started last.
    """
    is_supervised = bool(os.environ.get(SUPERVISED_VARIABLE)) and _reporter is not None
    os.write(2, (text + (f"{HANG_MARK}\n" if is_supervised else "")).encode())
    if is_supervised and _reporter:
        frames = reversed(traceback.extract_tb(error.__traceback__ if error else None))
        _reporter.raised = [{"file": one.filename, "line": one.lineno or 0, "function": one.name} for one in frames]
        if "gloo" in str(error):  # it names its source file
            _reporter.failed = read_recorder().get("last", [])
        _reporter.write()
        time.sleep(MAX_WAIT_SECONDS)


def _list_main_frames() -> list[dict[str, Any]]:
    """Return the frames of the main thread, innermost first. This is all that is known of a rank that is stopped."""
    frame, found = sys._current_frames().get(threading.main_thread().ident or 0), list[dict[str, Any]]()
    while frame and len(found) < _MAX_FRAMES:
        code = frame.f_code
        found.append({"file": code.co_filename, "line": frame.f_lineno, "function": code.co_name})
        frame = frame.f_back
    return found


def read_recorder() -> dict[str, Any]:
    """Return operations of torch's own process groups, as `parse_recorder` does; {} without its flight recorder."""
    found = dump_recorder()
    return {} if found is None else parse_recorder(found, time.time_ns())


def dump_recorder() -> dict[str, Any] | None:
    """Return what torch's flight recorder dumps as JSON; None if there is no recorder, or if it cannot be read."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    try:
        found: dict[str, Any] | None = json.loads(dump(True, False)) if dump else None
    except (ValueError, RuntimeError):
        return None
    return found


def parse_recorder(found: Mapping[str, Any], now: int) -> dict[str, Any]:
    """Return the flight recorder's entries: `pending` has unfinished operations, `progress` by channel the highest
    (number, name), and `last` a list of the operation that was started last, or []. An operation has channel, sequence,
    name and seconds (in `last` 0). `now` is in nanoseconds since 1970. A channel is "the world" (the default process
    group) or "group NAME", with ", between two" for two ranks.
    """
    pending, progress, last = [], dict[str, tuple[int, str]](), list[dict[str, Any]]()
    for entry in found.get("entries", ()):
        name, description = entry["process_group"]
        channel = "the world" if description == "default_pg" else f"group {name}"
        sequence, operation = entry["collective_seq_id"], entry["profiling_name"].rpartition(":")[2]
        if entry["is_p2p"]:
            channel, sequence = f"{channel}, between two", entry["p2p_seq_id"]
        progress[channel] = max(progress.get(channel, (0, "")), (sequence, operation))
        last = [{"channel": channel, "sequence": sequence, "name": operation, "seconds": 0.0}]
        if not entry["retired"]:
            pending.append(last[0] | {"seconds": (now - entry["time_created_ns"]) / 1e9})
    return {"pending": pending, "progress": progress, "last": last}
