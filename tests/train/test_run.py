"""The parts of a run's record, its final checkpoint, and what is reused of earlier measurements."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from cpuft.comm.backend_choice import Choice
from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.rank.world import World
from cpuft.record import EarlierMeasurements, read_measurements
from cpuft.train.checkpoint.folders import FOLDER
from cpuft.train.checkpoint.timing import Checkpoints
from cpuft.train.exchange.compression_choice import choose_compression
from cpuft.train.objective.table import make_objective
from cpuft.train.reporter import TrainingResult, average_phases, make_footer, merge_steps
from cpuft.train.run import choose_earlier_backend, finish, read_earlier_measurements
from tests.comm.ranks import fork_ranks
from tests.records import make_record, make_steps
from tests.train.exchange.test_compression_choice import PREPARED


def test_ranks_that_trained_apart_are_recorded_as_one_run() -> None:
    fast = make_steps(20, [0.9], step_seconds=1.0, samples=32)
    slow = [replace(line, step_seconds=3.0, samples=16, loss=line.loss + 0.2) for line in fast]
    steps = merge_steps([fast, slow])
    assert [line.step for line in steps] == list(range(1, 21))
    first = steps[0]
    assert (first.samples, first.tokens, first.compute_seconds) == (48, 3200, [1.0, 3.0])
    assert (first.step_seconds, first.loss) == pytest.approx((2.0, fast[0].loss + 0.1))
    assert merge_steps([[], []]) == []


def test_what_is_steady_is_without_the_first_tenth() -> None:
    lines = make_steps(20, [1.0], step_seconds=1.0, waited=0.5)
    cold = [replace(line, forward_seconds=9.0, step_seconds=9.0) for line in lines[:2]]
    phases = average_phases([*cold, *lines[2:]])
    wanted = {"data": 0.02, "forward": 0.3, "backward": 0.6, "communication": 0.5, "update": 0.08}
    assert phases == pytest.approx(wanted)
    footer = make_footer(TrainingResult([*cold, *lines[2:]], [phases], ""), 0, 0.0, 1.0)
    assert footer.steady_samples_per_second == pytest.approx(32)
    assert footer.samples_per_second == pytest.approx(640 / 36)
    assert average_phases([]) == dict.fromkeys(wanted, 0.0)


@pytest.mark.parametrize("keeps_final, written", [(True, ["update 9"]), (False, [])])
def test_a_final_checkpoint_is_written_where_the_launcher_has_to_fetch_the_run(
    keeps_final: bool, written: list[str]
) -> None:
    done = list[str]()
    writer = SimpleNamespace(
        write=lambda update: done.append(f"update {update}"), is_writing=False, finish=lambda: None
    )
    Checkpoints(cast(Any, None), cast(Any, writer), keep_final=keeps_final).write_final(9)
    assert done == written


@pytest.mark.parametrize("keeps", [True, False])
def test_checkpoints_are_removed_at_the_end_unless_the_launcher_fetches_the_run(tmp_path: Path, keeps: bool) -> None:
    (tmp_path / FOLDER / "000000009.0").mkdir(parents=True)
    finish(Checkpoints(cast(Any, None)), WorkerConfig(str(tmp_path), keep_checkpoints=keeps), 0)
    assert (tmp_path / FOLDER).exists() == keeps


def test_a_disk_that_is_slower_than_the_time_limit_of_messages_ends_no_run() -> None:
    done = fork_ranks(2, "tests.train.slow_disk")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("has finished") == 2


AUTO = {"backend": "auto", "grad_compression": "auto"}
HEADER = make_record(4, 4, backend="mpi", gradients="int8", options=AUTO).header


def test_it_comes_through_json_whole() -> None:
    measured = read_measurements(HEADER)
    assert measured == EarlierMeasurements(4, "mpi", "int8", "bf16")
    assert read_earlier_measurements(json.dumps(asdict(measured)), 4) == measured
    assert read_earlier_measurements("", 3) == EarlierMeasurements(3)


@pytest.mark.parametrize(
    "ranks, choice",
    [
        (4, Choice("mpi", "as measured when the run began")),
        (3, Choice("mpi", "as measured when the run began, on 4 ranks")),
    ],
)
def test_the_backend_stays_and_other_ranks_are_told_of_it(ranks: int, choice: Choice) -> None:
    assert choose_earlier_backend(read_measurements(HEADER), ranks) == choice


@pytest.mark.parametrize("change", [{"options": {"backend": "mpi"}}, {"world_size": 1}, {"options": {}}])
def test_a_backend_that_was_asked_for_or_had_no_rivals_was_not_measured(change: dict[str, Any]) -> None:
    assert choose_earlier_backend(read_measurements(replace(HEADER, **change)), 4) is None


@pytest.mark.parametrize(
    "asked, on_a_host, found",
    [("auto", 1, ("int8", "as when the run began")), ("auto", 2, ("", "")), ("bf16", 1, ("", ""))],
)
def test_what_gradients_are_sent_as_stays_where_it_is_a_question(
    asked: str, on_a_host: int, found: tuple[str, str]
) -> None:
    """Nothing is measured: there is no process group here."""
    config, world = TrainConfig(grad_compression=asked), World(0, 2, 0, on_a_host)
    objective = make_objective(config, PREPARED)
    assert choose_compression(config, "fp32", torch.nn.Linear(2, 2), objective, PREPARED, world, "int8") == found


def test_what_cannot_be_shared_out_is_not_gone_on_with() -> None:
    config, world = TrainConfig(shard="optimizer"), World(0, 2, 0, 1)
    objective = make_objective(config, PREPARED)
    settled = partial(choose_compression, config, "fp32", torch.nn.Linear(2, 2), objective, PREPARED, world)
    assert settled("bf16") == ("bf16", "as when the run began")
    # To measure anew it would have to have other ranks.
    with pytest.raises(ValueError, match="process group"):
        settled("int8")
