"""The registry of clusters: a directory for each one that cpuft made, with its entry, keys and ssh configuration."""

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

from cpuft.errors import CpuftError
from cpuft.serialization import find_control, load, parse_json

FILE_NAME = "cluster.json"
"""The file with a cluster's entry, in the cluster's directory of the registry."""
HOSTFILES = "hostfiles"
"""Folder of the hostfiles that `cpuft provision` writes, in its working directory; each has its cluster's name."""
_NAME = re.compile(r"[a-z][a-z0-9]{0,62}")
_MARK = "made by cpuft provision"
INSIDE = "inside"
"""Kind of the entry that a host has about its own cluster."""


@dataclass(frozen=True)
class Entry:
    """One cluster, as stored in `cluster.json` in the directory of its name. The fields are keys of that file."""

    name: str
    kind: str
    """One of `cpuft.provision.base.PROVIDERS`, or `INSIDE`."""
    hostfile: str
    """Absolute path."""
    ssh_config: str = ""
    """Path of ssh's client configuration for its hosts; empty for the user's own."""
    python: str = ""
    """Python of the training environment, the same path on every host; empty for this process's Python."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables that cpuft's own commands need on the hosts."""
    options: dict[str, str] = field(default_factory=dict)
    """The options it was made with, for `status` and `diff`."""
    ssh_config_there: str = ""
    """ssh's client configuration on the head host's own disk; empty where the head host sees `ssh_config`."""
    shares_files: bool = False
    """Whether the hosts see this machine's files under the same paths."""
    notice: str = ""
    """File or URL that announces a host's interruption: the default of --interruption-notice for launches."""
    renewal: str = ""
    """Command that a running launch executes on each host to extend the host's lease; empty for none."""
    here: str = ""
    """Name of the host on which this entry is, and which so knows that it is this host; empty if addresses decide."""
    until: int = 0
    """End of the hosts' lease in seconds since 1970, as provisioning knew it last; 0 for no lease."""


NO_CLUSTER = Entry("", "", "")
"""Stands for the entry of hosts that are no cluster of `cpuft provision`."""


def state_root(environ: Mapping[str, str]) -> Path:
    """Return the absolute path of the registry's folder, which need not exist: $CPUFT_STATE, else cpuft/clusters in
    $XDG_STATE_HOME or ~/.local/state. Raises CpuftError: it contains white space, which ssh's configuration and
    mpirun's options cannot hold, or others may write to it.
    """
    home = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME') or os.path.expanduser('~')}/.local/state"
    root = Path(environ.get("CPUFT_STATE") or f"{home}/cpuft/clusters").absolute()
    # On Windows there is no mpirun.
    if find_control(str(root)) or (len(str(root).split()) > 1 and sys.platform != "win32"):
        raise CpuftError(
            f"{str(root)!r} contains white space, which mpirun cannot pass to ssh: set CPUFT_STATE elsewhere"
        )
    if os.path.exists(root):
        refuse_untrusted(root)
    return root


_OF_CLUSTERS = ("decide which commands cpuft runs", "set CPUFT_STATE to a folder of your own")


def refuse_untrusted(path: Path, harm: tuple[str, str] = _OF_CLUSTERS) -> None:
    """Raise CpuftError when others than root and this user can have written `path`, which exists, or can replace it.

    The owner and the write permission of `path` and of all folders above it are checked, with and without symbolic
    links. A folder above may be writable when it is sticky, as /tmp is. The owner of the Python environment is trusted,
    because the running code is theirs, and so is a group of which only the file's owner is a member. `harm` is (what
    others could do, what to do instead of correcting the mode). Nothing is refused on Windows.
    """
    if sys.platform == "win32":  # which has access control lists in place of owners and modes
        return
    trusted = {0, os.geteuid(), os.stat(sys.prefix).st_uid}
    for leaf in dict.fromkeys((path, Path(os.path.realpath(path)))):
        for place in (leaf, *leaf.parents):
            found = os.lstat(place)
            why = ""
            if found.st_uid not in trusted and (place == leaf or found.st_uid != _find_unmapped()):
                why = f"its owner is user {found.st_uid}"
            elif not stat.S_ISLNK(found.st_mode) and (place == leaf or not found.st_mode & stat.S_ISVTX):
                others = found.st_mode & stat.S_IWOTH
                others |= 0 if _has_private_group(found) else found.st_mode & stat.S_IWGRP
                why = f"its mode is {stat.S_IMODE(found.st_mode):o}" if others else ""
            if why:
                raise CpuftError(
                    f"others may write to {place} ({why}), and so {harm[0]}: look at what is "
                    f"there and correct its owner and mode (chmod go-w), or {harm[1]}"
                )


def _has_private_group(found: os.stat_result) -> bool:
    """Return whether a file's group has its owner as the only member, as on distributions with umask 002."""
    if not found.st_uid:
        return False
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    return user.pw_gid == found.st_gid and user.pw_name == group.gr_name and not {*group.gr_mem} - {user.pw_name}


def _find_unmapped() -> int:
    """Return the id of all other users in a user namespace that maps only this one (Apptainer); else -1."""
    try:
        maps = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        overflow = int(Path("/proc/sys/fs/overflowuid").read_text())
    except (OSError, ValueError):
        return -1
    return -1 if any(int(first) <= overflow < int(first) + int(count) for first, _, count in maps) else overflow


