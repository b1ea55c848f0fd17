"""The process that sends a run's record to trackers while the run trains (`--report-to`)."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_END_SECONDS = 0.7
"""Longest time that a run waits for its trackers at its end: with starting and ending them, less than a second."""
_LOG = "trackers.err"


class TrackerProcess:
    """Runs `cpuft.trackers` beside the training, on the first rank. It is a context manager.

    At the end of the context, this waits less than a second until the trackers have the whole record, and shows a
    warning if they do not. It never raises an error because of a tracker. `users_run_dir` is the absolute path of the
    run's folder on the machine of `cpuft launch`; empty if the rank does not know it.
    """

    def __init__(self, names: str, run_dir: str, users_run_dir: str, warn: Callable[[str], None]) -> None:
        self._names, self._run_dir, self._users_run_dir, self._warn = names, run_dir, users_run_dir, warn
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TrackerProcess:
        if self._names:
            command = [sys.executable, "-m", "cpuft.trackers", self._names, self._run_dir]
            logs = Path(self._run_dir, "logs")
            try:
                logs.mkdir(exist_ok=True)
                with (logs / _LOG).open("ab") as log:
                    self._process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
            except OSError as error:
                self._warn(f"warning: the trackers {self._names} were not started ({error.strerror})")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        end = time.monotonic() + _END_SECONDS
        while kind is None and self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        code = self._process.poll()
        if code is None:
            self._process.kill()
            self._process.wait()
        if code != 0 and kind is None:
            command = shlex.join(["cpuft", "report", self._users_run_dir or "RUN", "--to", self._names])
            what = "do not have the whole record" if code is None else "have failed"
            self._warn(
                f"warning: the trackers {self._names} {what} (see logs/{_LOG} of the run): when they answer again, "
                f"send it with {command}{'' if self._users_run_dir else ', where RUN is the folder of the run'}"
            )
