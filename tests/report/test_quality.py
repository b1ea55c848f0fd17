"""`cpuft report A B`: whether the difference of two runs' metrics is real."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cpuft.cli import cli
from cpuft.judge.predictions import FILE_NAME
from cpuft.record import EvaluationLine, Record
from cpuft.report.comparison import compare
from cpuft.report.comparison_tables import format_text
from tests.conftest import Golden
from tests.judge.predicted import write_classes
from tests.records import make_record
from tests.report.test_comparison import write_record

BETTER, ALIKE = (300, 10, 25, 73), (300, 15, 20, 73)
OTHER_MODEL = make_record(1, model="bert-base", options={"learning_rate": 5e-5, "model": "bert-base"})


def write_pair(
    other: Record, counts: tuple[int, ...] = BETTER, folders: tuple[Path, Path] = (Path("a"), Path("b"))
) -> list[Record]:
    """Write two runs with predictions, the first one of MiniLM on one rank."""
    records = [make_record(1), other]
    for folder in folders:
        folder.mkdir()
    metrics = write_classes(folders, counts)
    for place, (folder, record) in enumerate(zip(folders, records)):
        records[place] = dataclasses.replace(record, evaluations=[EvaluationLine(1, metrics[place], 408, 2.0)])
        (folder / FILE_NAME).rename("kept")
        folder.rmdir()
        write_record(records[place], folder)
        Path("kept").rename(folder / FILE_NAME)
    return records


def report(*words: str) -> Result:
    return CliRunner().invoke(cli, ["report", *words])


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_of_other_models_are_compared_by_their_metrics(golden: Golden) -> None:
    write_pair(OTHER_MODEL)
    done = report("a", "b")
    assert (done.exit_code, done.stderr) == (0, "")
    golden("quality.txt", done.stdout)
    golden("quality.md", report("a", "b", "--markdown").stdout)
    told = json.loads(report("a", "b", "--json").stdout)
    assert list(told) == ["quality"]
    first = told["quality"]["metrics"][0]
    assert (first["metric"], first["is_real"], first["better"]) == ("accuracy", True, [10, 25])
    page = report("a", "b", "--html")
    assert page.stdout == "page: report.html\n"
    text = Path("report.html").read_text(encoding="utf-8")
    assert f'<p class="verdict">{told["quality"]["verdict"].replace(">", "&gt;")}</p>' in text
    assert "the runs are not the same job" in text


def test_runs_of_one_job_have_both_sections() -> None:
    records = write_pair(make_record(2), ALIKE)
    text = report("a", "b").stdout
    assert text.startswith(format_text(compare(records)))
    assert text.count("No difference can be shown: accuracy 0.7721 -> 0.7843") == 1
    assert "speed is not compared" not in text
    told = json.loads(report("a", "b", "--json").stdout)
    assert [run["np"] for run in told["runs"]] == [1, 2]
    assert told["quality"]["a"] == "a"
    assert report("a", "b", "--html").exit_code == 0
    assert "Quality of A (a) and B (b)" in Path("report.html").read_text(encoding="utf-8")
    # A and B are as they were named, and a single run or three have no such section.
    assert "No difference can be shown: accuracy 0.7843 -> 0.7721" in report("b", "a").stdout
    assert "Quality" not in report("a").stdout


def test_the_same_run_twice_is_no_difference() -> None:
    write_pair(OTHER_MODEL, (400, 0, 0, 8))
    assert "No difference: accuracy is 0.9804 in both, and the same in each of 408 rows." in report("a", "b").stdout


@pytest.mark.parametrize("is_same_job", [True, False])
@pytest.mark.parametrize(
    "problem, message",
    [
        ("missing", "b has no predictions.parquet"),
        ("damaged", "b/predictions.parquet is damaged"),
        ("others", "the two runs have different validation rows"),
        ("older", "b/predictions.parquet is of another evaluation than the metrics in b/record.jsonl: fetch the run"),
    ],
)
def test_without_predictions_of_the_same_rows_one_reason_is_told(problem: str, message: str, is_same_job: bool) -> None:
    records = write_pair(make_record(2) if is_same_job else OTHER_MODEL)
    path = Path("b", FILE_NAME)
    if problem == "missing":
        path.unlink()
    elif problem == "damaged":
        path.write_bytes(b"PAR1")
    elif problem == "older":
        write_classes((Path("a"), Path("b")), ALIKE)
        write_classes((Path("a"), Path()), BETTER)
    else:
        other = Path("other")
        other.mkdir()
        write_classes((other, Path("b")), BETTER, rows="others")
    done = report("a", "b")
    if is_same_job:
        assert done.stdout == format_text(compare(records))
        assert done.stderr.count(f"metrics are not compared row by row: {message}") == 1
    else:
        assert "are not the same job: they differ in model (minilm and bert-base)" in str(done.exception)
        wanted = f". Their metrics cannot be compared row by row, either, because {message}"
        assert wanted in str(done.exception)


def test_runs_without_predictions_are_compared_by_speed_alone() -> None:
    """Such as those of --task text."""
    records = [make_record(ranks) for ranks in (1, 2)]
    for folder, record in zip("ab", records):
        write_record(record, Path(folder))
    done = report("a", "b")
    assert (done.stdout, done.stderr) == (format_text(compare(records)), "")