def make_state_root(root: Path) -> None:
    """Make the folder of the registry and the missing folders above it, with mode 700; existing ones keep theirs.
    Raises CpuftError: others may write to it or replace it.
    """
    for folder in [*reversed(root.parents), root]:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    refuse_untrusted(root)


def search_roots(environ: Mapping[str, str], prefix: str = sys.prefix) -> tuple[Path, ...]:
    """Return the registries in which a run looks for its cluster: `state_root`, and clusters beside `prefix` if that is
    named env, as on provisioned hosts. Raises CpuftError: the first has white space, or others may write to it.
    """
    own = state_root(environ)
    # "env" is the Python environment that cpuft provision installs on hosts, with the cluster's entry beside it.
    return (own, Path(prefix).parent / "clusters") if Path(prefix).name == "env" else (own,)


def check_name(name: str) -> str:
    """Return a cluster's name, or raise CpuftError if it is not 1 to 63 small letters and digits, a letter first."""
    if not _NAME.fullmatch(name):
        raise CpuftError(
            f"{reprlib.repr(name)} is not a valid cluster name: use small letters and digits, a letter first"
        )
    return name


def find_by_name(roots: tuple[Path, ...], name: str) -> Entry:
    """Return the entry from the first registry that has it. Raises CpuftError: none has it, or it cannot be used."""
    for root in roots:
        if entry := read_entry_if_exists(root, name):
            return entry
    known = sorted(name for root in roots for name in list_names(root))
    raise _unknown(name, known, ", or name machines of your own in a file with --hostfile")


def read_entry_if_exists(root: Path, name: str) -> Entry | None:
    """Return a cluster's entry, or None; CpuftError: it is damaged, others may write to it, or `name` is not valid."""
    return read_entry(root, name) if os.path.exists(root / check_name(name) / FILE_NAME) else None


def read_entry(root: Path, name: str) -> Entry:
    """Return the entry of a cluster of the registry `root`. Raises CpuftError: there is none, it is damaged, or other
    users may write to it or to the ssh files beside it, which say what commands do.
    """
    path = root / check_name(name) / FILE_NAME
    for beside in (FILE_NAME, "ssh_config", "known_hosts"):
        if os.path.lexists(path.with_name(beside)):
            refuse_untrusted(path.with_name(beside))
    try:
        entry = load(Entry, parse_json(path.read_text(encoding="utf-8")))
        _check_entry(entry, path.parent)
        return entry
    except OSError:
        raise _unknown(name, list_names(root)) from None
    except ValueError as error:
        raise CpuftError(f"{path} is damaged ({error}): provision {name} again") from None


def _check_entry(entry: Entry, directory: Path) -> None:
    """Raise ValueError when an entry read from `directory` is another cluster's or names a path that it cannot own."""
    values = dataclasses.asdict(entry)
    for name, value in [*values.items(), *entry.settings.items(), *entry.options.items()]:
        if odd := find_control(name) or find_control(value if isinstance(value, str) else ""):
            raise ValueError(f"its {reprlib.repr(name)} contains the control character {odd!r}")
    names = {entry.name, entry.options.get("name", directory.name)}
    if names != {directory.name}:
        raise ValueError(f"it is the entry of {reprlib.repr((names - {directory.name}).pop())}")
    if not _NAME.fullmatch(entry.kind):
        raise ValueError(f"{reprlib.repr(entry.kind)} is no kind of cluster")
    hostfile = Path(entry.hostfile)
    beside = os.path.realpath(hostfile) == os.path.realpath(directory / "hostfile")
    named = hostfile.parts[-2:] == (HOSTFILES, directory.name) and hostfile.is_absolute() and ".." not in hostfile.parts
    if not (beside if entry.kind == INSIDE else named):
        raise ValueError(f"{reprlib.repr(entry.hostfile)} is no hostfile of a cluster of kind {entry.kind}")
    if entry.ssh_config and os.path.realpath(entry.ssh_config) != os.path.realpath(directory / "ssh_config"):
        raise ValueError(f"{reprlib.repr(entry.ssh_config)} is not its ssh configuration")


def carries_mark(text: str) -> bool:
    """Return whether a text's first line has "made by cpuft provision", in any case: cpuft may remove such a file."""
    return _MARK in text.partition("\n")[0].lower()


def _unknown(name: str, known: list[str], advice: str = "") -> CpuftError:
    others = f"the clusters that exist are {', '.join(known)}" if known else "no cluster exists yet"
    return CpuftError(f"there is no cluster named {name!r} ({others}): make one with cpuft provision{advice}")


def list_names(root: Path) -> list[str]:
    """Return the names of all clusters of a registry, sorted; [] if `root` does not exist. No entry is read."""
    names = sorted(path.parent.name for path in root.glob(f"*/{FILE_NAME}"))
    return [name for name in names if _NAME.fullmatch(name)]


def find_by_hostfile(roots: tuple[Path, ...], hostfile: str) -> Entry | None:
    """Return the entry of the cluster whose hostfile this path is, links followed, else None. Raises CpuftError: an
    entry that was read before it cannot be used.
    """
    wanted = str(Path(hostfile).resolve())
    entries = (read_entry(root, name) for root in roots for name in list_names(root))
    return next((entry for entry in entries if str(Path(entry.hostfile).resolve()) == wanted), None)


def format_entry(entry: Entry) -> str:
    """Return the text of an entry's file: an indented JSON object, and a newline at the end."""
    return json.dumps(dataclasses.asdict(entry), indent=2, sort_keys=True) + "\n"
