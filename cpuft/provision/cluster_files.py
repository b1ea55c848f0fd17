"""The files of a cluster on this machine: which of them cpuft wrote, and plans that write and remove them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import read_raw
from cpuft.hosts.registry import FILE_NAME, carries_mark
from cpuft.plans import Step, local_step

KEY_MARK = "cpuft"
"""Comment of the keys that cpuft makes: the last word of their .pub files."""
_PRIVATE = ("host_key", "id_ed25519")
_KEYGEN = """set -eu
umask 077
mkdir -p "$(dirname "$1")"
# ssh-keygen asks before it replaces a half-written key.
rm -f "$1" "$1.pub"
ssh-keygen -q -t ed25519 -N "" -C "$2" -f "$1"
"""
_PREFIX = re.compile(r"(/[\w.+-]+)+")


def read_files(directory: Path, hostfile: Path) -> dict[str, str]:
    """Return by path the texts of `hostfile`, and of the files of `directory`, its there/ and its nodes/*/.

    Missing files are left out. The text of a private key (host_key, id_ed25519) is "private", that of an unreadable
    file is "".
    """
    paths = [path for pattern in ("*", "there/*", "nodes/*/*") for path in directory.glob(pattern) if path.is_file()]
    texts = {path.as_posix(): "private" if path.name in _PRIVATE else read_raw(path) for path in paths}
    return texts | ({hostfile.as_posix(): read_raw(hostfile)} if hostfile.exists() else {})


def check_prefix(prefix: str) -> None:
    """Raise CpuftError unless `prefix` is like /opt/cpuft: parts of letters, digits and _.+-, none . or .. alone."""
    if not _PREFIX.fullmatch(prefix) or {".", ".."} & set(prefix.split("/")):
        raise CpuftError(f"prefix {prefix!r} is not a plain absolute path: give a new one, such as /opt/cpuft")


def is_ours(files: Mapping[str, str], directory: str) -> bool:
    """Whether cpuft made a cluster's directory: `files`, by path as of `read_files`, has its record, or a public key or
    ssh_config with cpuft's mark, in there.
    """
    own = {path.removeprefix(f"{directory}/"): text for path, text in files.items() if path.startswith(f"{directory}/")}
    return any(
        name.startswith(FILE_NAME)
        or (name.endswith(".pub") and text.rstrip().endswith(f" {KEY_MARK}"))
        or (name.startswith("ssh_config") and carries_mark(text))
        for name, text in own.items()
    )


def check_places(directory: str, hostfile: str) -> None:
    """Raise CpuftError when a cluster's directory or hostfile is not empty and was not made by `cpuft provision`."""
    files = read_files(Path(directory), Path(hostfile))
    if os.path.isdir(directory) and os.listdir(directory) and not is_ours(files, directory):
        raise CpuftError(f"{directory} was not made by cpuft provision: move it away, or choose another --name")
    if (text := files.get(hostfile)) and not carries_mark(text):
        raise CpuftError(f"{hostfile} was not made by cpuft provision: move it away, or choose another --name")


def plan_removal(files: Mapping[str, str], directory: str, hostfile: str) -> tuple[Step, ...]:
    """Return a step that removes a cluster's directory, and the hostfile if cpuft wrote that; () unless `is_ours`."""
    if not is_ours(files, directory):
        return ()
    mine = (hostfile,) if carries_mark(files.get(hostfile, "")) else ()
    return (local_step("remove its keys, files and hostfile", "remove_cluster", directory, *mine),)


def plan_key(path: str, why: str, comment: str = KEY_MARK, host: str = "") -> Step:
    """Return the step on `host` ("": here) that makes or replaces an ed25519 key, `path` and `path`.pub."""
    if not host:
        return local_step(why, "make_key", path, comment)
    return Step(why, ("sh", "-c", _KEYGEN, "keygen", path, comment), host=host)


def plan_file(path: str, text: str, why: str, host: str = "") -> Step:
    """Return the step on `host` ("": here) that makes a file's folder, and writes or replaces the file atomically."""
    if not host:
        return local_step(why, "write", path, stdin=text)
    # A new folder is writable by its owner only, because cpuft trusts no record in a folder that others can write to.
    script = 'set -eC; umask go-w; mkdir -p "${1%/*}"; rm -f "$1.new"; cat >"$1.new"; chmod 644 "$1.new"; '
    script += 'mv -f "$1.new" "$1"'
    return Step(why, ("sh", "-c", script, "write", path), host=host, stdin=text)


def plan_files(texts: Mapping[str, str], found: Mapping[str, str], why: str) -> list[Step]:
    """Return a step that writes a file on this machine for each of `texts` (by path) that differs from `found`."""
    return [plan_file(path, text, why) for path, text in texts.items() if found.get(path) != text]
