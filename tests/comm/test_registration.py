"""The registration of backends with torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cpuft.comm.registration import choose_timeout
from cpuft.comm.watchdog import TIMEOUT_VARIABLE
from cpuft.errors import CpuftError, install_command


def test_importing_needs_neither_library() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import cpuft.comm as c; print(c.BACKENDS['mpi'].find_problem())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert install_command("train", "mpi") in run.stdout


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon"])
def test_a_wrong_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(CpuftError, match=f"{TIMEOUT_VARIABLE}={text} is not a positive number of seconds"):
        choose_timeout(7.0)


@pytest.mark.parametrize(("text", "seconds"), [("", 7), ("1.5", 1.5)])
def test_the_variable_takes_precedence(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    assert choose_timeout(7.0) == seconds
