"""`cpuft mine`: what is refused at once, and the process that mines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cpuft.cli.mine import check_mining
from cpuft.config.fields import format_arguments, parse_arguments
from cpuft.config.mine import MineConfig
from cpuft.errors import CpuftError
from tests.conftest import find_arguments, run_cpuft

GOOD = MineConfig(model="minilm", file="my pairs.csv", output="out.csv", negatives=2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": ""}, "there is no --model: name the embedding model that compares the texts, such as minilm"),
        ({"file": ""}, "there is no --file: give a file with rows of an anchor and a positive"),
        ({"output": ""}, "there is no --output: give a file that ends in .csv, .tsv, .jsonl, .parquet"),
        ({"corpus_column": "x"}, "--corpus-column names a column of --corpus: add --corpus, or leave it out"),
        ({"search_depth": 3, "skip_top": 2}, "--search-depth 3 leaves fewer than 2 documents after --skip-top 2: rai"),
    ],
)
def test_requests_that_say_too_little_or_too_much(options: dict[str, Any], message: str) -> None:
    check_mining(GOOD)
    with pytest.raises(CpuftError) as error:
        check_mining(replace(GOOD, **options))
    assert message in str(error.value)


def test_the_plan_is_the_process_that_is_started() -> None:
    done = run_cpuft("mine", *format_arguments(GOOD), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert parse_arguments(MineConfig, find_arguments(done.stdout, "cpuft.train.write_negatives")) == GOOD
    done = run_cpuft("mine", "--model", "minilm", "--file", "none.csv", "--output", "x.csv")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cpuft: error: there is no file none.csv: check --file\n"
