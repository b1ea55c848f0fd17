"""Lists and ranges of option values, their combinations, and draws from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.sweep.search_space import (
    Values,
    apply_assignment,
    check_assignments,
    count_configurations,
    estimate_length,
    list_variable_options,
    parse_values,
    plan_grid,
    read_conditions,
    sample_configurations,
)


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("learning_rate", "1e-5, 3e-5", Values(("1e-5", "3e-5"))),
        ("seed", "1..3", Values(("1", "2", "3"))),
        ("learning_rate", "1e-5..1e-3", Values(low=1e-5, high=1e-3)),
        ("task", "mrpc,rte", Values(("mrpc", "rte"))),
        ("model", "minilm,models/own", Values(("minilm", "models/own"))),
        ("lr_schedule", "cosine", Values(("cosine",))),
    ],
)
def test_values_are_lists_or_ranges(name: str, text: str, values: Values) -> None:
    assert parse_values(name, text) == values


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("train_file", "a.csv,b.csv", "--train-file cannot vary in a sweep: give it one value on the command line"),
        ("learning_rate", "1e-5,", "--learning-rate '1e-5,' has an empty value"),
        ("learning_rate", "1e-5,1e-5", "has '1e-5' twice"),
        ("learning_rate", "1e-5,x", "--learning-rate"),
        ("lr_schedule", "linear,step", "--lr-schedule"),
        ("seed", "5..1", "--seed '5..1' is an empty range"),
        ("seed", "2..2", "is an empty range"),
        ("seed", "1..", "is not a range: write its first and its last number"),
        ("seed", "1..1000002", "has more than a million numbers"),
    ],
)
def test_wrong_values_are_refused_with_the_next_step(name: str, text: str, problem: str) -> None:
    with pytest.raises(CpuftError) as told:
        parse_values(name, text)
    assert problem in str(told.value)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9, unique=True))
def test_a_list_of_numbers_is_read_back(numbers: list[int]) -> None:
    assert parse_values("seed", ",".join(map(str, numbers))).texts == tuple(map(str, numbers))


def test_options_that_only_say_where_files_are_do_not_vary() -> None:
    options = list_variable_options()
    assert {"learning_rate", "seed", "lora_rank", "task", "model", "batch_size", "lr_schedule"} <= {*options}
    assert {"train_file", "data_dir", "text_columns", "class_weights", "fast_path"}.isdisjoint(options)


def test_a_grid_has_all_combinations_once() -> None:
    spaces = [
        {"learning_rate": Values(("1e-5", "3e-5")), "seed": Values(("1", "2"))},
        {"learning_rate": Values(("3e-5",)), "seed": Values(("2", "3"))},
    ]
    assert [tuple(one.values()) for one in plan_grid(spaces)] == [
        ("1e-5", "1"),
        ("1e-5", "2"),
        ("3e-5", "1"),
        ("3e-5", "2"),
        ("3e-5", "3"),
    ]
    assert plan_grid([{}]) == [{}]
    with pytest.raises(CpuftError, match=r"--learning-rate 1e-05\.\.0\.001 is a range of numbers with fractions"):
        plan_grid([{"learning_rate": Values(low=1e-5, high=1e-3)}])


def test_conditions_are_alternatives(tmp_path: Path) -> None:
    path = tmp_path / "conditions.yaml"
    path.write_text("- lora-rank: 0\n  learning-rate: [2e-5, 5e-5]\n- lora_rank: 8,16\n  learning-rate: 1e-4\n")
    spaces = read_conditions(str(path))
    assert [tuple(one.values()) for one in plan_grid(spaces)] == [
        ("0", "2e-5"),
        ("0", "5e-5"),
        ("8", "1e-4"),
        ("16", "1e-4"),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("seed: 1", "is not a list of mappings"),
        ("[]", "is not a list of mappings"),
        ("- sead: 1", "there is no training option 'sead': did you mean seed"),
        ("- seed: {a: 1}", "write what the option takes, or a list of that"),
        ("- seed: x", "--seed"),
        ("- [", "is not YAML"),
    ],
)
def test_broken_conditions_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "conditions.yaml"
    path.write_text(text)
    with pytest.raises(CpuftError) as told:
        read_conditions(str(path))
    assert problem in str(told.value)
    with pytest.raises(CpuftError, match=r"there is no file .*none\.yaml, which --conditions names"):
        read_conditions(str(tmp_path / "none.yaml"))


def test_a_run_has_the_options_of_the_sweep_and_its_own() -> None:
    base = TrainConfig(task="mrpc", epochs=2.0)
    config = apply_assignment(base, {"learning_rate": "1e-4", "seed": "3"})
    assert (config.task, config.epochs, config.learning_rate, config.seed) == ("mrpc", 2.0, 1e-4, 3)
    with pytest.raises(CpuftError, match=r"^lr-schedule constant: --lr-schedule constant has no warm-up"):
        check_assignments(TrainConfig(warmup_ratio=0.1), [{"lr_schedule": "cosine"}, {"lr_schedule": "constant"}])


def test_runs_that_train_on_more_examples_are_longer() -> None:
    lengths = [
        estimate_length(TrainConfig(**options))
        for options in ({"max_steps": 10}, {"max_steps": 20}, {"epochs": 1.0}, {"epochs": 2.0})
    ]
    assert lengths == sorted(lengths)
    assert estimate_length(TrainConfig(max_train_samples=100)) == 300
    assert estimate_length(TrainConfig(epochs=0.0)) == 1


def test_configurations_are_counted_without_their_seeds() -> None:
    space = {"lora_rank": Values(("4", "8")), "epochs": Values(("1", "2", "3")), "seed": Values(("1", "2"))}
    assert count_configurations([space, {"lora_rank": Values(("0",))}], 9) == 7
    assert count_configurations([space], 4) == 4
    assert count_configurations([space | {"learning_rate": Values(low=1e-5, high=1e-3)}], 10**6) == 10**6


def test_configurations_of_overlapping_alternatives_are_there_once() -> None:
    ranks, epochs = Values(("4", "8")), Values(("1", "2"))
    spaces = [{"lora_rank": ranks, "epochs": epochs}, {"epochs": epochs, "lora_rank": Values(("8", "16"))}]
    assert count_configurations(spaces, 99) == len(plan_grid(spaces)) == 6


def test_configurations_that_are_checked_have_the_ends_of_ranges() -> None:
    space = {
        "learning_rate": Values(low=1e-5, high=1e-3),
        "batch_size": parse_values("batch_size", "1..100"),
        "lora_rank": Values(("4", "8", "16")),
    }
    found = sample_configurations([space])
    assert len(found) == 24
    assert {one["batch_size"] for one in found} == {"1", "2", "3", "100"}
    assert {one["learning_rate"] for one in found} == {"1e-05", "0.001"}
    # Of more combinations than can be checked, some are drawn.
    many = {name: Values(tuple(map(str, range(0, 40, 2)))) for name in ("seed", "lora_rank", "max_steps", "batch_size")}
    drawn = sample_configurations([many])
    assert len(drawn) == 1000
    assert drawn[0].keys() == many.keys()
