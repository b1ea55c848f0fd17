"""Leases of rented hosts are renewed as long as a launch lasts, whatever it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft import execute
from cpuft.config.launch import LaunchConfig, ScriptConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.cluster import Access
from cpuft.hosts.hostfile import Host
from cpuft.hosts.registry import NO_CLUSTER
from cpuft.hosts.transport import SshTransport
from cpuft.launch import lease_renewal
from cpuft.launch.lease_renewal import renew_leases
from cpuft.launch.plan import Job, plan_ranks
from cpuft.launch.run import LaunchRequest, PlannedLaunch, run_launch
from cpuft.plans import RunPlan
from tests.conftest import wait_until
from tests.launch.test_inputs import AWAY
from tests.launch.test_plan import make_cluster

WORDS = ("/usr/local/sbin/cpuft-lease", "renew")
SOURCE = "http://169.254.169.254/latest/meta-data/spot/instance-action"
LIMIT = 1_800_000_000


def test_the_plan_of_a_run_on_rented_hosts_shows_lease_renewal_and_interruption_notice() -> None:
    entry = replace(NO_CLUSTER, notice=SOURCE, renewal=" ".join(WORDS))
    rented = replace(make_cluster((1, 1)), access=Access(entry=entry))
    plan = plan_ranks(rented, LaunchConfig(np=2), "/runs/one", ("python", "train.py"), "gloo", {})
    every = "until the launch ends, this command renews the lease of each host every 300 s"
    assert f"{every}: /usr/local/sbin/cpuft-lease renew" in plan.notes
    assert (
        f"  CPUFT_NOTICE={SOURCE}  interruption notice, which the first rank of each host looks for every 5 s"
        in plan.notes
    )
    own = plan_ranks(rented, LaunchConfig(np=2, interruption_notice="/run/end"), "/runs/one", ("true",), "gloo", {})
    assert (
        "  CPUFT_NOTICE=/run/end  interruption notice, which the first rank of each host looks for every 5 s"
        in own.notes
    )


def test_own_hosts_have_neither_lease_nor_notice() -> None:
    plan = plan_ranks(make_cluster((1, 1)), LaunchConfig(np=2), "/runs/one", ("true",), "gloo", {})
    assert [note for note in plan.notes if "CPUFT_NOTICE" in note or "lease of" in note] == []


Run = Callable[[SshTransport, Host, Sequence[str], str, float], Answer]


def be_renewed(transport: SshTransport, host: Host, words: Sequence[str], stdin: str, seconds: float) -> Answer:
    return Answer(0, f"{LIMIT - 60} {LIMIT}\n", "Shutdown scheduled\n")


def answer_strangely(transport: SshTransport, host: Host, words: Sequence[str], stdin: str, seconds: float) -> Answer:
    return Answer(0, "yes\n")


def fail(transport: SshTransport, host: Host, words: Sequence[str], stdin: str, seconds: float) -> Answer:
    return Answer(127, "", "no such file")


def be_off(transport: SshTransport, host: Host, words: Sequence[str], stdin: str, seconds: float) -> Answer:
    raise CpuftError("host a is off")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts whose lease was renewed, in their order, ten times a second."""
    asked = list[str]()

    def run(self: SshTransport, host: Host, words: Sequence[str], stdin: str = "", seconds: float = 0.0) -> Answer:
        assert (words, seconds) == (WORDS, 20.0)
        asked.append(host.name)
        return be_renewed(self, host, words, stdin, seconds)

    monkeypatch.setattr(SshTransport, "run", run)
    monkeypatch.setattr(lease_renewal, "RENEWAL_SECONDS", 0.1)
    return asked


def rent(*names: str) -> Access:
    hosts = {name: Host(name) for name in names}
    return Access(SshTransport("config", hosts=hosts), replace(NO_CLUSTER, renewal=" ".join(WORDS)))


