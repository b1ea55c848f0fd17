"""The process beside a training that computes its baseline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cpuft.argv import module_command
from cpuft.config.fields import format_arguments
from cpuft.config.train import TrainConfig
from cpuft.record import BaselineLine
from cpuft.serialization import load, parse_json

_WAIT_SECONDS = 60.0
"""Longest time that a run waits for its baseline at its end."""
_QUIET_SECONDS = 10.0
"""Longest time that it waits without saying so."""


class BaselineProcess:
    """Computes the baseline of a run on its first rank, in a process of the lowest priority and with one thread.

    It observes the updates (`UpdateObserver`), and starts after the first one, so that it delays no start, or with
    `is_measured` after the training, so that it disturbs no measurement. It raises no error because of a baseline.
    """

    def __init__(self, config: TrainConfig, is_measured: bool, say: Callable[[str], None]) -> None:
        self._config, self._is_measured, self._say = config, is_measured, say
        self._process: subprocess.Popen[str] | None = None

    def begin_update(self, setup: object) -> None:
        """Do nothing."""

    def end_update(self, clock: object, waited: float) -> None:
        """Start the process after the first update, unless `is_measured`; if that fails, later calls try again."""
        if not self._process and not self._is_measured:
            with suppress(OSError):  # the end of the run tries again
                self._start()

    def finish(self) -> BaselineLine | None:
        """Wait at most 70 s for the baseline, which starts here if not before; without one, say why and return None."""
        try:
            process = self._process or self._start()
            with suppress(subprocess.TimeoutExpired):
                return _read_result(process.communicate(timeout=_QUIET_SECONDS)[0], process.returncode)
            self._say(f"waiting for the baseline, at most {_WAIT_SECONDS:.0f} s more")
            return _read_result(process.communicate(timeout=_WAIT_SECONDS)[0], process.returncode)
        except subprocess.TimeoutExpired:
            self._say(f"no baseline: it was not ready {_QUIET_SECONDS + _WAIT_SECONDS:.0f} s after the training")
        except Exception as error:
            self._say(f"no baseline: {error}")
        return None

    def _start(self) -> subprocess.Popen[str]:
        command = (*module_command(sys.executable, "cpuft.train.baseline"), str(os.getpid()))
        self._process = subprocess.Popen(
            (*command, *format_arguments(self._config)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        return self._process

    def close(self) -> None:
        """Kill the process if it is still running."""
        if self._process and self._process.poll() is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # it may read a disk that does not answer
                self._process.wait(_QUIET_SECONDS)


def _read_result(text: str, code: int) -> BaselineLine:
    """Return the baseline that the process has printed. Raises ValueError, with the reason: it has printed none."""
    if not text.strip():
        killed = "was killed, probably because memory ran out"
        raise ValueError(f"its process {killed if code == -signal.SIGKILL else f'ended with exit code {code}'}")
    found = load(dict[str, Any], parse_json(text))
    if "error" in found:
        raise ValueError(load(str, found["error"]))
    return load(BaselineLine, found)
