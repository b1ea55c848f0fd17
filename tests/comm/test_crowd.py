"""Several groups, threads and many collectives under way."""

from __future__ import annotations

import pytest

from tests.comm.ranks import mpirun


@pytest.mark.parametrize("backend", ("ccl", "mpi", "gloo"))
def test_several_groups_and_threads_work_at_the_same_time(backend: str) -> None:
    run = mpirun(2, "tests.comm.crowd", backend, "5", seconds=60)
    assert run.returncode == 0, run.stdout[-3000:]
    assert run.stdout.count("passed") == 2
