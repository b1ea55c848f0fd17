"""Where a recorded run fails, in reports and in the page."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cpuft.cli import cli
from cpuft.judge.judgement import judge
from cpuft.judge.predictions import FILE_NAME, RunPredictions, write_predictions
from cpuft.record import EvaluationLine
from cpuft.serialization import format_json
from tests.judge.made import make_classes, make_five_classes
from tests.records import make_record
from tests.report.test_comparison import write_record


def write_run(folder: Path, made: RunPredictions) -> Path:
    """A recorded run that has predicted this."""
    evaluations = [EvaluationLine(1, made.about.metrics, 414, 2.0)]
    write_record(dataclasses.replace(make_record(), evaluations=evaluations), folder)
    write_predictions(folder, made.about, {name: made.table[name] for name in made.table.column_names})
    return folder


def report(*words: str) -> Result:
    done = CliRunner().invoke(cli, ["report", *words])
    assert done.exit_code == 0, done.output
    return done


def test_a_report_of_one_run_tells_where_it_fails(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_five_classes())
    text = report(str(run)).stdout
    assert "0.0862" in text
    assert "praise (159)" in text
    assert "By language" in text
    found = json.loads(report(str(run), "--json").stdout)["judgement"]
    assert found == json.loads(format_json(dataclasses.asdict(judge(make_five_classes()))))
    assert found["classes"][0]["mistaken"] == 159
    report(str(run), "--html")
    page = (run / "report.html").read_text(encoding="utf-8")
    for heading in ("Each class", "What is mistaken for what", "How sure the model is", "By length", "By language"):
        assert f"<h2>{heading}</h2>" in page
    assert re.search(r'<td style="--dark: 55%">159</td>', page)

    write_run(tmp_path / "undefined", make_classes(["a", "a"], ["a", "b"], {}, ("a", "b")))
    undefined = json.loads(report(str(tmp_path / "undefined"), "--json").stdout, parse_constant=pytest.fail)
    assert undefined["judgement"]["classes"][1]["recall"] is None


def test_a_run_is_shown_without_predictions_that_are_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", make_five_classes())
    whole = (run / FILE_NAME).read_bytes()
    write_record(make_record(), tmp_path / "other")
    before = report(str(tmp_path / "other"))
    assert before.stderr == ""
    assert "Each class" not in before.stdout
    (tmp_path / "other" / FILE_NAME).write_bytes(whole)
    for content, message in ((whole, "is of another evaluation"), (b"PAR1", "is damaged")):
        (tmp_path / "other" / FILE_NAME).write_bytes(content)
        after = report(str(tmp_path / "other"))
        assert after.stdout == before.stdout
        assert after.stderr.count("\n") == 1
        assert message in after.stderr
        report(str(tmp_path / "other"), "--html")
        page = (tmp_path / "other/report.html").read_text(encoding="utf-8")
        assert re.search(f"the model&#39;s errors are not shown: .*{message}", page)
    made = make_five_classes()
    columns = {name: made.table[name] for name in made.table.column_names if name != "prediction"}
    write_predictions(run, made.about, columns)
    assert "predictions.parquet is damaged (" in report(str(run)).stderr
    assert report(str(run), "--markdown").stderr == ""
    monkeypatch.setitem(sys.modules, "cpuft.judge.judgement", None)
    assert "predictions are judged with NumPy and SciPy: " in report(str(run)).stderr
