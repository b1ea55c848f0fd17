"""Files arrive whole or not at all, a broken transfer goes on, and nothing leads out of the folder."""

from __future__ import annotations

import inspect
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cpuft import transfer
from cpuft.transfer import (
    FROM_STREAM,
    FileEntry,
    LostError,
    RefusedError,
    Stream,
    TransferError,
    connect,
    hash_blocks,
    make_checksum,
    open_locked,
    open_part,
    receive,
    store,
    walk,
)
from tests.conftest import names_used

PYTHONS = sorted(path for path in Path.home().glob(".pyenv/versions/3.*/bin/python"))
NAMES = st.text("ab.é\udcff ", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
FILES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    st.tuples(st.binary(max_size=40), st.sampled_from([0o644, 0o755, 0o600, 0o6777])),
    max_size=12,
)


@dataclass
class Link:
    """What has gone over a connection in one direction, which breaks after some bytes."""

    cut_after: float = float("inf")
    nbytes: int = 0
    problems: list[BaseException] = field(default_factory=list)


class Cut(transfer._Pipe):
    """The sender's end of a connection that breaks."""

    def __init__(self, file: int, link: Link) -> None:
        super().__init__(file)
        self._link = link

    def write(self, data: Any) -> int:
        if self._link.nbytes >= self._link.cut_after:
            raise LostError("cut")
        written = super().write(data[: int(min(len(data), self._link.cut_after - self._link.nbytes))])
        self._link.nbytes += written
        return written


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides have them; a host's process has those of a user."""
    if "move" in names_used(inspect.unwrap(request.function)):
        monkeypatch.setattr(transfer, "BLOCK", 16)
        monkeypatch.setattr(transfer, "STALLED_SECONDS", 5.0)


