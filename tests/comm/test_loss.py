"""A rank that is killed, stopped, fails or hangs ends all other ranks in time, and they name it."""

from __future__ import annotations

import re
import time

import pytest

from cpuft.rank.process import FAILED_MARK, parse_missing_ranks
from tests.comm.loss import DEADLINE_SECONDS
from tests.comm.ranks import fork_ranks, mpirun

LIMIT_SECONDS = 10.0


OTHERS = tuple(
    pytest.param(backend, how, marks=pytest.mark.proof) for backend in ("ccl", "mpi") for how in ("raise", "sleep")
)


@pytest.mark.parametrize(
    ("backend", "how"),
    (
        pytest.param("ccl", "stop", marks=pytest.mark.proof),
        pytest.param("ccl", "kill", marks=pytest.mark.proof),
        pytest.param("mpi", "stop", marks=pytest.mark.proof),
        ("mpi", "kill"),
        ("gloo", "raise"),
        ("gloo", "kill"),
        pytest.param("gloo", "sleep", marks=pytest.mark.proof),
        *OTHERS,
    ),
)
def test_losing_a_rank_ends_the_run_and_names_it(backend: str, how: str) -> None:
    start_ranks = fork_ranks if backend == "gloo" else mpirun
    run = start_ranks(3, "tests.comm.loss", backend, how, "1", seconds=60)
    ended = time.time()
    begun = re.search(r"losing ([\d.]+)", run.stdout)
    assert begun, run.stdout
    assert run.returncode != 0
    assert ended - float(begun.group(1)) < DEADLINE_SECONDS + LIMIT_SECONDS
    lines = [line for line in run.stdout.splitlines() if line.startswith("cpuft comm: rank")]
    named = [line for line in lines if "all_reduce #6 of the world (4000 bytes)" in line and "rank 1 (" in line]
    # mpirun may kill the others before they can write a line, and then it names the rank itself.
    by_launcher = re.search(r"RANK 1 PID|\[rank1\]: ValueError", run.stdout)
    assert {line.split(":")[1] for line in named} == {" rank 0", " rank 2"} or by_launcher, run.stdout


@pytest.mark.proof
@pytest.mark.parametrize("lost", (0, pytest.param(1, marks=pytest.mark.proof)))
def test_a_stopped_rank_is_named_and_no_other(lost: int) -> None:
    """Also rank 0, which relays the messages of all ranks."""
    run = fork_ranks(3, "tests.comm.loss", "gloo", "stop", str(lost), seconds=60)
    assert run.returncode != 0
    found = re.findall(r"^cpuft comm: rank (\d): .*; did not arrive: (.*?)\. Next", run.stdout, re.MULTILINE)
    others = sorted({"0", "1", "2"} - {str(lost)})
    assert sorted(found) == [(rank, f"rank {lost} (no answer: stopped, or its host is lost)") for rank in others]
    assert parse_missing_ranks(run.stdout) == {lost}
    assert run.stdout.count(FAILED_MARK) == 2