def test_all_hosts_are_asked_again_and_again_and_the_limit_is_printed_once(asked: list[str]) -> None:
    """Hosts that became known or were lost meanwhile are taken into account."""
    said, access = list[str](), rent("a", "b")
    with renew_leases(access, said.append):
        wait_until(lambda: asked.count("a") > 2 and asked.count("b") > 2)
        access.transport.unreachable.add("a")
        access.transport.hosts["c"] = Host("c")
        wait_until(lambda: asked.count("c") > 2 and asked[-4:].count("a") == 0)
    time.sleep(0.3)
    before = len(asked)
    time.sleep(0.3)
    assert len(asked) == before
    limit = "until 2027-01-15 08:00 UTC at the latest"
    assert said == [f"cpuft: the lease of the hosts is renewed while the run lasts, {limit}"]


@pytest.mark.parametrize(("run", "why"), [(fail, "no such file"), (answer_strangely, "yes"), (be_off, "host a is off")])
def test_a_failed_renewal_is_reported_once_and_ends_nothing(
    run: Run, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SshTransport, "run", lambda self, host, words, seconds: run(self, host, words, "", seconds))
    monkeypatch.setattr(lease_renewal, "RENEWAL_SECONDS", 0.01)
    told = list[str]()
    with renew_leases(rent("a"), told.append):
        wait_until(lambda: bool(told))
        time.sleep(0.1)
    assert told == [f"cpuft: the lease of host a could not be renewed ({why}): check it with cpuft provision status"]


def test_an_error_of_the_program_does_not_end_the_renewals(monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    tries = list[int]()

    def try_hosts(function: Callable[[Host], Answer], hosts: Sequence[Host]) -> list[Answer]:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        return [function(host) for host in hosts]

    monkeypatch.setattr(lease_renewal, "try_hosts", try_hosts)
    told = list[str]()
    with renew_leases(rent("a"), told.append):
        wait_until(lambda: len(asked) > 1)
    assert told[0].startswith('cpuft: leases could not be renewed (RuntimeError("can\'t start new thread")): check')


def test_own_hosts_are_not_asked() -> None:
    before = threading.active_count()
    with renew_leases(replace(rent("a"), entry=NO_CLUSTER), print):
        assert threading.active_count() == before


@pytest.mark.parametrize("is_finished", [False, True], ids=["run", "fetch"])
def test_leases_are_renewed_until_the_launch_has_ended(
    is_finished: bool, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every phase: whatever is done in the attempts and between them, or if results only have to be fetched."""

    def last(*given: object) -> int:
        wait_until(lambda: len(asked) > 4)
        return 0

    long = "fetch_and_clean_up" if is_finished else "run_with_restarts"
    monkeypatch.setattr(f"cpuft.launch.run.{long}", last)
    cluster = replace(AWAY, access=rent("a", "b"))
    job = None if is_finished else Job(str(tmp_path / "run"), LaunchConfig(np=1), TrainConfig(), ("true",))
    planned = PlannedLaunch(str(tmp_path / "run"), cluster, RunPlan(), job)
    request = LaunchRequest(LaunchConfig(np=1), TrainConfig(), ScriptConfig(), ("true",), "", frozenset(), "lines")
    assert run_launch(request, planned, {"CPUFT_STATE": str(tmp_path)}, lambda line: None)[0] == 0
    time.sleep(0.3)
    before = len(asked)
    time.sleep(0.3)
    assert len(asked) == before


def test_a_rented_host_keeps_itself_for_unfetched_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, ...]] = []
    (tmp_path / "run/rows").mkdir(parents=True)

    def renew(command: Sequence[str], seconds: float, stdin: str = "") -> None:
        calls.append(tuple(command))
        if len(calls) == 3:
            (tmp_path / "run/rows").rmdir()

    monkeypatch.setattr(lease_renewal, "RENEWAL_SECONDS", 0.0)
    monkeypatch.setattr(lease_renewal, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(execute, "run_command", renew)
    lease_renewal.hold_lease(tmp_path, "")
    assert not calls
    lease_renewal.hold_lease(tmp_path, "cpuft-lease renew")
    assert calls == [("cpuft-lease", "renew")] * 3
    (tmp_path / "run/rows").mkdir()
    monkeypatch.setattr(lease_renewal, "_HELD_SECONDS", 0.0)
    lease_renewal.hold_lease(tmp_path, "cpuft-lease renew")
    assert len(calls) == 3
