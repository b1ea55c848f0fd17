"""The command of a user's own script: what the user typed, and what each rank runs for it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from cpuft.errors import CpuftError

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "ipexrun", "mpirun", "mpiexec", "horovodrun")
_LAUNCHER_MODULES = {"torch.distributed": "torchrun", "accelerate.commands": "accelerate", "deepspeed": "deepspeed"}
"""Prefixes of modules that are launchers, and the name of each launcher."""


def plan_script(script: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command of a user's script, given as its argv. A .py file is run by the Python that runs cpuft, which
    also stands for `python` and `python3`. The path of a local file, which wins over PATH, becomes absolute; a program
    in PATH is returned as it is given. Raises CpuftError: there is no such script or program.
    """
    if len(script) > 1 and _is_own_python(script[0]):
        arguments = script[2:] if script[1] == "-u" else script[1:]
        if len(arguments) > 1 and arguments[0] == "-m":
            return (sys.executable, *arguments)
        script = arguments if arguments and arguments[0].endswith(".py") else script
    path = Path(script[0])
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            place = "" if path.is_absolute() else f" in the folder {os.getcwd()}"
            raise CpuftError(f"there is no script {script[0]}{place}: give the path of the script")
        if path.suffix == ".py":
            return (sys.executable, str(path.absolute()), *script[1:])
        return (str(path.absolute()), *script[1:])
    if shutil.which(script[0]) is None:
        raise CpuftError(f"there is no script or program {script[0]}: give a .py file or a program in PATH")
    return script


def name_script(command: tuple[str, ...]) -> str:
    """Return the name of a run by its `plan_script` command: "train" for (sys.executable, "train.py"), ("train.sh",)
    and (sys.executable, "-m", "package.train").
    """
    if command[0] != sys.executable or len(command) == 1:
        return Path(command[0]).stem
    if command[1] == "-m" and len(command) > 2:
        return command[2].rpartition(".")[2]
    return Path(command[1]).stem


def refuse_other_launchers(script: tuple[str, ...]) -> None:
    """Raise CpuftError if `script`, not empty, begins with torchrun, mpirun or the like, also as `python -m MODULE`."""
    name = Path(script[0]).name
    if _is_own_python(script[0]):
        arguments = list(script[1:])
        while arguments and arguments[0].startswith("-") and arguments[0] != "-m":
            del arguments[: 2 if arguments[0] in ("-X", "-W") else 1]
        module = arguments[1] if len(arguments) > 1 and arguments[0] == "-m" else ""
        name = next((known for prefix, known in _LAUNCHER_MODULES.items() if module.startswith(prefix)), "")
    if name in _LAUNCHERS:
        raise CpuftError(
            f"cpuft launch starts the ranks itself, and {name} would start a job of its own on each of them: leave "
            f"{name} and its options out (cpuft launch --np N -- train.py ...), or add --independent"
        )


def _is_own_python(program: str) -> bool:
    """Whether a program is the Python that runs cpuft. A bare `python` counts as that: hosts may have none."""
    if program in ("python", "python3"):
        return True
    found = shutil.which(program) or ""
    return Path(found).name.startswith("python") and os.path.realpath(Path(found).parent) == os.path.realpath(
        Path(sys.executable).parent
    )


def wrap_script(command: tuple[str, ...], python: str, wrap: bool) -> tuple[str, ...]:
    """Return Python's arguments that run a script under cpuft's checks: ("-m", "cpuft.rank.script", "train.py"). With
    `wrap`, the script also gets the fast path. `python` is the one that runs the ranks; a command that does not run a
    Python script by it is returned unchanged. Raises CpuftError: `wrap` is given for such a command.
    """
    if len(command) < 2 or command[0] != python or not (command[1] == "-m" or command[1].endswith(".py")):
        if wrap:
            raise CpuftError("--wrap takes a Python script: cpuft launch --wrap -- train.py ...")
        return command
    return ("-m", "cpuft.train.wrap" if wrap else "cpuft.rank.script", *command[1:])
