"""The files of a cluster on this machine: which of them cpuft wrote, and plans that write and remove them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import REMOVE
from cpuft.hosts.registry import FILE_NAME, carries_mark
from cpuft.plan import Step

KEY_MARK = "cpuft"
"""The comment of keys that we made."""
_PRIVATE = ("host_key", "id_ed25519")
_REMOVAL = REMOVE + Path(__file__).with_name("cluster_removal.sh").read_text(encoding="utf-8")
"""The directory goes last: with its entry, a second try finds the rest."""
_PREFIX = re.compile(r"(/[\w.+-]+)+")


def read_files(directory: Path, hostfile: Path) -> dict[str, str]:
    """The cluster's own files on this machine, by path; of private keys only that they are there."""
    paths = [path for pattern in ("*", "there/*", "nodes/*/*") for path in directory.glob(pattern) if path.is_file()]
    texts = {str(path): "private" if path.name in _PRIVATE else read_raw(path) for path in paths}
    return texts | ({str(hostfile): read_raw(hostfile)} if hostfile.exists() else {})


def read_raw(path: Path) -> str:
    """The file's text; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_prefix(prefix: str) -> None:
    """Raises CpuftError for what cannot be a folder of cpuft's own on a host."""
    if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/")):
        raise CpuftError(f"prefix {prefix!r}: name a folder for cpuft alone by a plain path, such as /opt/cpuft")


def is_ours(files: Mapping[str, str], directory: str) -> bool:
    """Whether a cluster's directory has an entry, or what a run that was killed made before it; `files` by path."""

    def is_mark(name: str, text: str) -> bool:
        key = name.endswith(".pub") and text.rstrip().endswith(f" {KEY_MARK}")
        return key or name.startswith(FILE_NAME) or (name.startswith("ssh_config") and carries_mark(text))

    return any(
        is_mark(path[len(directory) + 1 :], text) for path, text in files.items() if path.startswith(f"{directory}/")
    )


def check_places(directory: str, hostfile: str) -> None:
    """Raises CpuftError when a cluster's directory or hostfile is there, and is not one that `cpuft provision` made."""
    files = read_files(Path(directory), Path(hostfile))
    if os.path.isdir(directory) and os.listdir(directory) and not is_ours(files, directory):
        raise CpuftError(f"{directory} is not cpuft's: move it away, or choose another --name")
    check_hostfile(hostfile, files.get(hostfile, ""))


def check_hostfile(path: str, text: str) -> None:
    """Raises CpuftError when a hostfile that is there, with `text` in it, is not one that `cpuft provision` wrote."""
    if text and not carries_mark(text):
        raise CpuftError(f"{path} is not cpuft's: move it away, or choose another --name")


def plan_removal(files: Mapping[str, str], directory: str, hostfile: str, *others: str) -> tuple[Step, ...]:
    """Take away what is remembered of a cluster of any kind: its directory, and a hostfile that carries our mark.

    `files` has texts by path; `others` go with the hostfile. Its directory goes too when nothing else is in it.
    """
    mine = (hostfile, *others) if carries_mark(files.get(hostfile, "")) else ()
    return (Step("take away its keys, files and hostfile", ("sh", "-c", _REMOVAL, "remove", directory, *mine)),)


def plan_file(path: str, text: str, why: str, mode: str = "644", host: str = "") -> Step:
    """Write a file beside its place and rename it, making its directory. A link that lies there is not followed.

    A folder that is made is writable by its owner only: cpuft trusts no entry in a folder that others may write to.
    """
    script = 'set -eC; umask go-w; mkdir -p "${1%/*}"; rm -f "$1.new"; cat >"$1.new"; chmod "$2" "$1.new"; '
    script += 'mv -f "$1.new" "$1"'
    return Step(why, ("sh", "-c", script, "write", path, mode), host=host, stdin=text)


def plan_files(texts: Mapping[str, str], found: Mapping[str, str], why: str) -> list[Step]:
    """Write those of `texts`, by path, that are not what was `found`, on this machine."""
    return [plan_file(path, text, why) for path, text in texts.items() if found.get(path) != text]
