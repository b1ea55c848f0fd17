"""What a run's record is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cpuft.config import WorkerConfig
from cpuft.rank.world import World
from cpuft.train.checkpoint.files import FOLDER
from cpuft.train.run import Story, average_phases, end, keep_final_state, make_footer, merge_steps
from tests.records import make_steps


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
    footer = make_footer([*cold, *lines[2:]], 0, 1.0, "", [phases])
    assert footer.steady_samples_per_second == pytest.approx(32)
    assert footer.samples_per_second == pytest.approx(640 / 36)
    assert average_phases([]) == dict.fromkeys(wanted, 0.0)


@pytest.mark.parametrize(
    "on_host, asked, kept",
    [(1, True, ["keep 9"]), (2, True, []), (1, False, [])],
    ids=["two hosts", "one host", "here"],
)
def test_the_final_state_is_kept_on_two_hosts_until_it_was_fetched(on_host: int, asked: bool, kept: list[str]) -> None:
    done = list[str]()
    keeper = SimpleNamespace(keep=lambda update, skip_if_busy: done.append(f"keep {update}"))
    story = cast(Story, SimpleNamespace(keeps=True, keeper=keeper))
    loop = cast(Any, SimpleNamespace(updates=9, world=World(0, 2, 0, on_host)))
    keep_final_state(loop, story, WorkerConfig(keep_checkpoints=asked))
    assert done == kept


@pytest.mark.parametrize("keeps", [True, False])
def test_checkpoints_are_removed_at_the_end_unless_the_launcher_fetches_the_run(tmp_path: Path, keeps: bool) -> None:
    (tmp_path / FOLDER / "000000009.0").mkdir(parents=True)
    loop = cast(Any, SimpleNamespace(world=World(0, 1, 0, 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.barrier", lambda: None)
        end(cast(Story, SimpleNamespace(keeper=None)), loop, WorkerConfig(str(tmp_path), keep_checkpoints=keeps))
    assert (tmp_path / FOLDER).exists() == keeps
