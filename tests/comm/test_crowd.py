"""Several groups, threads and many collectives in flight. scripts/repeat_crowd.sh does it 50 times."""

from __future__ import annotations

import pytest

from tests.comm.ranks import mpirun


@pytest.mark.parametrize("backend", ("ccl", "mpi", "gloo"))
def test_groups_and_threads_side_by_side(backend: str) -> None:
    run = mpirun(2, "tests.comm.crowd", backend, "5", seconds=60)
    assert run.returncode == 0, run.stdout[-3000:]
    assert run.stdout.count("all right") == 2
