"""What cpuft remembers of each cluster it made: a directory a cluster, with its keys and ssh configuration."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import reprlib
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, near_names
from cpuft.loader import find_control, load, parse_json

FILE_NAME = "cluster.json"
HOSTFILES = "hostfiles"
"""Folder of the hostfiles that `cpuft provision` writes, in its working directory; each is called as its cluster."""
_NAME = re.compile(r"[a-z][a-z0-9]{0,62}")
_MARK = "made by cpuft provision"
KINDS = {"local": HOSTFILES, "hosts": HOSTFILES, "plain": HOSTFILES, "aws": HOSTFILES, "inside": ""}
"""Where a cluster of each kind has its hostfile, under its name; empty for `hostfile` beside its entry.

`plain` is a hostfile and nothing else, `inside` a cluster as its own hosts know it.
"""


@dataclass(frozen=True)
class Entry:
    """One cluster, as `cluster.json` in its directory."""

    name: str
    """That of its directory."""
    kind: str
    """One of `KINDS`."""
    hostfile: str
    """Absolute path."""
    ssh_config: str = ""
    """How ssh and mpirun reach its hosts; empty for the user's own configuration."""
    python: str = ""
    """Python of the training environment, the same path on every host; empty for this one's."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables that cpuft's own commands need there."""
    options: dict[str, str] = field(default_factory=dict)
    """What it was asked to be, for `status` and `diff`."""
    ssh_config_there: str = ""
    """How the master reaches the hosts, on its own disk; empty where it sees `ssh_config`."""
    shares_files: bool = False
    """Whether the hosts see this machine's files under the same paths."""
    notice: str = ""
    """Where a host learns that it is about to go: what --notice of a launch is by itself."""
    renewal: str = ""
    """A command by which a host's lease goes on while a run does."""


def state_root(environ: Mapping[str, str]) -> Path:
    """Where clusters are remembered: $CPUFT_STATE, or cpuft/clusters in the XDG state directory.

    Raises CpuftError: its path holds white space, which ssh's configuration and mpirun's options cannot carry; or
    others may write there, and so decide what commands on a cluster do.
    """
    home = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '/root')}/.local/state"
    root = Path(environ.get("CPUFT_STATE") or f"{home}/cpuft/clusters").absolute()
    if find_control(str(root)) or len(str(root).split()) > 1:
        raise CpuftError(f"{str(root)!r} holds white space, which mpirun cannot pass to ssh: set CPUFT_STATE elsewhere")
    found = root.stat() if os.path.exists(root) else None
    if found and (found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH):
        raise CpuftError(
            f"others may write to {root}: look at what is there, and set CPUFT_STATE to a folder of your own"
        )
    return root


def search_roots(environ: Mapping[str, str], prefix: str = sys.prefix) -> tuple[Path, ...]:
    """Where a run looks for its cluster: what this user made, then what this very environment is a host of."""
    own = state_root(environ)
    return (own, Path(prefix).parent / "clusters") if Path(prefix).name == "env" else (own,)


