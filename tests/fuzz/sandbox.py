"""The room of `scripts/check-fuzz`: namespaces where one folder can be written, with witnesses around it."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

OUTSIDE = Path("/var/tmp")
"""A file system of its own in there; whatever changes in it beyond `ROOT` was changed by mistake."""

ROOT = OUTSIDE / "a" / "b" / "root"
FOLDERS = {"HOME": "home", "CPUFT_STATE": "state", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
_SHM = Path("/dev/shm")
_OWN = {str(OUTSIDE), str(_SHM)}
_REPOSITORY = Path(__file__).parents[2]

# All that is mounted becomes read-only here; the namespaces, and what was started in them, go with this process.
_ENTER = f"""set -eu
mount --make-rprivate /
while read -r _ _ _ _ target _; do mount -o remount,bind,ro "$target" 2>/dev/null || true; done </proc/self/mountinfo
mount -t proc -o ro proc /proc
for target in {OUTSIDE} {_SHM}; do mount -t tmpfs -o mode=1777,size=1g tmpfs "$target"; done
ip link set dev lo up
"$@"
"""


def enter_command(words: list[str]) -> list[str]:
    """The command that runs `words` in the room (root only)."""
    spaces = ("--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child")
    return ["unshare", *spaces, "sh", "-c", _ENTER, "check-fuzz", *words]


def find_reasons_to_refuse() -> list[str]:
    """Why this process must not be given random input: what of the machine it could change. Empty in the room."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    # The last mount on a target is the one that is seen.
    seen = {words[4]: (words[5].split(","), words[words.index("-") + 1]) for words in mounts}
    reasons = [f"{target} can be written" for target, (how, _) in seen.items() if "rw" in how and target not in _OWN]
    reasons += [f"{target} is not its own" for target in sorted(_OWN) if seen.get(target, ([], ""))[1] != "tmpfs"]
    reasons += [f"there is a network, {name}" for _, name in socket.if_nameindex() if name != "lo"]
    first = Path("/proc/1/cmdline").read_bytes().split(b"\0")
    return reasons + ([] if b"check-fuzz" in first else ["it sees the machine's processes"])


def prepare() -> None:
    """Witnesses beside and above `ROOT`, and at the places where cpuft keeps things; then `ROOT` itself."""
    for folder in (OUTSIDE, OUTSIDE / "a", OUTSIDE / "a" / "b"):
        for name in ("v", "local", "cpuft-inputs", "hostfiles"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "keep").write_text("never to be changed\n")
    for name in ("keep", "psm_keep", "sem.keep"):
        (_SHM / name).write_text("never to be changed\n")
    reset()


def reset() -> None:
    """`ROOT` as every input finds it; this process works in it."""
    os.chdir("/")
    shutil.rmtree(ROOT, ignore_errors=True)
    for folder in (*FOLDERS.values(), "work"):
        (ROOT / folder).mkdir(parents=True)
    os.chdir(ROOT / "work")


def snapshot_near() -> dict[str, str]:
    """Everything that can be written and is not in `ROOT`: name -> what it is and holds."""
    return {str(path): _describe(path) + _digest(path) for top in (OUTSIDE, _SHM) for path in _walk(top)}


def snapshot_far() -> dict[str, str]:
    """What is read-only, too: this checkout, the machine's settings, what ssh and cpuft keep in the home folder."""
    tops = [_REPOSITORY / name for name in ("cpuft", "tests", "scripts", "hostfiles", "ami")] + [Path("/etc")]
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    tops += [home / name for name in (".ssh", ".local/state/cpuft", ".cache/cpuft")]
    return {str(path): _describe(path) for top in tops for path in _walk(top)}


def _walk(top: Path) -> Iterator[Path]:
    """Files and folders below `top`, without those in `ROOT`, and what Python compiles."""
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name != "__pycache__" and Path(folder, name) != ROOT]
        yield Path(folder)
        yield from (Path(folder, name) for name in files)


def _describe(path: Path) -> str:
    state = os.lstat(path)
    text = f"{state.st_mode:o} {state.st_uid} {state.st_gid}"
    if stat.S_ISREG(state.st_mode):
        text += f" {state.st_size} {state.st_mtime_ns}"
    return text


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
