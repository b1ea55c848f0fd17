"""Leases of rented hosts go on while a run does, as far as the hosts let them; and the plan says so."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.cluster import Access
from cpuft.hosts.transport import Transport
from cpuft.launch.plan import plan_launch
from cpuft.launch.supervise import Renewal, Run, describe_renewal, run_plan
from cpuft.plan import RunPlan, Step
from tests.launch.test_planning import make_cluster

WORDS = ("/usr/local/sbin/cpuft-lease", "renew")
SOURCE = "http://169.254.169.254/latest/meta-data/spot/instance-action"
LIMIT = 1_800_000_000


def test_the_plan_of_a_run_on_rented_hosts_says_who_renews_and_where_notice_comes_from() -> None:
    rented = replace(make_cluster((1, 1)), access=Access(python="python", notice=SOURCE, renewal=" ".join(WORDS)))
    plan = plan_launch(rented, LaunchConfig(np=2), "/runs/one", ("python", "train.py"), "gloo", {})
    assert plan.renewal == plan.on_master().renewal == WORDS
    assert "while ranks run, for the lease to go on, every 300 s on each host: /usr/local/sbin/cpuft-lease renew" in (
        plan.notes
    )
    assert f"  CPUFT_NOTICE={SOURCE}  each host's first rank looks there every 5 s" in plan.notes
    own = plan_launch(rented, LaunchConfig(np=2, notice="/run/end"), "/runs/one", ("true",), "gloo", {})
    assert "  CPUFT_NOTICE=/run/end  each host's first rank looks there every 5 s" in own.notes


def test_hosts_of_ones_own_have_neither() -> None:
    plan = plan_launch(make_cluster((1, 1)), LaunchConfig(np=2), "/runs/one", ("true",), "gloo", {})
    assert plan.renewal == ()
    assert [note for note in plan.notes if "CPUFT_NOTICE" in note or "lease" in note] == []
    assert describe_renewal(()) == ()


def test_each_host_is_asked_every_five_minutes_and_the_limit_is_said_once() -> None:
    clock, asked, said = [0.0], list[str](), list[str]()
    done = threading.Semaphore(0)

    def run(host: str, words: tuple[str, ...], seconds: float) -> Answer:
        assert (words, seconds) == (WORDS, 20.0)
        asked.append(host)
        done.release()
        return Answer(0, f"{LIMIT - 60} {LIMIT}\n", "Shutdown scheduled\n")

    renewal = Renewal(WORDS, ("a", "b"), run, said.append, lambda: clock[0])
    for clock[0] in (0.0, 1.0, 299.0, 301.0):
        renewal.check()
    for _ in range(4):
        assert done.acquire(timeout=60)
    renewal.renew()
    assert sorted(asked) == ["a"] * 3 + ["b"] * 3
    assert said == ["the lease of the hosts goes on while the run does, to 2027-01-15 08:00 UTC at most"]


def answer_strangely(host: str, words: tuple[str, ...], seconds: float) -> Answer:
    return Answer(0, "yes\n")


def fail(host: str, words: tuple[str, ...], seconds: float) -> Answer:
    return Answer(127, "", "no such file")


def be_off(host: str, words: tuple[str, ...], seconds: float) -> Answer:
    raise CpuftError("host a is off")


@pytest.mark.parametrize(("run", "why"), [(fail, "no such file"), (answer_strangely, "yes"), (be_off, "host a is off")])
def test_a_host_that_does_not_renew_is_named_and_ends_nothing(run: Run, why: str) -> None:
    said = f"the lease of a cannot be renewed ({why}): look at it with cpuft provision status"
    told: list[str] = []
    renewal = Renewal(WORDS, ("a",), run, told.append)
    renewal.renew()
    renewal.renew()
    assert told == [said]


def test_whoever_supervises_ranks_renews(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "one"
    make = Step("make", ("sh", "-c", f"mkdir -p {run_dir}/logs"))
    # Ranks last until their lease has been renewed.
    ranks = Step("train", ("sh", "-c", f"until [ -e {tmp_path}/renewed ]; do sleep 0.1; done; sleep 1"))
    renewal = ("sh", "-c", f"touch {tmp_path}/renewed; echo 1 {LIMIT}")
    plan = RunPlan(((make,),), ranks=((ranks,),), renewal=renewal)
    assert run_plan(plan, str(run_dir), ("localhost",), os.environ, 120.0, Transport()) == 0
    assert "cpuft: the lease of the hosts goes on while the run does, to 2027-01-15 08:00 UTC" in capfd.readouterr().err
