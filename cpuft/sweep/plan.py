"""What a sweep does, from the options of the command line: its settings and its runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cpuft.config.fields import format_flag, format_options
from cpuft.config.sweep import SweepConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.sweep.results import is_larger_better
from cpuft.sweep.search_space import (
    SEED,
    OptionValues,
    Space,
    apply_assignment,
    check_assignments,
    count_configurations,
    list_variable_options,
    make_key,
    parse_values,
    plan_grid,
    read_conditions,
    sample_configurations,
)
from cpuft.sweep.study import SweepSettings
from cpuft.tasks import find_task

_MOST_RUNS = 10_000
"""Of a sweep."""


def plan_sweep(config: SweepConfig, given: Mapping[str, Any]) -> tuple[SweepSettings, bool, list[OptionValues]]:
    """Return (what a sweep does, whether a larger metric is better, the runs of a grid; [] for another search).

    `given` has the training options of the command line; a text with several values is a list or a range. Raises
    CpuftError: options exclude each other or cannot vary, a value is wrong, or there are too many or too few runs.
    """
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    # Of other options, a comma belongs to the value.
    varied = {name for name in texts if name in list_variable_options() and re.search(r",|\.\.", texts[name])}
    space = {name: parse_values(name, texts[name]) for name in texts if name in varied}
    fixed = {name: value for name, value in given.items() if name not in varied}
    conditions = read_conditions(config.conditions) if config.conditions else [Space()]
    for name in {name for condition in conditions for name in condition} & {*given}:
        raise CpuftError(f"{format_flag(name)} is on the command line and in --conditions: leave out one of them")
    spaces = [space | condition for condition in conditions]
    _check_count(config, spaces)
    base = TrainConfig(**{name: value for name, value in fixed.items() if name not in texts})
    base = apply_assignment(base, {name: text for name, text in fixed.items() if name in texts})
    runs = plan_grid(spaces) if config.search == "grid" else []
    checked = runs or sample_configurations(spaces)
    check_assignments(base, checked, fixed)
    configs = [apply_assignment(base, one) for one in checked]
    metric = config.metric or find_task(configs[0].task, configs[0].causal).metrics[0]
    is_maximized = is_larger_better(metric) if config.direction == "auto" else config.direction == "maximize"
    ranks = config.hosts_per_run * config.ranks_per_host
    options = format_options(fixed)
    options += [f"--np={ranks}", *([f"--ppn={config.ranks_per_host}"] if ranks > 1 else [])]
    return (
        SweepSettings(
            options,
            trials=len({*map(make_key, runs)}) or config.trials,
            metric=config.metric,
            hosts_per_run=config.hosts_per_run,
            price=config.price,
            search=config.search,
            search_seed=config.search_seed,
            pruner=_choose_pruner(config, configs),
            seeds=_count_seeds(spaces),
            spaces=[{name: values.text for name, values in one.items()} for one in spaces],
        ),
        is_maximized,
        runs,
    )


def _count_seeds(spaces: Sequence[Space]) -> int:
    return max(len(one[SEED].texts) if SEED in one else 1 for one in spaces)


def _check_count(config: SweepConfig, spaces: Sequence[Space]) -> None:
    if config.search == "grid":
        if config.trials:
            raise CpuftError("--trials is for --search random and tpe: leave it out, as a grid has all combinations")
        count = len(plan_grid(spaces, _MOST_RUNS + 1))
    else:
        if not config.trials:
            raise CpuftError(f"--search {config.search} needs --trials, the number of configurations: add --trials 20")
        if (known := count_configurations(spaces, config.trials)) < config.trials:
            raise CpuftError(
                f"the values allow {known} configurations, fewer than --trials {config.trials}: give a range such "
                "as --learning-rate 1e-5..1e-3, more values, or leave out --search and --trials, to train all of them"
            )
        count = config.trials * _count_seeds(spaces)
    if count > _MOST_RUNS:
        advice = "give fewer values, or --search random with --trials 50"
        raise CpuftError(f"this sweep has more than {_MOST_RUNS:,} runs: {advice}")


def _choose_pruner(config: SweepConfig, configs: Sequence[TrainConfig]) -> str:
    has_evaluations = all(one.eval_every != "none" for one in configs)
    if config.pruner == "median" and not has_evaluations:
        advice = "add --eval-every epoch or a number of updates, or leave out --pruner"
        raise CpuftError(f"--pruner median compares evaluations while training, and there are none: {advice}")
    if config.pruner == "auto":
        return "median" if config.search == "tpe" and has_evaluations else "none"
    return config.pruner
