"""The user's own rows: several labels a row, a tag for each word, and what is wrong with them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.errors import CpuftError
from cpuft.train.data.own import choose_metrics
from cpuft.train.data.rows import read_data
from cpuft.train.data.tasks import Data
from tests.train.data.test_rows import files

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda word: word.strip())
TAGS = ("B-LOC", "I-LOC", "O")
SENTENCES = st.lists(st.tuples(WORDS, st.sampled_from(TAGS)), min_size=1)
EVERY_TAG = [("x", tag) for tag in TAGS]
TAGGED = '{"tokens": ["Bath", "is", "old"], "tags": ["B-LOC", "O", "O"]}\n'


def read(train: str, validation: str, ending: str = "jsonl") -> Data:
    with tempfile.TemporaryDirectory() as folder:
        return read_data(files(Path(folder), train, validation, ending))


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def tag_lines(sentences: Sequence[Sequence[tuple[str, str]]]) -> str:
    return lines(*({"tokens": [w for w, _ in row], "tags": [t for _, t in row]} for row in sentences))


@given(st.lists(SENTENCES, min_size=1))
def test_every_word_reads_back_with_its_tag(sentences: list[list[tuple[str, str]]]) -> None:
    data = read(tag_lines([EVERY_TAG]), tag_lines(sentences))
    rows = data.validation[""]
    assert (data.task.kind, data.task.labels, data.task.texts, data.task.label) == ("tags", TAGS, ("tokens",), "tags")
    assert [
        [(word, data.task.labels[number]) for word, number in zip(*row)] for row in zip(rows.texts, rows.labels)
    ] == sentences


LABELS = ("a", "b c", "d")
SEVERAL = st.lists(st.lists(st.sampled_from(LABELS), unique=True), min_size=1)


@given(SEVERAL)
def test_several_labels_read_back_from_lists_and_from_cells(rows: list[list[str]]) -> None:
    wanted = [tuple(map(LABELS.index, row)) for row in rows]
    found = read(
        lines({"text": "x", "label": list(LABELS)}), lines(*({"text": "", "label": labels} for labels in rows))
    )
    cells = [" | ".join(labels) for labels in rows]
    table = read(
        f"text,label\nx,{'|'.join(LABELS)}\n", "text,label\n" + "".join(f"x,{cell}\n" for cell in cells), "csv"
    )
    for data in (found, table):
        assert (data.task.kind, data.task.labels) == ("labels", LABELS)
        assert data.validation[""].labels == wanted


@pytest.mark.parametrize(
    "kind, labels, metrics",
    [
        ("tags", ("B-X", "E-X", "I-X", "O", "S-X"), ("f1", "precision", "recall", "accuracy")),
        ("tags", ("ADJ", "NOUN"), ("accuracy",)),
        ("labels", ("a", "b"), ("f1_micro", "f1_macro", "accuracy")),
        ("class", ("a", "b"), ("accuracy", "f1")),
        ("class", ("a", "b", "c"), ("accuracy",)),
    ],
)
def test_what_rows_are_measured_by(kind: str, labels: tuple[str, ...], metrics: tuple[str, ...]) -> None:
    assert choose_metrics(kind, labels) == metrics


def test_words_and_tags_by_other_names(tmp_path: Path) -> None:
    row = lines({"words": ["a", "b"], "ner": [0, 1]})
    config = replace(files(tmp_path, row, row, "jsonl"), text_columns="words", label_column="ner")
    data = read_data(config)
    assert (data.task.kind, data.task.labels, data.train.labels) == ("tags", ("0", "1"), [(0, 1)])


@pytest.mark.parametrize(
    "row, message",
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "line 2 has 2 tokens and 1 tag: correct that line"),
        ({"tokens": ["a"], "tags": ["O", "O"]}, "line 2 has 1 token and 2 tags: correct that line"),
        ({"tokens": ["a", "b"], "tags": ["O", " "]}, "line 2 has 2 tokens and 1 tag: correct that line"),
        ({"tokens": [], "tags": []}, "line 2 has no 'tokens': correct or remove that line"),
        ({"tokens": [" "], "tags": ["O"]}, "line 2 has no 'tokens': correct or remove that line"),
        ({"tokens": [["a"]], "tags": ["O"]}, "line 2 has no 'tokens': correct or remove that line"),
        ({"tokens": ["a"]}, "line 2 has no 'tags': correct or remove that line"),
        ({"tokens": ["a"], "tags": ["O", None]}, "line 2 has no 'tags': correct or remove that line"),
        ({"tokens": "a b", "tags": ["O", "O"]}, "line 2: 'tokens' has to be a list, as it is elsewhere: correct that"),
        ({"tokens": ["a"], "tags": "O"}, "line 2: 'tags' has to be a list, as it is elsewhere: correct that line"),
    ],
)
def test_words_and_tags_that_do_not_fit(row: dict[str, Any], message: str) -> None:
    for train, validation in ((TAGGED + lines(row), TAGGED), (TAGGED, TAGGED + lines(row))):
        with pytest.raises(CpuftError) as error:
            read(train, validation)
        assert message in str(error.value)


@pytest.mark.parametrize(
    "train, validation, message",
    [
        (TAGGED, TAGGED.replace("B-", "I-"), "jsonl, line 1: no row of "),
        (TAGGED.replace("B-LOC", "O"), TAGGED, "have the label 'O': give rows of two labels or more"),
        (lines({"text": "a", "label": []}), TAGGED, "validation.jsonl has no column 'text'"),
        (lines({"text": "a", "label": []}), lines({"text": "a", "label": []}), "train.jsonl has no labels: give rows"),
        (lines({"text": "a", "label": ["x"]}), lines({"text": "a", "label": ["x"]}), "have the label 'x': give rows"),
        (
            lines({"text": "a", "label": ["x", "y"]}, {"text": "b", "label": "x"}),
            lines({"text": "a", "label": ["x"]}),
            "train.jsonl, line 2: 'label' has to be a list, as it is elsewhere: correct that line",
        ),
        (
            lines({"text": "a", "label": ["x", "y"]}),
            lines({"text": "a", "label": ["x", "z"]}),
            "has the label 'z': correct that line, or train on rows that have it",
        ),
        (
            lines({"text": "a", "label": "x"}, {"text": "b", "label": "y"}),
            lines({"text": "a", "label": "x"}, {"text": "b", "label": ["y"]}),
            "validation.jsonl, line 2: 'label' has to be one text, as it is elsewhere: correct that line",
        ),
    ],
)
def test_labels_that_teach_nothing_or_do_not_fit(train: str, validation: str, message: str) -> None:
    with pytest.raises(CpuftError) as error:
        read(train, validation)
    assert message in str(error.value)


def test_words_stand_in_one_column(tmp_path: Path) -> None:
    row = lines({"a": ["x"], "b": ["y"], "tags": ["O"]})
    config = replace(files(tmp_path, row, row, "jsonl"), text_columns="a,b", label_column="tags")
    with pytest.raises(CpuftError, match="has words, which stand in one column: name one with --text-columns"):
        read_data(config)


RATINGS = "text,label\n" + "".join(f"x,{number}\n" for number in (1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    "wanted, cells, kind, labels",
    [
        ("auto", RATINGS, "class", ("1", "2", "3", "4", "5")),
        ("number", RATINGS, "score", ()),
        ("class", "text,label\nx,0.5\nx,1.5\n", "class", ("0.5", "1.5")),
        ("auto", "text,label\nx,0.5\nx,1.5\n", "score", ()),
        ("class", "text,label\nx,a|b\nx,c\n", "class", ("a|b", "c")),
        ("multi", "text,label\nx,a\nx,b\n", "labels", ("a", "b")),
    ],
)
def test_the_label_type_may_be_chosen(
    wanted: str, cells: str, kind: str, labels: tuple[str, ...], tmp_path: Path
) -> None:
    data = read_data(replace(files(tmp_path, cells, cells), label_type=wanted))
    assert (data.task.kind, data.task.labels) == (kind, labels)


@pytest.mark.parametrize(
    "wanted, train, ending, problem",
    [
        ("number", "text,label\nx,good\nx,bad\n", "csv", r"line 2: score 'good' is no number"),
        ("number", TAGGED, "jsonl", r"has lists of words in 'tokens', .*: leave --label-type number out"),
        ("class", lines({"text": "x", "label": ["a", "b"]}), "jsonl", r"line 1: 'label' has to be one text"),
    ],
)
def test_labels_that_are_not_of_the_chosen_type(
    wanted: str, train: str, ending: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(CpuftError, match=problem):
        read_data(replace(files(tmp_path, train, train, ending), label_type=wanted))
