"""Who types another launcher's option is told ours; and the table of both is true on both sides."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from pathlib import Path

import pytest

from cpuft.cli import main
from cpuft.cli.aliases import TOOLS, Alias, read_aliases, suggest_options
from cpuft.cli.launch import launch as LAUNCH
from cpuft.cli.options import read_config
from cpuft.cli.provision import aws as RENT
from cpuft.config.fields import option_names
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from tests.conftest import DATA, run_cpuft

ALL = " (ranks of all hosts; --ppn is those of one)"
FLAGS = {flag for option in LAUNCH.params for flag in (*option.opts, *option.secondary_opts)}


@functools.cache
def names_of_tools() -> dict[str, set[str]]:
    """Each tool's options: from its own parser where it is installed, else as its sources have them."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser
    from transformers import TrainingArguments

    found: dict[str, set[str]] = collections.defaultdict(set)
    for line in (DATA / "options-of-others.txt").read_text(encoding="utf-8").splitlines():
        tool, *names = line.split()
        found[tool] |= {name.replace("_", "-") for name in names}
    found["run_glue"] |= {f"--{field.name}".replace("_", "-") for field in dataclasses.fields(TrainingArguments)}
    for tool, parser in (("torchrun", get_args_parser()), ("accelerate", launch_command_parser())):
        found[tool] |= {name.replace("_", "-") for action in parser._actions for name in action.option_strings}
    return found


@pytest.mark.parametrize("tool", TOOLS)
def test_every_name_is_one_of_that_tool_s(tool: str) -> None:
    ours = {name.replace("_", "-") for row in read_aliases() for name in row.names(tool)}
    assert ours
    assert ours <= names_of_tools()[tool]


@pytest.mark.parametrize("row", read_aliases(), ids=lambda row: row.ours + row.why)
def test_what_we_answer_with_is_an_option_of_launch_or_renting(row: Alias) -> None:
    known = {option.opts[0]: option.type for option in (*RENT.params, *LAUNCH.params)}
    ours = row.ours.split()
    assert set(ours[:1]) <= FLAGS | known.keys()
    for name, value in itertools.pairwise(ours):
        assert known[name].convert(value, None, None) == value


def test_no_name_has_two_answers() -> None:
    names = [{name.replace("_", "-") for name in row.names(*TOOLS)} for row in read_aliases()]
    counted = collections.Counter(name for row in names for name in row - FLAGS)
    assert max(counted.values()) == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["--per_device_train_batch_size", "16"], "write --batch-size instead of --per_device_train_batch_size"),
        (["--per-device-train-batch-size=16"], "write --batch-size instead of --per-device-train-batch-size"),
        (["--nproc_per_node", "2"], "write --np instead of --nproc_per_node" + ALL),
        (["--nproc-per-node=2"], "write --np instead of --nproc-per-node" + ALL),
        (["--nprocs-per-node", "2"], "write --np instead of --nprocs-per-node" + ALL),
        (["--num_processes", "4"], "write --np instead of --num_processes"),
        (["-n", "4", "-ppn", "2"], "write --np instead of -n, --ppn instead of -ppn (--np stays the number of all)"),
        (["-np", "4", "-f", "hosts"], "write --np instead of -np, --hostfile instead of -f"),
        (["-hostfile", "hosts"], "write --hostfile instead of -hostfile"),
        (["--hostfile", "hosts", "-H", "hosts"], "write --hostfile instead of -H"),
        (["--num_train_epochs", "3"], "write --epochs instead of --num_train_epochs"),
        (["--model_name_or_path", "bert-base-cased"], "write --model instead of --model_name_or_path"),
        (["--max_seq_length", "128"], "write --max-length instead of --max_seq_length"),
        (["--learning_rate", "2e-5"], "write --learning-rate instead of --learning_rate"),
        (["--output_dir", "out"], "write --run-dir instead of --output_dir"),
        (["--bf16"], "write --precision bf16 instead of --bf16"),
        (["--no_cuda", "True"], "leave out what cpuft does not have: --no_cuda (cpuft trains on CPUs only)"),
        (
            ["--task_name", "mrpc", "--do_train", "--xpu_backend", "ccl", "--no_cuda"],
            "write --task instead of --task_name, --backend instead of --xpu_backend; leave out what cpuft does not "
            "have: --do_train (a run always trains, then evaluates), --no_cuda (cpuft trains on CPUs only)",
        ),
        (["--lr", "1e-4"], "write --learning-rate instead of --lr"),
        (
            ["--no_cuda", "--push_to_hub"],
            "leave out what cpuft does not have: --no_cuda (cpuft trains on CPUs only), "
            "--push_to_hub (when the run has ended, upload its model yourself; it is in the folder of the run, for "
            "example in runs/mrpc-np2/model)",
        ),
        (
            ["--load_best_model_at_end", "True"],
            "write --save-best instead of --load_best_model_at_end",
        ),
        (["--np", "2", "--task", "mrpc"], ""),
        (["train.py", "--np", "2"], ""),
        (["train.py", "--lr", "2"], "the script train.py needs -- before it, and its own options after it: write for example cpuft launch -- train.py --name value"),  # noqa: E501
        (
            ["--nproc_per_node", "2", "run_glue.py", "--task_name", "mrpc"],
            "write --np instead of --nproc_per_node (ranks of all hosts; --ppn is those of one); "
            "the script run_glue.py needs -- before it, and its own options after it: write for example cpuft launch "
            "-- run_glue.py --name value",
        ),
    ],
)  # fmt: skip
def test_what_is_answered(words: list[str], message: str) -> None:
    assert suggest_options(words, FLAGS, script=True) == message


