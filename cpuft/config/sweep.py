"""The options of `cpuft sweep`, besides those of its launches."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import evaluation_option, hosts_option, output_option, recipe_option

SWEEP_SEARCHES = ("grid", "random", "tpe")
SWEEP_PRUNERS = ("auto", "median", "none")


@dataclass(frozen=True)
class SweepConfig:
    """What `cpuft sweep` varies, and where its runs train."""

    hosts_per_run: int = hosts_option(1, "Number of hosts on which each run trains", least=1)
    ranks_per_host: int = hosts_option(1, "Number of ranks on each host of a run", least=1)
    parallel: int = hosts_option(
        0,
        "Largest number of runs at the same time (default: one for each --hosts-per-run hosts, and one on this machine "
        "alone). On this machine alone, each run gets an equal part of the cores",
        least=0,
    )
    price: float = hosts_option(0.0, "Price of one host for one hour, in dollars, for the report", least=0.0, most=1e6)
    conditions: str = recipe_option(
        "",
        "YAML file with a list of alternatives, each a mapping of options to values, lists or ranges; each is combined "
        "with the values on the command line",
        takes="FILE",
    )
    search: str = recipe_option(
        "grid",
        "grid: all combinations of the values. random: --trials configurations that are drawn from them, each with all "
        "values of --seed. tpe: --trials configurations that Optuna chooses one after another, near good ones before "
        "(tree-structured Parzen estimator), each with all values of --seed. Only random and tpe take ranges with "
        "fractions, such as 1e-5..1e-3",
        choices=SWEEP_SEARCHES,
    )
    trials: int = recipe_option(0, "With --search random or tpe, number of configurations", least=0)
    search_seed: int = recipe_option(0, "With --search random or tpe, seed of the draws", least=0)
    pruner: str = evaluation_option(
        "auto",
        "Which runs are ended early. median: those whose best evaluation while training (see --eval-every) is worse "
        "than the median of the finished configurations after the same share of their training. auto: median with "
        "--search tpe if runs evaluate while training, otherwise none",
        choices=SWEEP_PRUNERS,
    )
    metric: str = evaluation_option(
        "", "Metric that is compared (default: the first one that the task reports)", takes="NAME"
    )
    direction: str = evaluation_option(
        "auto",
        "Whether a larger or a smaller metric is better; auto knows it for cpuft's metrics",
        choices=("auto", "maximize", "minimize"),
    )
    stop_after_failures: int = output_option(
        0, "Number of failed runs after which the sweep ends; 0 continues with the other runs, however many", least=0
    )
    resume: str = output_option(
        "",
        "Continue the sweep in this folder: runs that have a metric stay, and the others are resumed or started. "
        "Options of the launches, such as --cluster, are those of the sweep unless they are given again; give --mpirun "
        "and --ssh-config again",
        takes="FOLDER",
    )
