"""Errors for users: one line that says what happened and what to do next."""

from __future__ import annotations

import difflib
import errno
import os
import reprlib
import shlex
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cpuft

RESUMABLE = 75
"""Exit code of an interrupted run that `cpuft launch --resume` can continue (EX_TEMPFAIL of sysexits.h)."""

IO_ERROR = 74
"""Exit code for a disk that became full, and for results that this machine could not store (EX_IOERR of sysexits.h)."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Package index with PyTorch for CPUs; PyPI's newest packages install several GB of CUDA libraries."""


def escape_controls(text: str, kept: str = "") -> str:
    """Return the text with unprintable characters, except those in `kept`, as escapes: newlines become \\n."""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


class CpuftError(Exception):
    """An error that the user can do something about: one line that ends with the next step.

    The command line prints it without a traceback. Any other exception is a bug in cpuft and keeps its traceback.
    """

    is_transient = False
    """Whether no input is to blame, so that another attempt may succeed."""
    exit_code = 2

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class TransientError(CpuftError):
    """An error after which another attempt may succeed."""

    is_transient = True


class DiskFullError(CpuftError):
    """A disk became full during a run; the message names the path and this host, and says what to do."""

    exit_code = IO_ERROR

    def __init__(self, path: str, advice: str = "") -> None:
        host = socket.gethostname()
        resume = "cpuft launch --resume continues the run from its last checkpoint"
        advice = advice or f"make room there, then try again ({resume})"
        super().__init__(f"no space is left on the disk of {path} on host {host}: {advice}")


class Interrupted(Exception):
    """A signal to this process stopped the run. The text is the signal's name, and `exit_code` is 128 + its number."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


def last_line(text: str, default: str) -> str:
    """Return the last line with text in a program's output, or `default` if there is none."""
    return (text.strip().splitlines() or [default])[-1]


def join_last_lines(text: str, most: int = 6) -> str:
    """Return up to `most` of the last lines with text in an output, with " | " between, or "without a message"."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-most:]) or "without a message"


def describe_error(error: BaseException) -> str:
    """Return the text of any exception in one line of at most 200 characters; its class's name if it has no text."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `0 hosts`, `1 host`, `2 hosts`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def install_command(*extras: str) -> str:
    """Return the shell line that makes pip add cpuft[EXTRAS]==VERSION with the pins, or in a checkout its path with
    -e; for the extra "train", with CPU_INDEX as a further index.
    """
    package = Path(cpuft.__file__).parent
    names = f"[{','.join(extras)}]"
    is_checkout = (package.parent / "setup.cfg").is_file()
    what = ("-e", f"{package.parent}{names}") if is_checkout else (f"cpuft{names}=={cpuft.__version__}",)
    index = ("--extra-index-url", CPU_INDEX) if "train" in extras else ()
    return format_command(
        (sys.executable, "-m", "pip", "install", "-c", str(package / "constraints.txt"), *index, *what)
    )


def format_command(words: Sequence[str]) -> str:
    """Return a command line that the user can type on this machine."""
    if sys.platform == "win32":  # cmd knows no single quotation marks; PowerShell needs "& " before a quoted path
        return " ".join(f'"{word}"' if " " in word else word for word in words)
    return shlex.join(words)


@contextmanager
def requires(extra: str, problem: str) -> Iterator[None]:
    """Raise CpuftError if the block raises ImportError: `problem`, and the command that installs the extra."""
    try:
        yield
    except ImportError:
        raise CpuftError(f"{problem}: {install_command(extra)}") from None


def refuse_other_systems(what: str, advice: str, allows_macos: bool = False) -> None:
    """Raise CpuftError on any system but Linux, or with `allows_macos` on any but these: `what` needs Linux, and
    `advice` helps.
    """
    if sys.platform != "linux" and not (allows_macos and sys.platform == "darwin"):
        name = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        raise CpuftError(f"{what} needs Linux, and this machine has {name}: {advice}")


NO_MORE_PROCESSES = (
    "the limit of the user's processes and threads is reached on this host: end some, or raise the limit (ulimit -u, "
    "nproc in /etc/security/limits.conf)"
)


def explain_os_error(error: OSError) -> CpuftError | None:
    """Return, without raising it, the error to report for a full disk, a path that cannot be used or written, a deleted
    working folder or the limit of processes; None for other errors, such as a missing file.
    """
    path = str(error.filename2 or error.filename or "a file")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(path)
    if error.errno == errno.ENOENT and _is_working_folder_deleted():
        return CpuftError("the working folder does not exist any more: change to another one")
    if error.errno == errno.EAGAIN:  # of fork
        return CpuftError(NO_MORE_PROCESSES)
    if error.errno == errno.ENAMETOOLONG:
        return CpuftError(f"the path {reprlib.repr(path)} is longer than the file system takes: give a shorter one")
    if error.errno not in (errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOTDIR):
        return None
    return CpuftError(f"{path} cannot be used ({error.strerror}): see to its disk and its mode, or give another place")


def _is_working_folder_deleted() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


_ABOUT_AS_SIMILAR = 0.1


def suggest_names(name: str, known: Iterable[str]) -> str:
    """Return advice on an unknown name: "did you mean a or b?" with those of `known` that are most similar; if none
    is, "choose one of a, b", sorted, 20 at most.
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    likeness = [difflib.SequenceMatcher(None, other, name).ratio() for other in close]
    best = [other for other, ratio in zip(close, likeness) if ratio > likeness[0] - _ABOUT_AS_SIMILAR]
    return f"did you mean {' or '.join(best)}?" if best else f"choose one of {list_names(names)}"


def list_names(names: Sequence[str], most: int = 20) -> str:
    """Return names with commas between them; of more than `most`, the first ones: "a, b and 3 others"."""
    others = f" and {counted(len(names) - most, 'other')}" if len(names) > most else ""
    return ", ".join(names[:most]) + others
