"""Configurations and command lines."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_type_hints

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.cli import main
from cpuft.cli.options import CONFIG_FILE, Verb, make_options, read_config
from cpuft.config.fields import format_arguments, option_names, parse_arguments
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.errors import CpuftError
from cpuft.provision.options import LocalConfig
from cpuft.train.__main__ import parse_worker


def values_of(field: dataclasses.Field[object], kind: type) -> st.SearchStrategy[object]:
    """Everything that a field of a configuration may hold."""
    if field.metadata["choices"]:
        return st.sampled_from(field.metadata["choices"])
    least, most = field.metadata["least"], field.metadata["most"]
    by_kind: dict[type, st.SearchStrategy[object]] = {
        bool: st.booleans(),
        int: st.integers(int(least or 0), most or 10**9),
        float: st.floats(least or 0, most or 1e9),
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
        (["--tsk=mrpc"], "'--tsk' is no option here: did you mean --task"),
        (["--task=mprc"], "did you mean mrpc?"),
        (["--batch-size=0"], "--batch-size '0' is not valid: give a whole number of 1 or more"),
    ],
)
def test_what_no_launcher_writes(words: list[str], message: str) -> None:
    with pytest.raises(CpuftError, match=message.replace("?", r"\?")):
        parse_arguments(TrainConfig, words)


@pytest.mark.parametrize("words", [["--config="], ["--seed", "1", "--config="], ["--config=", "--seed=1"]])
def test_a_config_of_no_name_is_none(words: list[str]) -> None:
    verb = Verb("x", params=[*make_options(TrainConfig), CONFIG_FILE])
    assert verb.make_context("x", words).params["config"] == ""


def test_yaml_values(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("learning-rate: 2e-5\nnp: [1, 2]\nsave_model: false\ntask: mrpc\n")
    names = [*option_names(TrainConfig), "np"]
    assert read_config(str(path), names) == {
        "learning_rate": "2e-5",
        "np": "1,2",
        "save_model": "false",
        "task": "mrpc",
    }


@pytest.mark.parametrize(
    "text, value",
    [
        ("save_model: false", False),
        ("save_model: No", False),
        ("save_model: true", True),
        ("run_dir: 2026-13-01", "2026-13-01"),
        ("run_dir: !!timestamp x", "x"),
        ("run_dir: 010", "010"),
        ("learning_rate: 2e-5", 2e-5),
        ("seed: 7", 7),
        ("np: 2", 2),
    ],
)
def test_a_file_says_what_a_flag_says(text: str, value: object, tmp_path: Path) -> None:
    path, name = tmp_path / "options.yaml", text.partition(":")[0]
    path.write_text(text)
    verb = Verb("x", params=[*make_options(TrainConfig), *make_options(LaunchConfig), CONFIG_FILE])
    assert verb.make_context("x", ["--config", str(path)]).params[name] == value


@pytest.mark.parametrize(
    "text, message",
    [
        ("run_dir: [[a]]", "'run_dir'[0] is ['a'], and must be a text: write what its flag takes"),
        ("run_dir: {a: b}", "'run_dir'[0] is {'a': 'b'}, and must be a text: write what its flag takes"),
        ('run_dir: "\\ud800"', "'run_dir'[0] contains half of a surrogate pair"),
        (
            "run_dir: " + "[" * 5000 + "]" * 5000,
            "is not YAML (it is nested too deep): write lines of the form `option: value`",
        ),
        ("run_dir: &a [*a]", "is not YAML (an alias (*name) stands for a list or mapping: write that out): write"),
    ],
)
def test_a_value_that_no_flag_has(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(CpuftError, match=re.escape(message)):
        read_config(str(path), option_names(LaunchConfig))


@pytest.mark.parametrize(
    "text, message",
    [
        ("- a\n", "is not a mapping"),
        ("a: [", r"is not YAML \(line 1: .*\): write"),
        ("tsk: mrpc\n", r"there is no option 'tsk': did you mean task\?"),
        ("task:\n", "'task' has no value: give it one, or leave out the line"),
        ("max-steps: 3\nmax_steps: 4\n", "'max_steps' is there twice: keep one of the lines"),
        ("seed: 3\nseed: 3\n", "'seed' is there twice"),
    ],
)
def test_yaml_that_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(CpuftError, match=message):
        read_config(str(path), option_names(TrainConfig))


@pytest.mark.parametrize(
    "words, told",
    [
        (["provision", "hosts", "--hosts", "a", "--user", "x\n  ProxyCommand touch /tmp/x"], "--user 'x"),
        (["provision", "hosts", "--hosts", "a", "--key", "k\r"], "--key 'k"),
        (["provision", "hosts", "--hosts", "a\x1b[2J"], "--hosts 'a"),
        (["provision", "local", "--name", "lab\n"], "--name 'lab"),
        (["provision", "down", "lab\n"], "NAME 'lab"),
        (["launch", "--run-dir", "a\n\nb"], "--run-dir 'a"),
        (["submit", "slurm", "--dry-run", "--name", "a\u2028b", "--", "launch"], "--name 'a"),
        (["submit", "slurm", "--dry-run", "--", "launch", "--run-dir", "a\nb"], "--run-dir 'a"),
        (["doctor", "--ssh-config", "a\nb"], "--ssh-config 'a"),
    ],
)
def test_a_control_character_in_a_value_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"error: {told}" in said
    assert "contains the control character" in said
    assert said.count("\n") == 1


def test_a_control_character_in_a_yaml_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "options.yaml"
    path.write_text('hosts: a\nuser: "root\\n  ProxyCommand touch /tmp/x"\n')
    with pytest.raises(SystemExit) as ended:
        main(["provision", "hosts", "--config", str(path)])
    assert ended.value.code == 2
    assert "--user 'root\\n ProxyCommand touch /tmp/x' contains the control character" in capsys.readouterr().err


def test_a_script_s_own_arguments_may_hold_any_character(tmp_path: Path) -> None:
    argument = click.Argument(["script"], nargs=-1, type=click.UNPROCESSED)
    verb = Verb("x", params=[*make_options(TrainConfig), argument])
    assert verb.make_context("x", ["--", "-c", "a\nb"]).params["script"] == ("-c", "a\nb")


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["launch", "--np", "٢"],
            "--np '٢' is not valid: give a whole number of 1 or more, in the digits 0 to 9",
        ),
        (
            ["launch", "--epochs", "٣"],
            "--epochs '٣' is not valid: give a number of 0 or more, in the digits 0 to 9",
        ),
        (
            ["estimate", "r", "--bandwidth", "٢gbit"],
            "--bandwidth '٢gbit' is not a bit rate: write for example 1gbit",
        ),
        (["provision", "local", "--shm", "٢g", "--dry-run"], "--shm '٢g' is no size: write e.g. 256m or 1g"),
        (
            ["provision", "local", "--net", "٣gbit", "--dry-run"],
            "--net '٣gbit' is not a bit rate: write for example 1gbit or 100mbit",
        ),
        (["compare", "--np", "1,٢"], "--np 1,٢: '٢' is not a whole number from 1 to 1000000: give numbers"),
    ],
)
def test_digits_of_other_scripts_are_no_numbers(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert said.startswith(f"cpuft: error: {message}")


def test_every_number_option_takes_plain_digits_only() -> None:
    for option in (*make_options(TrainConfig), *make_options(LaunchConfig), *make_options(LocalConfig)):
        if isinstance(option.default, (int, float)) and not option.is_flag:
            with pytest.raises(click.BadParameter, match="digits 0 to 9"):
                option.type.convert("٢", option, None)


def test_the_demo_has_a_learning_rate_of_its_own_that_a_flag_overrides() -> None:
    asked = ((), ("--task=demo",), ("--task=demo", "--learning-rate=2e-5"), ("--task=mrpc",), ("--lora-rank=4",))
    # Whether a model has adapters by default is decided when its size is known.
    rates = [parse_arguments(TrainConfig, list(words)).choose_lora(0).learning_rate for words in asked]
    assert rates == [1e-4, 1e-4, 2e-5, 2e-5, 2e-4]
    assert "--learning-rate=0.0001" in format_arguments(TrainConfig())  # as the plan and the record show it


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("report run --to mlflow --html", "--to and --html"),
        ("report run --to mlflow --json", "--to and --json"),
        ("report run --markdown --to mlflow", "--to and --markdown"),
        ("report run --json --html", "--html and --json"),
        ("report run --markdown --html", "--html and --markdown"),
        ("report run --markdown --json", "--json and --markdown"),
        ("estimate run --link links.json --bandwidth 1gbit", "--link and --bandwidth"),
        ("estimate run --latency 0 --link links.json", "--link and --latency"),
        ("provision image --list --delete image", "--list and --delete"),
        ("provision image --aws --output image", "--output and --aws"),
        ("provision image --output image --list", "--output and --list"),
        ("provision image --output image --delete image", "--output and --delete"),
    ],
)
def test_options_that_exclude_each_other(words: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them would be without effect."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    said = capsys.readouterr()
    verb = "provision image" if words.startswith("provision") else words.split()[0]
    message = f"{flags} exclude each other: leave out one of them (see cpuft {verb} --help)"
    assert (ended.value.code, said.out, said.err) == (2, "", f"cpuft: error: {message}\n")


def test_an_option_that_is_off_excludes_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["provision", "image", "--no-aws", "--no-list", "--output", "image", "--recipe", "none.yaml"])
    assert "none.yaml" in capsys.readouterr().err
