"""Command lines of cpuft's own modules, and command lines that pass through mpirun unchanged."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

WITHOUT_WORKING_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
"""Makes a program for `python -c` not import from the working folder, where other users may be able to write."""

SUPERVISED_VARIABLE = "CPUFT_SUPERVISED"
"""Environment variable of ranks with the process number of their supervisor on the head host."""

_RUN = f"{WITHOUT_WORKING_FOLDER}; from cpuft.argv import run_module; run_module()"
_MARK = "json:"
_SHELL_WORD = re.compile(r"[\w@+:,./-][\w@%+=:,./-]*", re.ASCII)
"""Means itself in every shell: tcsh expands a word that begins with =, and older versions of fish one with %."""
_UNCHANGED = re.compile(r"(--)?[A-Za-z0-9_./][A-Za-z0-9_./=,+@:-]*")


def module_command(python: str, module: str) -> tuple[str, ...]:
    """Return the argv `PYTHON -c PROGRAM MODULE`, which acts as `python -P -m MODULE`; append arguments to it."""
    return (python, "-c", _RUN, module)


def run_module() -> None:
    """Run the module that `sys.argv[1]` names as `__main__`, and take that word out of `sys.argv`. On macOS, whose
    kernel does not end processes with their parents, this one ends with its parent: by SIGTERM, ranks by SIGKILL.
    """
    if sys.platform == "darwin":
        follow_parent(signal.SIGKILL if SUPERVISED_VARIABLE in os.environ else signal.SIGTERM)  # it is set for ranks
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def follow_parent(signal_number: int, other: int = 0) -> None:
    """Start a thread that sends this process a signal when its parent has ended, or the process with the number
    `other`, whose own parent has asked for its exit code. It looks every second.
    """
    followed = {os.getppid(), other or os.getppid()}

    def follow() -> None:
        with suppress(ProcessLookupError):
            # Process 1 takes over those whose parents have ended; a debugger takes over the process that it looks at.
            while os.getppid() != 1:
                for process in followed:
                    os.kill(process, 0)
                time.sleep(1.0)
        os.kill(os.getpid(), signal_number)

    threading.Thread(target=follow, daemon=True).start()


def make_shell_line(argv: Sequence[str]) -> str:
    """Return `exec COMMAND` for ssh, quoted so that sh, bash, zsh, csh, tcsh and fish read it alike: "exec ls 'a b'".

    In quotes, csh expands ! and ends a line, and fish reads \\\\ as one character; `\\` before ', \\ or ! has one
    meaning in all of them. A newline in an argument makes several lines, which sh puts together again.
    """
    lines = f"exec {shlex.join(argv)}".split("\n")
    if len(lines) == 1:
        return f"exec {' '.join(map(_quote, argv))}"
    return """exec sh -c 'eval "$(printf "%s\\n" "$@")"' sh """ + " \\\n".join(map(_quote, lines))


def _quote(word: str) -> str:
    if _SHELL_WORD.fullmatch(word):
        return word
    parts = re.split(r"(['\\!])", word)
    return "".join(f"\\{part}" if part in ("'", "\\", "!") else f"'{part}'" for part in parts if part) or "''"


def pack_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with the same number of arguments, of which mpirun takes none for its own, such as a `:`.
    Plain words, --options and a first `-m` stay; others, such as `-x` and `:`, become `json:` and their JSON text, such
    as `json:":"`. `unpack_argv` undoes this.
    """
    begin = 1 if list(argv[:1]) == ["-m"] else 0
    return (*argv[:begin], *(arg if _is_safe(arg) else _MARK + json.dumps(arg) for arg in argv[begin:]))


def _is_safe(arg: str) -> bool:
    return bool(_UNCHANGED.fullmatch(arg)) and not arg.startswith(_MARK)


def unpack_argv(argv: Sequence[str]) -> list[str]:
    """Return the command that `pack_argv` was given; a first `-m MODULE` becomes `module_command` of this Python."""
    unpacked = [json.loads(arg.removeprefix(_MARK)) if arg.startswith(_MARK) else arg for arg in argv]
    return [*module_command(sys.executable, unpacked[1]), *unpacked[2:]] if list(argv[:1]) == ["-m"] else unpacked


def parse_slurm_counts(text: str) -> tuple[int, ...]:
    """Return Slurm's count for each host: (2, 2, 2, 1) for "2(x3),1"; () for "" and any text of another form."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if not found:
            return ()
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)
