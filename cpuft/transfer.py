"""Move files between this machine and a host, in either direction. A transfer that broke goes on where it stopped.

Both sides run this file, so both have the same version of it: the host's Python gets it on its standard input
(`connect`). It therefore imports the standard library alone, and runs on Python 3.6 and newer. `python -m
cpuft.transfer push FOLDER COUNT NAME... COMMAND...` sends files to the host that COMMAND reaches.

The protocol, over the two streams of a command such as ssh:

1. The sender lists what it has, in the order of its walk: frames (4 bytes of length, then JSON) of lists [name, kind,
   size, mode, time in ns]. An empty frame ends the list.
2. The receiver names each block of 1 MiB that it has of an earlier try: number of the file or folder, number of the
   block, SHA-256. Number 2**32 - 1 ends this.
3. The sender goes through all blocks of all files. It writes `=` for a block that the receiver has, and `+`, the
   SHA-256 and the block for another one. `.` is the end.
4. The receiver verifies and writes the blocks in a folder beside their destination, which stays if the connection
   breaks, and moves the files to their places when all have come.

A sender that wants to send more than plain files and folders, a path outside the folder, or a name twice is refused.
There is no limit in total, but one of 60 s without any byte.
"""

import collections
import contextlib
import errno
import io
import json
import os
import re
import select
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

