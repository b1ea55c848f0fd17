"""The one error a user is meant to see: what went wrong, and the next move."""

from __future__ import annotations

import difflib
import errno
import reprlib
import shlex
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import cpuft

AGAIN = 75
"""Exit code EX_TEMPFAIL of sysexits.h: not the job's own fault, and `cpuft launch --resume` goes on with it."""

NOT_STORED = FULL = 74
"""Exit code EX_IOERR of sysexits.h: this machine could not store the results that hosts sent, or a disk became full
while a run went on; nothing is wrong with the run's options."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where PyTorch's builds without CUDA are: PyPI's for x86 bring several GB of CUDA libraries."""


class CpuftError(Exception):
    """Bad input or a bad situation, said in one line that ends with the next move.

    The command line prints it without a traceback and exits with `exit_code`. Any other exception is our bug and keeps
    its traceback.
    """

    passes = False
    """Whether only the way to a host failed: asked again, it may work."""
    exit_code = 2
    """Exit code of the command line for this error."""

    def __str__(self) -> str:
        # Nothing that ends a line, moves a terminal's cursor or cannot be printed.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())


class DiskFullError(CpuftError):
    """A disk became full while a run went on."""

    exit_code = FULL

    def __init__(self, path: str, advice: str = "") -> None:
        """`path`: the file or folder that could not be written on this host; `advice`: the next step."""
        host = socket.gethostname()
        resume = "cpuft launch --resume goes on with a run from its last checkpoint"
        advice = advice or f"make room there, then try again ({resume})"
        super().__init__(f"no space is left on the disk of {path} on host {host}: {advice}")


class Interrupted(Exception):
    """The run was stopped by a signal to this process."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


def counted(number: int, noun: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def install_command(*extras: str) -> str:
    """Return the shell command that adds these extras of setup.cfg to the Python that runs this process.

    A checkout is named by its folder; a cpuft installed from a wheel is named by its version, so that pip keeps it.
    The command has the exact versions (constraints.txt) and, for torch, the index of builds without CUDA.
    """
    package = Path(cpuft.__file__).parent
    names = f"[{','.join(extras)}]"
    is_checkout = (package.parent / "setup.cfg").is_file()
    what = ("-e", f"{package.parent}{names}") if is_checkout else (f"cpuft{names}=={cpuft.__version__}",)
    index = ("--extra-index-url", CPU_INDEX) if "train" in extras else ()
    return shlex.join((sys.executable, "-m", "pip", "install", "-c", str(package / "constraints.txt"), *index, *what))


def find_full_disk(error: OSError) -> DiskFullError | None:
    """The error to report for an OSError that says that a disk or a user's quota is full; None for any other one."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return DiskFullError(str(error.filename2 or error.filename or "a file")) if full else None


def describe_disk(error: OSError) -> str:
    """What to say of a path too long for the file system, a disk that is full or read-only, a folder that is closed to
    this user; nothing of all else."""
    if error.errno == errno.ENAMETOOLONG:
        return f"the path {reprlib.repr(str(error.filename))} is longer than the file system takes: give a shorter one"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOTDIR):
        return ""
    path = error.filename2 or error.filename or "a file"
    return f"{path} cannot be used ({error.strerror}): see to its disk and its mode, or name another place"


def near_names(name: str, known: Iterable[str]) -> str:
    """The names most like `name`, best first; all of them when none is close. Text for the end of an error."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(names)}"
