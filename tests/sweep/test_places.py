"""Where the runs of a sweep train: groups of hosts, or parts of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError
from cpuft.hosts.hostfile import Host
from cpuft.sweep.places import Place, divide_machine, find_lost_hosts, plan_places


def test_a_host_that_answers_is_not_lost() -> None:
    assert find_lost_hosts(Place("this machine"), ()) == {}
    assert find_lost_hosts(Place("localhost", hosts=(Host("localhost"),)), ("--no-check",)) == {}


def write_hosts(folder: Path, *names: str) -> LaunchConfig:
    path = folder / "hosts"
    path.write_text("".join(f"{name}\n" for name in names))
    return LaunchConfig(hostfile=str(path))


def test_hosts_are_grouped_and_this_machine_is_divided(tmp_path: Path) -> None:
    config = write_hosts(tmp_path, "a1", "a2", "a3", "a4", "a5")
    assert [place.name for place in plan_places(config, 2, 0)] == ["a1,a2", "a3,a4"]
    first = plan_places(config, 1, 3)
    assert [place.options for place in first] == [(f"--only-hosts=a{number}",) for number in (1, 2, 3)]
    assert first[0].hosts == (Host("a1"),)
    cores = [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert divide_machine(1, cores) == [Place("this machine")]
    # The threads of a core stay together.
    halves = [place.prefix[-1] for place in divide_machine(2, cores)]
    assert halves == ["0,1,4,5", "2,3,6,7"]
    threads = [place.prefix[-1] for place in divide_machine(2, [(0, 1)])]
    assert threads == ["0", "1"]
    assert [place.prefix[-1] for place in divide_machine(3, cores)] == ["0,4", "1,5", "2,3,6,7"]


def test_each_run_sees_its_share_of_the_quota_of_this_machine() -> None:
    """A control group with 3.5 of 8 cores: one run gets one core of the three that can be used, the other one two."""
    shares = [place.prefix for place in divide_machine(2, [(0,), (1,), (2,)], 3.5)]
    assert [float(share[1].removeprefix("CPUFT_CPU_QUOTA=")) for share in shares] == pytest.approx([3.5 / 3, 7 / 3])
    assert [share[-1] for share in shares] == ["0", "1,2"]
    # A whole number of cores is not rounded down.
    six = divide_machine(3, [(cpu,) for cpu in range(6)], 6.0)
    assert [place.prefix[:2] for place in six] == [("env", "CPUFT_CPU_QUOTA=2.0")] * 3
    assert divide_machine(1, [(0,), (1,)], 1.5)[0].prefix == ()


@pytest.mark.parametrize(
    ("names", "hosts_per_run", "parallel", "problem"),
    [
        ((), 2, 0, "--hosts-per-run 2 needs hosts: name them"),
        ((), 1, 9999, "--parallel 9999 is too many for "),
        (("a1",), 2, 0, "--hosts-per-run 2 is too many for 1 host"),
        (("a1", "a2"), 1, 3, "--parallel 3 is more than the 2 groups of 1: give fewer"),
    ],
)
def test_places_that_do_not_exist(
    tmp_path: Path, names: tuple[str, ...], hosts_per_run: int, parallel: int, problem: str
) -> None:
    config = write_hosts(tmp_path, *names) if names else LaunchConfig()
    with pytest.raises(CpuftError) as told:
        plan_places(config, hosts_per_run, parallel)
    assert problem in str(told.value)


def test_macos_limits_the_threads_of_a_part_and_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    parts = divide_machine(2, [(0,), (1,), (2,), (3,), (4,)])
    assert [place.prefix for place in parts] == [("env", "CPUFT_CPU_QUOTA=2"), ("env", "CPUFT_CPU_QUOTA=3")]
