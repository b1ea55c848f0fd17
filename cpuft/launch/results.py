"""Fetch a run's folder from the head host and store it on this machine.

`python -m cpuft.launch.results new|merge RUN_DIR COMMAND...` runs COMMAND, which writes a tar archive of the run's
folder to its standard output, and stores the archive as RUN_DIR. The archive comes from another machine, so nothing in
it is trusted: only plain files and folders are stored, and they are unpacked in a new folder, which no earlier fetch
could have prepared.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from cpuft import execute
from cpuft.errors import NOT_STORED, CpuftError, Interrupted

NEW, MERGE = "new", "merge"
"""Whether RUN_DIR must not exist yet, or files of an earlier start in RUN_DIR are replaced one by one."""
SKIPPED = "only plain files and folders of a run are fetched; left out: "
_BLOCK = 1 << 20
_END = bytes(1024)
"""Two blocks of zeros end every complete tar archive."""
_PREFIX = ".cpuft-fetch-"
_KINDS = {
    tarfile.SYMTYPE: "symbolic link",
    tarfile.LNKTYPE: "hard link",
    tarfile.FIFOTYPE: "pipe",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
}
_SHOWN = 5
"""Names of entries that were not stored, in the line that says so."""
_END_SECONDS = 10.0
"""For a sender whose archive broke off to give its exit code."""


class NotStoredError(CpuftError):
    """The results of a run could not be stored on this machine. The hosts keep their copy."""

    exit_code = NOT_STORED


class _Source:
    """The sender's output; it remembers how the archive ended."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.end = b""
        self.is_over = False

    def read(self, size: int = -1) -> bytes:
        found = self._stream.read(size)
        self.is_over = not found
        self.end = (self.end + found)[-len(_END) :]
        return found

    def drain(self) -> None:
        """Read what is left, so that the sender can end."""
        while self.read(_BLOCK):
            pass


def fetch(run_dir: Path, command: Sequence[str], merge: bool) -> list[str]:
    """Run `command` and store the archive that it writes as `run_dir`; nothing is stored for an empty archive.

    All files are on this machine's disk when this function returns. With `merge`, files in `run_dir` are replaced by
    those of the archive with the same name, other files stay, and older logs are kept as `logs-N`. Where a file takes a
    folder's place, or a folder a file's or a link's, the older one is renamed to `NAME.old-N`.

    Returns
    -------
    Names of the archive's links, pipes and devices, which are not stored, each with its kind.

    Raises
    ------
    CpuftError: the command failed.
    NotStoredError: the archive is incomplete or leads out of the folder, or this machine's disk does not take it.
    """
    run_dir = Path(os.path.realpath(run_dir))
    # On the disk of the run's folder, which may be a link to another disk or a mount point.
    place = run_dir if merge and run_dir.is_dir() else run_dir.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(place)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            part = folder / "run"
            skipped = _receive(part, command)
            if part.exists():
                _store(part, run_dir, merge)
            return skipped
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
    except OSError as error:
        raise NotStoredError(f"{error.filename2 or error.filename or run_dir}: {error.strerror}") from None


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of fetches that were killed; a fetch that still runs holds a lock on its folder."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid == os.geteuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)


def _receive(part: Path, command: Sequence[str]) -> list[str]:
    """Extract what the command sends into `part`; names of what was skipped."""
    sender = execute.start_sender(command, os.environ)
    assert sender.stdout is not None
    source = _Source(sender.stdout)
    try:
        skipped = extract(source, part)
        source.drain()
        code = sender.wait()
    except NotStoredError:
        # An archive that breaks off is the sender's failure, if the sender failed.
        if source.is_over and execute.wait(sender, _END_SECONDS):
            raise CpuftError(f"the run could not be sent (exit code {execute.exit_code(sender)})") from None
        raise
    finally:
        execute.end([sender])
        sender.stdout.close()
    if code:
        raise CpuftError(f"the run could not be sent (exit code {code})")
    if source.end != _END:
        raise NotStoredError("the archive that the host sent breaks off before its end")
    return skipped


