"""What a sweep does, from the options of the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config.sweep import SweepConfig
from cpuft.errors import CpuftError
from cpuft.sweep.plan import plan_sweep

TPE = SweepConfig(search="tpe", trials=3)


def test_a_grid_has_all_runs_and_a_search_has_the_values(tmp_path: Path) -> None:
    (tmp_path / "conditions.yaml").write_text("- lora-rank: 0\n- lora-rank: 8,16\n")
    grid = SweepConfig(conditions=str(tmp_path / "conditions.yaml"), ranks_per_host=2, price=1.5)
    settings, _, runs = plan_sweep(grid, {"task": "rte", "fast_path": False, "seed": "1..2"})
    assert settings.options == ["--task=rte", "--no-fast-path", "--np=2", "--ppn=2"]
    assert sorted(tuple(run.values()) for run in runs) == [(seed, rank) for seed in "12" for rank in ("0", "16", "8")]
    assert (settings.trials, settings.seeds, settings.price) == (3, 2, 1.5)
    settings, _, runs = plan_sweep(TPE, {"task": "rte", "seed": "1,2", "learning_rate": "1e-5..1e-3"})
    assert (settings.trials, settings.seeds, runs) == (3, 2, [])
    assert settings.spaces == [{"seed": "1,2", "learning_rate": "1e-5..1e-3"}]
    (tmp_path / "conditions.yaml").write_text("- seed: 1\n")
    with pytest.raises(CpuftError, match="--seed is on the command line and in --conditions"):
        plan_sweep(grid, {"seed": "1..2"})


@pytest.mark.parametrize(
    ("given", "config", "is_maximized", "pruner"),
    [
        ({"task": "mrpc", "eval_every": "epoch"}, TPE, True, "median"),
        ({"task": "mrpc", "eval_every": "epoch"}, replace(TPE, pruner="none"), True, "none"),
        ({"task": "mrpc", "eval_every": "epoch"}, SweepConfig(), True, "none"),
        ({"task": "mrpc", "eval_every": "epoch"}, SweepConfig(pruner="median"), True, "median"),
        ({"task": "mrpc"}, TPE, True, "none"),
        ({"task": "text", "train_file": "a.txt"}, TPE, False, "none"),
        ({"task": "mrpc"}, replace(TPE, metric="loss"), False, "none"),
        ({"task": "text", "train_file": "a.txt"}, replace(TPE, direction="maximize"), True, "none"),
    ],
)
def test_the_direction_is_known_before_the_first_run_has_ended(
    given: dict[str, str], config: SweepConfig, is_maximized: bool, pruner: str
) -> None:
    values = given | {"learning_rate": "1e-5..1e-3" if config.search == "tpe" else "1e-5,1e-3"}
    settings, found, _ = plan_sweep(config, values)
    assert (found, settings.pruner) == (is_maximized, pruner)
