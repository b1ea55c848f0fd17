"""Renting real instances: they boot, run commands over ssh, are reclaimed, and terminate themselves."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import IO, Any

import pytest

from cpuft.record import read_record
from tests.provision.aws.bottle.bottle import NOTHING_LEFT, WORDS, Bottle
from tests.provision.simulated import needs_root

pytestmark = needs_root
LAB = ("provision", "aws", "--name", "lab", *WORDS, "--wheels", "wheels")
LAUNCH = ("launch", "--cluster", "lab", "--no-check")
JOB = ("--task", "demo", "--max-train-samples", "64", "--precision", "fp32", "--batch-size", "4", "--dropout", "0")
QUIET = ("--backend", "gloo", "--no-save-model", "--no-fast-path")
SCRIPT = """
import os, socket, urllib.request
from urllib.error import HTTPError
try:
    urllib.request.urlopen("http://169.254.169.254/latest/meta-data/instance-id", timeout=10)
except HTTPError as error:
    print(error.code)
print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"], socket.gethostname())
"""
CHANGES = [
    "CreateSecurityGroup",
    "CreatePlacementGroup",
    "AuthorizeSecurityGroupIngress",
    "RevokeSecurityGroupEgress",
    "AuthorizeSecurityGroupEgress",
    "RunInstances",
]


def check(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait(bottle: Bottle, seconds: float, holds: Callable[[], Any]) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, [bottle.ask("console", one["id"]) for one in bottle.ask("instances")]
        time.sleep(0.2)


@pytest.fixture(autouse=True)
def _nothing_is_left(bottle: Bottle) -> Iterator[None]:
    """Empty the region after each test, whatever its result is."""
    yield
    bottle.ask("send_impostors", False)
    bottle.ask("send_broken", "")
    bottle.empty("lab")
    bottle.ask("calls")
    assert bottle.ask("left") == NOTHING_LEFT


@pytest.mark.proof
def test_a_cluster_is_rented_once_runs_a_script_and_is_removed(bottle: Bottle) -> None:
    check(bottle.cpuft(*LAB, "--nodes", "2"))
    assert bottle.ask("calls") == CHANGES
    check(bottle.cpuft(*LAB, "--nodes", "2"))
    assert bottle.ask("calls") == []
    (bottle.folder / "hello.py").write_text(SCRIPT)
    check(bottle.cpuft(*LAUNCH, "--np", "2", "--independent", "--run-dir", "hello", "--", "hello.py"))
    addresses = [one["private"] for one in bottle.live()]
    said = [(bottle.folder / f"hello/logs/rank-{rank}.out").read_text().split() for rank in (0, 1)]
    assert said == [
        ["401", str(rank), "2", addresses[0], f"ip-{address.replace('.', '-')}"]
        for rank, address in enumerate(addresses)
    ]
    check(bottle.cpuft("provision", "down", "lab"))
    assert bottle.ask("left") == NOTHING_LEFT
    assert [one["reason"] for one in bottle.ask("instances")] == ["Client.UserInitiatedShutdown"] * 2
    # What the user named for a run stays, because the run may be resumed.
    assert [path.name for path in (bottle.folder / "state").iterdir()] == [".named"]


def test_another_machine_at_the_addresses_gets_no_command(bottle: Bottle) -> None:
    bottle.ask("send_impostors", True)
    made = bottle.cpuft(*LAB, "--nodes", "1")
    assert made.returncode == 2
    assert re.search(
        r"its key .*\. The instances cost money: remove them with `cpuft provision down lab`$", made.stderr
    ), made.stderr
    (one,) = bottle.live()
    console = bottle.ask("console", one["id"])
    assert "[preauth]" in console
    assert "Accepted" not in console
    assert not (bottle.disk(one["id"]) / "opt").exists()


def test_an_instance_whose_lease_ended_before_it_booted_terminates_itself(bottle: Bottle) -> None:
    """Less than a whole minute of the lease is left. The laptop may see the end, which is then an error there."""
    bottle.rent(50 - 600, "--name", "lab", "--nodes", "1", "--lease", "10m")
    wait(bottle, 30, lambda: not bottle.live())
    assert bottle.ask("instances")[-1]["reason"] == "Client.InstanceInitiatedShutdown"


@pytest.mark.proof
def test_a_shutdown_that_user_data_did_not_schedule_is_scheduled_over_ssh(bottle: Bottle) -> None:
    bottle.ask("send_broken", "final")
    made = bottle.cpuft(*LAB, "--nodes", "1", "--lease", "2h")
    check(made)
    assert "schedule the shutdown at the end of the lease, because no shutdown is scheduled" in made.stderr
    (one,) = bottle.live()
    assert re.findall("shutdown in (.*) min", bottle.ask("console", one["id"])) == ["119"]
    assert (bottle.disk(one["id"]) / "etc/systemd/system/multi-user.target.wants/cpuft-lease.service").is_symlink()
    again = bottle.cpuft(*LAB, "--nodes", "1", "--lease", "2h")
    assert "schedule the shutdown" not in check(again) + again.stderr


def test_instances_that_would_never_terminate_themselves_are_terminated(bottle: Bottle) -> None:
    bottle.ask("send_broken", "shutdown")
    made = bottle.cpuft(*LAB, "--nodes", "2")
    assert made.returncode == 2
    assert re.search(
        r"no shutdown is scheduled, after .* with exit code 1 .*\. All instances of lab were terminated",
        made.stderr,
    )
    assert bottle.ask("left") == NOTHING_LEFT


@pytest.mark.proof
def test_all_instances_terminate_with_their_lease_when_the_laptop_is_off(bottle: Bottle) -> None:
    begun = time.time()
    check(bottle.rent(100 - 600, "--name", "lab", "--nodes", "3", "--lease", "10m"))
    assert len(bottle.live()) == 3
    wait(bottle, 40, lambda: all("in 1 min" in bottle.ask("console", one["id"]) for one in bottle.live()))
    # The lease ends 100 s after the laptop read its clock, which was at the beginning or later.
    time.sleep(max(0.0, begun + 50 - time.time()))
    assert len(bottle.live()) == 3
    wait(bottle, begun + 110 - time.time(), lambda: not bottle.live())
    reasons = [one["reason"] for one in bottle.ask("instances")[-3:]]
    assert reasons == ["Client.InstanceInitiatedShutdown"] * 3


@pytest.mark.proof
def test_a_training_on_rented_hosts_whose_lease_is_extended(bottle: Bottle) -> None:
    check(bottle.cpuft(*LAB, "--nodes", "2"))
    check(bottle.cpuft("provision", "extend", "lab", "--lease", "6h"))
    said = [re.findall("shutdown in (.*) min", bottle.ask("console", one["id"])) for one in bottle.live()]
    assert said == [["239", "359"]] * 2
    check(bottle.cpuft("launch", "--cluster", "lab", "--np", "2", "--epochs", "2", *JOB, *QUIET, "--run-dir", "run"))
    record = read_record(str(bottle.folder / "run"))
    assert record.footer
    names = [f"ip-{one['private'].replace('.', '-')}" for one in bottle.live()]
    assert [rank.host for rank in record.header.ranks] == names
    check(bottle.cpuft("provision", "down", "lab"))


def until(start: str, stream: IO[str]) -> list[str]:
    """Return the lines of a stream before the first one that starts with `start`, and read that one, too."""
    return list(takewhile(lambda line: not line.startswith(start), stream))


@pytest.mark.proof
def test_a_run_leaves_a_spot_instance_before_it_is_reclaimed_and_it_is_replaced(bottle: Bottle) -> None:
    """The instance is the head host, and --interruption-notice is not given."""
    rent = (*LAB, "--nodes", "3", "--market", "spot")
    check(bottle.cpuft(*rent))
    master, *others = bottle.live()
    words = (*LAUNCH, "--np", "3", *JOB, *QUIET, "--max-steps", "100", "--checkpoint-every", "0", "--run-dir", "taken")
    with bottle.start([sys.executable, "-m", "cpuft", *words]) as launch:
        disk = bottle.disk(master["id"])
        wait(bottle, 120, lambda: any('"step"' in path.read_text() for path in disk.glob("var/tmp/*/*/*/record.jsonl")))
        bottle.ask("interrupt", master["id"], 40.0)
        told = time.monotonic()
        assert launch.stderr
        said = until("cpuft: restart 1 of 3: ", launch.stderr)
        assert time.monotonic() - told < 30, said
        said += launch.stderr
        assert launch.wait(10) == 0, said
    record = read_record(str(bottle.folder / "taken"))
    (resumed,) = record.resumptions
    assert (resumed.restart_reason, resumed.repeated) == (
        f"host {master['private']} received an interruption notice",
        0,
    )
    names = [f"ip-{one['private'].replace('.', '-')}" for one in others]
    assert [rank.host for rank in resumed.ranks] == names
    assert [one.step for one in record.steps] == list(range(1, 101))
    assert record.evaluations
    wait(bottle, 60, lambda: len(bottle.live()) == 2)
    bottle.ask("calls")
    check(bottle.cpuft(*rent))
    assert bottle.ask("calls") == ["CreateTags", "RunInstances"]
    assert [one["id"] for one in bottle.live()][:2] == [one["id"] for one in others]
    assert len(bottle.live()) == 3
