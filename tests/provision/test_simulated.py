"""Simulated clusters: what is planned of them, what is read on this machine, and what simulated_node.sh does."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.registry import Entry, format_entry, read_entry
from cpuft.network_speed import parse_bit_rate
from cpuft.provision.cluster_files import read_files
from cpuft.provision.options import LocalConfig
from cpuft.provision.simulated import (
    SCRIPT,
    MachineFacts,
    NodeFacts,
    SimulatedCluster,
    check_config,
    choose_network,
    find_groups,
    parse_networks,
    parse_routes,
    plan_cluster,
    plan_cluster_down,
    plan_cpus,
    plan_fault,
    plan_texts,
)
from tests.conftest import wait_until
from tests.provision.simulated import needs_root

CONFIG = LocalConfig(nodes=2, cores_per_node=0.5, net="1gbit")
ENTRY = Entry("local", "local", "/work/hostfiles/local", "/state/local/ssh_config", "/usr/bin/python3")
KEYS = {
    f"/state/local/{path}": text
    for name in ("id_ed25519", "nodes/1/host_key", "nodes/2/host_key")
    for path, text in ((name, "private"), (f"{name}.pub", f"ssh-ed25519 {name}"))
}
EMPTY = MachineFacts(("/sys/fs/cgroup",), "10.77.0.0/24", False, {}, {}, ENTRY)


def whole(config: LocalConfig = CONFIG) -> MachineFacts:
    """Return the facts of a complete cluster."""
    keyed = replace(EMPTY, files=KEYS)
    files = KEYS | plan_texts(config, keyed)
    first = [step for stage in plan_cluster(config, keyed).stages for step in stage]
    booted = [s.value for step in first for s in step.settings if s.name == "NODE_BOOTED"]
    up = NodeFacts(True, True)
    nodes = {index: replace(up, booted=mark) for index, mark in enumerate(booted, start=1)}
    return replace(EMPTY, bridge=True, nodes=nodes, files=files)


def actions(facts: MachineFacts, config: LocalConfig = CONFIG) -> list[str]:
    plan = plan_cluster(config, facts)
    return [step.command[-1] for stage in plan.stages for step in stage if step.settings]


def test_keys_come_before_the_files_that_are_made_from_them() -> None:
    remembered, keys, *stages = plan_cluster(CONFIG, EMPTY).stages
    assert [step.command[-1] for step in remembered] == ["/state/local/cluster.json"]
    assert [step.command[-2] for step in keys] == [path for path in KEYS if not path.endswith(".pub")]
    assert not any(step.settings for stage in stages for step in stage)


def test_a_complete_cluster_needs_no_steps() -> None:
    assert plan_cluster(CONFIG, whole()).stages == ()


def test_every_planned_file_is_read_back(tmp_path: Path) -> None:
    base, hostfile = tmp_path / "local", tmp_path / "hostfiles/local"
    keys = {path.replace("/state", str(tmp_path)): text for path, text in KEYS.items()}
    there = "/opt/cpuft/clusters/local/ssh_config"
    entry = replace(ENTRY, hostfile=str(hostfile), ssh_config=f"{base}/ssh_config", ssh_config_there=there)
    texts = plan_texts(CONFIG, replace(EMPTY, files=keys, entry=entry))
    for path, text in texts.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    assert f"{base}/there/cluster.json" in texts
    assert read_files(base, hostfile) == texts


@pytest.mark.parametrize(
    "change, action",
    [
        ({"running": False, "answers": False}, "up"),
        ({"answers": False}, "up"),
        ({"booted": "older"}, "up"),
        ({"paused": True}, "resume"),
        ({"cut": True}, "join"),
    ],
)
def test_each_fault_of_a_host_has_its_repair(change: dict[str, object], action: str) -> None:
    facts = whole()
    nodes = facts.nodes | {2: replace(facts.nodes[2], **change)}  # type: ignore[arg-type]
    assert actions(replace(facts, nodes=nodes)) == [action]


@pytest.mark.parametrize("change", [{"net": "100mbit"}, {"cores_per_node": 0.2}, {"shm": "2g"}])
def test_hosts_start_again_with_other_limits(change: dict[str, Any]) -> None:
    assert actions(whole(), replace(CONFIG, **change)) == ["up", "up"]


def test_fewer_nodes_remove_the_surplus_hosts() -> None:
    assert "down" in actions(whole(), replace(CONFIG, nodes=1))


def test_a_changed_file_is_written_again() -> None:
    facts = whole()
    files = facts.files | {ENTRY.hostfile: "# made by cpuft provision\n10.0.0.1\n"}
    steps = [step for stage in plan_cluster(CONFIG, replace(facts, files=files)).stages for step in stage]
    assert [step.stdin for step in steps] == [facts.files[ENTRY.hostfile]]


@pytest.mark.parametrize(
    "cores, cpus, expected",
    (
        (0.0, (0, 1), ["0", "1"]),
        (0.5, (0, 1), ["0", "1"]),
        (0.4, (0, 1), ["0", "1"]),
        (1.0, (0, 1), ["0", "1"]),
        (1.5, (0, 1, 2, 3), ["0,1", "2,3"]),
        (8.0, (0, 1), ["0,1", "0,1"]),
        (0.0, (5,), ["5", "5"]),
    ),
    ids=(
        "an even share",
        "half a core",
        "less than half",
        "a core",
        "one and a half",
        "more than there are",
        "one for both",
    ),
)
def test_hosts_share_the_cores_of_the_machine(cores: float, cpus: tuple[int, ...], expected: list[str]) -> None:
    facts = replace(EMPTY, cpus=cpus)
    found = [",".join(map(str, plan_cpus(replace(CONFIG, cores_per_node=cores), facts, index))) for index in (1, 2)]
    assert found == expected


def test_hosts_are_spread_over_cores_before_they_share_one() -> None:
    """Four cores have two hardware threads each: 0 and 4, 1 and 5, and so on."""
    facts = replace(EMPTY, cpus=(0, 4, 1, 5, 2, 6, 3, 7), cores=(0, 1, 2, 3))

    def plan(nodes: int, cores: float) -> list[tuple[int, ...]]:
        config = replace(CONFIG, nodes=nodes, cores_per_node=cores)
        return [plan_cpus(config, facts, index) for index in range(1, nodes + 1)]

    assert plan(2, 0.4) == [(0,), (2,)]
    assert plan(2, 2.0) == [(0, 1), (2, 3)]
    assert plan(4, 0.5) == [(0,), (1,), (2,), (3,)]
    assert plan(8, 1.0) == [(0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,)]
    assert plan(2, 0.0) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert plan(3, 0.0) == [(0, 1, 4), (1, 2, 5), (3, 6, 7)]


def test_missing_control_groups_are_an_error_only_with_a_cpu_limit() -> None:
    facts = replace(EMPTY, groups=())
    assert plan_cluster(replace(CONFIG, cores_per_node=0.0), facts).stages
    with pytest.raises(CpuftError, match=r"omit --cores-per-node$"):
        plan_cluster(CONFIG, facts)


@pytest.mark.parametrize("node", ["2", "local-2", "10.77.0.2"])
def test_a_fault_finds_its_host_by_number_name_or_address(node: str) -> None:
    (step,) = plan_fault(CONFIG, whole(), "kill", node).stages[0]
    assert step.settings[0].value == "local-2"
    assert step.command[-1] == "crash"


def test_a_fault_needs_no_files_of_the_cluster() -> None:
    (step,) = plan_fault(CONFIG, replace(EMPTY, nodes=whole().nodes), "resume", "2").stages[0]
    assert step.command[-1] == "resume"


@pytest.mark.parametrize("nodes", [{}, {2: NodeFacts(running=False)}])
def test_a_host_that_does_not_run_has_no_faults(nodes: dict[int, NodeFacts]) -> None:
    with pytest.raises(CpuftError, match=r"^local-2 does not run: cpuft provision local --name local with the options"):
        plan_fault(CONFIG, replace(whole(), nodes=nodes), "join", "2")


def test_an_unknown_host_is_answered_with_the_known_ones() -> None:
    with pytest.raises(CpuftError, match=r"no host '9': choose one of local-1, local-2$"):
        plan_fault(CONFIG, whole(), "kill", "9")


def test_down_without_a_cluster_has_no_steps() -> None:
    assert plan_cluster_down(CONFIG, replace(EMPTY, files={})).stages == ()


def test_down_removes_files_last() -> None:
    stages = plan_cluster_down(CONFIG, whole()).stages
    assert [step.command[-1] for step in stages[0]] == ["down", "down"]
    assert stages[-1][0].command[-2:] == (EMPTY.directory, ENTRY.hostfile)


def removals(files: dict[str, str], bridge: bool = False) -> list[tuple[str, ...]]:
    """Return what the last step of `down` removes, given these files by path."""
    stages = plan_cluster_down(CONFIG, replace(EMPTY, bridge=bridge, files=files)).stages
    return [step.command[4:] for stage in stages for step in stage if step.command[3] == "remove_cluster"]


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("name", ["notes", "id_ed25519.pub", "nodes/1/notes.pub", "there/cluster.json"])
def test_down_leaves_a_directory_that_carries_no_mark(name: str, bridge: bool) -> None:
    assert removals({f"{EMPTY.directory}/{name}": "ssh-ed25519 AAAA me@home"}, bridge) == []


def test_down_removes_what_a_killed_run_left() -> None:
    keys = {f"{EMPTY.directory}/nodes/1/host_key.pub": "ssh-ed25519 AAAA cpuft\n"}
    assert removals(keys) == [(EMPTY.directory,)]


def test_down_leaves_a_hostfile_that_carries_no_mark() -> None:
    files = {path: text for path, text in whole().files.items() if path != ENTRY.hostfile}
    assert removals(files | {ENTRY.hostfile: "node1\n# made by cpuft provision\n"}) == [(EMPTY.directory,)]


@pytest.mark.parametrize("rate, bits", [("", 0), ("1gbit", 10**9), ("100mbit", 10**8), ("2.5gbit", 25 * 10**8)])
def test_rates(rate: str, bits: int) -> None:
    assert parse_bit_rate(rate) == bits


@pytest.mark.parametrize(
    "bad",
    [
        {"name": "a-name"},
        {"name": "toolongname"},
        {"name": "abcdefgh"},
        {"name": "abcdefg", "nodes": 10},
        {"name": "0abc"},
        {"name": "a 0"},
        {"name": 'a"=0"'},
        {"name": "a'; echo foo"},
        {"name": "$HOME"},
        {"name": "a\n"},
        {"name": ""},
        {"net": "fast"},
        {"net": "0gbit"},
        {"net": "9" * 400 + "gbit"},
        {"shm": "1 gb"},
        {"shm": "0"},
    ],
)
def test_impossible_options_are_refused_in_one_line(bad: dict[str, object]) -> None:
    with pytest.raises(CpuftError) as caught:
        check_config(replace(CONFIG, **bad))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_longest_possible_names_are_accepted() -> None:
    for name, nodes in (("abcdefg", 9), ("abcdef", 99)):
        check_config(replace(CONFIG, name=name, nodes=nodes))


def make_entry(folder: Path, config: LocalConfig = CONFIG, **environ: str) -> Entry:
    return SimulatedCluster(config, environ | {"CPUFT_STATE": str(folder)}).entry


def test_the_registry_entry_is_read_back(tmp_path: Path) -> None:
    entry = make_entry(tmp_path)
    write_text(tmp_path / "local" / "cluster.json", format_entry(entry))
    assert read_entry(tmp_path, "local") == entry
    assert entry.options["nodes"] == "2"


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"HOME": "/elsewhere"}, "/elsewhere/.cache"),
        ({"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere"),
        ({"HOME": pwd.getpwuid(os.geteuid()).pw_dir}, None),
    ],
)
def test_hosts_use_the_cache_of_the_user_who_made_them(
    environ: dict[str, str], cache: str | None, tmp_path: Path
) -> None:
    entry = make_entry(tmp_path, LocalConfig(), **environ)
    assert entry.settings.get("XDG_CACHE_HOME") == cache


ADDRESSES = """[{"ifname": "lo", "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8}]},
 {"ifname": "down0", "addr_info": []},
 {"ifname": "cpuft-local", "addr_info": [{"family": "inet", "local": "10.77.0.254", "prefixlen": 24}]}]"""
ROUTES = '[{"dst": "default", "gateway": "192.0.2.1"}, {"dst": "10.77.0.0/16"}, {"type": "local", "dst": "10.79.0.9"}]'


def test_networks_of_interfaces_are_parsed() -> None:
    assert parse_networks(ADDRESSES) == {"lo": "127.0.0.0/8", "cpuft-local": "10.77.0.0/24"}


def test_a_network_is_chosen_that_nothing_uses() -> None:
    assert choose_network(parse_routes(ROUTES)) == "10.78.0.0/24"
    assert choose_network(["10.77.0.0/16", "10.78.0.128/25"]) == "10.79.0.0/24"


def test_without_a_free_network_the_message_names_down() -> None:
    with pytest.raises(CpuftError, match=r"cpuft provision down$"):
        choose_network(["10.0.0.0/8"])


V2 = {"cpu.max": "max 100000\n", "cgroup.freeze": "0\n"}
V1 = {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n", "freezer.state": "THAWED\n"}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def run_node(verb: str, group: Path, folder: Path, quota: str = "") -> None:
    """Call simulated_node.sh for a host that has a control group and nothing else."""
    settings = {"NODE": "a", "NODE_DIR": str(folder), "NODE_LINK": "no-such-link", "NODE_CGROUPS": str(group)}
    environ = dict(os.environ) | settings | {"NODE_QUOTA": quota, "NODE_RATE": ""}
    subprocess.run(["sh", SCRIPT, verb], env=environ, check=True, capture_output=True, timeout=30)


@pytest.mark.parametrize(
    "files, groups",
    [
        ({"cgroup.controllers": "cpuset cpu io memory\n", "cgroup.procs": ""}, [""]),
        ({"cpu/cgroup.procs": "", "freezer/cgroup.procs": ""}, ["/cpu", "/freezer"]),
        ({"unified/cgroup.controllers": "hugetlb\n", "cpu/cgroup.procs": ""}, ["/cpu"]),
        ({"cgroup.controllers": "memory\n", "cpu/other": ""}, []),
        ({}, []),
    ],
    ids=["v2", "v1", "hybrid", "no cpu", "none"],
)
def test_control_groups_of_each_version_are_found(tmp_path: Path, files: dict[str, str], groups: list[str]) -> None:
    for name, text in files.items():
        write_files((tmp_path / name).parent, {Path(name).name: text})
    assert find_groups(str(tmp_path)) == tuple(f"{tmp_path}{group}" for group in groups)


@pytest.mark.parametrize(
    "files, name, limited, free",
    [(V2, "cpu.max", "5000 10000\n", "max 100000\n"), (V1, "cpu.cfs_quota_us", "5000\n", "-1\n")],
    ids=["v2", "v1"],
)
def test_a_limit_is_written(tmp_path: Path, files: dict[str, str], name: str, limited: str, free: str) -> None:
    group = write_files(tmp_path / "group", files)
    run_node("limit", group, tmp_path, "5000 10000")
    assert (group / name).read_text() == limited
    run_node("limit", group, tmp_path)
    assert (group / name).read_text() == free


@pytest.mark.parametrize(
    "files, name, frozen, free",
    [(V2, "cgroup.freeze", "1\n", "0\n"), (V1, "freezer.state", "FROZEN\n", "THAWED\n")],
    ids=["v2", "v1"],
)
def test_pausing_writes_the_freezer_of_each_version(
    tmp_path: Path, files: dict[str, str], name: str, frozen: str, free: str
) -> None:
    group = write_files(tmp_path / "group", files)
    run_node("pause", group, tmp_path)
    assert (group / name).read_text() == frozen
    run_node("resume", group, tmp_path)
    assert (group / name).read_text() == free


def find_v2() -> str:
    """Return where cgroup v2 is mounted. It can freeze processes even if v1 has the other controllers."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return next((words[1] for words in mounts if words[2] == "cgroup2" and os.access(words[1], os.W_OK)), "")


@pytest.fixture
def group() -> Iterator[Path]:
    path = Path(find_v2(), f"cpuft-t{os.getpid() % 1_000_000}")
    path.mkdir()
    yield path
    if path.exists():
        path.rmdir()


@needs_root
@pytest.mark.skipif(not find_v2(), reason="no cgroup v2 hierarchy is mounted here")
def test_a_real_v2_group_is_frozen_thawed_and_emptied(tmp_path: Path, group: Path) -> None:
    with subprocess.Popen(["sleep", "20"]) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        run_node("pause", group, tmp_path)
        wait_until(lambda: "frozen 1" in (group / "cgroup.events").read_text().splitlines(), pause=0.01)
        run_node("resume", group, tmp_path)
        wait_until(lambda: "frozen 0" in (group / "cgroup.events").read_text().splitlines(), pause=0.01)
        run_node("pause", group, tmp_path)
        run_node("down", group, tmp_path)
        assert process.wait(5) == -9
    assert not group.exists()
