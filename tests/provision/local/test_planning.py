import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config import parse_bits
from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.hosts.registry import format_entry, read_entry
from cpuft.provision.local.doing import Local
from cpuft.provision.local.facts import MachineFacts, NodeFacts
from cpuft.provision.local.planning import (
    Layout,
    check_config,
    make_entry,
    plan_cpus,
    plan_down,
    plan_fault,
    plan_local,
    plan_texts,
)
from cpuft.provision.options import LocalConfig
from cpuft.provision.ownership import read_files

CONFIG = LocalConfig(nodes=2, cores_per_node=0.5, net="1gbit")
LAYOUT = Layout("/state/local", "/work/hostfiles/local", "/usr/bin/python3", {})
KEYS = {
    f"/state/local/{path}": text
    for name in ("id_ed25519", "nodes/1/host_key", "nodes/2/host_key")
    for path, text in ((name, "private"), (f"{name}.pub", f"ssh-ed25519 {name}"))
}
EMPTY = MachineFacts(("/sys/fs/cgroup",), "10.77.0.0/24", False, {}, {})


def whole(config: LocalConfig = CONFIG) -> MachineFacts:
    """Facts of a cluster to which nothing is missing."""
    keyed = replace(EMPTY, files=KEYS)
    files = KEYS | plan_texts(config, keyed, LAYOUT)
    first = [step for stage in plan_local(config, keyed, LAYOUT).stages for step in stage]
    booted = [s.value for step in first for s in step.settings if s.name == "NODE_BOOTED"]
    up = NodeFacts(True, True, quota="5000 10000", rate_bits=10**9)
    nodes = {index: replace(up, booted=mark) for index, mark in enumerate(booted, start=1)}
    return MachineFacts(EMPTY.groups, EMPTY.network, True, nodes, files)


def actions(facts: MachineFacts, config: LocalConfig = CONFIG) -> list[str]:
    plan = plan_local(config, facts, LAYOUT)
    return [step.command[-1] for stage in plan.stages for step in stage if step.settings]


def test_keys_come_before_the_files_that_are_made_from_them() -> None:
    remembered, keys, *stages = plan_local(CONFIG, EMPTY, LAYOUT).stages
    assert [step.command[-2] for step in remembered] == ["/state/local/cluster.json"]
    assert [step.command[-2] for step in keys] == [path for path in KEYS if not path.endswith(".pub")]
    assert not any(step.settings for stage in stages for step in stage)


def test_a_whole_cluster_is_missing_nothing() -> None:
    assert plan_local(CONFIG, whole(), LAYOUT).stages == ()


def test_every_file_that_is_planned_is_found_again(tmp_path: Path) -> None:
    base, hostfile = tmp_path / "local", tmp_path / "hostfiles/local"
    keys = {path.replace("/state", str(tmp_path)): text for path, text in KEYS.items()}
    layout = Layout(str(base), str(hostfile), "python3", {}, there="/opt/cpuft/clusters/local")
    texts = plan_texts(CONFIG, replace(EMPTY, files=keys), layout)
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
        ({"quota": ""}, "limit"),
        ({"quota": "50000 100000"}, "limit"),
        ({"rate_bits": 10**8}, "limit"),
    ],
)
def test_each_fault_of_a_host_has_its_repair(change: dict[str, object], action: str) -> None:
    facts = whole()
    nodes = facts.nodes | {2: replace(facts.nodes[2], **change)}  # type: ignore[arg-type]
    assert actions(replace(facts, nodes=nodes)) == [action]


def test_fewer_nodes_take_the_surplus_away() -> None:
    assert "down" in actions(whole(), replace(CONFIG, nodes=1))


def test_one_file_changed_is_written_again() -> None:
    facts = whole()
    files = facts.files | {LAYOUT.hostfile: "# made by cpuft provision\n10.0.0.1\n"}
    steps = [step for stage in plan_local(CONFIG, replace(facts, files=files), LAYOUT).stages for step in stage]
    assert [step.stdin for step in steps] == [facts.files[LAYOUT.hostfile]]


@pytest.mark.parametrize(
    "cores, cpus, expected",
    (
        (0.0, (0, 1), ["0", "1"]),
        (0.5, (0, 1), ["0", "0"]),
        (1.0, (0, 1), ["0", "1"]),
        (1.5, (0, 1, 2, 3), ["0,1", "1,2"]),
        (8.0, (0, 1), ["0,1", "0,1"]),
        (0.0, (5,), ["5", "5"]),
    ),
    ids=("an even share", "half a core", "a core", "one and a half", "more than there are", "one for both"),
)
def test_hosts_share_out_the_machines_cores(cores: float, cpus: tuple[int, ...], expected: list[str]) -> None:
    facts = replace(EMPTY, cpus=cpus)
    found = [",".join(map(str, plan_cpus(replace(CONFIG, cores_per_node=cores), facts, index))) for index in (1, 2)]
    assert found == expected


