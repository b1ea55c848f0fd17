"""For every check, a fault is planted in the facts of a host; the doctor finds it, and nothing else."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from cpuft.doctor.checks import CHECKS, find_all, find_kernel_builds, format_kernel_builds
from cpuft.doctor.finding import describe_errors, findings_to_json, format_findings
from cpuft.doctor.probe import UNFETCHED
from cpuft.hosts import transport
from cpuft.instance_types import read_instance_types
from cpuft.record import Link
from tests.doctor.planted import healthy, plant

GONE: dict[str, Any] = {"facts": None, "health": None}

FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("CPUFT-001", GONE | {"address": "", "failure": "Name or service not known"}),
    ("CPUFT-002", GONE | {"failure": "host node3 cannot be used over ssh (no answer in 10 s)"}),
    ("CPUFT-002", GONE | {"failure": "does not match", "kind": transport.UNREACHABLE}),
    ("CPUFT-002", GONE | {"failure": "no answer in 10 s", "kind": transport.TIMED_OUT}),
    ("CPUFT-003", GONE | {"failure": "Server not found", "kind": transport.KEY_UNKNOWN}),
    ("CPUFT-003", GONE | {"failure": "got AAAA, expected BBBB", "kind": transport.KEY_CHANGED}),
    ("CPUFT-004", GONE | {"failure": "no key of ours fits", "kind": transport.LOGIN_REFUSED}),
    ("CPUFT-004", GONE | {"failure": "its login shell prints 'hello'", "kind": transport.NO_COMMANDS}),
    ("CPUFT-005", {"ssh": {"10.0.0.1": "Permission denied (publickey)."}}),
    ("CPUFT-006", {"own_address": "127.0.1.1"}),
    ("CPUFT-007", {"connected": ["10.0.0.1", "10.0.0.2"]}),
    ("CPUFT-008", {"address": "8.8.4.4", "listens": False}),
    ("CPUFT-009", {"routes": {"10.0.0.1": "172.17.0.1"}}),
    ("CPUFT-009", {"routes": {"10.0.0.1": ""}, "mtus": {}}),
    ("CPUFT-010", {"mtus": {"eth0": 9000, "docker0": 1500}}),
    ("CPUFT-012", {"skew": -90.0}),
    ("CPUFT-013", {"executable": "/usr/bin/python3"}),
    ("CPUFT-013", {"python": "3.9.2"}),
    ("CPUFT-013", {"python": "3.12.1"}),
    ("CPUFT-014", {"packages": {"torch": "2.12.0", "cpuft": "0.1.0"}}),
    ("CPUFT-014", {"packages": {"cpuft": "0.1.0"}}),
    ("CPUFT-015", {"mpi": "Open MPI 4.1"}),
    ("CPUFT-016", {"cpu_model": "EPYC"}),
    ("CPUFT-016", {"allowed_cpus": (0, 1, 2, 3)}),
    ("CPUFT-016", {"cpu_flags": ("avx2",)}),
    ("CPUFT-020", {"amx_usable": False}),
    ("CPUFT-021", {"memory_available": 1 << 30}),
    ("CPUFT-022", {"shm_free": 1 << 20}),
    ("CPUFT-022", {"shm_free": -1}),
    ("CPUFT-023", {"disk_free": 100 << 20}),
    ("CPUFT-024", {"ranks": 9}),
    ("CPUFT-025", {"cpu_quota": 0.5}),
    ("CPUFT-026", {"load": 7.5}),
    ("CPUFT-027", {"steal": 0.2}),
    ("CPUFT-028", {"governors": ["powersave"]}),
    ("CPUFT-029", {"huge_pages": "always madvise [never]"}),
    (
        "CPUFT-031",
        {"interfaces": {"ib0": "10.0.0.3"}, "memlock": 65536, "mtus": {"ib0": 1500}},
    ),
    ("CPUFT-034", {"open_files": 64}),
    ("CPUFT-038", {"ranks": 1, "lscpu": "".join(f"{n},{n},{n // 4},{n // 4}\n" for n in range(8))}),
    ("CPUFT-032", {"leftovers": ["pid 12: python -m cpuft.rank", "/var/tmp/cpuft-0/0123456789ab"]}),
    ("CPUFT-037", {"kernels": ""}),
    ("CPUFT-039", {"machine": "aarch64"}),
    ("CPUFT-040", {"page_size": 65536}),
]


@pytest.mark.parametrize("code, fault", FAULTS)
def test_a_fault_on_one_host_is_found_by_its_code(code: str, fault: dict[str, Any]) -> None:
    findings = find_all(plant(healthy(), 3, **fault))
    assert {finding.code for finding in findings} == {code}
    assert all("node3" in finding.host for finding in findings)
    assert all(finding.evidence and finding.cause and finding.next_step for finding in findings)


def test_a_host_name_behind_a_bastion_is_not_a_public_address() -> None:
    findings = find_all(plant(healthy(), 1, address="node1.internal"))
    assert "CPUFT-008" not in {finding.code for finding in findings}


def test_only_valid_process_ids_and_paths_become_part_of_the_fix() -> None:
    said = ["pid 12: cpuft.rank", "pid 1; reboot: cpuft.rank", "/var/tmp/cpuft-0/0123456789ab; cd; rm -r *"]
    said += ["/var/tmp/cpuft-0/0123456789ab", "/var/tmp/cpuft-0/../../home", "/var/tmp/cpuft-0", "/home"]
    (finding,) = find_all(plant(healthy(), 3, leftovers=said))
    kill = "for pid in 12; do ! grep -qs cpuft /proc/$pid/cmdline || kill -KILL $pid; done"
    assert finding.fix == ("sh", "-c", f"{kill}; rm -rf --one-file-system /var/tmp/cpuft-0/0123456789ab")


@pytest.mark.parametrize("other", [[], ["/var/tmp/cpuft-0/ba9876543210"]])
def test_checkpoints_and_results_are_not_part_of_the_fix(other: list[str]) -> None:
    (finding,) = find_all(plant(healthy(), 3, leftovers=[f"/var/tmp/cpuft-0/0123456789ab{UNFETCHED}", *other]))
    assert finding.fix == (("sh", "-c", f"rm -rf --one-file-system {other[0]}") if other else ())
    assert "cpuft launch --resume, or remove their folders by hand" in finding.next_step


def test_two_lines_for_the_same_host_are_found() -> None:
    state = healthy()
    facts = state.hosts[0].facts
    twin = replace(state, hosts=(*state.hosts[:3], replace(state.hosts[3], facts=facts)))
    assert [(f.code, f.host) for f in find_all(twin)] == [("CPUFT-011", "node4 (node1)")]


def test_a_cluster_without_bf16_is_found_once() -> None:
    state = healthy(2)
    for flags, missing in ((("avx2",), "neither AMX nor AVX512_BF16"), (("asimd",), "no bf16 instructions of Arm")):
        for index in (1, 2):
            state = plant(state, index, cpu_flags=flags)
        (finding,) = find_all(state)
        assert (finding.code, finding.evidence) == ("CPUFT-019", f"The CPU, Xeon, has {missing}.")
    known = {name.partition(".")[0] for name in read_instance_types()}
    assert set(re.findall(r"\b[a-z]\d[gi]\b", finding.next_step)) == {"m7i", "c7i", "m8g", "c8g"} <= known


def test_a_slow_link_is_found_at_both_ends() -> None:
    pairs = [(f"node{a}", f"node{b}") for a in range(1, 5) for b in range(1, 5) if a != b]
    links = tuple(Link(a, b, 40.0, 4e8 if {a, b} == {"node2", "node3"} else 1e9) for a, b in pairs)
    findings = find_all(replace(healthy(), links=links))
    assert [(f.code, f.host) for f in findings] == [("CPUFT-033", "node2"), ("CPUFT-033", "node3")]
    assert findings[0].evidence == "The link to node3 carries 0.40 Gbit/s; the median of all links is 1.00 Gbit/s."


def test_every_check_has_a_planted_fault() -> None:
    planted = {code for code, _ in FAULTS} | {"CPUFT-011", "CPUFT-019", "CPUFT-033"}
    assert planted == {check.code for check in CHECKS}
    codes = [check.code for check in CHECKS]
    assert codes == sorted(set(codes))


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_nothing_is_found_on_healthy_hosts(hosts: int) -> None:
    state = healthy(4)
    state = replace(state, hosts=state.hosts[:hosts])
    findings = find_all(state)
    assert findings == []
    assert "no problems found" in format_findings(findings, hosts, len(CHECKS))


def test_memory_is_counted_for_the_ranks_planned() -> None:
    state = plant(healthy(), 2, memory_available=6 << 30)
    assert find_all(plant(state, 2, ranks=2)) == []
    assert [f.code for f in find_all(plant(state, 2, ranks=4))] == ["CPUFT-021"]


@pytest.mark.parametrize("ranks, need", [(2, 332), (100, 920)])
def test_open_files_are_counted_for_the_ranks_of_all_hosts(ranks: int, need: int) -> None:
    for files, told in ((need, []), (max(0, need - 1), ["CPUFT-034"])):
        found = find_all(plant(plant(healthy(2), 1, ranks=1), 2, open_files=files, ranks=ranks - 1))
        assert [f.code for f in found if f.code == "CPUFT-034"] == told
    alone = plant(healthy(2), 1, open_files=0, ranks=1)
    assert find_all(replace(alone, hosts=alone.hosts[:1])) == []


def test_a_rank_alone_on_its_host_shares_no_memory() -> None:
    state = plant(healthy(), 2, shm_free=0)
    assert find_all(plant(state, 2, ranks=1)) == []
    assert [f.code for f in find_all(plant(state, 2, ranks=2))] == ["CPUFT-022"]


def test_a_host_that_is_off_causes_no_findings_on_other_hosts() -> None:
    state = plant(healthy(), 3, **GONE, failure="no answer in 10 s")
    state = plant(state, 1, ssh={"node3": "Connection timed out"}, connected=["10.0.0.2", "10.0.0.4"])
    assert [(f.code, f.host) for f in find_all(state)] == [("CPUFT-002", "node3")]


def test_equal_findings_share_an_entry_and_errors_come_first() -> None:
    state = plant(healthy(), 2, load=9.0)
    state = plant(plant(state, 3, load=9.0), 4, disk_free=0)
    text = format_findings(find_all(state), 4, len(CHECKS))
    assert text.splitlines()[0].startswith("CPUFT-023 error on node4: 0 MB are free")
    assert "CPUFT-026 warning on node2, node3: 9.0 of 8 cores are busy" in text
    assert text.endswith("4 hosts, 35 checks: 1 error, 2 warnings\n")


def test_each_build_of_the_kernels_is_named_with_its_hosts() -> None:
    state = plant(healthy(), 2, kernel_build="compiled on this host by /usr/bin/g++, for AVX2")
    state = plant(state, 3, kernel_build="")
    assert format_kernel_builds(find_kernel_builds(state)) == (
        "kernels: from the wheel, for AMX (node1, node4)\n"
        "kernels: compiled on this host by /usr/bin/g++, for AVX2 (node2)\n"
    )


def test_only_errors_stop_a_launch() -> None:
    findings = find_all(plant(healthy(), 2, disk_free=0, load=9.0))
    assert describe_errors(findings).startswith("CPUFT-023 on node2: 0 MB are free in /var/tmp")
    assert "CPUFT-026" not in describe_errors(findings)


def test_json_has_every_field() -> None:
    findings = find_all(plant(healthy(), 2, huge_pages="[never]"))
    (told,) = json.loads(json.dumps(findings_to_json(findings, ["node1"])))["findings"]
    assert sorted(told) == ["cause", "code", "evidence", "fix", "host", "next_step", "severe"]
