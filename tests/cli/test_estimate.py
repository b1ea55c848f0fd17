"""`cpuft estimate`, from a record and from a probe."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cpuft.doctor.finding import findings_to_json
from cpuft.hardware import list_deciding
from cpuft.record import GradientSizes, Link, Record, Writer, read_record
from tests.conftest import run_cpuft
from tests.records import make_record


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    record = make_record(
        gradient_sizes=GradientSizes(10_993_538, 384, 1_000_000, {"1": 700.0, "64": 9000.0}), examples=3668
    )
    write(record, tmp_path / "run")
    return tmp_path / "run"


def write(record: Record, folder: Path) -> None:
    with Writer(str(folder)) as writer:
        writer.write(record.header)
        for number in range(20):
            writer.write(replace(record.steps[0], step=number + 1))


def test_a_table_of_hosts_with_a_verdict(run_dir: Path) -> None:
    done = run_cpuft("estimate", str(run_dir), "--instance", "c7i.8xlarge", "--hosts", "1,4,64")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "mrpc with minilm on hosts of 16 cores"
    assert [line.split()[0] for line in lines[4:7]] == ["1", "4", "64"]
    assert "* worth it: up to " in done.stdout
    assert "* c7i.8xlarge: 16 cores, 12.5 Gbit/s, about 1.428 dollars an hour (2025)." in lines


@pytest.mark.parametrize(
    "flags, rented, told",
    [
        (("asimd", "bf16"), "c8g.4xlarge", ""),
        (("asimd", "bf16"), "m8g.4xlarge", ""),
        (("asimd", "bf16"), "r8g.4xlarge", ""),
        (("asimd", "bf16"), "Standard_D16pls_v6", ""),
        (("asimd", "bf16"), "c7i.8xlarge", "it lacks an Arm CPU, unlike the recorded CPU"),
        (("avx2", "amx_bf16"), "c8g.4xlarge", "it has an Arm CPU, unlike the recorded CPU"),
        (("avx2", "amx_bf16"), "c6i.16xlarge", "it lacks AMX, unlike the recorded CPU"),
    ],
)
def test_another_cpu_than_the_recorded_one_is_told(
    run_dir: Path, tmp_path: Path, flags: tuple[str, ...], rented: str, told: str
) -> None:
    record = read_record(str(run_dir))
    write(replace(record, header=replace(record.header, cpu_flags=list_deciding(flags))), tmp_path / "other")
    done = run_cpuft("estimate", str(tmp_path / "other"), "--instance", rented, "--hosts", "1,2")
    assert ("unlike the recorded CPU" in done.stdout) == bool(told), done.stderr
    assert told in done.stdout


def test_numbers_for_programs(run_dir: Path) -> None:
    done = run_cpuft("estimate", str(run_dir), "--bandwidth", "100mbit", "--hosts", "8,2", "--price", "2", "--json")
    told = json.loads(done.stdout)
    assert [one["hosts"] for one in told["predictions"]] == [2, 8]
    assert all(0 < one["efficiency"] < 1 and one["price"] > 0 for one in told["predictions"])


def test_ranks_of_a_host_share_its_cores(run_dir: Path) -> None:
    network = ("--bandwidth", "100mbit", "--hosts", "1,4", "--json")
    one, two = (
        json.loads(run_cpuft("estimate", str(run_dir), *network, "--ppn", ppn).stdout)["predictions"]
        for ppn in ("1", "2")
    )
    assert two[0]["step_seconds"] == 2 * one[0]["step_seconds"]
    assert two[0]["samples_per_second"] == one[0]["samples_per_second"]
    table = run_cpuft("estimate", str(run_dir), *network[:-1], "--ppn", "2").stdout
    assert "* what the 2 ranks of a host send each other is not counted" in table
    assert "each host has" not in run_cpuft("estimate", str(run_dir), *network[:-1]).stdout


def test_an_estimate_from_a_simulated_host_says_so(run_dir: Path, tmp_path: Path) -> None:
    record = read_record(str(run_dir))
    write(replace(record, header=replace(record.header, simulated=True)), tmp_path / "simulated")
    note = "* the run was on a simulated host: simulated hosts that share their cores are slower than this."
    for folder, expected in ((tmp_path / "simulated", True), (run_dir, False)):
        done = run_cpuft("estimate", str(folder), "--bandwidth", "1gbit", "--hosts", "1,2")
        assert (note in done.stdout) == expected, done.stderr


def test_the_doctor_measures_links_for_an_estimate(run_dir: Path, tmp_path: Path) -> None:
    links = [
        Link("a", "b", 40.0, 9e8),
        Link("b", "a", 60.0, 1.1e9),
        Link("c", "a", 50.0, 0.0),
        Link("a", "c", 0.0, 0.0, "timed out"),
    ]
    (tmp_path / "links.json").write_text(
        json.dumps(findings_to_json([], ["a", "b"]) | {"links": [asdict(one) for one in links]})
    )
    done = run_cpuft("estimate", str(run_dir), "--link", "links.json")
    assert done.returncode == 0, done.stderr
    assert "1 Gbit/s, 50 us" in done.stdout
    (tmp_path / "links.json").write_text(json.dumps({"links": [asdict(one) for one in links[2:]]}))
    done = run_cpuft("estimate", str(run_dir), "--link", "links.json")
    assert done.returncode == 2
    assert "--link links.json: the doctor could measure no link" in done.stderr


def test_a_wrong_link_file_is_answered_before_the_short_training(tmp_path: Path) -> None:
    start = time.monotonic()
    done = run_cpuft("estimate", "--link", "none")
    assert (done.returncode, time.monotonic() - start < 10) == (2, True)
    assert done.stderr.startswith("cpuft: error: there is no file none, which --link names")
    assert "step" not in done.stderr


def test_a_link_file_that_is_none(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "comm.jsonl").write_text("x")
    for name, said in (
        ("comm.jsonl", "is no record of cpuft bench comm of this version"),
        ("none", "there is no file none, which --link names"),
    ):
        done = run_cpuft("estimate", str(run_dir), "--link", name)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert said in done.stderr


@pytest.mark.proof
@pytest.mark.real
def test_a_probe_leaves_nothing(tmp_path: Path) -> None:
    done = run_cpuft("estimate", "--bandwidth", "1gbit", "--hosts", "1,2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo with minilm on hosts of ")
    assert list(tmp_path.iterdir()) == []
