"""Checkpoints on a disk: there as a whole or not at all."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cpuft.train.checkpoint.folders import (
    keep_best,
    list_checkpoints,
    note_update,
    read_checkpoint,
    read_newest,
    remove_after,
    remove_all,
    write_checkpoint,
)


def write(root: Path, update: int, rank: int = 0, nbytes: int = 100) -> Path:
    content = memoryview(bytes([update % 256]) * nbytes)
    return write_checkpoint(root, update, rank, {"state.safetensors": content, "record.jsonl": memoryview(b"line\n")})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_two_are_kept_and_read_back(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (tmp_path / "checkpoints" / "000000003.0.new").mkdir(parents=True)  # what a killed process left
    for update in (9, 10, 1000000000, 11):
        write(root, update)
    assert names(root) == ["000000011.0", "1000000000.0"]
    update, files, damaged = read_newest(root)
    assert (update, damaged) == (1000000000, [])
    assert files == {"state.safetensors": bytearray(b"\0" * 100), "record.jsonl": bytearray(b"line\n")}


def test_the_best_one_stays_when_it_is_old_until_a_better_one_comes(tmp_path: Path) -> None:
    keep_best(write(tmp_path, 3))
    keep_best(write(tmp_path, 3, rank=2))
    for update in (4, 5, 6):
        write(tmp_path, update)
    assert read_newest(tmp_path / "best")[0] == 3
    keep_best(write(tmp_path, 7))
    assert names(tmp_path / "best") == ["000000003.2", "000000007.0"]
    remove_after(tmp_path / "best", 6)
    assert names(tmp_path / "best") == ["000000003.2"]
    remove_all(tmp_path)
    assert not tmp_path.exists()


def test_another_ranks_are_left_until_they_are_older(tmp_path: Path) -> None:
    for update, rank in ((4, 2), (5, 0), (6, 0), (6, 2), (8, 0)):
        write(tmp_path, update, rank)
    assert names(tmp_path) == ["000000006.0", "000000006.2", "000000008.0"]
    remove_after(tmp_path, 6)
    assert names(tmp_path) == ["000000006.0", "000000006.2"]
    remove_all(tmp_path)
    remove_all(tmp_path)
    assert not tmp_path.exists()


def test_a_ranks_first_one_removes_none_of_others(tmp_path: Path) -> None:
    """If it is damaged, a run that was resumed on other ranks needs those of the ranks before."""
    for update, rank in ((4, 0), (5, 0), (7, 1)):
        write(tmp_path, update, rank)
    assert names(tmp_path) == ["000000004.0", "000000005.0", "000000007.1"]


def test_only_checkpoints_of_ours_are_taken_away(tmp_path: Path) -> None:
    own = ["1.0", "000000001.0.txt", "000000001.x", "best.new", "notes.old"]
    for name in own:
        (tmp_path / name).mkdir()
    (tmp_path / "000000002.0.old").mkdir()
    write(tmp_path, 1)
    assert [update for update, _ in list_checkpoints(tmp_path)] == [1]
    remove_after(tmp_path, 0)
    assert names(tmp_path) == sorted(own)
    write(tmp_path, 2)
    remove_all(tmp_path)
    assert names(tmp_path) == sorted(own)


def test_a_removal_that_breaks_off_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head host may be lost at this moment; its next start would find a damaged checkpoint and stop."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: next(path.iterdir()).unlink())
    remove_all(tmp_path)
    assert list_checkpoints(tmp_path) == []


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda path: flip(path / "state.safetensors", 50), "state.safetensors is damaged"),
        (lambda path: os.truncate(path / "state.safetensors", 99), "state.safetensors is damaged"),
        (lambda path: flip(path / "record.jsonl", 1), "record.jsonl is damaged"),
        (lambda path: flip(path / "checkpoint.json", 20), ""),
        (lambda path: os.truncate(path / "checkpoint.json", 30), ""),
        (lambda path: os.truncate(path / "checkpoint.json", 0), ""),
        (lambda path: (path / "record.jsonl").unlink(), "record.jsonl cannot be read (No such file or directory)"),
    ],
)
def test_damage_is_noticed_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    write(tmp_path, 1)
    damage(write(tmp_path, 2))
    update, files, (line,) = read_newest(tmp_path)
    assert (update, len(files)) == (1, 2)
    assert line.startswith(f"checkpoint {tmp_path}/000000002.0 is left out: ")
    assert line.endswith(said)


def test_every_flipped_byte_of_its_description_is_noticed_or_says_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    files, content = read_checkpoint(path), (path / "checkpoint.json").read_bytes()
    for at in range(len(content)):
        (path / "checkpoint.json").write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match=r"."):
            read_checkpoint(path)
    (path / "checkpoint.json").write_bytes(content)
    assert read_checkpoint(path) == files


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Inside, a longer file cannot be written: as on a full disk, an error comes in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_up_leaves_the_last_good_one(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with largest_file(1 << 16), pytest.raises(OSError, match="File too large"):
        write(tmp_path, 2, nbytes=1 << 20)
    assert names(tmp_path) == ["000000001.0"]


def write_for_ever(root: Path) -> None:
    for update in range(3, 1_000_000):
        write(root, update, nbytes=1 << 16)


def test_a_process_killed_at_any_moment_leaves_a_whole_one(tmp_path: Path) -> None:
    write(tmp_path, 2, nbytes=1 << 16)
    moments, left = random.Random(0), 0
    for _ in range(50):
        child = os.fork()
        if not child:
            write_for_ever(tmp_path)
        # A checkpoint takes a few milliseconds.
        signal.sigtimedwait([], moments.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        update, files, damaged = read_newest(tmp_path)
        left += any(name.endswith(".new") for name in names(tmp_path))
        assert damaged == []
        assert files["state.safetensors"] == bytearray([update % 256]) * (1 << 16)
    assert left, "no kill came while one was being written"
    # The newest two, one that a child killed later than in its first checkpoint has left, and the first one of another.
    assert len(list_checkpoints(tmp_path)) <= 4
    write(tmp_path, 1_000_000)
    assert len(names(tmp_path)) == 2, "the next checkpoint removes what kills have left"


def test_a_checkpoint_that_is_replaced_stays_until_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was started anew in the same folder, and is killed while it writes the same update."""
    write(tmp_path, 3)

    def remove_and_end(path: Path, **_: object) -> None:
        for file in path.iterdir():
            file.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("cpuft.train.checkpoint.folders.shutil.rmtree", remove_and_end)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 3)
    assert read_newest(tmp_path)[0] == 3


def test_ranks_that_end_at_once_on_a_shared_disk_take_it_away_together(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        for number in range(300):
            root = tmp_path / f"{number}"
            root.mkdir()
            note_update(root, 3, 0)
            list(pool.map(remove_all, [root] * 4))
            assert not root.exists()


@pytest.mark.parametrize("name", ["checkpoint.json", "state.safetensors"])
def test_a_named_pipe_in_a_checkpoint_is_damage_and_nobody_waits_for_it(name: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2) / name
    path.unlink()
    os.mkfifo(path)
    update, _, damaged = read_newest(tmp_path)
    assert update == 1
    assert damaged == [f"checkpoint {path.parent} is left out: {path} cannot be read (it is not a regular file)"]


def test_how_far_a_rank_is_goes_into_no_pipe_and_through_no_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-0.last")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "rank-1.last").symlink_to("precious")
    for rank in range(3):
        note_update(tmp_path, 7, rank)
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "rank-2.last").read_text() == "7\n"
