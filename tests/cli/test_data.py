"""`cpuft data show` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from cpuft.cli.options import make_options
from cpuft.config.fields import SECTIONS, option_names
from cpuft.config.train import DATA_OPTIONS, TrainConfig
from tests.conftest import run_cpuft

ROWS = "text,label\nthe cat,animal\nthe red,colour\na dog,animal\nthe cat,animal\n"
OTHER_ROWS = "text,label\nthe cat,animal\na fork,tool\n"


def test_all_options_on_data_are_there_but_those_of_masking() -> None:
    options = {str(one.name): one.section for one in make_options(TrainConfig)}
    of_data = [name for name in option_names(TrainConfig) if options[name] == SECTIONS[1]]
    assert [*DATA_OPTIONS] == [name for name in of_data if name not in ("mlm_probability", "whole_word_mask")] + [
        "max_train_samples",
        "seed",
    ]


def test_what_is_wrong_with_examples_is_named(tmp_path: Path) -> None:
    Path("train.csv").write_text(ROWS)
    Path("validation.csv").write_text(OTHER_ROWS)
    files = ("--task", "files", "--train-file", "train.csv", "--validation-file", "validation.csv")
    settings = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_cpuft("data", "show", *files, settings=settings)
    assert done.returncode == 0, done.stderr
    assert "columns    text -> label" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "problem: only validation examples have the label tool: correct them, or train on such examples",
        "problem: 50.0 % of the validation examples are training examples, too, so that the metric is better than on "
        "new examples: remove them from one of the two",
    ]
    found = json.loads(run_cpuft("data", "show", *files, "--json", "--baseline", settings=settings).stdout)
    assert found["unknown_labels"] == {"tool": 1}
    assert found["baselines"] == []
    assert "no baseline: validation examples have labels that no training example has" in found["notes"]
    assert [split["labels"] for split in found["splits"]] == [
        {"animal": 3, "colour": 1, "tool": 0},
        {"animal": 1, "colour": 0, "tool": 1},
    ]


def test_bad_input_is_one_line() -> None:
    done = run_cpuft("data", "show", "--task", "files", "--train-file", "none.csv")
    wanted = "cpuft: error: there is no file none.csv: check --train-file\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", wanted)


def test_files_that_the_task_does_not_read_are_refused() -> None:
    done = run_cpuft("data", "show", "--train-file", "train.csv")
    assert done.returncode == 2
    assert done.stderr.startswith("cpuft: error: --train-file has no effect with --task demo: leave it out, or give ")


def test_a_dry_run_prints_the_process() -> None:
    done = run_cpuft("data", "show", "--task", "demo", "--json", "--dry-run")
    assert done.returncode == 0
    assert "cpuft.train.data.show json" in done.stdout