@pytest.mark.parametrize(
    "words, message",
    [
        (["launch", "-hostfile", "hosts"], "write --hostfile instead of -hostfile (see cpuft launch --help)"),
        (
            ["launch", "train.py", "--lr", "1"],
            "the script train.py needs -- before it, and its own options after it: write for example cpuft launch -- "
            "train.py --name value (see cpuft launch",
        ),
        (
            ["compare", "--num_train_epochs", "3"],
            "write --epochs instead of --num_train_epochs (see cpuft compare --help)",
        ),
        (["bench", "comm", "-n", "2"], "write --np instead of -n (see cpuft bench comm --help)"),
        (["doctor", "-hostfile", "hosts"], "write --hostfile instead of -hostfile (see cpuft doctor --help)"),
        (["env", "--learning_rate", "2"], "there is no option --learning_rate"),
        (["provision", "aws", "--spot-or-demand"], "write --market spot-first instead of --spot-or-demand"),
        (["provision", "aws", "--recipe", "a.yaml"], "write --image instead of --recipe (the path of the recipe)"),
        (
            ["launch", "--config", "glue.yaml"],
            "--config glue.yaml: write batch-size instead of per_device_train_batch_size",
        ),
    ],
)
def test_every_verb_answers_with_what_it_has(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "glue.yaml").write_text("per_device_train_batch_size: 16\n")
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith(f"cpuft: error: {message}")


def test_behind_two_dashes_nobody_is_answered() -> None:
    done = run_cpuft("launch", "--dry-run", "--", "none.py", "--learning_rate", "2")
    assert "there is no script none.py" in done.stderr


def test_in_a_yaml_file_our_own_names_may_have_underscores(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("learning_rate: 1e-4\nmax-steps: 3\n")
    assert read_config(str(path), ["learning_rate", "max_steps"]) == {"learning_rate": "1e-4", "max_steps": "3"}


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--lora", "4"], "write --lora-rank instead of --lora"),
        (["--accumulation=4", "--recompute"], "write --gradient-accumulation instead of --accumulation, --gradient-"),
        (["--plain"], "write --no-fast-path instead of --plain (in YAML: fast-path: false)"),
    ],
)
def test_an_old_flag_is_refused_with_one_line_that_names_the_new_one(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", *words])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert problem in said


def test_what_follows_two_dashes_may_have_old_names() -> None:
    with LAUNCH.make_context("launch", ["--", "train.py", "--lora", "4"]) as context:
        assert context.params["script"] == ("train.py", "--lora", "4")


def test_old_names_in_a_yaml_file_are_refused_with_the_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("accumulation: 4\nplain: true\ntask: text\n")
    with pytest.raises(CpuftError) as refused:
        read_config(str(path), option_names(TrainConfig))
    assert str(refused.value) == (
        f"--config {path}: write gradient-accumulation instead of accumulation, no-fast-path instead of plain (in "
        "YAML: fast-path: false)"
    )
