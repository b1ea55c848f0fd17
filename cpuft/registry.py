"""What cpuft remembers of each cluster it made: a directory a cluster, with its keys and ssh configuration."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpuft.errors import CpuftError, near_names
from cpuft.loader import load, parse_json

FILE_NAME = "cluster.json"


@dataclass(frozen=True)
class Entry:
    """One cluster, as `cluster.json` in its directory."""

    name: str
    kind: str
    """local, hosts, plain (a hostfile and nothing else) or inside (a cluster as its own hosts know it)"""
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


def state_root(environ: Mapping[str, str]) -> Path:
    """Where clusters are remembered: $CPUFT_STATE, or cpuft/clusters in the XDG state directory.

    Raises
    ------
    CpuftError: its path holds white space, which ssh's configuration and mpirun's options cannot carry.
    """
    home = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME', '/root')}/.local/state"
    root = Path(environ.get("CPUFT_STATE") or f"{home}/cpuft/clusters").absolute()
    if len(str(root).split()) > 1:
        raise CpuftError(f"{str(root)!r} holds white space, which mpirun cannot pass to ssh: set CPUFT_STATE elsewhere")
    return root


def search_roots(environ: Mapping[str, str], prefix: str = sys.prefix) -> tuple[Path, ...]:
    """Where a run looks for its cluster: what this user made, then what this very environment is a host of."""
    own = state_root(environ)
    return (own, Path(prefix).parent / "clusters") if Path(prefix).name == "env" else (own,)


def find_entry(roots: tuple[Path, ...], name: str) -> Entry:
    """The cluster called `name` in the first of `roots` that has it. Raises CpuftError when none does."""
    for root in roots:
        if (root / name / FILE_NAME).exists():
            return read_entry(root, name)
    raise _unknown(name, sorted(name for root in roots for name in list_names(root)))


def read_entry(root: Path, name: str) -> Entry:
    """The cluster called `name`. Raises CpuftError with the known names when there is none."""
    try:
        return load(Entry, parse_json((root / name / FILE_NAME).read_text(encoding="utf-8")))
    except OSError:
        raise _unknown(name, list_names(root)) from None
    except ValueError as error:
        raise CpuftError(f"{root / name / FILE_NAME} is damaged ({error}): provision {name} again") from None


def _unknown(name: str, known: list[str]) -> CpuftError:
    hint = near_names(name, known) if known else "make one with cpuft provision"
    return CpuftError(f"there is no cluster {name!r}: {hint}")


def list_names(root: Path) -> list[str]:
    """Names of all clusters."""
    return sorted(path.parent.name for path in root.glob(f"*/{FILE_NAME}"))


def find_by_hostfile(roots: tuple[Path, ...], hostfile: str) -> Entry | None:
    """The cluster whose hostfile this is."""
    wanted = str(Path(hostfile).resolve())
    entries = (read_entry(root, name) for root in roots for name in list_names(root))
    return next((entry for entry in entries if str(Path(entry.hostfile).resolve()) == wanted), None)


def format_entry(entry: Entry) -> str:
    """Text that `read_entry` reads back as the same entry."""
    return json.dumps(dataclasses.asdict(entry), indent=2, sort_keys=True) + "\n"
