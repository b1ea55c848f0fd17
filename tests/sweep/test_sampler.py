"""What Optuna chooses, from results that are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.sweep.pruning import MedianPruner
from cpuft.sweep.sampler import name_parameters
from cpuft.sweep.search_space import Values
from cpuft.sweep.study import create_sweep, make_sweep, open_sweep
from tests.sweep.searches import SETTINGS, find_rates, make_search, train


def test_half_of_the_first_draws_of_a_wide_range_are_below_the_middle_of_its_logarithms(tmp_path: Path) -> None:
    settings = replace(SETTINGS, search="random", trials=40)
    sweep, other = (make_sweep("s", replace(settings, search_seed=seed), True) for seed in (1, 2))
    rates = find_rates(sweep)
    assert len({*rates}) == 40
    assert 0.3 < sum(rate < 1e-4 for rate in rates) / 40 < 0.7
    # Numbers are short, so that they can be read.
    assert max(len(run.values["learning_rate"]) for run in sweep.runs) <= len("0.0001234")
    assert find_rates(make_sweep("s", replace(settings, trials=10), True)) == rates[:10]
    assert find_rates(other) != rates


@pytest.mark.parametrize("stopped", [3, 12, 20])
def test_a_continued_search_chooses_what_it_would_have_chosen(tmp_path: Path, stopped: int) -> None:
    whole, pruner = make_search(tmp_path / "whole")
    for _ in range(stopped + 3):
        train(whole, pruner)
    create_sweep(str(tmp_path / "parts"), SETTINGS, True)
    for count in (stopped, 3):
        with open_sweep(str(tmp_path / "parts")) as sweep:
            for _ in range(count):
                train(sweep, MedianPruner(sweep))
    assert [run.values for run in sweep.runs] == [run.values for run in whole.runs]
    assert [run.status for run in sweep.runs] == [run.status for run in whole.runs]


@pytest.mark.parametrize("search", ["tpe", "random"])
def test_no_configuration_is_trained_twice(tmp_path: Path, search: str) -> None:
    spaces = [{"lora_rank": "4,8,16", "batch_size": "8..9", "epochs": "2"}]
    settings = replace(SETTINGS, search=search, trials=6, spaces=spaces)
    sweep = make_sweep(str(tmp_path), settings, True)
    while len(sweep.configurations) < 6:
        train(sweep, MedianPruner(sweep), lambda run: float(run["lora_rank"]))
    assert len({tuple(run.values.items()) for run in sweep.runs}) == 6
    assert all(run.values["epochs"] == "2" and run.values["batch_size"] in ("8", "9") for run in sweep.runs)
    with pytest.raises(CpuftError, match="hardly any configuration is left after 6"):
        sweep.choose_next()


def test_alternatives_have_parameters_of_their_own(tmp_path: Path) -> None:
    spaces = [
        {"epochs": Values(("1", "2")), "lora_rank": Values(("0",)), "learning_rate": Values(low=1e-5, high=1e-4)},
        {"epochs": Values(("1", "2")), "lora_rank": Values(("8", "16")), "learning_rate": Values(low=1e-4, high=1e-3)},
    ]
    assert name_parameters(spaces) == [
        {"epochs": "epochs", "learning_rate": "learning_rate (1)"},
        {"epochs": "epochs", "lora_rank": "lora_rank (2)", "learning_rate": "learning_rate (2)"},
    ]
    texts = [
        {"epochs": "1,2", "lora_rank": "0", "learning_rate": "1e-5..1e-4"},
        {"epochs": "1,2", "lora_rank": "8,16", "learning_rate": "1e-4..1e-3"},
    ]
    sweep, pruner = make_search(tmp_path, replace(SETTINGS, options=[], spaces=texts))
    for _ in range(25):
        train(sweep, pruner)
    for run in sweep.runs:
        assert (float(run.values["learning_rate"]) <= 1e-4) == (run.values["lora_rank"] == "0")
    assert {run.values["lora_rank"] for run in sweep.runs} == {"0", "8", "16"}
