"""What is told of data, compared with what a training makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.describe import describe_data
from cpuft.train.data.prepare import prepare
from cpuft.train.data.show import count_duplicates, find_problems, format_summary, summarize
from cpuft.train.data.sources import Examples
from tests.train.tiny import MAKERS, make_config

pytestmark = pytest.mark.usefixtures("own_cache")


def write_csv(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return str(path)


@pytest.mark.parametrize("kind", MAKERS)
def test_it_is_what_a_training_uses(kind: str, tmp_path: Path) -> None:
    config = replace(make_config(tmp_path, kind), max_length=8)
    summary, prepared = summarize(config), read_prepared(str(prepare(config)))
    train, validation = summary.splits
    assert (train.examples, validation.examples) == (len(prepared.train), len(prepared.validation[""])) == (96, 37)
    assert tuple(train.labels) == prepared.labels
    assert (summary.kind, tuple(summary.text_columns), summary.label_column) == (kind, prepared.texts, prepared.label)
    assert train.lengths.cut == prepared.truncated > 0
    assert train.lengths.longest == 10 > prepared.train.lengths.max()
    assert train.unknown_share == prepared.unknown_share
    if labels := train.labels:
        assert all(f"{name} ({count:,})" in describe_data(prepared, config) for name, count in labels.items())
    else:
        assert train.scores[0] == pytest.approx(prepared.train.labels.min(), abs=1e-6)
    assert any("--max-length 8 cuts" in line for line in summary.problems)
    assert any("task       files" in line for line in format_summary(summary))


def test_one_class_is_named_as_such(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "a.csv", [("one", "ham"), ("two", "ham")])
    summary = summarize(TrainConfig(task="files", train_file=train, validation_file=train))
    assert summary.problems[0] == "the training examples have only the class ham: give examples of at least two classes"
    assert f"problem: {summary.problems[0]}" in format_summary(summary)


def test_duplicates_and_contradictions_are_counted() -> None:
    known: dict[tuple[str, ...], set[float]] = {}
    train = Examples([("a",), ("b",), ("a",), ("a",)], [0.0, 1.0, 1.0, 0.0])
    assert count_duplicates(train, known, True) == (2, 1)
    assert count_duplicates(Examples([("a",), ("b",), ("c",)], [1.0, 0.0, 0.0]), known, False) == (2, 1)
    assert ("c",) not in known


def test_contradicting_labels_are_a_problem(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "a.csv", [("one", "ham"), ("one", "spam"), ("two", "ham")])
    other = write_csv(tmp_path / "b.csv", [("three", "ham"), ("four", "spam")])
    summary = summarize(TrainConfig(task="files", train_file=train, validation_file=other))
    assert summary.problems == ["labels of 1 training example contradict others: mend them"]


def test_texts_have_lines_in_both_splits(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a cat is old\nthe dog\n" * 30)
    (tmp_path / "other.txt").write_text("the dog\na green fork\n")
    config = TrainConfig(
        task="text", train_file=str(tmp_path / "train.txt"), validation_file=str(tmp_path / "other.txt")
    )
    summary = summarize(replace(config, max_length=16))
    train, validation = summary.splits
    prepared = read_prepared(str(prepare(replace(config, max_length=16))))
    assert (train.examples, validation.examples) == (len(prepared.train), len(prepared.validation[""]))
    assert (train.duplicates, validation.duplicates, train.labels) == (58, 1, {})
    assert "task       text: masked tokens of texts" in format_summary(summary)


def test_the_built_in_task_has_no_problem_but_its_repeated_pairs() -> None:
    summary = summarize(TrainConfig(max_train_samples=300))
    assert summary.splits[0].examples == 300
    assert summary.unknown_labels == {}
    assert find_problems(summary) == summary.problems
    assert not any("cuts" in line or "class" in line for line in summary.problems)


def test_names_of_labels_are_safe_on_a_terminal(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "a.csv", [("one", "\x1b[31mred"), ("two", "x" * 80)])
    lines = format_summary(summarize(TrainConfig(task="files", train_file=train, validation_file=train)))
    assert not any("\x1b" in line for line in lines)
    assert Counter("x" * 38 in line for line in lines)[True] == 0


def test_texts_that_are_empty_are_counted(tmp_path: Path) -> None:
    rows = [("nan", "ham"), ("", "spam"), ("None ", "ham"), *((f"text {number}", "ham") for number in range(5))]
    train = write_csv(tmp_path / "a.csv", rows)
    config = TrainConfig(task="files", train_file=train, validation_file=train)
    summary = summarize(config)
    assert summary.splits[0].without_text == {"text": 3}
    assert any(line.split() == ["without", "a", "text", "3", "3"] for line in format_summary(summary))
    told = describe_data(read_prepared(str(prepare(config))), config)
    assert told.endswith("3 of 8 examples have no text (empty, nan or null)")


def test_a_text_column_that_is_empty_is_refused(tmp_path: Path) -> None:
    rows = [("" if number else "text", ("ham", "spam")[number % 2]) for number in range(20)]
    config = TrainConfig(task="files", train_file=write_csv(tmp_path / "a.csv", rows))
    config = replace(config, validation_file=config.train_file)
    problem = "19 of 20 examples have no text in 'text': name another column with --text-columns"
    assert problem in summarize(config).problems
    with pytest.raises(CpuftError) as error:
        prepare(config)
    assert str(error.value) == problem


def test_labels_that_may_stand_for_no_label_are_told(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "a.csv", [("one", "nan"), ("two", "ham"), ("three", "spam")])
    config = TrainConfig(task="files", train_file=train, validation_file=train)
    told = describe_data(read_prepared(str(prepare(config))), config)
    assert "ham (1), nan (1), spam (1) (nan may stand for rows without a label, which --skip-" in told


def test_how_a_file_was_understood_is_told(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "a.csv", [("one", "a|b"), ("two", "a")])
    summary = summarize(TrainConfig(task="files", train_file=train, validation_file=train))
    note = f"an example may have several labels, because the label in {train}, line 2 has a bar"
    assert f"note: {note}" in format_summary(summary)


def test_of_pairs_the_share_of_their_texts_that_are_cut_is_told(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("anchor,positive\n" + "".join(f"a{n} b c d e f,g{n} h i j k l\n" for n in range(12)))
    summary = summarize(TrainConfig(task="pairs", train_file=str(path), max_length=4))
    assert "--max-length 4 cuts 100.0 % of the training texts: consider a larger one" in summary.problems
