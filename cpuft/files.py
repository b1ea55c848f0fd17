"""Write files atomically, make private folders and remove trees, on this machine and as shell text on hosts."""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import secrets
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.transfer import FILE, NO_WAIT, TransferError, lock_file, walk

_ELSEWHERE = "set XDG_CACHE_HOME to a folder of your own"
_HERE = Path(__file__)
PRIVATE = _HERE.with_name("private.sh").read_text(encoding="utf-8")
"""Shell function `private FOLDER`: make a folder that only this user can open, or accept one that is there.

It fails if something else is there, such as a link, or a folder that another user owns or can open. 41c0 is the mode of
a folder with permissions 700; stat does not follow links."""
REMOVE = _HERE.with_name("remove.sh").read_text(encoding="utf-8")
"""Shell function `remove ROOT PATH...`: remove paths below ROOT, on ROOT's disk only.

It fails for a path that resolves to a place outside ROOT, to / or to a folder that contains the user's home."""


def describe_lfs_pointer(path: Path, begin: bytes) -> str:
    """Return "PATH is a pointer of Git LFS, ...", with the command that gets the file, if `begin`, its first bytes, are
    those of such a pointer; "" for other files.
    """
    if not begin.startswith(b"version https://git-lfs"):
        return ""
    return (
        f"{path} is a pointer of Git LFS, not the file itself: fetch the file with this command in its repository: "
        f"git lfs pull --include {shlex.quote(path.name)}"
    )


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file beside `path`, which replaces `path` if the block raises nothing. A link to a
    file is replaced, not its target; folders, devices, pipes, sockets and links to them are refused (CpuftError).
    Missing folders above `path` are made, and the file gets the permissions of a new one.
    """
    refuse_special(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    # The random name and O_EXCL make sure that no link which somebody else put there is followed.
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def write_folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, which becomes `folder` if the block raises nothing and else is removed.
    Raises CpuftError: anything but an empty folder is at `folder`, or one of its parents is a file.
    """
    refuse_filled(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CpuftError(f"{folder.parent} is not a folder: give another --output") from None
    beside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.new")
    beside.mkdir()
    try:
        yield beside
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def refuse_filled(folder: Path) -> None:
    """Raise CpuftError if anything but an empty folder is at `folder`; a link to a folder is refused, too."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CpuftError(f"{folder} is not a folder: give another --output")
    if folder.is_dir() and any(folder.iterdir()):
        raise CpuftError(f"the folder {folder} is not empty: give another --output, or remove the folder")


def refuse_special(path: Path) -> None:
    """Raise CpuftError if a folder, device, named pipe or socket is at `path`, or a link to one."""
    with suppress(OSError):  # nothing is there, or the same error will come when the file is written
        if not stat.S_ISREG(path.stat().st_mode):
            raise CpuftError(f"{path} is a folder or no regular file, which cannot be written: give another file")


def refuse_input(path: Path, *inputs: str) -> None:
    """Raise CpuftError if `path`, which is to be written, is one of the `inputs` in the form of `split_paths`."""
    if any(path.resolve() == Path(one).resolve() for given in inputs for one in split_paths(given)):
        raise CpuftError(f"{path} is one of the files that are read: give another --output")


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor, with `flags` of os.open, of a regular file, or raise OSError; never wait at a named pipe."""
    descriptor = os.open(path, flags | NO_WAIT, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8 as `write_atomically`, with its errors: readers see the old file or the whole new one."""
    with write_atomically(path) as beside:
        beside.write_text(text, encoding="utf-8", errors="surrogateescape")


def read_given_text(path: str | Path, option: str, advice: str) -> str:
    """Return the text of a file that `option` names; CpuftError, ending with `advice`: it cannot be read as UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}, which {option} names: {advice}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CpuftError(f"{option} {path} cannot be read ({error}): {advice}") from None


def read_raw(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read. Bytes that are not UTF-8 become U+FFFD."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def split_paths(text: str) -> list[str]:
    """Return [text] if that path exists, else the stripped paths between commas, so [""] for "". In place of a pattern
    (*.csv) come its sorted matches; a pattern without matches stays.
    """
    if os.path.exists(text):
        return [text]
    names = [word.strip() for word in text.split(",")]
    return [path for name in names for path in (sorted(glob.glob(name)) if glob.has_magic(name) else []) or [name]]


def list_files(path: Path) -> list[Path]:
    """Return the regular files at or below a path, in alphabetical order, without __pycache__; links are followed.
    Raises CpuftError: a link is broken or circular; FileNotFoundError: nothing is at the path.
    """
    try:
        return [Path(one.path) for one in walk(str(path), path.name) if one.kind == FILE]
    except TransferError as error:
        raise CpuftError(str(error)) from None


def hash_text(text: str, digits: int = 64) -> str:
    """Return the first `digits` hexadecimal digits, at most 64, of the SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:digits]


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def is_locked(path: str | Path) -> bool:
    """Return whether a process holds an exclusive lock of a file; False if it cannot be opened, or has no locks."""
    try:
        with open(path) as file:
            # NFSv4 refuses an exclusive lock of a file that is open for reading only, with EBADF.
            lock_file(file, is_shared=True)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def remove_command(root: str, *paths: str) -> tuple[str, ...]:
    """Return the argv, for a host with sh, that removes `paths` with all they contain on the same disk, and skips
    missing ones. It fails if one of them could not be removed, and stops at the first path that leads out of `root`, is
    `root`, or contains the user's home.
    """
    return ("sh", "-c", f'{REMOVE}remove "$@"', "remove", root, *paths)


def cache_path(environ: Mapping[str, str]) -> Path:
    """Return $XDG_CACHE_HOME/cpuft (CpuftError: relative). If unset or empty, return ~/.cache/cpuft, or if that cannot
    be written /var/tmp/cpuft-cache-UID. Nothing is made.
    """
    own = environ.get("HOME") or os.path.expanduser("~")  # a user without a name, who has no home, gets "~"
    home = environ.get("XDG_CACHE_HOME") or f"{'' if own == '~' else own}/.cache"
    if not os.path.isabs(home):
        raise CpuftError(f"the cache folder {home} is a relative path: {_ELSEWHERE}")
    folder = Path(home, "cpuft")
    lowest = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    if environ.get("XDG_CACHE_HOME") or os.access(lowest, os.W_OK) or sys.platform == "win32":
        return folder
    return Path(f"/var/tmp/cpuft-cache-{os.geteuid()}")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return `cache_path`, made with mode 700. Raises CpuftError: it cannot be made, or others can write to it."""
    return make_private_folder(cache_path(environ), _ELSEWHERE)


def make_private_folder(folder: Path, advice: str) -> Path:
    """Make a folder with mode 700, and missing ones above it, or give an existing folder this mode; return it. Raises
    CpuftError, ending with `advice`: this fails, or `check_private_folder` refuses the folder.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        check_private_folder(folder, advice)
        folder.chmod(0o700)
    except OSError as error:
        raise CpuftError(f"folder {folder} cannot be made ({error.strerror}): {advice}") from None
    return folder


def check_private_folder(folder: Path, advice: str = _ELSEWHERE) -> None:
    """Raise CpuftError, with `advice`, if a folder is a link or a file, another user's, or writable for others; OSError
    if it is missing.
    """
    if trouble := _describe_risk(folder):
        raise CpuftError(f"folder {folder} {trouble}: see what it is and remove it, or {advice}")


def _describe_risk(folder: Path) -> str:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return "is a link or a file"
    if sys.platform == "win32":  # which has access control lists in place of owners and modes
        return ""
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and you are user {os.geteuid()}"
    return f"can be written to by other users (mode {found.st_mode & 0o777:o})" if found.st_mode & 0o022 else ""
