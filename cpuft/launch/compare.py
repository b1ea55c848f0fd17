"""Plan a comparison: the same job on several numbers of ranks, one run after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cpuft.config.compare import CompareConfig
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.execute import Say
from cpuft.hosts.cluster import Cluster, gather_cluster
from cpuft.hosts.topology import plan_placement
from cpuft.launch.attempt import run_attempt
from cpuft.launch.inputs import gather_missing, pack_files
from cpuft.launch.lease_renewal import renew_leases
from cpuft.launch.plan import add_transfers, check_training, plan_training
from cpuft.launch.progress_bar import show_progress
from cpuft.plans import RunPlan


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison, ready to start."""

    label: str
    """For example "np 2", "ideal of np 2, round 1 of 3", or "np 2, seed 42 (1 of 5)"."""
    run_dir: str
    """Folder of this run in that of the comparison, such as "np-2", "ideal-2-round-1" or "np-2-seed-42"."""
    cluster: Cluster
    plan: RunPlan


def _scale_batch(train: TrainConfig, ranks: int, fewest: int, scaling: str) -> TrainConfig:
    """Return the options of a run: weak scaling keeps the batch of each rank, strong scaling the global batch."""
    if scaling == "weak":
        return train
    if train.batch_size * fewest % ranks:
        raise CpuftError(
            f"a global batch of {train.batch_size * fewest} does not divide among {ranks} ranks: "
            f"choose a --batch-size that is a multiple of {ranks}"
        )
    return replace(train, batch_size=train.batch_size * fewest // ranks)


def list_runs_in_turn(numbers: tuple[int, ...], comparison: CompareConfig) -> list[tuple[int, bool, int]]:
    """Return each run as (number of ranks, whether they are independent, round from 1). Each round (a repeat or a seed)
    has all runs in the order of `numbers`, so that drifts affect all alike. With `comparison.ideal`, the independent
    ranks of each number above 1 follow its run.
    """
    return [
        (ranks, independent, number)
        for number in range(1, max(comparison.repeats, comparison.seeds) + 1)
        for ranks in numbers
        for independent in (False, True)
        if not independent or (comparison.ideal and ranks > 1)
    ]


def limit_cores(clusters: Mapping[int, Cluster]) -> dict[int, Cluster]:
    """Return the clusters, by their number of ranks, with `most_cores` set to the cores of the rank with fewest in the
    cluster with most ranks. Raises CpuftError: that cluster has several hosts.
    """
    largest = clusters[max(clusters)]
    if len(largest.assignments) > 1:
        raise CpuftError("--equal-cores compares ranks on one host, and there are several: leave it out")
    # Ranks that each stay within a NUMA node may have fewer cores than an even share.
    most = min(len(one.compute) for one in plan_placement(largest.facts[0].cores, largest.ranks, 0))
    return {ranks: replace(cluster, most_cores=most) for ranks, cluster in clusters.items()}


def refuse_different_precisions(
    clusters: Mapping[int, Cluster], train: TrainConfig, environ: Mapping[str, str]
) -> None:
    """Raise CpuftError if the runs of a comparison would train in different precisions, which happens without
    --precision if only some of the hosts have bf16 instructions. Raises as `check_training`, too.
    """
    precisions = {ranks: check_training(cluster, train, environ)[1] for ranks, cluster in clusters.items()}
    if len(set(precisions.values())) > 1:
        listed = ", ".join(f"np {ranks} in {precision}" for ranks, precision in precisions.items())
        raise CpuftError(
            "only some of the hosts have bf16 instructions, so the runs would train in different precisions "
            f"({listed}) and could not be compared: add --precision fp32"
        )


def plan_comparison(
    numbers: tuple[int, ...],
    config: LaunchConfig,
    train: TrainConfig,
    comparison: CompareConfig,
    run_dir: str,
    progress: str,
    environ: Mapping[str, str],
) -> list[PlannedRun]:
    """Plan all runs of a comparison, each in a folder of its own in `run_dir`, in the order of `list_runs_in_turn`;
    `numbers` must ascend. Asks the hosts for facts and missing files, and changes nothing. With strong scaling, the
    batch size of `train` is that of a rank in the run with the fewest ranks. Each seed is a round, from `train.seed`
    on. `progress` is "bar" or "lines". Raises CpuftError: options contradict each other, a global batch does not divide
    among the ranks, or a host cannot be used.
    """
    if comparison.ideal and numbers[-1] == 1:
        raise CpuftError("--ideal needs two or more ranks, because one rank has nothing to wait for: add more to --np")
    if comparison.repeats > 1 and comparison.seeds > 1:
        raise CpuftError("--seeds repeats each run already, once with each seed: leave out --repeats")
    clusters = {ranks: gather_cluster(replace(config, np=ranks)) for ranks in numbers}
    if comparison.equal_cores:
        clusters = limit_cores(clusters)
        # Runs with one rank have no cores for communication, so no run has.
        config = replace(config, comm_cores=max(0, config.comm_cores))
        if train.checkpoint_every > 0:
            raise CpuftError("--equal-cores excludes --checkpoint-every: a run that is resumed uses all cores")
    refuse_different_precisions(clusters, train, environ)
    planned: list[PlannedRun] = []
    sent: dict[str, set[str]] = {}
    for ranks, independent, number in list_runs_in_turn(numbers, comparison):
        options = _scale_batch(train, ranks, numbers[0], comparison.scaling)
        # A comparison measures training, so it saves no checkpoints unless the user asked for them.
        options = replace(options, checkpoint_every=max(0.0, options.checkpoint_every))
        launch, cluster = replace(config, np=ranks), clusters[ranks]
        label, name = f"np {ranks}", f"{'ideal' if independent else 'np'}-{ranks}"
        if independent:
            # An independent rank sends nothing, so it needs no fast backend and no cores for communication.
            label, options = f"ideal of {label}", replace(options, backend="gloo")
            launch = replace(launch, comm_cores=0)
        if comparison.repeats > 1:
            label, name = f"{label}, round {number} of {comparison.repeats}", f"{name}-round-{number}"
        if comparison.seeds > 1:
            seed = train.seed + number - 1
            label, name = f"{label}, seed {seed} ({number} of {comparison.seeds})", f"{name}-seed-{seed}"
            options = replace(options, seed=seed)
        folder = f"{run_dir}/{name}"
        options, bundles = pack_files(cluster, options)
        work = cluster.work_dir(folder)
        plan = plan_training(cluster, launch, options, work, progress, environ, independent, is_measured=True)
        # Bundles that an earlier run of the comparison sends will be there.
        missing = {host: folders - sent.get(host, set()) for host, folders in gather_missing(bundles, cluster).items()}
        sent |= {host: folders | sent.get(host, set()) for host, folders in missing.items()}
        planned.append(PlannedRun(label, folder, cluster, add_transfers(plan, bundles, missing, cluster, folder)))
    return planned


def run_comparison(planned: Sequence[PlannedRun], progress: str, time_limit: float, say: Say) -> tuple[int, PlannedRun]:
    """Carry out one run or more, one after another; return the exit code of the last run that was started, and that
    run. The first run that fails is the last one. `time_limit` is that of each run, in seconds; 0 for none. `say` gets
    "LABEL:" before each run. Raises what `run_attempt` raises.
    """
    with renew_leases(planned[0].cluster.access, say):
        for run in planned:
            say(f"{run.label}:")
            with show_progress(progress):
                code = run_attempt(run.plan, run.run_dir, run.cluster, time_limit, say)
            if code:
                break
    return code, run
