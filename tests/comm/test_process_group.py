"""All operations, types and layouts on real ranks: one mpirun for each backend and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.comm.ranks import mpirun

MIN_CASES = {"ccl": 460, "mpi": 460, "gloo": 250}


@pytest.mark.parametrize(
    "backend, ranks, place",
    (
        *((backend, ranks, ()) for backend in ("ccl", "mpi", "gloo") for ranks in (2, 4)),
        # Ranks on different hosts sleep between two polls of MPI.
        ("mpi", 2, ("MPI_LOCALNRANKS=1",)),
    ),
)
def test_all_operations_return_what_one_process_computes(
    backend: str, ranks: int, place: tuple[str, ...], tmp_path: Path
) -> None:
    run = mpirun(ranks, "tests.comm.grid", backend, str(tmp_path), *place, seconds=90)
    assert run.returncode == 0, run.stdout[-3000:]
    for rank in range(ranks):
        outcomes = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {case: outcome for case, outcome in outcomes.items() if outcome != "ok"} == {}
        assert len(outcomes) >= MIN_CASES[backend]