def extract(source: _Source, part: Path) -> list[str]:
    """Extract the plain files and folders of a tar archive into `part`, a path where nothing is.

    Owners are not restored; files get at most mode 755 and folders too. Each file is synced to the disk.

    Returns
    -------
    Names of links, pipes and devices, which are not stored, each with its kind.

    Raises
    ------
    NotStoredError: it is no tar archive, a name leads out of the folder, or a name is there twice.
    """
    skipped = []
    try:
        stream = cast(IO[bytes], source)  # reading is all that is done with it
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2, errors="surrogateescape") as archive:
            for member in archive:
                path = part.joinpath(*_split(member.name))
                if member.isdir():
                    _make_folders(path, part)
                    path.chmod(member.mode & 0o755 | 0o700)
                elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
                    _make_folders(path.parent, part)
                    _write(archive, member, path)
                else:
                    skipped.append(f"{member.name} ({_KINDS.get(member.type, 'special file')})")
                vars(archive)["members"] = []  # it would remember all of them
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise NotStoredError(f"what the host sent is no readable tar archive ({error})") from None
    for folder, _, _ in os.walk(part):
        _sync(Path(folder))
    return skipped


def _split(name: str) -> list[str]:
    """Return the components of a member's name below the run's folder."""
    words = [word for word in name.split("/") if word not in ("", ".")]
    if name.startswith("/") or ".." in words or "\0" in name:
        raise NotStoredError(
            f"the host sent a file named {name!r}, which leads out of the run's folder: "
            "no cpuft does that, so look at the host before you use it again"
        )
    return words


def _make_folders(path: Path, part: Path) -> None:
    """Make a folder of the archive and those above it. Raises NotStoredError: a file has that name."""
    missing = [folder for folder in (path, *path.parents) if folder == part or part in folder.parents]
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            if not stat.S_ISDIR(folder.lstat().st_mode):
                raise NotStoredError(
                    f"the host sent {folder.relative_to(part)} both as a file and as a folder"
                ) from None


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    content = archive.extractfile(member)
    assert content is not None
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise NotStoredError(f"the host sent {member.name} twice") from None
    with os.fdopen(file, "wb") as output:
        shutil.copyfileobj(content, output, _BLOCK)
        output.flush()
        os.fchmod(file, member.mode & 0o755 | 0o600)
        with contextlib.suppress(OverflowError, OSError, ValueError):  # a time that no file system knows
            os.utime(file, (member.mtime, member.mtime))
        os.fsync(file)


def _sync(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def _store(part: Path, run_dir: Path, merge: bool) -> None:
    """Move the extracted folder to its place."""
    if not merge or not run_dir.is_dir():
        try:
            os.rename(part, run_dir)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise NotStoredError(f"{run_dir} exists already") from None
        _sync(run_dir.parent)
        return
    own = [run_dir / "logs"] if _is_folder(part / "logs") else []
    for logs in (*own, *sorted(part.glob("logs-*"))):
        if _is_folder(logs):
            logs.rename(_free_name(run_dir / "logs", "-"))
    _merge(part, run_dir)


def _merge(part: Path, target: Path) -> None:
    for source in sorted(part.iterdir()):
        place = target / source.name
        if os.path.lexists(place) and _is_folder(source) != _is_folder(place):
            place.rename(_free_name(place, ".old-"))
        if not _is_folder(source) or not place.exists():
            source.replace(place)
        else:
            _merge(source, place)
    _sync(target)


def _is_folder(path: Path) -> bool:
    """Whether a folder is there, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _free_name(path: Path, mark: str) -> Path:
    """Return NAME, the mark, and the first number from 1 that makes a name which is not taken."""
    number = 1
    while os.path.lexists(taken := path.with_name(f"{path.name}{mark}{number}")):
        number += 1
    return taken


def _stop(signal_number: int, frame: object) -> None:
    raise Interrupted(signal_number)


def main() -> None:
    """Exit code 0, 74 (EX_IOERR) if the results could not be stored here, or 1 if they could not be sent."""
    how, run_dir, *command = sys.argv[1:]
    signal.signal(signal.SIGTERM, _stop)
    try:
        skipped = fetch(Path(run_dir), command, how == MERGE)
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(NOT_STORED if isinstance(error, NotStoredError) else 1)
    except Interrupted as stopped:
        sys.exit(stopped.exit_code)
    if skipped:
        more = f" and {len(skipped) - _SHOWN} more" if skipped[_SHOWN:] else ""
        print(f"{SKIPPED}{', '.join(skipped[:_SHOWN])}{more}")


if __name__ == "__main__":
    main()
