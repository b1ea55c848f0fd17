"""When checkpoints are made, and what training notices of them."""

from __future__ import annotations

import json
import math
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import Record, format_line
from cpuft.train.checkpoint.folders import list_checkpoints, read_newest, remove_after, remove_all, write_checkpoint
from cpuft.train.checkpoint.resume import describe_other_job, resume
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.checkpoint.timing import DEFAULT_TIME_SHARE, Checkpoints, is_due
from cpuft.train.checkpoint.writer_thread import CheckpointWriter, choose_writer_ranks
from tests.comm.ranks import fork_ranks
from tests.records import make_steps
from tests.train.checkpoint.training import CONFIG, HEADER, compare, go, go_on, make_loop, make_writer


def make_linear_writer(root: Path, every: float, rank: int = 0) -> CheckpointWriter:
    model = torch.nn.Linear(100, 100)
    return CheckpointWriter(TrainingState(model, torch.optim.AdamW(model.parameters())), root, rank, every)


def test_the_first_rank_and_the_first_of_a_second_host_keep_them() -> None:
    assert choose_writer_ranks([0, 1, 0, 1, 0]) == [0, 2]
    assert choose_writer_ranks([0, 1, 2]) == [0]


def test_the_interval_is_as_asked_or_follows_from_the_cost(tmp_path: Path) -> None:
    asked, often, measured = (make_linear_writer(tmp_path, every) for every in (3600.0, 0.0, -1.0))
    for writer in (asked, often, measured):
        writer.finish()
    measured.cost = 3600.0 * DEFAULT_TIME_SHARE
    assert [is_due(writer) for writer in (asked, often, measured)] == [False, True, False]
    measured.cost = 0.0
    assert is_due(measured)
    measured.write(1, wait=True)
    assert 0 < measured.cost < 10


def test_a_keeper_that_still_writes_takes_no_snapshot_and_stands_by(tmp_path: Path) -> None:
    stood: list[int] = []
    going_on, writer = threading.Event(), make_linear_writer(tmp_path, 0.0)
    exchange: Any = SimpleNamespace(contribute_to_checkpoint=lambda: stood.append(1))
    assert writer.write(1, wait=True)
    writer._thread = threading.Thread(target=going_on.wait, args=(60,))
    writer._thread.start()
    Checkpoints(exchange, writer).write(2)
    going_on.set()
    assert writer.write(3, wait=True)
    assert stood == [1]
    assert [update for update, _ in list_checkpoints(tmp_path)] == [3, 1]


def test_the_last_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    writer, going_on = make_linear_writer(tmp_path, 0.0), threading.Event()
    writer.finish()
    writer._thread = threading.Thread(target=going_on.wait, args=(60,))
    writer._thread.start()
    threading.Timer(0.1, going_on.set).start()
    writer.write(7)
    writer.finish()
    assert [update for update, _ in list_checkpoints(tmp_path)] == [7]


def test_a_checkpoint_has_the_record_up_to_it(tmp_path: Path) -> None:
    writer = make_linear_writer(tmp_path, 0.0)
    first, second = make_steps(2, [0.1])
    writer.add_line(first)
    writer.write(1, wait=True)
    writer.add_line(second)
    update, files, _ = read_newest(tmp_path)
    assert (update, files["record.jsonl"].decode()) == (1, writer.record[0] + "\n")


def test_another_host_knows_how_far_the_run_is(tmp_path: Path) -> None:
    """The first rank has the record; its host may be lost with it."""
    for rank in (0, 3):
        writer = make_linear_writer(tmp_path / str(rank) / "checkpoints", math.inf, rank)
        writer.begin(["header"], 7)
        told = [path.read_text() for path in tmp_path.glob("*/checkpoints/rank-*.last")]
        for line in make_steps(9, [0.1])[7:]:
            writer.add_line(line)
    assert told == ["7\n"]
    assert [(path.name, path.read_text()) for path in tmp_path.glob("*/checkpoints/*")] == [("rank-3.last", "9\n")]
    remove_after(tmp_path / "3/checkpoints", 9)
    assert list((tmp_path / "3/checkpoints").iterdir()) == []


def test_a_full_disk_does_not_keep_training_from_going_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    make_linear_writer(tmp_path / "checkpoints", math.inf, 1).begin([], 7)
    (tmp_path / "checkpoints").unlink()
    make_linear_writer(tmp_path / "checkpoints", math.inf, 1).begin([], 7)
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
    writer = make_linear_writer(small_disk / "checkpoints", 0.0)
    writer.write(1, wait=True)
    (small_disk / "else").write_bytes(bytes(150 << 10))
    for update in (2, 3):
        writer.write(update, wait=True)
    said = f"checkpoint of update 2 cannot be written to {small_disk}/checkpoints (No space left on device)"
    assert capsys.readouterr().err == f"{said}: training goes on, and the last good one stays\n"
    assert [update for update, _ in list_checkpoints(small_disk / "checkpoints")] == [1]
    assert read_newest(small_disk / "checkpoints")[0] == 1


