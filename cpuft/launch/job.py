"""What a launch runs, on whatever hosts: the same job makes a plan for those that are there now, again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cpuft.config import LaunchConfig, TrainConfig
from cpuft.hosts.cluster import Cluster
from cpuft.launch.inputs import gather_lacking, pack_script, pack_training, plan_travel
from cpuft.launch.planning import end_script, plan_launch, plan_training
from cpuft.launch.resume import ROWS, Resumed
from cpuft.launch.settings import script_settings
from cpuft.plan import RunPlan


@dataclass(frozen=True)
class Job:
    """A training, or a script of the user's own."""

    config: LaunchConfig
    train: TrainConfig
    script: tuple[str, ...] = ()
    """Its command, from `planning.plan_script`; empty for a training."""
    wrap: bool = False
    independent: bool = False
    """Whether the ranks of the script are meant to be independent of each other."""
    progress: str = "lines"
    named: frozenset[str] | None = None
    """Files and folders that may be sent to hosts, where `train` is a record's; None where the user gave all of it."""


@dataclass(frozen=True)
class Launch:
    """A job, where its run lies, and what its ranks inherit."""

    job: Job
    run_dir: str
    environ: Mapping[str, str]


def plan_run(
    job: Job, cluster: Cluster, run_dir: str, environ: Mapping[str, str], resumed: Resumed | None = None
) -> RunPlan:
    """The whole plan of a job on these hosts: of a new run in `run_dir`, or with `resumed` of one that goes on there.

    Asks the hosts which inputs they lack, and changes nothing.

    Raises CpuftError: it cannot run there.
    """
    work, config = cluster.work_dir(run_dir), job.config
    if job.script:
        command, parcels = pack_script(cluster, job.script)
        command = end_script(command, cluster.python, job.wrap)
        extra = script_settings(config.np, job.independent)
        plan = plan_launch(cluster, config, work, command, "gloo", environ, resumed, extra)
    else:
        train, parcels = pack_training(cluster, job.train, job.named)
        plan = plan_training(cluster, config, train, work, job.progress, environ, resumed=resumed)
    lacking = gather_lacking(parcels, cluster)
    kept, have = (resumed.kept, find_rows(resumed, cluster)) if resumed else ((), set[str]())
    return plan_travel(plan, parcels, lacking, cluster, run_dir, kept, have)


def plan_fetching(cluster: Cluster, resumed: Resumed) -> RunPlan:
    """The plan that only fetches a finished run from the head host, and then removes it from all hosts."""
    plan = RunPlan(ways=cluster.ways, resumed=True)
    return plan_travel(plan, (), {}, cluster, resumed.run_dir, resumed.kept)


def find_rows(resumed: Resumed, cluster: Cluster) -> set[str]:
    """Hosts that have the prepared rows of this very launch, where it starts its run again."""
    if not resumed.because:
        return set()
    if not cluster.away:
        return {cluster.master} if Path(resumed.run_dir, ROWS).exists() else set()
    return {one.host.name for one in resumed.kept if one.rows}