def make_tree(root: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """Files of names that may not exist together: a file wins over a folder of its name."""
    for name, (content, mode) in files.items():
        with suppress(OSError):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
            (root / name).chmod(mode)


def read_tree(root: Path) -> dict[str, tuple[object, ...]]:
    found = dict[str, tuple[object, ...]]()
    for path in sorted(root.rglob("*")):
        state = path.lstat()
        mode = stat.S_IMODE(state.st_mode) & 0o755
        content = (path.read_bytes(), mode | 0o600, state.st_mtime_ns) if path.is_file() else (mode | 0o700,)
        found[str(path.relative_to(root))] = content
    return found


def move(entries: Sequence[FileEntry], folder: Path, link: Link, checksum: str = "") -> list[FileEntry]:
    """Send entries to a receiver in this process; return what else the sender has."""
    with ExitStack() as stack:
        to_receiver, to_sender = os.pipe(), os.pipe()
        closed = set[int]()

        def close(file: int) -> None:
            if file not in closed:
                closed.add(file)
                os.close(file)

        for file in (*to_receiver, *to_sender):
            stack.callback(close, file)
        sender = Stream(to_sender[0], to_receiver[1])
        sender._target = Cut(to_receiver[1], link)

        def run() -> None:
            try:
                transfer.send(sender, entries)
            except (TransferError, RefusedError) as error:
                link.problems.append(error)
            close(to_receiver[1])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            with open_part(f"{folder}.partial") as part:
                found, others = receive(Stream(to_receiver[0], to_sender[1]), part, checksum)
                store(part, str(folder), found, bool(checksum))
            return others
        finally:
            close(to_receiver[0])
            close(to_sender[1])
            thread.join()


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@given(FILES, st.lists(st.integers(0, 900), max_size=4))
def test_any_tree_arrives_however_often_the_connection_breaks(
    files: dict[str, tuple[bytes, int]], cuts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "from"), Path(folder, "to")
        source.mkdir()
        make_tree(source, files)
        for cut in cuts:
            with suppress(TransferError):
                move([*walk(str(source), follow=False)], target, Link(cut))
                break
            assert not target.exists()
        else:
            move([*walk(str(source), follow=False)], target, Link())
        wanted = read_tree(source)
        assert (read_tree(target) if target.exists() else {}) == wanted
        assert {path.name for path in Path(folder).iterdir()} == {"from", *(["to"] if wanted else [])}


BOTH = {"a": (bytes(40), 0o644), "z": (bytes(40), 0o644)}


@given(FILES, FILES, st.integers(0, 900))
@example(BOTH, {"z": (bytes(40), 0o600)}, 260)
@example(BOTH, {"a/b": (bytes(40), 0o644)}, 260)
@example({"a/b": (bytes(40), 0o644), **BOTH}, BOTH, 260)
def test_what_changes_between_two_tries_arrives_as_it_is_at_the_last(
    first: dict[str, tuple[bytes, int]], second: dict[str, tuple[bytes, int]], cut: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "from"), Path(folder, "to")
        for files in (first, second):
            shutil.rmtree(source, ignore_errors=True)
            source.mkdir()
            make_tree(source, files)
            with suppress(TransferError):
                move([*walk(str(source), follow=False)], target, Link(cut))
                shutil.rmtree(target, ignore_errors=True)
        move([*walk(str(source), follow=False)], target, Link())
        assert (read_tree(target) if target.exists() else {}) == read_tree(source)


def test_no_block_is_sent_twice(root: Path) -> None:
    """Apart from the one that was on its way, also if a cut came in the middle of the list or of a file."""
    source, target = root / "from", root / "to"
    source.mkdir()
    (source / "large").write_bytes(os.urandom(16_000))
    (source / "small").write_bytes(os.urandom(1_000))
    whole = Link()
    move([*walk(str(source))], root / "other", whole)
    total, cuts = 0, (40, 10_000, 20_000, 12_000)
    for cut in cuts:
        link = Link(cut)
        with pytest.raises(TransferError):
            move([*walk(str(source))], target, link)
        total += link.nbytes
    link = Link()
    move([*walk(str(source))], target, link)
    # The list, a mark for each block, and at most one block with its checksum.
    again = len(cuts) * (300 + 17_000 // 16 + 16 + 33)
    assert total + link.nbytes < whole.nbytes + again
    assert read_tree(target) == read_tree(source)


@pytest.mark.parametrize(
    "names, problem",
    [
        (["../x"], "outside the folder"),
        (["/x"], "outside the folder"),
        (["a/../../x"], "outside the folder"),
        (["a//x"], "outside the folder"),
        (["."], "outside the folder"),
        (["a\0"], "outside the folder"),
        (["a", "a"], "twice"),
        (["a", "a/b"], "both as a file and as a folder"),
        (["a/b", "a"], "both as a file and as a folder"),
    ],
)
def test_a_list_that_cpuft_would_not_send_is_refused(root: Path, names: list[str], problem: str) -> None:
    (root / "x").write_text("kept")
    entries = [FileEntry(name, transfer.FILE, 0, 0o644, 0) for name in names]
    with pytest.raises(RefusedError, match=problem):
        move(entries, root / "to", Link())
    assert read_tree(root).keys() == {"x"}


@pytest.mark.parametrize(
    "names, problem",
    [
        (["a/..\\..\\x"], "is none that Windows can hold"),
        (["c:x"], "is none that Windows can hold"),
        (["a/NUL"], "is none that Windows can hold"),
        (["com1.txt"], "is none that Windows can hold"),
        (["a/b."], "is none that Windows can hold"),
        (["a/x", "A/x"], "differs only in its letters' case"),
    ],
)
def test_windows_refuses_names_that_it_cannot_hold(
    root: Path, names: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(transfer, "lock_file", lambda file: None)
    entries = [FileEntry(name, transfer.FILE, 0, 0o644, 0) for name in names]
    with pytest.raises(RefusedError, match=problem):
        move(entries, root / "to", Link())
    assert read_tree(root) == {}


def test_windows_ends_the_other_side_when_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(transfer, "STALLED_SECONDS", 0.1)
    (source, away), (there, target) = os.pipe(), os.pipe()
    with pytest.raises(LostError, match=r"the other side has sent nothing for 0 s"):
        Stream(source, target, lambda: os.close(away)).read(1)  # which ends the thread that waits, too
    for descriptor in (source, there, target):
        os.close(descriptor)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n",
        b"\0\0\0\2[1",
        b"\xff\xff\xff\xff[",
        *(
            struct.pack(">I", len(text)) + text
            for text in (
                b'{"x": 1}',
                b"[[1]",
                b"[[[]]]",
                b'[["x", "file", -5, 420, 0]]',
                b'[["x", "file", 1e999, 420, 0]]',
                b'[["x", "file", 0, NaN, 0]]',
                b'[["\\ud800", "file", 0, 420, 0]]',
                b'[["x", "file", 0, 420, 0, "more"]]',
                b"[" * 10**5,
            )
        ),
    ],
)
def test_what_is_no_transfer_is_refused(root: Path, sent: bytes) -> None:
    (root / "sent").write_bytes(sent + bytes(4) + b"." + bytes(100))
    with (root / "sent").open("rb") as source, (root / "answer").open("wb") as target:
        stream = Stream(source.fileno(), target.fileno())
        with pytest.raises((RefusedError, TransferError)), open_part(str(root / "part")) as part:
            receive(stream, part)
    assert not (root / "part" / "files").exists()


def test_links_and_devices_are_named_and_not_sent(root: Path) -> None:
    source = root / "from"
    source.mkdir()
    (source / "file").write_text("x")
    (source / "link").symlink_to("/etc/passwd")
    os.mkfifo(source / "pipe")
    others = move([*walk(str(source), follow=False)], root / "to", Link())
    assert [(one.name, one.kind) for one in others] == [("link", "symbolic link"), ("pipe", "pipe")]
    assert read_tree(root / "to").keys() == {"file"}


def test_a_file_that_changes_while_it_is_sent_is_named(root: Path) -> None:
    source = root / "from"
    source.mkdir()
    (source / "log").write_text("x" * 100)
    entries = [*walk(str(source))]
    os.utime(source / "log", (1000, 1000))
    link = Link()
    with pytest.raises(TransferError, match="the connection ended before the last file"):
        move(entries, root / "to", link)
    assert "log has changed while it was read" in str(link.problems[0])
    assert not (root / "to").exists()


def test_files_are_compared_with_the_checksum_of_the_plan(root: Path) -> None:
    source = root / "from"
    source.mkdir()
    (source / "a").write_text("x" * 100)
    entries = [*walk(str(source))]
    checksum = make_checksum(entries, [digest for _, digest in hash_blocks(entries)])
    move(entries, root / "to", Link(), checksum=checksum)
    (source / "a").write_text("y" * 100)
    with pytest.raises(RefusedError, match="have changed since their checksum was computed"):
        move([*walk(str(source))], root / "other", Link(), checksum=checksum)
    assert sorted(path.name for path in root.iterdir()) == ["from", "to", "to.files"]


def test_a_file_that_a_bundle_lacks_is_replaced_without_disturbing_who_reads_it(root: Path) -> None:
    source, target = root / "from", root / "to"
    source.mkdir()
    for name in "abc":
        (source / name).write_bytes(os.urandom(320))
    entries = [*walk(str(source))]
    checksum = make_checksum(entries, [digest for _, digest in hash_blocks(entries)])
    move(entries, target, Link(), checksum=checksum)
    assert transfer.has_bundle(str(target))
    other = os.open(target / "b", os.O_RDONLY)
    os.truncate(target / "c", 100)
    assert not transfer.has_bundle(str(target))
    (target / "log").write_text("written by a run")
    move(entries, target, Link(), checksum=checksum)
    assert os.pread(other, 400, 0) == (source / "b").read_bytes()
    os.close(other)
    (target / "log").unlink()
    assert read_tree(target) == read_tree(source)
    assert sorted(path.name for path in root.iterdir()) == ["from", "to", "to.files"]


def test_a_damaged_block_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = root / "from"
    source.mkdir()
    (source / "a").write_text("x" * 100)
    own = Stream.write
    monkeypatch.setattr(Stream, "write", lambda self, data: own(self, bytes(16) if len(data) == 16 else data))
    with pytest.raises(TransferError, match="a was damaged on its way"):
        move([*walk(str(source))], root / "to", Link())


def test_the_other_side_may_be_slow_but_not_silent(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALLED_SECONDS", 0.2)
    source, target = os.pipe(), os.pipe()
    stream = Stream(source[0], target[1])
    with pytest.raises(TransferError, match="has sent nothing for 0 s"):
        stream.read(1)
    with pytest.raises(TransferError, match="has taken nothing for 0 s"):
        stream.write(bytes(1 << 24))
    for file in (*source, *target):
        os.close(file)


def test_two_transfers_to_the_same_place_do_not_disturb_each_other(root: Path) -> None:
    with open_part(f"{root}/to.partial") as one, open_part(f"{root}/to.partial") as two:
        assert one != two
    assert list(root.iterdir()) == []


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_again(root: Path) -> None:
    path = str(root / "lock")
    first = open_locked(path)
    with pytest.raises(BlockingIOError):
        open_locked(path, 0.2)

    def end_first() -> None:
        os.unlink(path)
        os.close(first)

    timer = threading.Timer(0.3, end_first)
    timer.start()
    second = open_locked(path, 10.0)
    assert os.path.samestat(os.fstat(second), os.stat(path))
    with pytest.raises(BlockingIOError):
        open_locked(path)
    os.close(second)
    timer.join()


def serve(python: str, *words: str, before: str = "") -> list[str]:
    """A command that runs this side of the protocol on a host, after what the login shell prints."""
    return ["sh", "-c", f'{before} exec "$@"', "sh", python, "-IS", "-c", FROM_STREAM, *words]


@pytest.mark.parametrize("python", [sys.executable, *map(str, PYTHONS)])
def test_every_python_of_a_host_receives_and_sends(root: Path, python: str) -> None:
    """Names are the same although the host's locale has no letters but ASCII."""
    source = root / "from"
    source.mkdir()
    make_tree(source, {"é/\udcff": (os.urandom(2_500_000), 0o755), "empty": (b"", 0o644)})
    private = root / "mine"
    words = [*serve(python, "receive", str(private), str(private / "to"), before="echo Welcome; LC_ALL=C")]
    with connect(words) as stream:
        transfer.send(stream, walk(str(source)))
    assert read_tree(private / "to") == read_tree(source)
    assert private.stat().st_mode & 0o777 == 0o700
    with connect(serve(python, "send-run", str(private / "to"), "empty")) as stream, open_part(f"{root}/p") as part:
        found, _ = receive(stream, part)
        store(part, str(root / "back"), found, False)
    assert read_tree(root / "back").keys() == {"é", "é/\udcff"}


@pytest.mark.parametrize(
    "words, code, problem",
    [
        (["sh", "-c", "exit 255"], 255, "the connection"),
        (["sh", "-c", "yes Welcome; exit 3"], 0, "the login shell prints 'Welcome"),
        (serve(sys.executable, "send-run", "/nowhere/run", ""), 1, "the connection ended"),
    ],
)
def test_a_command_that_fails_gives_its_exit_code(words: list[str], code: int, problem: str) -> None:
    with pytest.raises(TransferError) as raised, connect(words) as stream:
        stream.read(1)
    if code:
        assert raised.value.exit_code == code
    assert problem.replace("'", "") in str(raised.value).replace("b'", "").replace("'", "")


def test_a_program_says_which_file_it_could_not_send(root: Path) -> None:
    """The receiver's own message is that the connection ended."""
    (root / "link").symlink_to("nowhere")
    push = [sys.executable, transfer.__file__, "push", str(root), "1"]
    receiver = serve(sys.executable, "receive", str(root / "mine"), str(root / "mine" / "to"))
    done = subprocess.run([*push, "link", *receiver], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"cpuft: error: {root}/link is a link to nowhere, which does not exist" in done.stderr
    lost = subprocess.run([*push, "mine", "sh", "-c", "echo no route >&2; exit 255"], capture_output=True, text=True)
    assert (lost.returncode, lost.stderr) == (255, "no route\n")


def test_a_folder_that_others_can_open_is_refused(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / "mine").mkdir(mode=0o755)
    (root / "mine").chmod(0o755)
    with (
        pytest.raises(TransferError),
        connect(serve(sys.executable, "receive", f"{root}/mine", f"{root}/mine/to")) as it,
    ):
        transfer.send(it, ())
    assert "mine is no folder of mode 700 of user" in capfd.readouterr().err


def test_many_small_files_take_no_round_trip_each(root: Path) -> None:
    """Each answer of the receiver comes 20 ms late."""
    source = root / "from"
    source.mkdir()
    for number in range(500):
        (source / f"{number}").write_text(f"{number}")
    late = root / "late.py"
    late.write_text(
        "import os, time\nwhile True:\n    block = os.read(0, 65536)\n    time.sleep(0.02)\n"
        "    os.write(1, block) if block else os._exit(0)\n"
    )
    receiver = serve(sys.executable, "receive", f"{root}/mine", f"{root}/mine/to")
    script = f'"$@" | {sys.executable} -IS {late}'
    began = time.monotonic()
    with connect(["bash", "-o", "pipefail", "-c", script, "sh", *receiver]) as stream:
        transfer.send(stream, walk(str(source)))
    assert time.monotonic() - began < 5
    assert read_tree(root / "mine" / "to") == read_tree(source)
