"""Files written whole; folders that are this user's alone; trees taken away: here and, as shell text, on hosts."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.serialization import load, parse_json

_ELSEWHERE = "set XDG_CACHE_HOME to a folder of your own"
SENT = "CPUFT_SENT"
"""Says how the paths begin of files from which processes of a host take variables that nobody else may see."""

_SPECIAL = {
    stat.S_IFDIR: "folder",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
}
_HERE = Path(__file__)
PRIVATE = _HERE.with_name("private.sh").read_text(encoding="utf-8")
"""`private FOLDER`: makes a folder for this user alone, in one step with its mode. What is there and could be another
user's work, or others may look into, fails; 41c0 is a directory of mode 700, and stat follows no link."""
REMOVE = _HERE.with_name("remove.sh").read_text(encoding="utf-8")
"""`remove ROOT PATH...`: takes away what lies below ROOT on one disk. What resolves to anything else, to / or to what
holds this user's home fails."""


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """An empty file to write to, beside `path`; it is renamed to `path` when the block ends well, and removed else.

    The folder of `path` is made. A link at `path` is replaced by the file, and what it points to stays as it is.

    Raises
    ------
    CpuftError: at `path` is a folder, device, named pipe or socket, or a link to one: these are never replaced.
    """
    refuse_special(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    # A name that nobody could foresee, and O_EXCL: no link that somebody planted there is followed.
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    try:
        yield beside
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def refuse_special(path: Path) -> None:
    """Do nothing when a file may be written at `path`.

    Raises
    ------
    CpuftError: a folder, device, named pipe or socket is there, or a link to one.
    """
    with suppress(OSError):  # nothing is there, or what goes wrong goes wrong again when it is written
        kind = _SPECIAL.get(stat.S_IFMT(path.stat().st_mode))
        if kind:
            raise CpuftError(f"{path} is a {kind}, and only a regular file can be written: name another file")


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file at `path`. A named pipe would make a plain open wait for its other end.

    Raises
    ------
    OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, making its folder."""
    with written_beside(path) as beside:
        beside.write_text(text, encoding="utf-8", errors="surrogateescape")


def split_paths(text: str) -> list[str]:
    """The paths in a text with commas between, or the text where it is the path of something by itself."""
    return [text] if os.path.exists(text) else [word.strip() for word in text.split(",")]


def hash_text(text: str, digits: int = 64) -> str:
    """SHA-256 of a text, the first hexadecimal `digits` of it."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:digits]


def hash_file(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def remove_command(root: str, *paths: str) -> tuple[str, ...]:
    """A command that takes away `paths`, each of which must lie below `root`."""
    return ("sh", "-c", f'{REMOVE}remove "$@"', "remove", root, *paths)


def take_sent(environ: Mapping[str, str], process: str) -> dict[str, str]:
    """Variables that were sent to this process of a host alone, by a file that is gone then.

    None where there is no such file, as for a printed plan that is run by hand, or where it is another user's.

    Raises
    ------
    CpuftError: the file is damaged.
    """
    path = f"{environ.get(SENT) or '/nowhere'}-{process}"
    try:
        with os.fdopen(open_regular(Path(path), os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid == os.geteuid():
                os.unlink(path)
                return load(dict[str, str], parse_json(file.read()), "it")
    except OSError:
        pass
    except ValueError as error:
        # Not what it holds: these are secrets.
        said = f"is no JSON object of texts ({type(error).__name__})"
        raise CpuftError(
            f"{path}, which brings this process its secret variables, {said}: start the run again"
        ) from None
    return {}


def cache_path(environ: Mapping[str, str]) -> Path:
    """$XDG_CACHE_HOME/cpuft or ~/.cache/cpuft. Raises CpuftError for a relative one."""
    home = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or os.path.expanduser('~')}/.cache"
    if not os.path.isabs(home):
        raise CpuftError(f"{home} is no place for what runs share, because it is relative: {_ELSEWHERE}")
    return Path(home, "cpuft")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder at `cache_path`, made now where it is not there.

    Raises CpuftError: it cannot be made, or others could have written there.
    """
    return make_private(cache_path(environ), _ELSEWHERE)


def make_private(folder: Path, advice: str) -> Path:
    """Make a folder for this user alone; one of ours that others could only read is closed to them.

    Raises CpuftError: it cannot be made, or is a link, another user's, or open to others' writing; ends with `advice`.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check_private(folder, advice)
        folder.chmod(0o700)
    except OSError as error:
        raise CpuftError(f"folder {folder} cannot be made ({error.strerror}): {advice}") from None
    return folder


def check_private(folder: Path, advice: str = _ELSEWHERE) -> None:
    """Raises CpuftError when what is in a folder may be another user's work; ends with `advice`."""
    if trouble := _describe_doubt(folder):
        raise CpuftError(f"folder {folder} {trouble}: see what it is and remove it, or {advice}")


def _describe_doubt(folder: Path) -> str:
    """Why what is in a folder may be another user's work; empty where only this user can have written there."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is a link or a file"
    if found.st_uid != os.geteuid():
        return f"is user {found.st_uid}'s, and you are {os.geteuid()}"
    return f"is open to others' writing (mode {found.st_mode & 0o777:o})" if found.st_mode & 0o022 else ""
