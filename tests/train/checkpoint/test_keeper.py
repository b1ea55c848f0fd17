"""When checkpoints are made, and what training notices of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cpuft.record import RecordedRank
from cpuft.train.checkpoint.files import list_checkpoints, read_newest
from cpuft.train.checkpoint.keeper import SHARE, Keeper, find_keepers
from cpuft.train.checkpoint.state import State
from tests.records import make_steps


def make_keeper(root: Path, every: float) -> Keeper:
    model = torch.nn.Linear(100, 100)
    return Keeper(State(model, torch.optim.AdamW(model.parameters())), root, 0, every)


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


def test_a_checkpoint_has_the_record_up_to_it(tmp_path: Path) -> None:
    keeper = make_keeper(tmp_path, 0.0)
    first, second = make_steps(2, [0.1])
    keeper.note(first)
    keeper.keep(1, wait=True)
    keeper.note(second)
    update, files, _ = read_newest(tmp_path)
    assert (update, files["record.jsonl"].decode()) == (1, keeper.record[0] + "\n")


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
