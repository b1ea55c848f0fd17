"""What an image says of itself: read by all, written when it is whole.

`python -m cpuft.provision.image.stamp IMAGE JSON` finishes the image that was built beside its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.files import hash_file
from cpuft.serialization import load, parse_json

STAMP = "etc/cpuft-image.json"
_VOLATILE = {STAMP, "etc/ld.so.cache", "etc/shadow", "etc/shadow-", "tmp", "run", "proc", "sys", "dev"}
_VOLATILE |= {"var/log", "var/cache", "var/lib/apt", "var/lib/dpkg", "var/lib/systemd"}
"""Written anew by every build, with times in it."""


def check_image(image: str) -> None:
    """Raises CpuftError when --image is given and is none."""
    if image and not os.path.exists(f"{image}/usr/sbin/sshd"):
        raise CpuftError(f"--image {image}: there is no root filesystem with an sshd: name its directory")


def read_stamp(root: Path) -> dict[str, Any]:
    """What an image says of itself; empty for a folder that is none."""
    with suppress(OSError, ValueError):
        return load(dict[str, Any], parse_json((root / STAMP).read_text(encoding="utf-8")))
    return {}


def write_stamp(path: Path, told: dict[str, object]) -> None:
    """Write into the image beside `path` what is `told` of it and what it holds, and put it in its place."""
    built = Path(f"{path}.new")
    found = {"contents": hash_contents(built), "packages": list_packages(built)}
    (built / STAMP).write_text(json.dumps(told | found, indent=2) + "\n", encoding="utf-8")
    built.rename(path)


def list_packages(root: Path) -> list[str]:
    """name=version of every Debian package in it."""
    command = ("dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f=${Package}=${Version}\\n")
    answer = execute.run_quietly(command, seconds=60)
    if answer.exit_code:
        raise CpuftError(f"{root} lists no packages ({answer.said.strip()[-200:]}): build it anew")
    return sorted(answer.output.split())


def hash_contents(root: Path) -> str:
    """A fingerprint of all files: names, modes, owners and contents, without what every build writes anew."""
    digest = hashlib.sha256()
    for folder, names, files in os.walk(root):
        inside = os.path.relpath(folder, root)
        names[:] = sorted(n for n in names if os.path.normpath(f"{inside}/{n}") not in _VOLATILE and n != "__pycache__")
        for name in sorted(files):
            if f"{inside}/{name}" in _VOLATILE:
                continue
            path = os.path.join(folder, name)
            state = os.lstat(path)
            digest.update(f"{inside}/{name} {state.st_mode:o} {state.st_uid} {state.st_gid}\0".encode())
            if stat.S_ISLNK(state.st_mode):
                digest.update(os.readlink(path).encode())
            elif stat.S_ISREG(state.st_mode):
                digest.update(hash_file(Path(path)).encode())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    write_stamp(Path(sys.argv[1]), json.loads(sys.argv[2]))
