"""The options of `cpuft compare`, besides those of a launch."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import hosts_option


@dataclass(frozen=True)
class CompareConfig:
    """What `cpuft compare` varies."""

    np: str = hosts_option("1,2", "Numbers of ranks to compare, separated by commas, such as 1,2,4", takes="N,N")
    scaling: str = hosts_option(
        "weak",
        "weak: every rank has batches of --batch-size examples. strong: all runs have the global batch of the run "
        "with the fewest ranks, divided among their ranks",
        choices=("weak", "strong"),
    )
    equal_cores: bool = hosts_option(
        False,
        "Give the ranks of every run as many cores as a rank has in the run with the most ranks; others stay idle. "
        "On one host, the speedup is then about what further hosts of the size of a rank's share would give (default: "
        "the ranks of each run divide all cores of their hosts)",
    )
    ideal: bool = hosts_option(
        False,
        "For each number of ranks, also measure the same number of ranks without communication, each training on "
        "its own share of the examples: the upper limit of the speed",
    )
    repeats: int = hosts_option(
        1,
        "Number of rounds; each round does all runs once, and the report then shows the spread. Not with --seeds",
        least=1,
    )
    seeds: int = hosts_option(
        1,
        "Number of seeds: each number of ranks is trained with --seed, with --seed + 1, and so on. The report then has "
        "the mean of each metric, its standard error, and whether all numbers of ranks reach the same metric",
        least=1,
        most=1000,
    )
