"""The times of layers in the estimates that scripts/check-estimate compares with slow motion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpuft.report.estimate import Network, estimate_hosts, read_job
from scripts.benchmarks.check_estimate import list_ready_shares, read_timed_job
from scripts.benchmarks.step_times import GradientTime
from tests.benchmarks.timed import LAYER_TIMES, time_record
from tests.report.test_estimate import JOB, recorded


def test_recorded_times_say_when_gradients_are_ready() -> None:
    gradients = [
        GradientTime("head", [100], "float32", 0.1, False),
        GradientTime("layer", [30, 10], "float32", 0.9, False),
        GradientTime("words", [1000, 8], "float32", 1.0, True),
    ]
    assert list_ready_shares(gradients, 2.0) == ((0.25, 0.05), (1.0, 0.45))
    job = replace(JOB, ready=((0.25, 0.05), (1.0, 0.45)))
    assert [job.when_ready(share) for share in (0.125, 0.25, 0.375, 1.0)] == [0.05, 0.05, 0.45, 0.45]
    assert JOB.when_ready(0.375) == 0.375
    # Gradients that are ready earlier hide more, and those of a pass before the last one are not sent.
    network = Network(460e6, 0.0)
    usual = estimate_hosts(JOB, network, 4).waited_seconds
    assert estimate_hosts(job, network, 4).waited_seconds < usual - 0.1
    assert estimate_hosts(replace(JOB, last_backward=0.5), network, 4).waited_seconds > usual + 0.2


def test_times_of_layers_are_the_times_of_a_step() -> None:
    times = LAYER_TIMES
    job = read_timed_job(time_record(recorded()))
    assert job.forward_seconds == times.data_seconds + times.forward_seconds
    assert (job.backward_seconds, job.update_seconds) == (times.backward_seconds, times.update_seconds)
    assert job.last_backward == times.last_backward_seconds / times.backward_seconds
    assert job.ready[-1][0] == pytest.approx(1.0)
    # Times without a backward pass, or without gradients of layers, say nothing.
    for none in (None, replace(times, last_backward_seconds=0.0)):
        assert read_timed_job(time_record(recorded(), none)) == read_job(recorded())
    assert read_timed_job(time_record(recorded(), replace(times, gradients=[]))).ready == ()
