"""The process that sends a run's record to trackers while the run trains (`--report-to`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_END_SECONDS = 0.7
"""Longest time that a run waits for its trackers at its end: with starting and ending them, less than a second."""
_LOG = "trackers.err"


@contextmanager
def run_trackers(names: str, run_dir: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Run `cpuft.trackers` beside the training, on the first rank; empty `names` run none.

    At the end, this waits less than a second until the trackers have the whole record, and shows a warning if they do
    not or have failed.
    """
    process = _start(names, run_dir, warn) if names else None
    try:
        yield
        if process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        if process.returncode != 0:
            what = "do not have the whole record" if process.returncode is None else "have failed"
            warn(
                f"warning: the trackers {names} {what} (see logs/{_LOG} of the run): when they answer again, "
                f"send it with cpuft report RUN --to {names}, where RUN is the folder of the run"
            )
    finally:
        if process:
            process.kill()
            process.wait()


def _start(names: str, run_dir: str, warn: Callable[[str], None]) -> subprocess.Popen[bytes] | None:
    command, logs = [sys.executable, "-m", "cpuft.trackers", names, run_dir], Path(run_dir, "logs")
    try:
        logs.mkdir(exist_ok=True)
        with (logs / _LOG).open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    except OSError as error:
        warn(f"warning: the trackers {names} were not started ({error.strerror})")
        return None