ALONE = World(0, 1, 0, 1)


def updates_of(ranks: list[dict[str, Any]]) -> list[list[int]]:
    """Rows of each update, all ranks together, each once."""
    return [sorted({row for share in shares for row in share}) for shares in zip(*(r["rows"] for r in ranks))]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_on_one_rank_the_rest_is_the_same_to_the_bit(tmp_path: Path, dropout: float) -> None:
    found = compare(ALONE, tmp_path / "kept", dropout)
    assert found["update"] == 5
    assert found["resumed"]["checksum"] == found["whole"]["checksum"]
    assert found["resumed"]["losses"] == found["whole"]["losses"][5:]
    assert found["resumed"]["rows"] == found["whole"]["rows"][5:]


@pytest.mark.usefixtures("alone")
def test_other_numbers_of_ranks_go_on_with_the_same_rows_and_losses(tmp_path: Path) -> None:
    found = {}
    for size in (3, 2):
        done = fork_ranks(size, "tests.train.checkpoint.training", str(tmp_path), str(tmp_path / "kept"), seconds=120)
        assert done.returncode == 0, done.stdout[-3000:]
        found[size] = [json.loads((tmp_path / f"{rank}-of-{size}.json").read_text()) for rank in range(size)]
    found[1] = [{"0.0": compare(ALONE, tmp_path / "kept" / "0.0", 0.0)}]
    whole = [rank["0.0"]["whole"] for rank in found[3]]
    for size in (1, 2, 3):
        resumed = [rank["0.0"]["resumed"] for rank in found[size]]
        assert resumed[0]["losses"] == pytest.approx(whole[0]["losses"][5:], abs=1e-5)
        assert updates_of(resumed) == updates_of(whole)[5:]
    # The checkpoint is of three ranks, with masks of theirs.
    assert len({rank["0.5"][run]["checksum"] for rank in found[3] for run in ("whole", "resumed")}) == 1
    assert {rank["0.5"]["update"] for rank in found[2]} == {5}


@pytest.mark.usefixtures("alone")
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = make_loop(ALONE, 0.5)
    whole = go(loop, make_writer(loop, tmp_path))
    good = (tmp_path / "000000005.0/state.safetensors").read_bytes()
    files = {"state.safetensors": memoryview(good), "record.jsonl": memoryview(b"")}
    newer = write_checkpoint(tmp_path, 7, 0, files)
    with (newer / "state.safetensors").open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"\xff")
    past, resumed = go_on(ALONE, tmp_path, 0.5)
    assert capsys.readouterr().err.startswith(f"checkpoint {newer} is left out: state.safetensors is damaged (")
    assert (past.update, resumed["checksum"]) == (5, whole["checksum"])
    assert [update for update, _ in list_checkpoints(tmp_path)] == [5]


@pytest.mark.usefixtures("alone")
def test_where_all_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    loop = make_loop(ALONE, 0.0)
    files = {"state.safetensors": memoryview(b"state"), "record.jsonl": memoryview(b"")}
    (write_checkpoint(tmp_path, 7, 0, files) / "record.jsonl").write_text("other")
    with pytest.raises(
        CpuftError, match=r"^all checkpoints in .* are damaged: restore one, or start a new run without"
    ):
        resume(TrainingState(loop.model, loop.optimizer), tmp_path, ALONE, vars(CONFIG), HEADER.data)
    assert len(list_checkpoints(tmp_path)) == 1


@pytest.mark.usefixtures("alone")
def test_without_a_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    past, resumed = go_on(ALONE, tmp_path / "none", 0.0)
    assert (past.update, past.text, len(resumed["losses"])) == (0, "", 8)


@pytest.mark.parametrize(
    "options, data, same, problem",
    [
        ({}, HEADER.data, True, ""),
        ({"backend": "mpi", "model": "/elsewhere", "checkpoint_every": 7.0}, HEADER.data, True, ""),
        ({"seed": 7}, HEADER.data, True, "is of another job, with --seed 42, and this is 7: start a new run"),
        ({"warmup_ratio": 0.0}, HEADER.data, True, "is of another job, with --warmup-ratio 0.3, and this is 0.0"),
        ({}, "feed", True, "was trained on other examples: restore the data as it was"),
        ({}, HEADER.data, False, "is of another model: see whether it was copied from another run"),
    ],
)
def test_what_differs_is_named(options: dict[str, Any], data: str, same: bool, problem: str) -> None:
    found = describe_other_job(Record("", HEADER), same, vars(CONFIG) | options, data)
    assert found[: len(problem) or None] == problem


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    record = format_line(HEADER).encode()
    write_checkpoint(tmp_path, 3, 0, {"state.safetensors": memoryview(b"foreign"), "record.jsonl": memoryview(record)})
    loop = make_loop(ALONE, 0.0)
    with pytest.raises(CpuftError, match=r"checkpoint of update 3 on .* is of another model: see"):
        resume(TrainingState(loop.model, loop.optimizer), tmp_path, ALONE, vars(CONFIG), HEADER.data)
