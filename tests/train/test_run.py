"""What a run's record is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpuft.train.run import average_phases, make_footer, merge_steps
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
