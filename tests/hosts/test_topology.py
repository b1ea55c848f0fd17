"""Cores and placement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cpuft.errors import CpuftError
from cpuft.hosts.topology import (
    Core,
    HostFacts,
    RankCores,
    choose_comm_cores,
    format_mask,
    parse_facts,
    parse_lscpu,
    plan_placement,
    spread_cores,
)
from tests.conftest import make_facts, make_lscpu


def test_lscpu_of_two_sockets_with_hardware_threads() -> None:
    cores = parse_lscpu(make_lscpu(2, 2), tuple(range(8)))
    assert cores == (Core(0, 0, (0, 4)), Core(0, 0, (1, 5)), Core(1, 1, (2, 6)), Core(1, 1, (3, 7)))


def test_lscpu_leaves_out_what_we_may_not_use() -> None:
    assert parse_lscpu(make_lscpu(1, 4), (1, 2)) == (Core(0, 0, (1,)), Core(0, 0, (2,)))


@pytest.mark.parametrize("quota, cores", ((0.0, 32), (0.5, 1), (1.0, 1), (2.5, 2), (64.0, 32)))
def test_no_more_cores_than_the_quota_feeds(quota: float, cores: int) -> None:
    assert len(dataclasses.replace(make_facts(), cpu_quota=quota).cores) == cores


@pytest.mark.parametrize("quota, nodes, used", [(0.0, 2, 32), (20.0, 1, 20), (30.0, 2, 28), (16.0, 1, 16)])
def test_nodes_of_unequal_size_waste_no_cores(quota: float, nodes: int, used: int) -> None:
    facts = dataclasses.replace(make_facts(), lscpu=make_lscpu(2, 16), cpu_quota=quota)
    assert facts.numa_nodes == nodes
    assert sum(len(one.compute) for one in plan_placement(facts.cores, 2, 0)) == used


def test_without_lscpu_each_allowed_thread_is_a_core() -> None:
    assert parse_lscpu("", (0, 3)) == (Core(0, 0, (0,)), Core(0, 0, (3,)))


@pytest.mark.parametrize(
    "per_rank, ranks, backend, cores",
    [
        (32, 4, "ccl", 4),
        (16, 4, "ccl", 2),
        (8, 4, "mpi", 1),
        (7, 4, "ccl", 0),
        (64, 2, "ccl", 4),
        (32, 1, "ccl", 0),
        (32, 4, "gloo", 0),
    ],
)
def test_comm_cores(per_rank: int, ranks: int, backend: str, cores: int) -> None:
    assert choose_comm_cores(per_rank, ranks, backend)[0] == cores


def test_placement_keeps_ranks_inside_numa_nodes() -> None:
    cores = parse_lscpu(make_lscpu(2, 8), tuple(range(32)))
    placed = plan_placement(cores, 4, 1)
    assert placed == (
        RankCores((1, 2, 3), (0,)),
        RankCores((5, 6, 7), (4,)),
        RankCores((9, 10, 11), (8,)),
        RankCores((13, 14, 15), (12,)),
    )


def test_more_ranks_than_cores_share() -> None:
    assert plan_placement(parse_lscpu("", (0, 1)), 3, 0) == (RankCores((0,)), RankCores((1,)), RankCores((0,)))


def test_no_core_left_to_compute() -> None:
    with pytest.raises(CpuftError) as error:
        plan_placement(parse_lscpu("", tuple(range(8))), 2, 4)
    assert str(error.value) == (
        "2 ranks on 8 cores have 4 cores each, and communication takes 4: lower --ppn or --comm-cores"
    )


@given(
    st.integers(1, 4), st.integers(1, 24), st.integers(1, 2), st.integers(1, 3), st.integers(1, 12), st.integers(0, 3)
)
def test_ranks_never_overlap(sockets: int, cores: int, threads: int, numa: int, ranks: int, comm: int) -> None:
    found = parse_lscpu(make_lscpu(sockets, cores, threads, numa), tuple(range(sockets * cores * threads)))
    assume(ranks * (comm + 1) <= len(found))
    placed = plan_placement(found, ranks, comm)
    used = [cpu for rank in placed for cpu in (*rank.compute, *rank.comm)]
    assert len(used) == len(set(used))
    assert len({len(rank.compute) for rank in placed}) == 1
    assert all(rank.compute and len(rank.comm) == comm for rank in placed)


@pytest.mark.parametrize(
    "cpus, mask", [((0,), "0x1"), ((0, 1), "0x3"), (tuple(range(4, 32)), "0xfffffff0"), ((64,), hex(1 << 64))]
)
def test_masks(cpus: tuple[int, ...], mask: str) -> None:
    assert format_mask(cpus) == mask


@pytest.mark.parametrize("line", ["1&a,0,0,0", "0,x,0,0", "0,0,\u0663,0", "9" * 5000 + ",0,0,0", ",,,"])
def test_a_line_that_lscpu_never_wrote_is_left_out(line: str) -> None:
    assert parse_lscpu(f"{line}\n1,1,0,0\n", (0, 1)) == (Core(0, 0, (1,)),)


def what_it_says(facts: HostFacts) -> str:
    """What a host with these facts prints."""
    cpuinfo = f"processor: 0\nmodel name: {facts.cpu_model}\nflags: {' '.join(facts.cpu_flags)}\n"
    said = dataclasses.asdict(facts) | {"cpu_model": "", "cpu_flags": [], "cpuinfo": cpuinfo, "machine": "x86_64"}
    return json.dumps(said)


def test_facts_read_back() -> None:
    assert parse_facts(what_it_says(make_facts()), "node1") == make_facts()


@pytest.mark.parametrize(
    "text",
    [
        *("", "Permission denied", "{}", "[]", '{"hostname": 1}', "[" * 100_000),
        what_it_says(make_facts()).replace("2.90GHz", "\\ud800"),
        what_it_says(make_facts()).replace('"cpu_quota": 0.0', '"cpu_quota": "0"'),
        what_it_says(dataclasses.replace(make_facts(), allowed_cpus=())),
    ],
)
def test_facts_that_are_none(text: str) -> None:
    with pytest.raises(CpuftError, match="host node1 did not report its facts"):
        parse_facts(text, "node1")


def test_hosts_that_are_one_machine_use_different_cores_of_it() -> None:
    """Containers with a quota of two cores see all four cores; hosts on other machines are not looked at."""

    def spread(quotas: Sequence[float], *machines: str) -> list[list[int]]:
        hosts = [make_facts(number, 1, 4) for number in range(len(quotas))]
        hosts = [replace(one, boot_id=name, cpu_quota=quota) for one, quota, name in zip(hosts, quotas, machines)]
        return [[core.threads[0] for core in cores] for cores in spread_cores(hosts)]

    assert spread((2.0, 2.0), "a", "a") == [[0, 1], [2, 3]]
    assert spread((0.4, 0.4, 0.4), "a", "a", "a") == [[0], [1], [2]]
    assert spread((3.0, 3.0), "a", "a") == [[0, 1, 2], [0, 1, 3]]
    assert spread((2.0, 2.0, 2.0), "a", "b", "a") == [[0, 1], [0, 1], [2, 3]]
    assert spread((0.0, 0.0), "a", "a") == [[0, 1, 2, 3], [0, 1, 2, 3]]
