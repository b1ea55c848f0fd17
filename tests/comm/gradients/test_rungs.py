"""Error feedback: what ranks receive and what they still keep add up to all gradients, over steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.comm.ranks import mpirun


@pytest.fixture(scope="module", params=(2, 3))
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, float]]]:
    folder: Path = tmp_path_factory.mktemp("rungs")
    run = mpirun(request.param, "tests.comm.gradients.rungs", str(folder), seconds=60)
    assert run.returncode == 0, run.stdout[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


# PowerSGD's small gradients go as bf16 and keep nothing: 8 bits of the largest.
@pytest.mark.parametrize("rung, gap, lack", [("int8", 1e-6, 1e-4), ("powersgd", 5e-3, 0.1)])
def test_nothing_is_lost_over_steps(
    found: list[dict[str, dict[str, float]]], rung: str, gap: float, lack: float
) -> None:
    for one in found:
        assert one[rung]["gap"] < gap
        # Else this test would hold of exact sums, too.
        assert one[rung]["lack"] > lack
        assert one[rung]["differ"] < 1e-9
        assert one["untouched"]
