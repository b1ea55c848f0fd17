"""Starts of a job one after another, on this machine; how each ends is told by a stand-in for its ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Cluster, gather_cluster
from cpuft.hosts.hostfile import Host
from cpuft.launch.attempts import Launch, describe_limit, find_limit, find_update, run_attempts
from cpuft.launch.job import Job, plan_run
from cpuft.launch.kept import Kept
from cpuft.launch.remote import MasterLost
from cpuft.options.fields import LaunchConfig, TrainConfig
from cpuft.plan import RunPlan
from cpuft.rank.process import format_failure
from cpuft.rank.world import World
from cpuft.record import InterruptedLine, format_line


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return gather_cluster(LaunchConfig())


def script(restarts: int, **options: float) -> Job:
    return Job(LaunchConfig(restarts=restarts, **options), TrainConfig(), ("true",))  # type: ignore[arg-type]


def run(job: Job, cluster: Cluster, *ends: Callable[[Path], int]) -> tuple[int, list[RunPlan], list[str], list[float]]:
    """Exit code, the plan of each start, what was said, and the seconds that each start had left."""
    plans, said, left, folder = list[RunPlan](), list[str](), list[float](), Path("run").absolute()

    def start(plan: RunPlan, run_dir: str, where: Cluster, seconds: float) -> int:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        plans.append(plan)
        left.append(seconds)
        return ends[len(plans) - 1](folder / "logs" / "rank-0.err")

    plan = plan_run(job, cluster, str(folder), {})
    return run_attempts(Launch(job, str(folder), {}), plan, cluster, start, said.append), plans, said, left


def fails(code: int, text: str = "") -> Callable[[Path], int]:
    def end(log: Path) -> int:
        log.write_text(f"{text}\n{format_failure(World(0, 1, 0, 1), 'localhost', code)}\n")
        return code

    return end


def lost(log: Path) -> int:
    raise MasterLost("the master does not answer: look at it")


def refused(log: Path) -> int:
    raise CpuftError("no such rows: name others")


def ends(log: Path) -> int:
    return 0


KILLED, AGAIN = fails(137), "on localhost begins anew"


def test_what_is_killed_or_lost_is_started_again_until_it_ends(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(3), cluster, KILLED, lost, ends)
    assert (code, [plan.resumed for plan in plans]) == (0, [False, True, True])
    assert said == [
        f"cpuft: restart 1 of 3: rank 0 on localhost was killed by SIGKILL; 1 rank {AGAIN}",
        f"cpuft: restart 2 of 3: the connection to the master was lost; 1 rank {AGAIN}",
    ]


def is_told_to_go(log: Path) -> int:
    line = InterruptedLine(3, 9, "the notice /gone on localhost", (0,))
    (log.parents[1] / "record.jsonl").write_text(format_line(line) + "\n")
    return fails(75)(log)


def test_a_host_that_was_told_to_go_is_left_out(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(3), cluster, is_told_to_go)
    assert (code, len(plans)) == (75, 1)
    assert said == ["cpuft: not started again: host localhost was told to go, and no other host is left"]


def test_after_the_last_restart_the_run_ends_as_that_did(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(1), cluster, KILLED, KILLED)
    assert (code, len(plans), said[1]) == (137, 2, "cpuft: not started again: that was restart 1 of 1")
    with pytest.raises(MasterLost):
        run(script(1), cluster, KILLED, lost)


def test_the_same_error_ends_the_run(cluster: Cluster) -> None:
    code, plans, said, _ = run(script(3), cluster, fails(1, "ValueError"), fails(1, "ValueError"))
    told = "cpuft: not started again: rank 0 on localhost failed (exit code 1), as it had before"
    assert (code, len(plans), said[1]) == (1, 2, told)


@pytest.mark.parametrize("restarts, end", [(0, KILLED), (3, fails(2))])
def test_what_is_not_to_be_started_again_is_not(cluster: Cluster, restarts: int, end: Callable[[Path], int]) -> None:
    code, plans, said, _ = run(script(restarts), cluster, end)
    assert (code in (2, 137), len(plans), said) == (True, 1, [])


def test_what_is_refused_is_said_as_it_is(cluster: Cluster) -> None:
    with pytest.raises(CpuftError, match=r"^no such rows: name others$"):
        run(script(3), cluster, refused)


def test_the_time_limit_is_that_of_all_starts(cluster: Cluster) -> None:
    code, _, _, left = run(script(3, time_limit=100.0), cluster, KILLED, ends)
    assert code == 0
    assert 0 < left[1] < left[0] <= 100


def test_the_dry_run_tells_how_often(cluster: Cluster) -> None:
    told = "where a host or a rank is lost, cpuft launch starts it again up to 2 times, on the hosts that answer"
    assert describe_limit(script(2), cluster) == (told,)
    assert describe_limit(script(-1), cluster) == ()
    assert describe_limit(script(2, np=3, min_np=2), cluster) == (f"{told}, 2 ranks at least",)
    assert find_limit(Job(LaunchConfig(restarts=3), TrainConfig(engine="ipex")), cluster) == 0
    with pytest.raises(CpuftError, match="--min-np 2 is more than --np 1: lower it"):
        describe_limit(script(2, min_np=2), cluster)


def test_the_update_of_the_newest_checkpoint_anywhere(tmp_path: Path) -> None:
    assert find_update(str(tmp_path), ()) == 0
    for name in ("000000012.0", "000000020.0.new", "000000007.1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert find_update(str(tmp_path), ()) == 12
    assert find_update(str(tmp_path), (Kept(Host("node2"), update=15), Kept(Host("node3")))) == 15
