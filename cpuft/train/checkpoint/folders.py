"""Checkpoints on a disk: a folder UPDATE.RANK for each, which exists completely or not at all.

A checkpoint is written to a folder with another name, synced and renamed. Its checkpoint.json has the checksums of its
files and of itself, and it is read only if they are right. `python -m cpuft.train.checkpoint.folders FOLDER` checks
one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpuft.files import hash_text, open_regular
from cpuft.serialization import load, parse_json

FOLDER = "checkpoints"
BEST = "best"
"""Name of the folder, in the folder of checkpoints, of the checkpoint of the best evaluation."""
STATE, RECORD, VALUES = "state.safetensors", "record.jsonl", "values.json"
"""Files of a checkpoint: the state, and the record of a training, or a script's values that are no tensors."""
CHECKPOINTS_KEPT = 2
"""How many updates back checkpoints stay: those of the newest two for which a rank has written one."""
_LAST = "last"
_META, _NEW, _OLD = "checkpoint.json", ".new", ".old"
_FORMAT = 1
_AT_CWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)
_NAME = re.compile(r"(\d{9,})\.(\d+)(\.new|\.old)?")  # update, rank, and whether it is being written or removed


def write_checkpoint(root: Path, update: int, rank: int, files: Mapping[str, memoryview]) -> Path:
    """Write a rank's checkpoint of an update, and return its folder, such as root/000000100.0 (update 100, rank 0).

    `files` are contents by name: STATE, and RECORD or VALUES. They are on the disk (fsync) when this returns. A
    checkpoint of the same update and rank is replaced, and those of all ranks that are older than this rank's newest
    two are removed. Raises OSError, after which the checkpoints of other updates are still there.
    """
    target = root / f"{update:09}.{rank}"
    new = root / f"{target.name}{_NEW}"
    root.mkdir(parents=True, exist_ok=True)
    for path, name in _list_folders(root):
        if name[3] == _OLD or (name[3] == _NEW and name[2] == str(rank)):
            shutil.rmtree(path, ignore_errors=True)
    try:
        new.mkdir()
        sums = {name: _write(new / name, content) for name, content in files.items()}
        meta = {"format": _FORMAT, "update": update, "files": sums}
        _write(new / _META, memoryview(json.dumps(meta | {"checksum": _checksum(meta)}).encode()))
        _sync(new)
        if _exchange(new, target):  # a checkpoint of the same update, from an earlier start of the run
            shutil.rmtree(new, ignore_errors=True)
        else:
            _remove(target)
            new.rename(target)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _sync(root)
    updates = sorted(number for number, path in list_checkpoints(root) if path.suffix == f".{rank}")
    oldest = updates[-CHECKPOINTS_KEPT] if len(updates) >= CHECKPOINTS_KEPT else 0
    for number, path in list_checkpoints(root):
        if number < oldest:
            _remove(path)
    return target


def keep_best(path: Path) -> None:
    """Keep a checkpoint as its rank's best: link its files into the folder best/NAME beside it, where they stay when
    the checkpoint is removed, and remove the rank's earlier best one. If it raises OSError, the earlier one stays.
    """
    root = path.parent / BEST
    root.mkdir(exist_ok=True)
    new = root / f"{path.name}{_NEW}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    for file in path.iterdir():
        os.link(file, new / file.name)
    _sync(new)
    _remove(root / path.name)
    new.rename(root / path.name)
    _sync(root)
    for _, older in list_checkpoints(root):
        if older.suffix == path.suffix and older.name != path.name:
            _remove(older)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False if one is missing or the file system cannot do it."""
    try:
        rename = ctypes.CDLL(None).renameat2  # glibc 2.28 and newer
    except (AttributeError, OSError):
        return False
    return bool(rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed before its first file is removed, so that no half of it looks complete."""
    old = path.with_name(path.name + _OLD)
    with suppress(OSError):
        path.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, content: memoryview) -> str:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(content).hexdigest()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(meta: Mapping[str, Any]) -> str:
    return hash_text(json.dumps(meta, sort_keys=True))


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return (update, folder) of the checkpoint of each update and rank in `root`, newest first, of one update the last
    name first; [] without `root`. Damaged ones are included, but not those that are being written or removed.
    """
    return sorted(((int(name[1]), path) for path, name in _list_folders(root) if not name[3]), reverse=True)


def _list_folders(root: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the folders of checkpoints in `root`, also half-written ones, with the parts of their names."""
    try:
        names = os.listdir(root)
    except OSError:  # there is none, or not any more: on a shared disk, ranks of several hosts remove it at once
        names = []
    return [(root / name, found) for name in names if (found := _NAME.fullmatch(name))]


def read_checkpoint(path: Path) -> dict[str, bytearray]:
    """Return the contents of STATE, and RECORD or VALUES, by name. ValueError: missing, damaged, of another version."""
    try:
        text = _read(path / _META).decode()
        meta = load(dict[str, Any], parse_json(text), _META)
        if meta.pop("checksum", "") != _checksum(meta) or meta.get("format") != _FORMAT:
            raise ValueError(f"{_META} is damaged, or of another version")
        sums = load(dict[str, str], meta.get("files"), _META)
        if sums.keys() not in ({STATE, RECORD}, {STATE, VALUES}):
            raise ValueError(f"{_META} names other files")
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
        size = file.readinto(content)  # a file that is cut off meanwhile has another checksum
    return content[:size] if size < len(content) else content


def read_newest(root: Path) -> tuple[int, dict[str, bytearray], list[str]]:
    """Return update and files of the newest undamaged checkpoint in a folder, -1 and {} without one, and a message for
    each newer checkpoint, which is damaged; all ranks' checkpoints count.
    """
    damaged: list[str] = []
    for update, path in list_checkpoints(root):
        try:
            return update, read_checkpoint(path), damaged
        except ValueError as error:
            damaged.append(f"checkpoint {path} is left out: {error}")
    return -1, {}, damaged


def note_update(root: Path, update: int, rank: int) -> None:
    """Write a rank's last update to `root`/rank-RANK.last, for a launcher whose record is lost; ignore OSErrors."""
    with suppress(OSError):  # training goes on with a full disk
        root.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(open_regular(root / f"rank-{rank}.{_LAST}", flags), "w") as file:
            file.write(f"{update}\n")


def remove_after(root: Path, update: int) -> None:
    """Remove checkpoints newer than `update` (-1: all), not best ones, and all files rank-N.last; ignore OSErrors."""
    for number, path in list_checkpoints(root):
        if number > update:  # a run that resumes from `update` has found these damaged
            _remove(path)
    _forget_updates(root)


def _forget_updates(root: Path) -> None:
    with suppress(OSError):
        for name in os.listdir(root):
            if name.startswith("rank-") and name.endswith(f".{_LAST}"):
                (root / name).unlink(missing_ok=True)


def remove_all(root: Path) -> None:
    """Remove all checkpoints in `root`, also half-written and best ones, and `root` if empty; ignore OSErrors."""
    if root.name != BEST:
        remove_all(root / BEST)
    for path, name in _list_folders(root):
        if name[3]:
            shutil.rmtree(path, ignore_errors=True)
        else:
            _remove(path)
    _forget_updates(root)
    with suppress(OSError):
        root.rmdir()


def to_view(lines: Iterable[str]) -> memoryview:
    """Return the content of a file in UTF-8 with these lines, to each of which a newline is added."""
    return memoryview("".join(f"{line}\n" for line in lines).encode())


def main() -> None:
    """Check the checkpoint in the folder of the first argument: exit with 1 and a line on stderr if it is not whole."""
    try:
        read_checkpoint(Path(sys.argv[1]))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
