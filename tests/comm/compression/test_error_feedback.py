"""Error feedback: what ranks receive and what is unsent sum up to all gradients, over several steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.comm.ranks import mpirun

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", params=(2, 3))
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, float]]]:
    folder: Path = tmp_path_factory.mktemp("feedback")
    run = mpirun(request.param, "tests.comm.compression.feedback", str(folder), seconds=60)
    assert run.returncode == 0, run.stdout[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


# PowerSGD sends small gradients as bf16 without feedback: an error of 8 bits of the largest.
@pytest.mark.parametrize("compression, gap, lack", [("int8", 1e-6, 1e-4), ("powersgd", 5e-3, 0.1)])
def test_nothing_is_lost_over_steps(
    found: list[dict[str, dict[str, float]]], compression: str, gap: float, lack: float
) -> None:
    for one in found:
        assert one[compression]["gap"] < gap
        # Otherwise this test would also pass with exact sums.
        assert one[compression]["lack"] > lack
        assert one[compression]["differ"] < 1e-9
        assert one["untouched"]


# The rounding error of the last message is lost: 1/254 of its largest number, for each rank and for their mean.
@pytest.mark.parametrize("sent_as, off", [("none", 1e-5), ("bf16", 0.1), ("int8", 0.1)])
@pytest.mark.parametrize("how", ["", ", received"])
def test_local_sgd_ends_at_the_mean_of_the_ranks(
    found: list[dict[str, dict[str, float]]], sent_as: str, off: float, how: str
) -> None:
    for one in found:
        walked = one[f"local {sent_as}{how}"]
        assert walked["off"] < off
        assert walked["differ"] < 1e-12
        assert walked["unnamed"] == 0


def test_the_mean_is_applied_one_synchronization_later_with_nesterovs_formula(
    found: list[dict[str, list[float]]],
) -> None:
    # Of 1 the first step makes 0.7 * 1.9, the second 0.7 * (1 + 0.9 * 1.9), the third 0.7 * (1 + 0.9 * 2.71).
    steps = [1.33, 0.7 * 2.71, 0.7 * 3.439]
    places = [1.0, steps[0] + 1.0, steps[0] + steps[1] + 1.0, sum(steps) + 1.0]
    for one in found:
        assert one["plain"] == [1.0, 2.0, 3.0, 4.0]
        assert one["outer"] == pytest.approx(places, abs=1e-4)
