"""When checkpoints are made, and what training notices of them."""

from __future__ import annotations

import math
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cpuft.record import RecordedRank
from cpuft.train.checkpoint.files import list_checkpoints, read_newest, remove_after, remove_all
from cpuft.train.checkpoint.policy import SHARE, Keeper, find_keepers
from cpuft.train.checkpoint.state import State
from tests.records import make_steps


def make_keeper(root: Path, every: float, rank: int = 0) -> Keeper:
    model = torch.nn.Linear(100, 100)
    return Keeper(State(model, torch.optim.AdamW(model.parameters())), root, rank, every)


def test_the_first_rank_and_the_first_of_a_second_host_keep_them() -> None:
    hosts = ["a", "a", "b", "b", "c"]
    assert find_keepers([RecordedRank(rank, host, [0]) for rank, host in enumerate(hosts)]) == [0, 2]
    assert find_keepers([RecordedRank(rank, "a", [0]) for rank in range(3)]) == [0]


def test_the_interval_is_as_asked_or_follows_from_the_cost(tmp_path: Path) -> None:
    asked, often, measured = (make_keeper(tmp_path, every) for every in (3600.0, 0.0, -1.0))
    for keeper in (asked, often, measured):
        keeper.end()
    measured.cost = 3600.0 * SHARE
    assert [keeper.is_due() for keeper in (asked, often, measured)] == [False, True, False]
    measured.cost = 0.0
    assert measured.is_due()
    measured.keep(1, wait=True)
    assert 0 < measured.cost < 10


def test_a_keeper_that_still_writes_takes_no_snapshot_and_stands_by(tmp_path: Path) -> None:
    stood: list[int] = []
    model, going_on = torch.nn.Linear(2, 2), threading.Event()
    state = State(model, torch.optim.AdamW(model.parameters()))
    keeper = Keeper(state, tmp_path, 1, 0.0, lambda: stood.append(1))
    assert keeper.keep(1, wait=True)
    keeper._thread = threading.Thread(target=going_on.wait, args=(60,))
    keeper._thread.start()
    assert not keeper.keep(2)
    going_on.set()
    assert keeper.keep(3, wait=True)
    assert stood == [1]
    assert [update for update, _ in list_checkpoints(tmp_path)] == [3, 1]


def test_the_last_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    keeper, going_on = make_keeper(tmp_path, 0.0), threading.Event()
    keeper.end()
    keeper._thread = threading.Thread(target=going_on.wait, args=(60,))
    keeper._thread.start()
    threading.Timer(0.1, going_on.set).start()
    keeper.keep(7, skip_if_busy=False)
    keeper.end()
    assert [update for update, _ in list_checkpoints(tmp_path)] == [7]


def test_a_checkpoint_has_the_record_up_to_it(tmp_path: Path) -> None:
    keeper = make_keeper(tmp_path, 0.0)
    first, second = make_steps(2, [0.1])
    keeper.note(first)
    keeper.keep(1, wait=True)
    keeper.note(second)
    update, files, _ = read_newest(tmp_path)
    assert (update, files["record.jsonl"].decode()) == (1, keeper.record[0] + "\n")


def test_another_host_knows_how_far_the_run_is(tmp_path: Path) -> None:
    """The first rank has the record; its host may be lost with it."""
    for rank in (0, 3):
        keeper = make_keeper(tmp_path / str(rank) / "checkpoints", math.inf, rank)
        keeper.begin(["header"], 7)
        told = [path.read_text() for path in tmp_path.glob("*/checkpoints/rank-*.last")]
        for line in make_steps(9, [0.1])[7:]:
            keeper.note(line)
    assert told == ["7\n"]
    assert [(path.name, path.read_text()) for path in tmp_path.glob("*/checkpoints/*")] == [("rank-3.last", "9\n")]
    remove_after(tmp_path / "3/checkpoints", 9)
    assert list((tmp_path / "3/checkpoints").iterdir()) == []


def test_a_full_disk_does_not_keep_training_from_going_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    make_keeper(tmp_path / "checkpoints", math.inf, 1).begin([], 7)
    (tmp_path / "checkpoints").unlink()
    make_keeper(tmp_path / "checkpoints", math.inf, 1).begin([], 7)
    remove_all(tmp_path / "checkpoints")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "small").mkdir()
    # Room for two checkpoints of 120 kB, and for two of what is being written.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", "small"], check=True, cwd=tmp_path)
    yield tmp_path / "small"
    subprocess.run(["umount", "small"], check=True, cwd=tmp_path)


@pytest.mark.skipif("os.geteuid() != 0", reason="only root can mount a small disk")
def test_a_full_disk_is_said_once_and_the_last_good_one_stays(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = make_keeper(small_disk / "checkpoints", 0.0)
    keeper.keep(1, wait=True)
    (small_disk / "else").write_bytes(bytes(150 << 10))
    for update in (2, 3):
        keeper.keep(update, wait=True)
    said = f"checkpoint of update 2 cannot be written to {small_disk}/checkpoints (No space left on device)"
    assert capsys.readouterr().err == f"{said}: training goes on, and the last good one stays\n"
    assert [update for update, _ in list_checkpoints(small_disk / "checkpoints")] == [1]
    assert read_newest(small_disk / "checkpoints")[0] == 1
