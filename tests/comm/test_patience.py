"""A rank that waits for other hosts leaves its core to computing."""

from __future__ import annotations

import re

from tests.comm.ranks import mpirun


def test_a_second_of_waiting_costs_little_cpu_time() -> None:
    run = mpirun(2, "tests.comm.patience", seconds=60)
    found = re.search(r"rank 0 worked ([\d.]+) s", run.stdout)
    assert found, run.stdout[-3000:]
    assert float(found[1]) < 0.2
