"""What of a cluster's files is ours to write over or to take away: pure, but for reading one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import REMOVE
from cpuft.hosts.registry import carries_mark
from cpuft.plan import Step

_PREFIX = re.compile(r"(/[\w.+-]+)+")


def read_raw(path: Path) -> str:
    """The file's text; empty where it cannot be read, or is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def check_prefix(prefix: str) -> None:
    """Raises CpuftError for what cannot be a folder of cpuft's own on a host."""
    if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/")):
        raise CpuftError(f"prefix {prefix!r}: name a folder for cpuft alone by a plain path, such as /opt/cpuft")


def check_hostfile(path: str, text: str) -> None:
    """Raises CpuftError when a hostfile that is there, with `text` in it, is not one that `cpuft provision` wrote."""
    if text and not carries_mark(text):
        raise CpuftError(f"{path} is not cpuft's: move it away, or choose another --name")


def plan_removal(files: Mapping[str, str], directory: str, hostfile: str, *others: str) -> tuple[Step, ...]:
    """Take away what is remembered of a cluster of any kind: its directory, and a hostfile that carries our mark.

    `files` has texts by path; `others` go with the hostfile. Its directory goes too when nothing else is in it.
    """
    mine = (hostfile, *others) if carries_mark(files.get(hostfile, "")) else ()
    # The directory last: with its entry, a second try finds the rest.
    script = f"""{REMOVE}directory=$1
shift
for file; do rm -f "$file"; rmdir "$(dirname "$file")" 2>/dev/null || true; done
remove "$(dirname "$directory")" "$directory"
"""
    return (Step("take away its keys, files and hostfile", ("sh", "-c", script, "remove", directory, *mine)),)