S = TypeVar("S")
T = TypeVar("T")
BLOCK = 1 << 20
FILE, FOLDER = "file", "folder"
STALLED_SECONDS = 60.0
"""The other side is given up if it has sent or taken no byte for so long."""
FROM_STREAM = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
"""Argument of `python -c` on a host for `connect`, which sends the length of this file and the file."""
_END_SECONDS = 10.0
"""How long a command may take to give its exit code after its stream broke."""
_LOCK_SECONDS = 15.0
_KEEP_SECONDS = 30 * 86400.0
_MAGIC = b"cpuft-transfer-begins\n"
_SAME, _SENT, _END = b"=", b"+", b"."
_LENGTH, _HAVE = struct.Struct(">I"), struct.Struct(">II32s")
_LAST = (1 << 32) - 1
_MOST_FRAME, _MOST_NAMES = 1 << 24, 10**7
_BATCH = 256
"""Most small blocks that are read at a time."""
_AHEAD = 4
"""Number of threads that read, hash and write blocks, and of the blocks that each direction holds in memory."""
_SMALL = 1 << 16
"""Pieces of fewer bytes are read and written together, and hashed at once instead of by threads. A login shell may
print so many bytes before the command begins."""
_KINDS = {"-": FILE, "d": FOLDER, "l": "symbolic link", "p": "pipe", "s": "socket"}
_BUNDLE = re.compile(r"[0-9a-f]{24}(\.[A-Za-z0-9_]{6,8})?")
_CHECKPOINT = re.compile(r"[0-9]+\.[0-9]+")
_SPECIAL = re.compile(r'[\\:*?"<>|]|[. ]$|^(con|prn|aux|nul|(com|lpt)[0-9])(\.|$)', re.IGNORECASE)
"""In names that Windows takes for paths, drives, streams or devices, or does not hold."""
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags with which every system opens files alike: Windows translates the ends of lines without."""
NO_WAIT, NO_LINK = _FLAGS | getattr(os, "O_NONBLOCK", 0), _FLAGS | getattr(os, "O_NOFOLLOW", 0)
"""The same flags, and that opening does not wait at a named pipe, or fails at a link. Windows has neither."""
_LOCKED_BYTE = 1 << 30
"""Windows locks bytes, which nobody else can read then, rather than a file: one behind all that a lock file has."""


class TransferError(Exception):
    """The connection or the other side failed, or files could not be read. Another try goes on where this one ended."""

    exit_code = 0
    """Exit code of the command of `connect`, if it ended by itself."""


class LostError(TransferError):
    """The connection was lost."""


class RefusedError(Exception):
    """What came is not what cpuft sends."""


class FileEntry(NamedTuple):
    """A file, a folder, or something else that is named and not sent."""

    name: str
    """Path below the folder that is sent."""
    kind: str
    """FILE, FOLDER, or for example "symbolic link"."""
    size: int
    mode: int
    time: int
    """Time of change in ns."""
    path: str = ""
    """Where the sender has it."""


class Block(NamedTuple):
    """A part of a file that is sent."""

    number: int
    """Number of the file among the entries."""
    entry: FileEntry
    place: int
    """Number of the block in the file."""
    size: int


def walk(
    path: str, name: str = "", follow: bool = True, above: "tuple[tuple[int, int], ...]" = ()
) -> "Iterator[FileEntry]":
    """Yield an entry for what is at a path and for all below it, in alphabetical order, each folder before its content.
    Names begin with `name`; if that is "", the path itself has no entry. With `follow`, links are followed, and
    compiled modules (__pycache__) and special files are left out; without, all are named, with their kind. `above` is
    for the recursion. Raises TransferError: a link leads to nothing, or to a folder that contains it; or OSError.
    """
    try:
        state = os.stat(path) if follow else os.lstat(path)
    except OSError:
        if not os.path.islink(path):
            raise
        raise TransferError(
            f"{path} is a link to {os.readlink(path)}, which does not exist or cannot be read: correct the link, or "
            "remove it"
        ) from None
    kind = _KINDS.get(stat.filemode(state.st_mode)[0], "device")
    if follow and kind not in (FILE, FOLDER):
        return
    if name:
        mode = state.st_mode | (0o111 if sys.platform == "win32" else 0)  # which has no bit for programs
        yield FileEntry(name, kind, state.st_size if kind == FILE else 0, mode, state.st_mtime_ns, path)
    if kind == FOLDER:
        folder = (state.st_dev, state.st_ino)
        if folder in above:
            raise TransferError(
                f"{path} is a link to {os.path.realpath(path)}, a folder that contains the link: remove the link, or "
                "name a folder without it"
            )
        for inner in sorted(os.listdir(path)):
            if not follow or inner != "__pycache__":
                below = f"{name}/{inner}" if name else inner
                yield from walk(os.path.join(path, inner), below, follow, (*above, folder))


def hash_blocks(entries: "Sequence[FileEntry]") -> "Iterator[tuple[Block, bytes]]":
    """Yield each block of the files among the entries, with the 32 bytes of its SHA-256. Reads them at `entry.path`.
    Raises TransferError: a file has another size or time than its entry.
    """

    def read(batch: "list[Block]") -> "list[tuple[Block, bytes]]":
        return [(block, _hash(_read_block(block))) for block in batch]

    return _run_ahead(read, _list_batches(entries))


def make_checksum(entries: "Sequence[FileEntry]", digests: "Sequence[bytes]") -> str:
    """Return 24 hexadecimal digits for the names, executable bits and contents of files, and for names of folders.
    `entries` are files and folders alone, and `digests` are those of `hash_blocks`, in their order.
    """
    found = [[_to_wire(one.name), one.kind, one.size, one.mode & 0o111 * (one.kind == FILE)] for one in entries]
    return _hash(json.dumps(found).encode() + b"".join(digests)).hex()[:24]


def _hash(data: bytes) -> bytes:
    import hashlib  # takes as long as all that a host is asked before most launches

    return hashlib.sha256(data).digest()


def _remove(folder: str) -> None:
    import shutil  # as above

    shutil.rmtree(folder, ignore_errors=True)


def _list_batches(entries: "Sequence[FileEntry]") -> "Iterator[list[Block]]":
    """Yield all blocks of all files in their order: one large block, or many small ones, at a time."""
    batch: list[Block] = []
    nbytes = 0
    for number, entry in enumerate(entries):
        for offset in range(0, entry.size if entry.kind == FILE else 0, BLOCK):
            size = min(BLOCK, entry.size - offset)
            if batch and (nbytes + size > BLOCK or len(batch) == _BATCH):
                yield batch
                batch, nbytes = [], 0
            batch.append(Block(number, entry, offset // BLOCK, size))
            nbytes += size
    yield batch


def _read_block(block: Block) -> bytes:
    entry = block.entry
    with os.fdopen(os.open(entry.path, os.O_RDONLY | NO_WAIT), "rb", 0) as file:
        file.seek(block.place * BLOCK)
        data = file.read(block.size)
        state = os.fstat(file.fileno())
    if len(data) != block.size or (state.st_size, state.st_mtime_ns) != (entry.size, entry.time):
        raise TransferError(f"{entry.path} has changed while it was read: try again when no program writes to it")
    return data


def _run_ahead(function: "Callable[[list[S]], list[T]]", batches: "Iterable[list[S]]") -> "Iterator[T]":
    """Yield the items of all results of a function in the order of its arguments; threads compute the next ones."""
    import concurrent.futures  # takes longer than what a host is asked before most launches

    with concurrent.futures.ThreadPoolExecutor(_AHEAD) as pool:
        waiting: collections.deque[concurrent.futures.Future[list[T]]] = collections.deque()
        for batch in batches:
            waiting.append(pool.submit(function, batch))
            if len(waiting) > _AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


class Stream:
    """Bytes from and to the other side, by descriptors, which become non-blocking. Raises LostError: the connection is
    lost, or nothing moves.
    """

    def __init__(self, source: int, target: int, stop: "Callable[[], None]" = lambda: None) -> None:
        """`stop` ends the other side if nothing moves on Windows."""
        pipes = [_WaitingPipe(one, stop) if sys.platform == "win32" else _Pipe(one) for one in (source, target)]
        # No BufferedWriter, which would write at its end, perhaps to another file with the same descriptor.
        self._source, self._target = io.BufferedReader(pipes[0], _SMALL), pipes[1]
        self._written, self._flushed_at = bytearray(), time.monotonic()

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes; LostError: the stream ended before, or nothing came for 60 s."""
        data = self._source.read(size)
        if len(data) < size:
            raise LostError("the connection ended before the last file")
        return data

    def skip_noise(self) -> None:
        """Read what a login shell printed before the other side's program; LostError: 64 KiB, or the stream's end."""
        line, noise = b"", b""
        while not line.endswith(_MAGIC):
            noise += line
            if len(noise) > _SMALL:
                raise LostError(f"the login shell prints {noise[:80]!r} and more before each command")
            line = self._source.readline(_SMALL)
            if not line:
                raise LostError("the connection ended before the transfer began")

    def write(self, data: bytes) -> None:
        """Write bytes: at once if 64 KiB have come together or a second has passed since the last time, else later."""
        self._written += data
        if len(self._written) >= _SMALL or time.monotonic() - self._flushed_at > 1:
            self.flush()

    def flush(self) -> None:
        """Write what `write` has collected; LostError: the other side is gone, or takes nothing for 60 s."""
        left, self._written = memoryview(self._written), bytearray()
        while left:
            left = left[self._target.write(left) or 0 :]
        self._flushed_at = time.monotonic()