def check_name(name: str) -> str:
    """`name`, if a cluster can be called so: it becomes part of paths, names of links and of control groups.

    Raises CpuftError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise CpuftError(f"{reprlib.repr(name)} is no name of a cluster: use small letters and digits, a letter first")
    return name


def find_entry(roots: tuple[Path, ...], name: str) -> Entry:
    """The cluster called `name` in the first of `roots` that has it. Raises CpuftError when none does."""
    check_name(name)
    for root in roots:
        if os.path.exists(root / name / FILE_NAME):
            return read_entry(root, name)
    raise _unknown(name, sorted(name for root in roots for name in list_names(root)))


def recall(root: Path, name: str) -> Entry | None:
    """The cluster called `name`, None where there is none. Raises CpuftError for what is no name, or damaged."""
    return read_entry(root, name) if os.path.exists(root / check_name(name) / FILE_NAME) else None


def read_entry(root: Path, name: str) -> Entry:
    """The cluster called `name`.

    Raises CpuftError: there is none (with the known names), or what is there was not written by `cpuft provision`:
    commands act on what an entry names.
    """
    path = root / check_name(name) / FILE_NAME
    try:
        values = load(dict[str, Any], parse_json(path.read_text(encoding="utf-8")))
        # Entries of earlier versions do not say so: settings were for hosts that run this machine's own cpuft.
        entry = load(Entry, {"shares_files": bool(values.get("settings"))} | values)
        _check_entry(entry, path.parent)
        return entry
    except OSError:
        raise _unknown(name, list_names(root)) from None
    except ValueError as error:
        raise CpuftError(f"{path} is damaged ({error}): provision {name} again") from None


def _check_entry(entry: Entry, directory: Path) -> None:
    """Check an entry that was read from `directory`.

    Raises ValueError when it contains a control character, is another cluster's, or names a path that a cluster of its
    kind does not own.
    """
    values = dataclasses.asdict(entry)
    for name, value in [*values.items(), *entry.settings.items(), *entry.options.items()]:
        if odd := find_control(name) or find_control(value if isinstance(value, str) else ""):
            raise ValueError(f"its {reprlib.repr(name)} contains the control character {odd!r}")
    names = {entry.name, entry.options.get("name", directory.name)}
    if names != {directory.name}:
        raise ValueError(f"it is the entry of {reprlib.repr((names - {directory.name}).pop())}")
    if entry.kind not in KINDS:
        raise ValueError(f"there is no kind {reprlib.repr(entry.kind)}: {', '.join(KINDS)}")
    hostfile = Path(entry.hostfile)
    beside = os.path.realpath(hostfile) == os.path.realpath(directory / "hostfile")
    named = hostfile.parts[-2:] == (HOSTFILES, directory.name) and hostfile.is_absolute() and ".." not in hostfile.parts
    if not (named if KINDS[entry.kind] else beside):
        raise ValueError(f"{reprlib.repr(entry.hostfile)} is no hostfile of a cluster of kind {entry.kind}")
    if entry.ssh_config and os.path.realpath(entry.ssh_config) != os.path.realpath(directory / "ssh_config"):
        raise ValueError(f"{reprlib.repr(entry.ssh_config)} is not its ssh configuration")


def refuse_other_kind(root: Path, name: str, kind: str) -> None:
    """Raises CpuftError when `name` is a cluster of another kind than `kind`, whose hosts would be lost."""
    entry = None
    with suppress(CpuftError):  # a damaged entry is written anew
        entry = recall(root, name)
    if entry and entry.kind != kind:
        raise CpuftError(
            f"{name} is a cluster of kind {entry.kind} already: choose another --name, or cpuft provision down {name}"
        )


def carries_mark(text: str) -> bool:
    """Whether a text file is one that `cpuft provision` wrote, and may write over or take away."""
    return _MARK in text.partition("\n")[0].lower()


def _unknown(name: str, known: list[str]) -> CpuftError:
    hint = near_names(name, known) if known else "make one with cpuft provision"
    return CpuftError(f"there is no cluster {name!r}: {hint}")


def list_names(root: Path) -> list[str]:
    """Names of all clusters."""
    names = sorted(path.parent.name for path in root.glob(f"*/{FILE_NAME}"))
    return [name for name in names if _NAME.fullmatch(name)]


def find_by_hostfile(roots: tuple[Path, ...], hostfile: str) -> Entry | None:
    """The cluster whose hostfile this is."""
    wanted = str(Path(hostfile).resolve())
    entries = (read_entry(root, name) for root in roots for name in list_names(root))
    return next((entry for entry in entries if str(Path(entry.hostfile).resolve()) == wanted), None)


def format_entry(entry: Entry) -> str:
    """Text that `read_entry` reads back as the same entry."""
    return json.dumps(dataclasses.asdict(entry), indent=2, sort_keys=True) + "\n"
