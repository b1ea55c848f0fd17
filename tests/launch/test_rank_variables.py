"""The settings of ranks, and which of the user's variables they get."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.hosts.facts import has_efa
from cpuft.hosts.topology import Interface, RankCores, choose_interface
from cpuft.launch.rank_variables import (
    export_settings,
    forwarded_settings,
    host_settings,
    keep_user_values,
    plan_settings,
    shared_settings,
    user_variables,
)
from cpuft.plans import Setting
from tests.conftest import make_facts
from tests.launch.test_plan import make_cluster, settings_of


def test_interface_is_the_one_that_routes_to_the_others() -> None:
    assert choose_interface(make_facts(1), "10.0.0.2").name == "ens5"


@pytest.mark.parametrize("source", ["127.0.0.1", "172.17.0.1", "", "10.9.9.9"])
def test_loopback_docker_or_no_route_is_refused(source: str) -> None:
    facts = dataclasses.replace(make_facts(1), routes={"10.0.0.2": source})
    with pytest.raises(CpuftError, match="or name --iface"):
        choose_interface(facts, "10.0.0.2")


def test_a_named_interface_wins_and_must_exist() -> None:
    assert choose_interface(make_facts(1), "10.0.0.2", "docker0").address == "172.17.0.1"
    with pytest.raises(CpuftError, match="has no interface eth9 with an address: use one of docker0, ens5, lo"):
        choose_interface(make_facts(1), "10.0.0.2", "eth9")


def test_values_set_by_the_user_are_kept_and_reported() -> None:
    ours = (
        Setting("OMP_NUM_THREADS", "14", "why"),
        Setting("FI_PROVIDER", "tcp", "why"),
        Setting("CPUFT_PIN", "rank", "why"),
    )
    kept = keep_user_values(ours, {"OMP_NUM_THREADS": "7", "FI_PROVIDER": "tcp", "CPUFT_PIN": "x"})
    assert kept == (
        Setting("OMP_NUM_THREADS", "7", "kept as you set it; cpuft would set 14", from_user=True),
        *ours[1:],
    )
    assert [one.name for one in kept if one.from_user] == ["OMP_NUM_THREADS"]


@pytest.mark.parametrize(
    ("efa", "provider"), [((True, True), "efa"), ((True, False), "tcp"), ((False, False), "tcp"), ((True,), "tcp")]
)
def test_fast_fabrics_are_used_where_every_host_has_them(efa: tuple[bool, ...], provider: str) -> None:
    hosts = tuple(dataclasses.replace(make_facts(number), efa=has) for number, has in enumerate(efa, start=1))
    shared = {s.name: s for s in shared_settings(Interface("ens5", "10.0.0.1", "it is"), 4000, hosts, len(hosts))}
    assert shared["FI_PROVIDER"].value == provider
    assert ("every host has an EFA adapter" in shared["FI_PROVIDER"].reason) == (provider == "efa")


@pytest.mark.parametrize(
    ("driver", "library", "found"), [("efa", "/x/libefa.so.1", True), ("mlx5_core", "/x/libefa.so.1", False)]
)
def test_an_efa_adapter_is_recognized_by_its_driver_and_library(
    driver: str, library: str, found: bool, tmp_path: Path
) -> None:
    (tmp_path / "drivers" / driver).mkdir(parents=True)
    (tmp_path / "devices" / "rdmap0s31" / "device").mkdir(parents=True)
    (tmp_path / "devices" / "rdmap0s31" / "device" / "driver").symlink_to(tmp_path / "drivers" / driver)
    assert has_efa(str(tmp_path / "devices"), library) is found
    assert has_efa(str(tmp_path / "devices"), "") is False
    assert has_efa(str(tmp_path / "none"), library) is False


def test_values_exported_by_cpuft_env_are_the_users_only_if_changed() -> None:
    settings = (Setting("OMP_NUM_THREADS", "2", ""), Setting("FI_PROVIDER", "tcp", ""), Setting("CPUFT_CORES", "0", ""))
    shell = {setting.name: setting.value for setting in export_settings(settings)} | {"FI_PROVIDER": "efa"}
    assert "CPUFT_CORES" not in shell
    users = user_variables(shell | {"HOME": "/root"})
    assert {name: users.get(name) for name in ("OMP_NUM_THREADS", "FI_PROVIDER", "HOME")} == {
        "OMP_NUM_THREADS": None,
        "FI_PROVIDER": "efa",
        "HOME": "/root",
    }
    assert user_variables({"CPUFT_EXPORTED": "no json", "OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"] == "2"


def test_known_prefixes_are_passed_on_without_secrets() -> None:
    environ = {"CCL_LOG_LEVEL": "info", "HF_HOME": "/x", "HF_TOKEN": "secret", "PATH": "/bin", "FI_PROVIDER": "efa"}
    environ |= {"MPIR_CVAR_CH4_CMA_ENABLE": "0"}
    found = forwarded_settings(environ, (Setting("FI_PROVIDER", "efa", ""),))
    assert [setting.name for setting in found] == ["CCL_LOG_LEVEL", "HF_HOME", "MPIR_CVAR_CH4_CMA_ENABLE"]
    odd = {"OMP_X;id #": "1", "OMP_A\nB": "1", "OMP_Ä": "1", "HF_API_KEY": "x", "HF_ENDPOINT": "https://me:pass@hub"}
    assert forwarded_settings(odd, ()) == ()


@pytest.mark.parametrize(
    "libraries, expected",
    [
        ({}, ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"]),
        ({"jemalloc": "/j.so", "tcmalloc_minimal": "/t.so"}, ["LD_PRELOAD"]),
        ({"jemalloc": "/j.so"}, ["LD_PRELOAD", "MALLOC_CONF"]),
        ({"iomp5": "/i.so"}, ["LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"]),
    ],
)
def test_allocators_are_set_to_keep_freed_memory(libraries: dict[str, str], expected: list[str]) -> None:
    loopback = Interface("lo", "127.0.0.1", "")
    facts = dataclasses.replace(make_facts(1), libraries=libraries)
    settings = host_settings(facts, loopback, (RankCores((0, 1)),), True, "")
    assert [s.name for s in settings if s.name.startswith(("GLIBC_", "LD_", "MALLOC_"))] == expected


def test_macos_gets_the_settings_that_it_can_use() -> None:
    facts = dataclasses.replace(make_facts(1), system="darwin", libraries={"jemalloc": "/j.so"})
    loopback = Interface("lo0", "127.0.0.1", "")
    settings = host_settings(facts, loopback, (RankCores((0, 1)), RankCores((2, 3))), False, "")
    assert {one.name: one.value for one in settings} == {
        "CPUFT_HOSTNAME": facts.hostname,
        "CPUFT_CORES": "0,1;2,3",
        "OMP_NUM_THREADS": "2",
        "GLOO_SOCKET_IFNAME": "lo0",
        "FI_TCP_IFACE": "lo0",
    }
    shared = {one.name for one in shared_settings(loopback, 4000, (facts,), 2)}
    of_cpuft = {"CPUFT_WORLD_SIZE", "CPUFT_VERSION"}
    assert shared == {"MASTER_ADDR", "MASTER_PORT", "TOKENIZERS_PARALLELISM", "FI_PROVIDER", *of_cpuft}


def test_the_recipes_settings_on_its_machine() -> None:
    """Of 32 cores, four are for communication and 28 for OpenMP, as in the published recipe."""
    (first, _) = settings_of(make_cluster((1, 1)), LaunchConfig(np=2), "ccl")
    assert first["OMP_NUM_THREADS"] == "28"
    assert first["I_MPI_PIN_DOMAIN"] == "[0xfffffff0]"
    assert first["CCL_WORKER_COUNT"] == "4"
    assert first["CCL_WORKER_AFFINITY"] == "0,1,2,3"
    assert first["MASTER_ADDR"] == "10.0.0.1"
    assert first["GLOO_SOCKET_IFNAME"] == "ens5"


def test_each_host_has_settings_from_its_own_cores() -> None:
    cluster = make_cluster((1, 1))
    small = make_facts(2, sockets=1, cores=8, target="10.0.0.1")
    cluster = dataclasses.replace(cluster, facts=(cluster.facts[0], small))
    threads = [host["OMP_NUM_THREADS"] for host in settings_of(cluster, LaunchConfig(np=2), "gloo")]
    assert threads == ["32", "8"]


def test_either_mpirun_or_cpuft_pins_the_ranks() -> None:
    (host,) = settings_of(make_cluster((2,)), LaunchConfig(np=2), "gloo")
    assert ("I_MPI_PIN_DOMAIN" in host, "CPUFT_PIN" in host) == (True, False)
    (host,) = settings_of(make_cluster((2,), "openmpi"), LaunchConfig(np=2), "gloo")
    assert ("I_MPI_PIN_DOMAIN" in host, host["CPUFT_PIN"]) == (False, "rank")
    (host,) = settings_of(make_cluster((2,)), LaunchConfig(np=2), "gloo", I_MPI_PIN_DOMAIN="socket")
    assert (host["I_MPI_PIN_DOMAIN"], "CPUFT_CORES" in host) == ("socket", False)


@pytest.mark.parametrize(
    "hosts, boots, expected",
    ((1, 1, ("shm", "1")), (2, 2, ("shm:ofi", "1")), (2, 1, ("ofi", "0"))),
    ids=("one host", "two hosts", "two hosts that are one machine"),
)
def test_when_ranks_use_shared_memory(hosts: int, boots: int, expected: tuple[str, str]) -> None:
    cluster = make_cluster((2 // hosts,) * hosts)
    facts = tuple(dataclasses.replace(one, boot_id=str(at % boots)) for at, one in enumerate(cluster.facts))
    shared = settings_of(dataclasses.replace(cluster, facts=facts), LaunchConfig(np=2), "gloo")[0]
    assert (shared["I_MPI_FABRICS"], shared["CCL_ATL_SHM"]) == expected


def test_too_many_comm_cores() -> None:
    with pytest.raises(CpuftError, match="16 ranks on 32 cores have 2 cores each, and communication takes 2"):
        plan_settings(make_cluster((16,)), LaunchConfig(np=16, comm_cores=2), "ccl", {})