@contextlib.contextmanager
def _raise_lost() -> "Iterator[None]":
    """Raise LostError in place of an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise LostError(f"the connection was lost ({error})") from None


class _Pipe(io.RawIOBase):
    """A descriptor that has a time limit."""

    def __init__(self, file: int) -> None:
        import fcntl  # Windows has none

        self._file = file
        os.set_blocking(file, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, 1031, BLOCK)  # F_SETPIPE_SZ of Linux

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, place: "Any") -> int:
        self._wait(select.POLLIN, "sent")
        with _raise_lost():
            return os.readv(self._file, [place])

    def write(self, data: "Any") -> int:
        while True:
            self._wait(select.POLLOUT, "taken")
            with _raise_lost(), contextlib.suppress(BlockingIOError):
                return os.write(self._file, data)

    def _wait(self, event: int, verb: str) -> None:
        poll = select.poll()
        poll.register(self._file, event)
        if not poll.poll(STALLED_SECONDS * 1000):
            raise LostError(f"the other side has {verb} nothing for {STALLED_SECONDS:.0f} s")


class _WaitingPipe(io.RawIOBase):
    """The same on Windows, where no call waits for a pipe with a limit: a thread waits and ends with the other side."""

    def __init__(self, file: int, stop: "Callable[[], None]") -> None:
        import concurrent.futures

        self._file, self._stop, self._pool = file, stop, concurrent.futures.ThreadPoolExecutor(1)

    def readable(self) -> bool:
        return True

    def readinto(self, place: "Any") -> int:
        data = self._wait("sent", os.read, len(place))
        place[: len(data)] = data
        return len(data)

    def write(self, data: "Any") -> int:
        return self._wait("taken", os.write, data)

    def _wait(self, verb: str, function: "Callable[..., T]", argument: "Any") -> "T":
        import concurrent.futures

        with _raise_lost():
            try:
                return self._pool.submit(function, self._file, argument).result(STALLED_SECONDS)
            except concurrent.futures.TimeoutError:  # an OSError from Python 3.11 on
                self._stop()
                raise LostError(f"the other side has {verb} nothing for {STALLED_SECONDS:.0f} s") from None


@contextlib.contextmanager
def connect(command: "Sequence[str]") -> "Iterator[Stream]":
    """Start a command that runs FROM_STREAM on a host, yield the stream to it, and wait for its end. Raises
    TransferError, with the command's exit code: the command failed, or the block raised this error.
    """
    import subprocess

    with open(__file__, "rb") as file:
        program = file.read()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    problem, seconds = None, _END_SECONDS
    try:
        stream = Stream(process.stdout.fileno(), process.stdin.fileno(), process.kill)
        stream.write(b"%d\n%b" % (len(program), program))
        stream.flush()
        stream.skip_noise()
        yield stream
        seconds = STALLED_SECONDS
    except TransferError as error:
        problem = error
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if problem or process.returncode:
        problem = problem or LostError("the command on the host failed")
        problem.exit_code = max(0, process.returncode)
        raise problem


def send(stream: Stream, entries: "Iterable[FileEntry]") -> None:
    """Send files and folders as `walk` finds them, without the blocks that the receiver says it has. Raises
    TransferError: a file has changed, or the connection was lost; OSError: a file cannot be read; RefusedError: the
    receiver names a block that does not exist.
    """
    entries = list(entries)
    for start in range(0, len(entries), 1000):
        text = json.dumps([[_to_wire(one.name), *one[1:5]] for one in entries[start : start + 1000]]).encode()
        stream.write(_LENGTH.pack(len(text)) + text)
    stream.write(_LENGTH.pack(0))
    stream.flush()
    entries = [one for one in entries if one.kind in (FILE, FOLDER)]
    have = {}
    while True:
        number, index, digest = _HAVE.unpack(stream.read(_HAVE.size))
        if number == _LAST:
            break
        have[number, index] = digest
        if number >= len(entries) or index * BLOCK >= entries[number].size:
            raise RefusedError("the host says that it has a block that no file has")

    def read(batch: "list[Block]") -> "list[bytes]":
        pieces = []
        for block in batch:
            data = _read_block(block)
            digest = _hash(data)
            pieces += [_SAME] if digest == have.get((block.number, block.place)) else [_SENT + digest, data]
        return pieces

    for piece in _run_ahead(read, _list_batches(entries)):
        stream.write(piece)
    stream.write(_END)
    stream.flush()


@contextlib.contextmanager
def open_part(folder: str) -> "Iterator[str]":
    """Yield the path of what has come of a transfer, in `folder` beside the destination. That stays if the connection
    broke, and is removed if all has come or cannot be stored. A second transfer at the same time gets another folder.
    """
    import tempfile

    os.makedirs(folder, 0o700, exist_ok=True)
    lock = -1
    try:
        lock = open_locked(os.path.join(folder, "lock"))
    except (BlockingIOError, FileNotFoundError):  # or another transfer has just removed the folder
        folder = tempfile.mkdtemp(prefix=folder.rpartition(".")[0] + ".")
    files = os.path.join(folder, "files")
    try:
        yield files
    except BaseException as error:
        if lock < 0 or isinstance(error, (OSError, RefusedError)) or not os.path.exists(files):
            _remove(folder)
        raise
    else:
        _remove(folder)
    finally:
        if lock >= 0:
            os.close(lock)
            if sys.platform == "win32" and not os.path.exists(files):
                _remove(folder)  # Windows removes no file that is open


def lock_file(file: "Any", is_shared: bool = False, waits: bool = False) -> None:
    """Lock an open file until it is closed, exclusively unless `is_shared` (on Windows always). Raises BlockingIOError:
    another process has the lock, and this one does not wait (`waits`). Raises another OSError: the file system has no
    locks.
    """
    if sys.platform == "win32":
        _lock_byte(file if isinstance(file, int) else file.fileno(), waits)
    else:
        import fcntl  # Windows has none

        fcntl.flock(file, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))


def _lock_byte(file: int, waits: bool) -> None:
    import importlib

    windows: Any = importlib.import_module("msvcrt")  # as which mypy knows none on other systems
    place = os.lseek(file, 0, os.SEEK_CUR)
    os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
    try:
        while True:
            try:
                windows.locking(file, windows.LK_NBLCK, 1)
                return
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    raise
                if not waits:  # Windows says EACCES, and Wine nothing
                    raise BlockingIOError("another process has the lock") from None
            time.sleep(0.1)
    finally:
        os.lseek(file, place, os.SEEK_SET)


def open_locked(path: str, seconds: float = 0.0) -> int:
    """Open or make a file, and return a descriptor that holds its lock until it is closed (no lock if the file system
    has none). Raises BlockingIOError: another process holds the lock, and still does after `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        held = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o600)
        try:
            lock_file(held)
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(held)
                raise
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return held
        else:
            with contextlib.suppress(OSError):  # who held it before has removed it
                if os.path.samestat(os.fstat(held), os.stat(path)):
                    return held
        os.close(held)


def receive(
    stream: Stream, part: str, checksum: str = "", syncs: bool = False
) -> "tuple[list[FileEntry], list[FileEntry]]":
    """Receive files and folders into `part`, which may have some of an earlier try. Return the files and folders that
    have come, and what else the sender has, which it does not send.

    What else is in `part` is removed. Files get at most mode 755 and at least 600, folders at least 700; owners are not
    restored. `checksum` is what `make_checksum` must return of all that has come; empty if nobody knows it. With
    `syncs`, all is on the disk at the end. Raises TransferError: the connection was lost, or a block is damaged. Raises
    RefusedError: a path leads out of the folder or is there twice, this is no transfer, or the checksum is wrong.
    """
    found = _read_list(stream)
    entries = [one._replace(path=os.path.join(part, one.name)) for one in found if one.kind in (FILE, FOLDER)]
    kinds = _check_names(entries)
    _prune(part, kinds)
    for folder in ["", *sorted(name for name, kind in kinds.items() if kind == FOLDER)] if entries else []:
        os.makedirs(os.path.join(part, folder), 0o700, exist_ok=True)
    have = {}
    for block, digest in hash_blocks([_find_blocks(one) if one.kind == FILE else one for one in entries]):
        have[block.number, block.place] = digest
        stream.write(_HAVE.pack(block.number, block.place, digest))
    stream.write(_HAVE.pack(_LAST, 0, b""))
    stream.flush()

    def read(block: Block) -> "tuple[Block, bytes, bytes]":
        mark, known = stream.read(1), have.get((block.number, block.place))
        if mark == _SAME and known:
            return block, b"", known
        if mark != _SENT:
            raise RefusedError(f"the host did not send {block.entry.name} as it said")
        digest = stream.read(32)
        return block, stream.read(block.size), digest

    digests = [*_run_ahead(_write_blocks, ([read(block) for block in batch] for batch in _list_batches(entries)))]
    if stream.read(1) != _END:
        raise RefusedError("the host sends something after the last file")
    if checksum and make_checksum(entries, digests) != checksum:
        raise RefusedError("the files have changed since their checksum was computed: start again")
    for entry in entries:
        if entry.kind == FILE and not entry.size:
            os.close(os.open(entry.path, os.O_WRONLY | os.O_CREAT, 0o600))
        os.chmod(entry.path, entry.mode & 0o755 | (0o600 if entry.kind == FILE else 0o700))
        if entry.kind == FILE:
            with contextlib.suppress(OverflowError, OSError, ValueError):  # a time that no file system knows
                os.utime(entry.path, ns=(entry.time, entry.time))
    for path in (*(one.path for one in entries), part) if syncs and entries else ():
        sync(path)
    return entries, [one for one in found if one.kind not in (FILE, FOLDER)]


def _read_list(stream: Stream) -> "list[FileEntry]":
    found: list[FileEntry] = []
    while True:
        length = _LENGTH.unpack(stream.read(_LENGTH.size))[0]
        if not length:
            return found
        if length > _MOST_FRAME or len(found) > _MOST_NAMES:
            raise RefusedError("the host did not send a list of files")
        try:
            for name, kind, size, mode, changed in json.loads(stream.read(length).decode()):
                found.append(FileEntry(_from_wire(name), str(kind), int(size), int(mode), int(changed)))
                if found[-1].size < 0:
                    raise ValueError
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
            raise RefusedError("the host did not send a list of files") from None


def _to_wire(name: str) -> str:
    """Return a name as text that is the same on both sides, whatever their locales are."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def _from_wire(name: str) -> str:
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


def _check_names(entries: "Sequence[FileEntry]") -> "dict[str, str]":
    kinds: dict[str, str] = {}
    named: set[str] = set()
    for entry in entries:
        parts = entry.name.split("/")
        if "" in parts or "." in parts or ".." in parts or "\0" in entry.name:
            raise RefusedError(
                f"the other side sent a file named {entry.name!r}, which is outside the folder: "
                "cpuft never does that, so check the host before you use it again"
            )
        if sys.platform == "win32":
            _refuse_windows_name(parts, named)
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        for name, kind in (*((name, FOLDER) for name in above), (entry.name, entry.kind)):
            if kinds.setdefault(name, kind) != kind:
                raise RefusedError(f"the other side sent {name} both as a file and as a folder")
        if entry.name in named:
            raise RefusedError(f"the other side sent {entry.name} twice")
        named.add(entry.name)
    return kinds


def _refuse_windows_name(parts: "list[str]", named: "set[str]") -> None:
    name = "/".join(parts)
    is_taken = any(one != name and one.casefold() == name.casefold() for one in named)
    is_special = any(_SPECIAL.search(part) for part in parts)
    if is_taken or is_special:
        why = "differs only in its letters' case from another one" if is_taken else "is none that Windows can hold"
        raise RefusedError(f"the name {name!r} {why}: rename the file on the host, or fetch the run with WSL2")


def _prune(part: str, kinds: "dict[str, str]") -> None:
    for folder, folders, files in os.walk(part, topdown=False):
        for name, kind in (*((name, FILE) for name in files), *((name, FOLDER) for name in folders)):
            path = os.path.join(folder, name)
            if kinds.get(os.path.relpath(path, part).replace(os.sep, "/")) != kind:
                (os.rmdir if kind == FOLDER else os.unlink)(path)


def _find_blocks(entry: FileEntry) -> FileEntry:
    """Return the whole blocks of a file that are here already, as a file that can be read."""
    with contextlib.suppress(FileNotFoundError):
        size = os.stat(entry.path).st_size
        if size != entry.size:
            os.truncate(entry.path, min(size, entry.size) // BLOCK * BLOCK)
        state = os.stat(entry.path)
        return entry._replace(size=state.st_size, time=state.st_mtime_ns)
    return entry._replace(size=0)


def _write_blocks(batch: "list[tuple[Block, bytes, bytes]]") -> "list[bytes]":
    """Verify and write blocks, and return their SHA-256; without data, that of a block which is there."""
    digests = []
    for block, data, digest in batch:
        if data and _hash(data) != digest:
            raise TransferError(f"{block.entry.name} was damaged on its way")
        digests.append(digest)
        if data:
            with os.fdopen(os.open(block.entry.path, os.O_WRONLY | os.O_CREAT | NO_LINK, 0o600), "wb") as file:
                file.seek(block.place * BLOCK)
                file.write(data)
    return digests


def sync(path: str) -> None:
    """Bring a file, or the names in a folder, to the disk. Windows does not do the latter."""
    if sys.platform == "win32" and os.path.isdir(path):
        return
    held = os.open(path, (os.O_RDWR if sys.platform == "win32" else os.O_RDONLY) | _FLAGS)
    try:
        os.fsync(held)
    finally:
        os.close(held)


def store(part: str, folder: str, entries: "Sequence[FileEntry]", is_bundle: bool) -> None:
    """Move `part` to `folder`: as a whole if that is missing or empty, else each file of `entries` by itself, which may
    replace another. Without entries nothing is moved. For a bundle, files and sizes are noted in the file
    `folder`.files, for `has_bundle`.
    """
    if is_bundle:
        with open(part + ".list", "w") as file:
            json.dump([[_to_wire(one.name), one.size] for one in entries if one.kind == FILE], file)
    try:
        if entries:
            os.rename(part, folder)
    except OSError:
        if not os.path.isdir(folder):
            raise
        place = os.path.realpath(folder)
        for one in entries:
            target = os.path.join(place, one.name)
            os.makedirs(target if one.kind == FOLDER else os.path.dirname(target), 0o700, exist_ok=True)
            if one.kind == FILE:
                os.replace(os.path.join(part, one.name), target)
    if is_bundle:
        os.replace(part + ".list", folder + ".files")


def has_bundle(folder: str) -> bool:
    """Return whether every file that `store` noted for a bundle is there and has its size (False without the note):
    systemd-tmpfiles removes single files from /var/tmp, and a full disk leaves files that were cut off.
    """
    try:
        with open(folder + ".files") as file:
            listed = [(os.path.join(folder, _from_wire(name)), size) for name, size in json.load(file)]
        return all(os.stat(path).st_size == size for path, size in listed)
    except (OSError, ValueError):
        return False


def _make_private(folder: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    state = os.lstat(folder)
    if state.st_mode != stat.S_IFDIR | 0o700 or state.st_uid != os.geteuid():
        mode = stat.filemode(state.st_mode)
        raise TransferError(
            f"{folder} is no folder of mode 700 of user {os.geteuid()} ({mode} {state.st_uid}): see what it is, "
            "remove it"
        )


def _answer() -> Stream:
    stream = Stream(0, 1)
    stream.write(_MAGIC)
    stream.flush()
    return stream


def _receive(root: str, folder: str, checksum: str = "") -> None:
    """Receive files into `folder`, below this user's private folder `root`, which may be missing. A bundle has a
    checksum.
    """
    stream = _answer()
    for private in (root, *[os.path.dirname(folder)] * bool(checksum)):
        _make_private(private)
    os.makedirs(os.path.dirname(folder), 0o700, exist_ok=True)
    with open_part(folder + ".partial") as part:
        entries, _ = receive(stream, part, checksum)
        store(part, folder, entries, bool(checksum))


def _send_run(folder: str, left_out: str) -> None:
    """Send a run folder, which may not exist, after the run's supervisor has ended."""
    stream = _answer()
    try:
        os.close(open_locked(folder + ".lock", _LOCK_SECONDS))
    except BlockingIOError:
        raise TransferError("the run is still active there") from None
    # A run that rejected its input has removed its folder.
    found = walk(folder, follow=False) if os.path.isdir(folder) else ()
    send(stream, [one for one in found if one.name.split("/")[0] != left_out])


def _send_checkpoints(folder: str, *have: str) -> None:
    """Send the newest checkpoint in a folder, and that of the best evaluation, unless the receiver has them."""
    import tempfile

    stream, wanted = _answer(), []
    for part in ("", "best"):
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(os.path.join(folder, part)) if _CHECKPOINT.fullmatch(name)]
            wanted += [os.path.join(part, max(names, key=lambda name: int(name.split(".")[0])))] if names else []
    if not set(wanted) - set(have):
        send(stream, ())
        return
    for old in os.listdir(folder):
        if old.startswith("copy."):
            _remove(os.path.join(folder, old))
    # The ranks may remove a checkpoint while it is sent. Links keep its files until then.
    with tempfile.TemporaryDirectory(prefix="copy.", dir=folder) as links:
        for name in sorted(set(wanted) - set(have)):
            os.makedirs(os.path.join(links, name))
            for file in os.listdir(os.path.join(folder, name)):
                os.link(os.path.join(folder, name, file), os.path.join(links, name, file))
        send(stream, walk(links, follow=False))


def _find_missing(root: str, *folders: str) -> None:
    for private in (root, os.path.join(root, "inputs")):
        if os.path.lexists(private):
            _make_private(private)
    for folder in folders:
        if not has_bundle(folder):
            print(folder)


def _keep_bundles(folder: str, *used: str) -> None:
    """Note that bundles are used now, and remove those that no run has used for 30 days and that no process names."""
    if not os.path.lexists(folder):
        return
    _make_private(folder)
    now = time.time()
    for path in used:
        for inner, _, files in os.walk(path):  # new access times keep systemd-tmpfiles away
            for file in (os.path.join(inner, name) for name in files):
                os.utime(file, ns=(int(now * 1e9), os.stat(file).st_mtime_ns))
        for file in (path, path + ".files"):
            with contextlib.suppress(OSError):
                os.utime(file)
    commands = _read_commands()
    for name in filter(_BUNDLE.fullmatch, os.listdir(folder)):
        path = os.path.join(folder, name)
        state = os.lstat(path)
        is_old = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and state.st_mtime < now - _KEEP_SECONDS
        if is_old and os.fsencode(path) not in commands:
            _remove(path)
            with contextlib.suppress(OSError):
                os.unlink(path + ".files")


def _read_commands() -> bytes:
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
            found.append(file.read())
    return b"\n".join(found)


def _push(folder: str, count: str, *words: str) -> None:
    """Send `count` files or folders of a folder, with what their links lead to, to the command after their names."""
    with connect(words[int(count) :]) as stream:
        send(stream, [one for name in words[: int(count)] for one in walk(os.path.join(folder, name), name)])


ROLES: "dict[str, Callable[..., None]]" = {
    "push": _push,
    "receive": _receive,
    "send-run": _send_run,
    "send-checkpoints": _send_checkpoints,
    "find-missing": _find_missing,
    "keep-bundles": _keep_bundles,
}


def main() -> None:
    """Do what the first argument says. Exits with the exit code of a command that failed, and with 1 for an error."""
    os.umask(0o077)
    try:
        ROLES[sys.argv[1]](*sys.argv[2:])
    except LostError as error:
        # The command has told its reason on standard error.
        sys.exit(error.exit_code or f"cpuft: error: {error}")
    except (TransferError, RefusedError, OSError) as error:
        sys.exit(f"cpuft: error: {error}")


if __name__ == "__main__":
    main()
