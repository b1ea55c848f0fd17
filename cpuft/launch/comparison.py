"""Runs the same job on several numbers of ranks, one after another, for a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cpuft.config import CompareConfig, LaunchConfig, TrainConfig, is_count
from cpuft.errors import CpuftError
from cpuft.hosts.cluster import Cluster, gather_cluster
from cpuft.launch.inputs import add_transfers, gather_missing, pack_training
from cpuft.launch.plan import plan_training
from cpuft.plan import RunPlan


@dataclass(frozen=True)
class Planned:
    """One run of a comparison, ready to start."""

    label: str
    run_dir: str
    cluster: Cluster
    plan: RunPlan


def parse_numbers(text: str) -> tuple[int, ...]:
    """Rank numbers of `--np 1,2,4`, ascending. Raises CpuftError for anything but different whole numbers from 1."""
    words = [word.strip() for word in text.split(",")]
    advice = "give the numbers of ranks to compare, for example --np 1,2,4"
    for place, word in enumerate(words):
        if not is_count(word):
            raise CpuftError(f"--np {text[:60]}: {word[:60]!r} is not a whole number from 1: {advice}")
        if int(word) in map(int, words[:place]):
            raise CpuftError(f"--np {text[:60]}: the number {word[:60]} is there twice: {advice}")
    return tuple(sorted(map(int, words)))


def scale_batch(train: TrainConfig, ranks: int, fewest: int, scaling: str) -> TrainConfig:
    """The training options for `ranks` ranks: with strong scaling, the batch of the run with the fewest, in all.

    Raises CpuftError: the global batch does not divide evenly.
    """
    if scaling == "weak":
        return train
    if train.batch_size * fewest % ranks:
        raise CpuftError(
            f"a global batch of {train.batch_size * fewest} does not divide among {ranks} ranks: "
            f"choose a --batch-size that is a multiple of {ranks}"
        )
    return replace(train, batch_size=train.batch_size * fewest // ranks)


def order_runs(numbers: tuple[int, ...], comparison: CompareConfig) -> list[tuple[int, bool, int]]:
    """Ranks, whether each trains apart, and the round, of each run: whatever drifts meanwhile drifts for all."""
    return [
        (ranks, apart, turn)
        for turn in range(1, comparison.repeats + 1)
        for ranks in numbers
        for apart in (False, True)
        if not apart or (comparison.ideal and ranks > 1)
    ]


def plan_comparison(
    numbers: tuple[int, ...],
    config: LaunchConfig,
    train: TrainConfig,
    comparison: CompareConfig,
    run_dir: str,
    progress: str,
    environ: Mapping[str, str],
) -> list[Planned]:
    """A run for each number of ranks, and one of as many ranks apart, in turn. All are checked before the first starts.

    Raises CpuftError: an ideal of one rank alone, or what is wrong with the hosts or options.
    """
    if comparison.ideal and numbers[-1] == 1:
        raise CpuftError("--ideal is of two or more ranks: one rank alone is its own, add more to --np")
    clusters = {ranks: gather_cluster(replace(config, np=ranks)) for ranks in numbers}
    planned: list[Planned] = []
    sent: dict[str, set[str]] = {}
    for ranks, apart, turn in order_runs(numbers, comparison):
        own = scale_batch(train, ranks, numbers[0], comparison.scaling)
        # What is measured is training, unless checkpoints were asked for.
        own = replace(own, checkpoint_every=max(0.0, own.checkpoint_every))
        launch, cluster = replace(config, np=ranks), clusters[ranks]
        label, name = f"np {ranks}", f"{'ideal' if apart else 'np'}-{ranks}"
        if apart:
            # A job alone sends nothing: its cores are its own, and so is its model.
            label, own, launch = f"ideal of {label}", replace(own, backend="gloo"), replace(launch, comm_cores=0)
        if comparison.repeats > 1:
            label, name = f"{label}, round {turn} of {comparison.repeats}", f"{name}-round-{turn}"
        directory = f"{run_dir}/{name}"
        own, bundles = pack_training(cluster, own)
        plan = plan_training(cluster, launch, own, cluster.work_dir(directory), progress, environ, apart)
        missing = gather_missing(bundles, cluster)
        # What an earlier run of the comparison sends is there by then.
        missing = {host: places - sent.get(host, set()) for host, places in missing.items()}
        sent |= {host: places | sent.get(host, set()) for host, places in missing.items()}
        planned.append(Planned(label, directory, cluster, add_transfers(plan, bundles, missing, cluster, directory)))
    return planned
