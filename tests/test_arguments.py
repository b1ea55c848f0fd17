"""Configurations and command lines."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.arguments import parse_arguments, read_config
from cpuft.config import TrainConfig, WorkerConfig, format_arguments, option_names
from cpuft.errors import CpuftError
from cpuft.train.__main__ import parse_worker


def values_of(field: dataclasses.Field[object], kind: type) -> st.SearchStrategy[object]:
    """Everything that a field of a configuration may hold."""
    if field.metadata["choices"]:
        return st.sampled_from(field.metadata["choices"])
    least = field.metadata["least"]
    by_kind: dict[type, st.SearchStrategy[object]] = {
        bool: st.booleans(),
        int: st.integers(int(least or 0), 10**9),
        float: st.floats(least or 0, 1e9),
        str: st.text(st.characters(exclude_categories=["Cs"])),
    }
    return by_kind[kind]


def configs(config: type) -> st.SearchStrategy[object]:
    """All configurations of a class."""
    kinds = get_type_hints(config)
    fields = {field.name: values_of(field, kinds[field.name]) for field in dataclasses.fields(config)}
    return st.builds(config, **fields)


@given(configs(TrainConfig), configs(WorkerConfig))
def test_workers_read_what_launchers_write(train: TrainConfig, worker: WorkerConfig) -> None:
    assert parse_worker(format_arguments(train) + format_arguments(worker)) == (train, worker)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--tsk=mrpc"], "Did you mean '--task'"),
        (["--task=mprc"], "did you mean mrpc?"),
        (["--batch-size=0"], "0 is not in the range"),
    ],
)
def test_what_no_launcher_writes(words: list[str], message: str) -> None:
    with pytest.raises(CpuftError, match=message.replace("?", r"\?")):
        parse_arguments(TrainConfig, words)


def test_yaml_values(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("learning-rate: 2e-5\nnp: [1, 2]\nsave_model: false\ntask: mrpc\n")
    names = [*option_names(TrainConfig), "np"]
    assert read_config(str(path), names) == {"learning_rate": "2e-5", "np": "1,2", "save_model": False, "task": "mrpc"}


@pytest.mark.parametrize(
    "text, message",
    [
        ("- a\n", "holds no mapping"),
        ("a: [", r"is no YAML \(line 1: .*\): write"),
        ("tsk: mrpc\n", r"no option 'tsk': did you mean task\?"),
        ("task:\n", "'task' has no value: give it one, or leave the line out"),
        ("max-steps: 3\nmax_steps: 4\n", "'max_steps' is there twice: keep one of the lines"),
        ("seed: 3\nseed: 3\n", "'seed' is there twice"),
    ],
)
def test_yaml_that_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(CpuftError, match=message):
        read_config(str(path), option_names(TrainConfig))
