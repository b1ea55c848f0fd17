"""What a run leaves when its training is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.judge.predictions import write_predictions
from cpuft.train.reporter import Progress
from cpuft.train.results import show_judgement
from tests.judge.made import make_five_classes


def test_a_run_that_has_trained_ends_well_whatever_its_predictions_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress("log", 0)
    show_judgement(tmp_path, progress)
    assert capsys.readouterr() == ("", "")
    made = make_five_classes()
    write_predictions(tmp_path, made.about, {"split": [""], "label": ["complaint"]})
    show_judgement(tmp_path, progress)
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("warning: the errors of the model could not be analysed (")
    assert error.count("\n") == 1
    write_predictions(tmp_path, made.about, {name: made.table[name] for name in made.table.column_names})
    show_judgement(tmp_path, progress)
    assert "praise (159)" in capsys.readouterr().out
