"""All operations, types and layouts on real ranks, in one start for each backend and number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.comm.ranks import fork_ranks, mpirun

pytestmark = pytest.mark.real
MIN_CASES = {"ccl": 460, "mpi": 460, "gloo": 250}
TWO_RANKS = [(backend, 2, ()) for backend in MIN_CASES]
STARTS = [
    *TWO_RANKS,
    *((backend, 4, ()) for backend in MIN_CASES),
    # Ranks on different hosts sleep between two polls of MPI.
    ("mpi", 2, ("MPI_LOCALNRANKS=1",)),
]
Start = tuple[str, int, Path]


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """The backend and number of ranks of a start, and what its ranks have written."""
    backend, ranks, place = request.param
    folder = tmp_path_factory.mktemp("grid")
    start_ranks = fork_ranks if backend == "gloo" else mpirun
    run = start_ranks(ranks, "tests.comm.grid", backend, str(folder), *place, seconds=300)
    assert run.returncode == 0, run.stdout[-3000:]
    return backend, ranks, folder


@pytest.mark.parametrize("start", STARTS, indirect=True, ids=str)
def test_all_operations_return_what_one_process_computes(start: Start) -> None:
    """Also those of several groups and threads at the same time, on two ranks."""
    backend, ranks, folder = start
    for rank in range(ranks):
        outcomes = json.loads((folder / f"{rank}.json").read_text())
        assert {case: outcome for case, outcome in outcomes.items() if outcome != "ok"} == {}
        assert len(outcomes) >= MIN_CASES[backend]


@pytest.mark.parametrize("start", TWO_RANKS, indirect=True, ids=str)
def test_arguments_of_collectives(start: Start) -> None:
    """Wrong ones raise before a buffer is touched, and unusual ones work as in torch's own groups."""
    backend, ranks, folder = start
    for rank in range(ranks):
        found = json.loads((folder / f"arguments-{rank}.json").read_text())
        refused = {name: outcome for name, outcome in found.items() if name.startswith("wrong")}
        assert len(refused) == 25
        for name, outcome in refused.items():
            operation = name.split()[1]
            assert str(outcome).startswith(f"RuntimeError: {operation}: "), (name, outcome)
        assert "invalid root rank: -1" in refused["wrong: broadcast root"]
        assert "(expected 2 * 3 elements, got 5)" in refused["wrong: all_gather into small"]
        for name, outcome in found.items():
            if name.startswith("unequal"):
                # Both ranks raise, and say what each has called.
                assert str(outcome).startswith("RuntimeError: "), (name, outcome)
                assert "rank 0" in outcome or name.endswith("one rank"), (name, outcome)
        if backend != "gloo":
            differ = found["unequal: all_reduce 3"]
            assert "rank 0: all_reduce (sum) of 3 float32; rank 1: all_reduce (sum) of 4 float32" in differ
            assert "invalid root rank: -1" in found["unequal: one rank"]
        if backend != "gloo":  # which sends the memory of a conjugated view
            assert found["unusual: conjugated"] == ["-1j", "(1-1j)"]
        del found["unusual: conjugated"]
        assert {name: outcome for name, outcome in found.items() if name.startswith("unusual")} == {
            "unusual: form op": [2.0, 2.0],
            "unusual: form list op": [3.0, 3.0],
            "unusual: form root": [2.0, 2.0],
            "unusual: form reduce": [[3.0, 3.0], [2.0, 2.0]][rank],
            "unusual: form barrier": True,
            "unusual: sparse gradients": [[0.5, 0.5] if row < 2 else [float(row == 4)] * 2 for row in range(10)],
            "unusual: sparse sum": [2.0, 1.0, 0.0],
            "unusual: strided": [
                [value * (2 * rank + 1) for value in row] for row in ([0.0, 3.0], [1.0, 4.0], [2.0, 5.0])
            ],
            "unusual: async_save": True,
            "unusual: timeout": 17.0,
            "unusual: device types": ["cpu"],
            "unusual: shared memory with a name": [],
            "unusual: backend": {"gloo": "cpuft_gloo"}.get(backend, backend),
            "unusual: parsed name": "mpi",
            "unusual: new group": 2,
        }
