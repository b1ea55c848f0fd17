"""The process that sends a run's record to trackers while the run trains (`--report-to`).

The first rank starts `python -m cpuft.train.tracker_process NAMES RUN_DIR`, so that a tracker that fails, or waits for
its server, never disturbs the training.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cpuft.rank.process import end_with_parent
from cpuft.record import FILE_NAME
from cpuft.secret_variables import mask_secrets
from cpuft.trackers import follow, parse_trackers, send

_END_SECONDS = 0.7
"""Longest time that a run waits for its trackers at its end: with starting and ending them, less than a second."""
_LOG = "trackers.err"


@contextmanager
def run_trackers(names: str, run_dir: str, warn: Callable[[str], None]) -> Iterator[None]:
    """Run this module beside the training, on the first rank, for trackers `names`, separated by commas ("": none).

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
    command, logs = [sys.executable, "-m", "cpuft.train.tracker_process", names, run_dir], Path(run_dir, "logs")
    try:
        logs.mkdir(exist_ok=True)
        with (logs / _LOG).open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    except OSError as error:
        warn(f"warning: the trackers {names} were not started ({error.strerror})")
        return None


class _MaskedText(io.TextIOWrapper):
    """Standard output or error without passwords and tokens, which libraries may show in warnings and errors."""

    def write(self, text: str) -> int:
        super().write(mask_secrets(text, os.environ))
        return len(text)


def main() -> None:
    """Follow the record in RUN_DIR and send it to the trackers NAMES, until its footer or the end of the rank."""
    names, run_dir = sys.argv[1:]
    end_with_parent()  # even if a library never returns
    os.nice(19)
    sys.stdout, sys.stderr = (
        _MaskedText(stream.buffer, stream.encoding, "backslashreplace", line_buffering=True)
        for stream in (sys.stdout, sys.stderr)
    )
    send(follow(Path(run_dir) / FILE_NAME), parse_trackers(names), Path(run_dir))


if __name__ == "__main__":
    main()