def test_a_hostfile_of_the_users_is_kept() -> None:
    with pytest.raises(CpuftError, match=r"is not cpuft's: move it away, or choose another --name$"):
        plan_local(CONFIG, replace(whole(), files=KEYS | {LAYOUT.hostfile: "node1\n"}), LAYOUT)


def test_no_control_groups_is_an_error_only_where_a_limit_is_asked_for() -> None:
    facts = replace(EMPTY, groups=())
    assert plan_local(replace(CONFIG, cores_per_node=0.0), facts, LAYOUT).stages
    with pytest.raises(CpuftError, match=r"leave out --cores-per-node$"):
        plan_local(CONFIG, facts, LAYOUT)


@pytest.mark.parametrize("node", ["2", "local-2", "10.77.0.2"])
def test_a_fault_finds_its_host_by_number_name_or_address(node: str) -> None:
    (step,) = plan_fault(CONFIG, whole(), LAYOUT, "kill", node).stages[0]
    assert step.settings[0].value == "local-2"
    assert step.command[-1] == "crash"


def test_a_fault_needs_no_files_of_the_cluster() -> None:
    (step,) = plan_fault(CONFIG, EMPTY, LAYOUT, "resume", "2").stages[0]
    assert step.command[-1] == "resume"


def test_an_unknown_host_is_answered_with_the_known_ones() -> None:
    with pytest.raises(CpuftError, match=r"no host '9': choose one of local-1, local-2$"):
        plan_fault(CONFIG, whole(), LAYOUT, "kill", "9")


def test_down_of_nothing_is_nothing() -> None:
    assert plan_down(CONFIG, replace(EMPTY, files={}), LAYOUT).stages == ()


def test_down_takes_files_last() -> None:
    stages = plan_down(CONFIG, whole(), LAYOUT).stages
    assert [step.command[-1] for step in stages[0]] == ["down", "down"]
    assert stages[-1][0].command[-2:] == (LAYOUT.directory, LAYOUT.hostfile)


def removals(files: dict[str, str], bridge: bool = False) -> list[tuple[str, ...]]:
    """What the last step of `down` takes away, for these files by path."""
    stages = plan_down(CONFIG, replace(EMPTY, bridge=bridge, files=files), LAYOUT).stages
    return [step.command[4:] for stage in stages for step in stage if step.command[3] == "remove"]


@pytest.mark.parametrize("bridge", [False, True])
@pytest.mark.parametrize("name", ["notes", "id_ed25519.pub", "nodes/1/notes.pub", "there/cluster.json"])
def test_down_leaves_a_directory_that_carries_no_mark(name: str, bridge: bool) -> None:
    assert removals({f"{LAYOUT.directory}/{name}": "ssh-ed25519 AAAA me@home"}, bridge) == []


def test_down_takes_what_a_killed_run_left() -> None:
    keys = {f"{LAYOUT.directory}/nodes/1/host_key.pub": "ssh-ed25519 AAAA cpuft\n"}
    assert removals(keys) == [(LAYOUT.directory,)]


def test_down_leaves_a_hostfile_that_carries_no_mark() -> None:
    files = {path: text for path, text in whole().files.items() if path != LAYOUT.hostfile}
    assert removals(files | {LAYOUT.hostfile: "node1\n# made by cpuft provision\n"}) == [(LAYOUT.directory,)]


@pytest.mark.parametrize("rate, bits", [("", 0), ("1gbit", 10**9), ("100mbit", 10**8), ("2.5gbit", 25 * 10**8)])
def test_rates(rate: str, bits: int) -> None:
    assert parse_bits(rate) == bits


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
        {"nodes": 100},
        {"net": "fast"},
        {"net": "0gbit"},
        {"net": "9" * 400 + "gbit"},
        {"shm": "1 gb"},
    ],
)
def test_bad_wishes_are_refused_in_a_line(bad: dict[str, object]) -> None:
    with pytest.raises(CpuftError) as caught:
        check_config(replace(CONFIG, **bad))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_longest_names_of_links() -> None:
    for name, nodes in (("abcdefg", 9), ("abcdef", 99)):
        check_config(replace(CONFIG, name=name, nodes=nodes))


def test_the_entry_is_read_back(tmp_path: Path) -> None:
    entry = make_entry(CONFIG, replace(LAYOUT, directory=f"{tmp_path}/local"))
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
def test_hosts_use_the_cache_of_whoever_makes_them(environ: dict[str, str], cache: str | None, tmp_path: Path) -> None:
    made = Local(LocalConfig(), environ | {"CPUFT_STATE": str(tmp_path)})
    entry = make_entry(made.config, made.layout)
    assert entry.settings.get("XDG_CACHE_HOME") == cache
