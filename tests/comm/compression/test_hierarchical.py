"""Hierarchical means: within each host first, and then between the hosts."""

from __future__ import annotations

import json
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cpuft.comm.compression.hierarchical import HierarchicalReducer, HostGroups, count_ranks_per_host
from tests.comm.compression.feedback import Bucket
from tests.comm.loss import DEADLINE_SECONDS
from tests.comm.ranks import fork_ranks, mpirun


@pytest.mark.parametrize(
    "places, ranks_per_host",
    [
        ([(0, 2), (1, 2), (0, 2), (1, 2)], 2),
        ([(0, 3), (1, 3), (2, 3)] * 2, 3),
        ([(0, 1)] * 4, 0),  # one rank per host
        ([(0, 4), (1, 4), (2, 4), (3, 4)], 0),  # one host
        ([(0, 2), (1, 2), (0, 1)], 0),  # hosts with different numbers of ranks
        ([(0, 1), (0, 2), (1, 2)], 0),
        ([(0, 2), (0, 2), (1, 2), (1, 2)], 0),  # ranks that take turns
        ([(0, 2), (1, 2), (0, 2)], 0),
    ],
)
def test_means_are_hierarchical_on_several_hosts_with_equally_many_ranks(
    places: list[tuple[int, int]], ranks_per_host: int
) -> None:
    assert count_ranks_per_host(places) == ranks_per_host


@pytest.fixture(scope="module", params=("gloo", "mpi"))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("hosts")
    start_ranks = mpirun if request.param == "mpi" else fork_ranks
    run = start_ranks(4, "tests.comm.compression.hosts", request.param, str(folder))
    assert run.returncode == 0, run.stdout[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


ALL = [0, 1, 2, 3]
LEADERS = [0, 2]


@pytest.mark.real
# Rounding of the leader's numbers, and of the mean: 1/254 of the largest number each. bf16 rounds the mean once more.
@pytest.mark.parametrize("dtype, error", [("torch.float32", 2 / 254), ("torch.bfloat16", 2 / 254 + 1 / 256)])
@pytest.mark.parametrize("compression", ["int8", "powersgd"])
def test_all_ranks_get_the_mean_and_only_leaders_send_to_another_host(
    found: list[dict[str, Any]], compression: str, dtype: str, error: float
) -> None:
    for rank, one in enumerate(report[f"{compression} {dtype}"] for report in found):
        assert one["dtype"] == dtype
        assert 1e-6 < one["error"] < error
        assert one["same"]
        own_host = [rank // 2 * 2, rank // 2 * 2 + 1]
        # Each rank waits for all ranks in a mean, which sends nothing itself.
        expected = {("mean", tuple(ALL)), ("reduce", tuple(own_host)), ("broadcast", tuple(own_host))}
        if rank in LEADERS:
            expected |= {("all_to_all", tuple(LEADERS)), ("all_gather", tuple(LEADERS))}
        assert {(name, tuple(ranks)) for name, ranks in one["operations"]} == expected
        assert len(one["operations"]) == 3 * len(expected)
        assert one["bytes"] == (one["expected bytes"] if rank in LEADERS else 0)


@pytest.mark.real
@pytest.mark.parametrize("compression, gap, lack", [("int8", 1e-6, 1e-4), ("powersgd", 5e-3, 1e-4)])
def test_nothing_is_lost_over_updates(found: list[dict[str, Any]], compression: str, gap: float, lack: float) -> None:
    for report in found:
        one = report[f"{compression} sums"]
        assert one["gap"] < gap
        assert one["lack"] > lack
        assert one["differ"] < 1e-9


@pytest.mark.real
def test_rows_are_averaged_in_the_same_way(found: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(report["int8 rows"] for report in found):
        assert 0 < one["error"] < 4 * 2 / 254
        assert one["same"]
        others = {tuple(ranks) for name, ranks in one["operations"] if name != "mean"}
        own_host = (rank // 2 * 2, rank // 2 * 2 + 1)
        assert others == {own_host, tuple(LEADERS)} if rank in LEADERS else {own_host}


@pytest.mark.real
def test_other_places_and_exact_levels_average_among_all_ranks(found: list[dict[str, Any]]) -> None:
    for report in found:
        assert len(report["places"]) == 6
        assert not any(report["places"].values())
        assert report["int8 timeout"] == 20.0


@pytest.mark.real
@pytest.mark.parametrize("lost", ["1", "2", "3"])
@pytest.mark.parametrize("how", ["kill", "sleep"])
def test_losing_any_rank_ends_the_others_and_they_name_it(how: str, lost: str) -> None:
    run = fork_ranks(4, "tests.comm.compression.hosts_loss", "gloo", how, lost)
    ended = time.time()
    begun = re.search(r"losing ([\d.]+)", run.stdout)
    assert begun, run.stdout
    assert run.returncode != 0
    assert ended - float(begun.group(1)) < DEADLINE_SECONDS + 10.0
    lines = re.findall(r"^cpuft comm: rank (\d): .*did not arrive: (.*?)\. Next", run.stdout, re.MULTILINE)
    named = {rank: re.findall(r"rank (\d) \(", names) for rank, names in lines}
    assert named, run.stdout
    # Rank 0 relays what ranks report. If it has named the lost rank and ended, the others can name rank 0 only.
    allowed = ([lost], ["0"]) if named.get("0") == [lost] else ([lost],)
    assert all(names in allowed for names in named.values()), run.stdout


class _Done:
    def wait(self) -> None: ...


class _Host:
    """The ranks of a host."""

    def size(self) -> int:
        return 2


def test_the_futures_of_all_buckets_raise_the_error_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = _Host()
    hosts = HostGroups(group, group, group, leader=0, ranks=4, timeout=timedelta(seconds=9))
    monkeypatch.setattr(dist, "reduce", lambda *_, **options: _Done())
    calls = []

    def fail_second(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket)
        if len(calls) == 2:
            raise RuntimeError("connection closed by rank 2")
        return torch.futures.Future()  # it never completes, as that of an earlier bucket of PowerSGD

    reducer = HierarchicalReducer(hosts, fail_second)
    buckets = [Bucket([torch.zeros(7)], [torch.ones(7)], last=n == 1) for n in range(2)]
    futures = [reducer.reduce(bucket) for bucket in buckets]
    deadline = time.monotonic() + 10
    while not all(future.done() for future in futures) and time.monotonic() < deadline:
        time.sleep(0.01)
    for future in futures:
        assert future.done()
        with pytest.raises(RuntimeError, match="connection closed by rank 2"):
            future.wait()
