"""Which folder of the package may import which, and a few other rules for the whole tree."""

from __future__ import annotations

import ast
import configparser
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "cpuft"

PURE = {
    "argv",
    "compiler",
    "compressions",
    "errors",
    "files",
    "hardware",
    "serialization",
    "tasks",
    "terminal",
    "words",
}
TOLD = PURE | {"config", "plan", "record"}
HOSTS = TOLD | {"execute", "hosts"}
ON_A_RANK = PURE | {"config", "record"}
ALLOWED: dict[str, set[str]] = {
    "argv": set(),
    "compiler": {"errors"},
    "compressions": set(),
    "errors": set(),
    "files": {"errors", "serialization"},
    "hardware": {"errors"},
    "serialization": set(),
    "tasks": set(),
    "terminal": {"errors"},
    "words": {"argv"},
    "config": PURE,
    "plan": PURE,
    "record": PURE | {"config"},
    "execute": PURE | {"plan"},
    "hosts": HOSTS,
    # Supervising a run is reading what its ranks wrote when they failed.
    "launch": HOSTS | {"rank"},
    # What instances cost is in the table that estimates read.
    "provision": HOSTS | {"launch", "rank", "report"},
    "doctor": HOSTS | {"launch", "rank"},
    "rank": ON_A_RANK,
    "comm": ON_A_RANK | {"rank"},
    "train": ON_A_RANK | {"rank", "comm"},
    "report": PURE | {"record", "config"},
    "schedulers": HOSTS | {"launch", "rank"},
    "cli": HOSTS | {"launch", "schedulers", "rank", "provision", "doctor", "report"},
    "__main__": HOSTS | {"launch", "schedulers", "rank", "provision", "doctor", "report", "cli"},
}
"""What each room may reach, through whatever it imports."""

TYPE_IGNORES = 36
"""Most `type: ignore` comments that the whole tree may hold."""

FILES = sorted(path for folder in ("cpuft", "scripts", "tests") for path in (ROOT / folder).rglob("*.py"))
# This file tells what it counts.
IGNORE = "# type: " + "ignore"


def name_of(path: Path) -> str:
    """`cpuft.comm.group` for cpuft/comm/group/__init__.py."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES if path.is_relative_to(PACKAGE)}


def with_packages(name: str) -> set[str]:
    """A module and the packages around it, whose __init__ is imported on the way. The outermost holds a version only,
    and `accelerate` for those who ask for it."""
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(2, len(parts) + 1)} & MODULES.keys()


@functools.cache
def imports_of(name: str) -> set[str]:
    """The modules of cpuft that a module imports, wherever in it the import stands."""
    found = with_packages(name) - {name}
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found |= with_packages(f"{node.module}.{alias.name}") | with_packages(node.module)
        elif isinstance(node, ast.Import):
            found |= {module for alias in node.names for module in with_packages(alias.name)}
    return found


def reached_from(name: str) -> set[str]:
    """All modules that importing and using this one may import."""
    found, waiting = {name}, [name]
    for module in waiting:
        new = imports_of(module) - found
        found |= new
        waiting += sorted(new)
    return found - {name}


def room_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"cpuft"}))
def test_a_module_reaches_only_what_its_room_may(name: str) -> None:
    room = room_of(name)
    assert sorted(module for module in reached_from(name) if room_of(module) not in ALLOWED[room] | {room}) == []


def test_the_package_itself_holds_nothing_but_its_face() -> None:
    face = {
        "cpuft.train",
        "cpuft.train.fast",
        "cpuft.train.fast.acceleration",
        "cpuft.train.checkpoint",
        "cpuft.train.checkpoint.script",
    }
    assert imports_of("cpuft") <= face


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_execute_starts_processes(name: str) -> None:
    text = MODULES[name].read_text(encoding="utf-8")
    # Two run on hosts that have no execute.py, and a rank that compiles its kernels may not import it.
    allowed = MODULES[name].name in ("execute.py", "facts.py", "probe.py", "kernels.py", "compiler.py")
    assert allowed or ("import subprocess" not in text and "os.system" not in text)


def test_types_are_honest() -> None:
    assert sum(path.read_text(encoding="utf-8").count(IGNORE) for path in FILES) <= TYPE_IGNORES


def test_every_file_is_installed_with_its_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    patterns = {name: re.split(r"[,\s]+", names) for name, names in setup["options.package_data"].items()}
    found = [path for path in PACKAGE.rglob("*.*") if path.suffix not in (".py", ".pyc", ".so") and path.is_file()]
    assert [
        path.relative_to(ROOT).as_posix()
        for path in found
        if not any(path.match(pattern) for pattern in patterns.get(".".join(path.relative_to(ROOT).parent.parts), []))
    ] == []
