"""`cpuft errors`: what a terminal and a program get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpuft.judge.predictions import write_predictions
from tests.conftest import call_cpuft
from tests.judge.test_model_errors import make_reviews


def test_errors_of_a_run_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    made = make_reviews()
    write_predictions(Path("run"), made.about, dict(zip(made.table.column_names, made.table.columns)))
    code, said, warned = call_cpuft(capsys, "errors", "run", "--most", "1")
    assert (code, warned) == (0, "")
    assert said.startswith("run: 3 of 6 validation rows are predicted wrongly. ")
    assert said.count("\nrow ") == 2
    code, said, _ = call_cpuft(capsys, "errors", "run", "--json")
    found = json.loads(said)
    assert code == 0
    assert [one["row"] for one in found["worst"]] == [2, 0, 1]
    assert (found["contradictory"], found["contradictions"][0]["similarity"]) == (1, 1.0)


@pytest.mark.parametrize("label", ["c", None, 3])
def test_a_damaged_column_is_named_in_one_line(label: object, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_reviews()
    columns = dict(zip(made.table.column_names, made.table.columns))
    write_predictions(Path("run"), made.about, columns | {"label": [label] * len(made.table)})
    code, said, warned = call_cpuft(capsys, "errors", "run")
    assert (code, said, warned.count("\n")) == (2, "", 1)
    assert warned.startswith("cpuft: error: run/predictions.parquet is damaged (KeyError(")


@pytest.mark.parametrize(
    "words, message",
    [
        (["run"], "run has no predictions.parquet: give the folder of a finished run"),
        (["run", "--most", "0"], "error: --most '0' is not valid: give a whole number of 1 or more (see cpuft errors"),
        ([], "RUN"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, warned = call_cpuft(capsys, "errors", *words)
    assert (code, said, warned.count("\n")) == (2, "", 1)
    assert message in warned
