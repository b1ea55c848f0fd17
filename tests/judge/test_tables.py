"""What a person reads about where a model fails."""

from __future__ import annotations

import math

import numpy as np

from cpuft.judge.judgement import judge
from cpuft.judge.tables import describe_judgement, list_tables
from tests.judge.made import make_classes, make_five_classes, make_predictions
from tests.test_readme import TEXTS


def test_five_classes_are_explained_at_the_end_of_a_run() -> None:
    shown = "".join(f"{line}\n" for line in describe_judgement(judge(make_five_classes())))
    assert f"```text\n{shown}```" in TEXTS["docs/training.md"]


def test_two_classes_take_two_lines() -> None:
    label, found = ["no"] * 129 + ["yes"] * 279, ["no"] * 77 + ["yes"] * 52 + ["no"] * 17 + ["yes"] * 262
    accuracy = (77 + 262) / 408
    lines = describe_judgement(judge(make_classes(label, found, {"accuracy": accuracy, "f1": 0.8836}, ("no", "yes"))))
    assert lines[0].startswith("95 % intervals with 408 validation rows: accuracy 0.8309 (0.791 to 0.864), F1 0.8836 (")
    assert lines[1:] == ["52 of 129 rows of no are predicted as yes; 17 of 279 rows of yes are predicted as no"]
    right = judge(make_classes(label, label, {"accuracy": 1.0}, ("no", "yes")))
    assert describe_judgement(right) == ["95 % intervals with 408 validation rows: accuracy 1.0000 (0.991 to 1.000)"]


def test_many_classes_take_few_lines_and_long_names_are_cut() -> None:
    names = tuple(f"class {number:03}\x1b {'x' * 1000}" for number in range(200))
    label = list(names) * 3
    found = [names[0] if number % 2 else name for number, name in enumerate(label)]
    judgement = judge(make_classes(label, found, {"accuracy": 0.5}, names, slice=label, slice_by="name"))
    lines = describe_judgement(judgement)
    assert len(lines) <= 10
    assert "and 194 more, which cpuft report shows" in lines
    assert max(map(len, lines)) < 120
    assert "\x1b" not in "".join(lines)
    tables = {one.heading: one for one in list_tables(judgement)}
    assert len(tables["Each class"].rows) == 50
    assert tables["What is mistaken for what"].columns == ["label", "predicted as", "rows"]
    assert tables["By name"].text == "The 20 most frequent of the 200 values of this column."


def test_scores_name_the_range_that_is_worst() -> None:
    label = np.linspace(0, 5, 200)
    found = np.where(label < 1.25, label + 0.8, label)
    lines = describe_judgement(judge(make_predictions("score", label, found, {"pearson": 0.95})))
    assert lines[1].startswith("worst where the label is 0 to 1.231: the mean absolute error is 0.8, and predictions")
    assert lines[1].endswith(" are 0.8 too high on average")
    found[7] = math.nan
    broken = judge(make_predictions("score", label, found, {"pearson": math.nan}))
    assert len(describe_judgement(broken)) == 1  # of the ranges without the row that has no number
    cells = [cell for one in list_tables(broken) for row in one.rows for cell in row]
    assert "nan" not in cells
    assert "-" in cells


def test_the_tables_say_what_they_show_and_have_no_undefined_numbers() -> None:
    judgement = judge(make_five_classes())
    tables = {one.heading: one for one in list_tables(judgement)}
    assert list(tables) == [
        "How sure the metrics are",
        "Each class",
        "What is mistaken for what",
        "How sure the model is",
        "By length",
        "By language",
    ]
    matrix = tables["What is mistaken for what"]
    assert matrix.rows[0] == ["complaint", "15", "0", "159", "0", "0"]
    assert matrix.shades is not None
    assert matrix.shades[0][3] == 159 / 174
    for one in tables.values():
        assert one.text.endswith(".")
        assert {len(one.columns)} == {len(row) for row in one.rows}
    empty = judge(make_classes(["a", "a", "b"], ["a", "c", "a"], {}, ("a", "b", "c")))
    (classes,) = (one for one in list_tables(empty) if one.heading == "Each class")
    assert [row[3:5] for row in classes.rows] == [["0.5000", "0.5000"], ["-", "0.0000"], ["0.0000", "-"]]


def test_several_labels_and_tags_name_what_they_count() -> None:
    label, found = [["x"], ["y"], ["x", "y"]], [["x"], [], ["x"]]
    lines = describe_judgement(judge(make_predictions("labels", label, found, {"f1_micro": 0.6}, ("x", "y"))))
    assert lines[1].split() == ["class", "rows", "predicted", "precision", "recall", "F1"]
    assert lines[2].split() == ["y", "2", "0", "-", "0.0000", "0.0000"]
    tags = judge(make_predictions("tags", [["B-LOC", "O"]], [["O", "O"]], {"f1": 0.0}, ("B-LOC", "O")))
    assert [one.columns[:2] for one in list_tables(tags) if one.heading == "Each class"] == [["entity", "entities"]]
