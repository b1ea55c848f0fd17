"""Checkpoints as folders on a disk: UPDATE.RANK, each there as a whole or not at all, and read only when whole.

A folder is written beside, synced and renamed. Its checkpoint.json has the checksums of its files, and its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpuft.files import hash_text, open_regular
from cpuft.serialization import load, parse_json

FOLDER = "checkpoints"
STATE, RECORD, VALUES = "state.safetensors", "record.jsonl", "values.json"
"""Of a checkpoint: the state, and beside it the record of a training, or what a script keeps that is no tensor."""
KEPT = 2
_LAST = "last"
_ABOUT, _BESIDE, _GOING = "checkpoint.json", ".new", ".old"
_FORMAT = 1
_BLOCK = 1 << 24
_OURS = re.compile(r"(\d{9,})\.(\d+)(\.new|\.old)?")
"""What checkpoints are called, and nothing else that may lie beside them."""


def write_checkpoint(root: Path, update: int, rank: int, files: Mapping[str, memoryview]) -> Path:
    """Write a rank's checkpoint after so many updates; those before the newest two go.

    Raises
    ------
    OSError: the disk does not take it; what was there is as it was.
    """
    target = root / f"{update:09}.{rank}"
    beside = root / f"{target.name}{_BESIDE}"
    root.mkdir(parents=True, exist_ok=True)
    for path, own in _list_ours(root):
        if own[3] == _GOING or (own[3] == _BESIDE and own[2] == str(rank)):
            shutil.rmtree(path, ignore_errors=True)
    try:
        beside.mkdir()
        sums = {name: _write(beside / name, content) for name, content in files.items()}
        about = {"format": _FORMAT, "update": update, "files": sums}
        _write(beside / _ABOUT, memoryview(json.dumps(about | {"checksum": _checksum(about)}).encode()))
        _sync(beside)
        _remove(target)  # one of the same update, from a start before this one
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    _sync(root)
    updates = sorted(number for number, path in list_checkpoints(root) if path.suffix == f".{rank}")
    for number, path in list_checkpoints(root):
        if number < updates[-KEPT:][0]:
            _remove(path)
    return target


def _remove(path: Path) -> None:
    """Take a checkpoint away: it has lost its name before the first of its files goes."""
    going = path.with_name(path.name + _GOING)
    with suppress(OSError):
        path.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _write(path: Path, content: memoryview) -> str:
    """Write and sync a file; its checksum."""
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        for start in range(0, len(content), _BLOCK):
            block = content[start : start + _BLOCK]
            digest.update(block)
            while block:
                block = block[file.write(block) :]
        os.fsync(file.fileno())
    return digest.hexdigest()


def _sync(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(about: Mapping[str, Any]) -> str:
    return hash_text(json.dumps(about, sort_keys=True))


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Number of the last update and folder of each checkpoint, whole or not, the newest first."""
    return sorted(((int(own[1]), path) for path, own in _list_ours(root) if not own[3]), reverse=True)


def _list_ours(root: Path) -> list[tuple[Path, re.Match[str]]]:
    """What is ours in a folder, and the parts of its name."""
    try:
        names = os.listdir(root)
    except OSError:  # none there, or not any more: on a shared disk ranks of several hosts take it away at once
        names = []
    return [(root / name, own) for name in names if (own := _OURS.fullmatch(name))]


def read_checkpoint(path: Path) -> dict[str, bytearray]:
    """The files of a checkpoint, by name.

    Raises
    ------
    ValueError: it is not whole; says what is wrong.
    """
    try:
        text = _read(path / _ABOUT).decode()
        about = load(dict[str, Any], parse_json(text), _ABOUT)
        if about.pop("checksum", "") != _checksum(about) or about.get("format") != _FORMAT:
            raise ValueError(f"{_ABOUT} is damaged, or of another version")
        sums = load(dict[str, str], about.get("files"), _ABOUT)
        if sums.keys() not in ({STATE, RECORD}, {STATE, VALUES}):
            raise ValueError(f"{_ABOUT} names other files")
        files = {name: _read(path / name) for name in sums}
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read ({error.strerror})") from None
    for name, content in files.items():
        if hashlib.sha256(content).hexdigest() != sums[name]:
            raise ValueError(f"{name} is damaged")
    return files


def _read(path: Path) -> bytearray:
    with os.fdopen(open_regular(path), "rb") as file:
        content = bytearray(os.fstat(file.fileno()).st_size)
        size = file.readinto(content)  # a file that is cut meanwhile is found by the checksum
    return content[:size] if size < len(content) else content


def read_newest(root: Path) -> tuple[int, dict[str, bytearray], list[str]]:
    """Update and files of the newest whole checkpoint in a folder (-1 and none: there is none), and a line for each
    newer one that is damaged."""
    damaged: list[str] = []
    for update, path in list_checkpoints(root):
        try:
            return update, read_checkpoint(path), damaged
        except ValueError as error:
            damaged.append(f"checkpoint {path} is left out: {error}")
    return -1, {}, damaged


def note_update(root: Path, update: int, rank: int) -> None:
    """Say beside the checkpoints how far a rank is: where the record is lost, it is known by this what was lost."""
    with suppress(OSError):  # on a full disk training goes on
        root.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(open_regular(root / f"rank-{rank}.{_LAST}", flags), "w") as file:
            file.write(f"{update}\n")


def remove_after(root: Path, update: int) -> None:
    """Take away what is newer than what a run goes on from: it was damaged."""
    for number, path in list_checkpoints(root):
        if number > update:
            _remove(path)
    _forget_updates(root)


def _forget_updates(root: Path) -> None:
    with suppress(OSError):
        for name in os.listdir(root):
            if name.startswith("rank-") and name.endswith(f".{_LAST}"):
                (root / name).unlink(missing_ok=True)


def remove_all(root: Path) -> None:
    """Remove the checkpoints of a finished run, and their folder when nothing else is in it.

    Each loses its name first: if this process is killed in the middle, no half of a checkpoint looks like a whole one.
    """
    for path, own in _list_ours(root):
        if own[3]:
            shutil.rmtree(path, ignore_errors=True)
        else:
            _remove(path)
    _forget_updates(root)
    with suppress(OSError):
        root.rmdir()


def to_view(text: Iterable[str]) -> memoryview:
    """Lines of a text, as a file holds them."""
    return memoryview("".join(f"{line}\n" for line in text).encode())
