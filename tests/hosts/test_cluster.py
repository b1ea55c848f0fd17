"""How ranks are distributed over hosts, and what hosts report."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import (
    LOCAL,
    Access,
    Cluster,
    find_access,
    gather_cluster,
    gather_facts,
    refuse_both_architectures,
)
from cpuft.hosts.hostfile import Host, parse_hostfile
from cpuft.hosts.mpi_implementations import MpiImplementation, find_mpi
from cpuft.hosts.rank_counts import Assignment, assign_ranks, choose_ranks
from cpuft.hosts.registry import Entry
from cpuft.hosts.transport import SshTransport
from tests.conftest import make_facts

FOUR = "a\nb\nc\nd\n"


def counts(assignments: tuple[Assignment, ...]) -> dict[str, int]:
    return {assignment.host.name: assignment.ranks for assignment in assignments}


@pytest.mark.parametrize(
    "text, np, ppn, placed",
    [
        (FOUR, 4, 0, {"a": 1, "b": 1, "c": 1, "d": 1}),
        (FOUR, 2, 0, {"a": 1, "b": 1}),
        (FOUR, 8, 0, {"a": 2, "b": 2, "c": 2, "d": 2}),
        (FOUR, 6, 0, {"a": 2, "b": 2, "c": 2}),
        (FOUR, 4, 2, {"a": 2, "b": 2}),
        (FOUR, 3, 2, {"a": 2, "b": 1}),
        ("a:4\nb:2\n", 6, 0, {"a": 4, "b": 2}),
        ("a:4\nb:2\n", 5, 0, {"a": 3, "b": 2}),
        ("a:1\n", 1, 0, {"a": 1}),
    ],
)
def test_ranks_are_distributed_in_the_order_of_the_hostfile(
    text: str, np: int, ppn: int, placed: dict[str, int]
) -> None:
    assert counts(assign_ranks(parse_hostfile(text), np, ppn, {})) == placed


def test_hosts_of_both_architectures_are_refused_in_one_line() -> None:
    refuse_both_architectures({"a": "aarch64", "b": "aarch64"})
    with pytest.raises(CpuftError) as caught:
        refuse_both_architectures({"a": "x86_64", "b": "x86_64", "c": "aarch64"})
    assert str(caught.value) == (
        "a is x86_64 and c is aarch64, and the ranks of a run need hosts of one architecture: "
        "name them with --only-hosts"
    )


def test_a_launch_on_hosts_of_both_architectures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"127.0.0.2": "x86_64", "127.0.0.3": "aarch64"}
    facts = [replace(make_facts(number), machine=kind) for number, kind in enumerate(kinds.values())]
    monkeypatch.setattr("cpuft.hosts.cluster.gather_facts", lambda hosts, access: facts)
    with pytest.raises(CpuftError, match=r"127\.0\.0\.2 is x86_64 and 127\.0\.0\.3 is aarch64"):
        gather_cluster(LaunchConfig(np=2), tuple(map(Host, kinds)), Access())


def test_a_mac_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "127.0.0.2", "127.0.0.3"
    facts = [make_facts(1), replace(make_facts(2), system="darwin")]
    monkeypatch.setattr("cpuft.hosts.cluster.gather_facts", lambda hosts, access: facts[-len(hosts) :])
    for hosts in (names, ("127.0.0.3",)):
        chosen = tuple(Host(name, port=22) for name in hosts)  # with a port, it is not this machine
        with pytest.raises(
            CpuftError, match=r"^one of the hosts has macOS, and a Mac trains only by itself and to try it out: "
        ):
            gather_cluster(LaunchConfig(np=2), chosen, Access())
    with pytest.raises(CpuftError, match=r"^--interruption-notice does not work on macOS: leave it out"):
        gather_cluster(LaunchConfig(np=2, interruption_notice="/gone"), (Host("127.0.0.1"),), Access())


@pytest.mark.parametrize(
    "text, np, ppn, message",
    [
        ("a:2\n", 3, 0, "3 ranks on a, which has 2 slots: lower --np or --ppn, or write slots=3 in a hostfile"),
        ("a:2\nb:2\n", 5, 0, "5 ranks do not fit: 2 hosts with 4 slots: lower --np, or add hosts"),
        ("a\nb\n", 5, 2, "5 ranks do not fit: 2 hosts with 4 slots at --ppn 2: lower --np, or add hosts"),
        ("a:1\nb\n", 4, 2, "2 ranks on a, which has 1 slot: lower --np or --ppn, or write slots=2 in a hostfile"),
    ],
)
def test_more_ranks_than_slots_are_refused(text: str, np: int, ppn: int, message: str) -> None:
    with pytest.raises(CpuftError) as error:
        assign_ranks(parse_hostfile(text), np, ppn, {})
    assert str(error.value).startswith(message)


def test_cores_limit_the_ranks_of_a_host_without_slots() -> None:
    with pytest.raises(CpuftError, match="5 ranks on a, which has 4 cores"):
        assign_ranks((Host("a"),), 5, 0, {"a": 4})


@pytest.mark.parametrize("cores, fitting", [({"a": 4}, 2), ({"a": 1}, 1), ({}, 2)])
def test_max_slots_only_lowers_the_number_of_cores(cores: dict[str, int], fitting: int) -> None:
    hosts = parse_hostfile("a max_slots=2")
    assert counts(assign_ranks(hosts, fitting, 0, cores)) == {"a": fitting}
    with pytest.raises(CpuftError, match=f"{fitting + 1} ranks on a, which has {fitting}"):
        assign_ranks(hosts, fitting + 1, 0, cores)


NODES = {"a": 1, "b": 1, "c": 2, "d": 2}
"""Hosts and their numbers of NUMA nodes."""


@pytest.mark.parametrize(
    "hosts, np, ppn, wanted",
    [
        ("a b c d", 0, 0, {"a": 1, "b": 1, "c": 2, "d": 2}),
        ("a b c d", 6, 0, {"a": 1, "b": 1, "c": 2, "d": 2}),  # moved to the head host, or resumed
        ("a b c", 4, 0, {"a": 1, "b": 1, "c": 2}),  # restarted without d
        ("a b c d", 4, 0, {"a": 1, "b": 1, "c": 1, "d": 1}),
        ("a b c d", 0, 2, {"a": 2, "b": 2, "c": 2, "d": 2}),
        ("c:1 d:4", 0, 0, {"c": 1, "d": 2}),
        ("a b c d", 3, 2, {"a": 2, "b": 1}),
    ],
)
def test_each_host_has_one_rank_for_each_of_its_numa_nodes(
    hosts: str, np: int, ppn: int, wanted: dict[str, int]
) -> None:
    facts = {name: make_facts(sockets=nodes) for name, nodes in NODES.items()}
    named = parse_hostfile(hosts.replace(" ", "\n"))
    assert counts(choose_ranks(named, np, ppn, facts)) == wanted


def test_this_machine_reports_its_facts() -> None:
    (facts,) = gather_facts((LOCAL,), Access())
    assert facts.cores
    assert facts.interfaces["lo"] == "127.0.0.1"
    assert facts.uid == os.geteuid()


def test_the_head_host_gets_the_absolute_path_of_the_ssh_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "hosts").write_text("node1\n")
    (tmp_path / "config").touch()
    access = find_access(LaunchConfig(hostfile="hosts", ssh_config="config"))
    assert access.mpirun_options == ("-F", f"{Path.cwd()}/config")
    access = find_access(LaunchConfig(hostfile="hosts", ssh_config="~/config"))
    assert access.transport.config == f"{tmp_path}/config"
    with pytest.raises(CpuftError, match=f"there is no file {Path.cwd()}/nofig, which --ssh-config names"):
        find_access(LaunchConfig(hostfile="hosts", ssh_config="nofig"))


def test_the_message_says_that_the_lease_has_ended() -> None:
    hosts = (Host("127.0.0.2", port=9),)
    ended = Access(entry=Entry("lab", "aws", "", until=1_700_000_000))
    with pytest.raises(CpuftError) as error:
        gather_facts(hosts, ended)
    assert str(error.value).startswith(
        "the lease of cluster lab ended at 2023-11-14 22:13 UTC, and its hosts shut down then: run "
        "cpuft provision down lab, then rent the cluster again with cpuft provision aws (host 127.0.0.2 cannot be used"
    )
    with pytest.raises(CpuftError, match=r"^host 127\.0\.0\.2 cannot be used"):
        gather_facts(hosts, Access(entry=Entry("lab", "aws", "", until=1 << 40)))


def test_users_have_a_folder_each_on_hosts_with_disks_of_their_own() -> None:
    first, second = (
        Cluster((), (), MpiImplementation("mpirun", "intel"), works_remotely=True, uid=uid) for uid in (0, 1000)
    )
    assert first.inputs == "/var/tmp/cpuft-0/inputs"
    assert re.fullmatch("/var/tmp/cpuft-1000/[0-9a-f]{12}/run", second.work_dir("/home/me/run"))


def test_a_run_on_the_disk_of_a_host_stays_there_if_only_this_machine_remains() -> None:
    assert not gather_cluster(LaunchConfig(), (LOCAL,), Access()).works_remotely
    cluster = gather_cluster(LaunchConfig(), (LOCAL,), Access(), is_on_host_disk=True)
    assert (cluster.works_remotely, cluster.command_prefixes) == (True, {"localhost": ()})


@pytest.mark.parametrize("uid", [0, 1000])
def test_mpirun_runs_as_root_if_the_user_on_the_head_host_is_root(uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuft.hosts.cluster.gather_facts", lambda hosts, access: [replace(make_facts(), uid=uid)])
    assert gather_cluster(LaunchConfig(), (LOCAL,), Access()).as_root == (uid == 0)


def test_every_host_that_fails_is_named() -> None:
    hosts = (Host("localhost"), Host("127.0.0.2", port=9), Host("127.0.0.3", port=9))
    with pytest.raises(CpuftError, match=r"host 127\.0\.0\.2 cannot be used.*host 127\.0\.0\.3 cannot be used"):
        gather_facts(hosts, Access())


def test_a_name_without_an_address_is_an_error() -> None:
    with pytest.raises(CpuftError, match=r"host no-such-host\.invalid has no address"):
        gather_facts((Host("no-such-host.invalid"),), Access())


def test_a_missing_mpirun_is_an_error() -> None:
    with pytest.raises(CpuftError, match="there is no mpirun at /nowhere/mpirun"):
        find_mpi(LOCAL, "/nowhere/mpirun", sys.executable, SshTransport())
