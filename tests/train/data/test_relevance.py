"""Reading queries and documents, in each form of rows that rerankers learn from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpuft.config.conflicts import refuse_conflicts
from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.files import cache_folder
from cpuft.kernels import plain_torch
from cpuft.tasks import TASKS
from cpuft.train.data import hard_negatives
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.describe import describe_data
from cpuft.train.data.embedding_pairs import read_pairs
from cpuft.train.data.prepare import prepare
from cpuft.train.data.recipe import check_recipe
from cpuft.train.data.relevance import number_queries, read_documents_to_predict, read_relevance
from cpuft.train.data.show import format_summary, summarize
from cpuft.train.data.sources import Examples, TaskData
from tests.train.rerank import list_rows, make_config, write_csv

TASK = TASKS["rerank"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(folder: Path, rows: list[dict[str, Any]], **options: Any) -> TaskData:
    """The rows for training and for validation."""
    file = write_rows(folder / "rows.jsonl", rows)
    return read_relevance(TASK, TrainConfig(task="rerank", train_file=file, validation_file=file, **options))


def list_train(data: TaskData) -> list[tuple[str, ...]]:
    found = data.train.load()
    return [(*texts, f"{label:g}") for texts, label in zip(found.texts, found.labels)]


LABELLED = [("a", "x", "1"), ("a", "y", "0"), ("b", "y", "0.5")]


@pytest.mark.parametrize(
    ("columns", "options"),
    [
        (("query", "document", "label"), {}),
        (("query", "passage", "score"), {}),
        (("question", "answer", "relevance"), {}),
        (("sentence1", "sentence2", "label"), {}),
        (("query", "positive", "label"), {}),
        (("q", "d", "s"), {"text_columns": "q, d", "label_column": "s"}),
    ],
)
def test_rows_with_labels(columns: tuple[str, ...], options: dict[str, Any], tmp_path: Path) -> None:
    data = read(tmp_path, [dict(zip(columns, row), other="z") for row in LABELLED], **options)
    assert list_train(data) == LABELLED
    assert (data.task.texts, data.task.label) == (columns[:2], columns[2])
    validation = data.validation[""].load()
    assert validation.labels == [(1.0, 0.0), (0.0, 0.0), (0.5, 1.0)]


def test_labels_may_be_true_and_false(tmp_path: Path) -> None:
    rows = [{"query": "a", "document": "x", "label": True}, {"query": "a", "document": "y", "label": False}]
    assert list_train(read(tmp_path, rows)) == [("a", "x", "1"), ("a", "y", "0")]


WANTED = [("a", "x", "1"), ("a", "y", "0"), ("a", "z", "0"), ("b", "z", "1"), ("b", "x", "0")]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (
            [
                {"anchor": "a", "positive": "x", "negative_1": "y", "negative_2": "z"},
                {"anchor": "b", "positive": "z", "negative_1": "x", "negative_2": ""},
            ],
            {},
        ),
        (
            [
                {"query": "a", "positive": ["x"], "negative": ["y", "z"], "score": 7},
                {"query": "b", "positive": ["z"], "negative": ["x"], "score": 8},
            ],
            {},
        ),
        ([{"q": "a", "p": "x", "n": "y", "m": "z"}, {"q": "b", "p": "z", "n": "x"}], {"text_columns": "q,p,n,m"}),
    ],
)
def test_rows_with_irrelevant_documents(rows: list[dict[str, Any]], options: dict[str, Any], tmp_path: Path) -> None:
    data = read(tmp_path, rows, **options)
    assert list_train(data) == WANTED
    assert data.task.label == "relevant"


def test_rows_without_a_score_may_be_left_out_and_are_counted_in_both_files(tmp_path: Path) -> None:
    rows = [dict(zip(("query", "document", "label"), row)) for row in (*LABELLED, ("c", "z", ""))]
    data = read(tmp_path, rows, skip_unlabelled=True)
    assert list_train(data) == LABELLED
    assert len(data.validation[""]) == len(LABELLED)
    assert [note.partition(" of ")[0] for note in data.notes] == ["1 row"] * 2


def test_rows_for_validation_may_have_the_other_form(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [{"anchor": "a", "positive": "x", "negative": "y"}])
    validation = write_csv(tmp_path / "validation.csv", ("query", "passage", "score"), list(LABELLED))
    data = read_relevance(TASK, TrainConfig(task="rerank", train_file=train, validation_file=validation))
    assert list_train(data) == [("a", "x", "1"), ("a", "y", "0")]
    assert data.task.texts == ("anchor", "positive, negative")
    assert data.validation[""].load().labels == [(1.0, 0.0), (0.0, 0.0), (0.5, 1.0)]
    bare = write_csv(tmp_path / "bare.csv", ("query", "passage"), [("a", "x")])
    with pytest.raises(CpuftError, match=r"bare.csv has neither a column of labels nor columns of irrelevant"):
        read_relevance(TASK, TrainConfig(task="rerank", train_file=train, validation_file=bare))


def test_a_document_is_validated_once_and_as_relevant_if_it_is_that_in_one_row(tmp_path: Path) -> None:
    rows = [
        {"query": "a", "positive": "x", "negative": "y"},
        {"query": "b", "positive": "y", "negative": "x"},
        {"query": "a", "positive": "z", "negative": "x"},
        {"query": "b", "positive": "y", "negative": "x"},
    ]
    found = read(tmp_path, rows).validation[""].load()
    assert found.texts == [("a", "x"), ("a", "y"), ("b", "y"), ("b", "x"), ("a", "z")]
    assert found.labels == [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)]


def test_queries_are_not_divided_between_training_and_validation(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "rows.csv", ("query", "document", "label"), list(list_rows(30, 0)))
    data = read_relevance(TASK, TrainConfig(task="rerank", train_file=file, validation_split=0.2))
    train, validation = data.train.load(), data.validation[""].load()
    assert (len(train), len(validation)) == (96, 24)
    assert not {texts[0] for texts in train.texts} & {texts[0] for texts in validation.texts}


BAD: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    (
        [{"query": "a", "document": "x", "label": 1}, {"query": "a", "document": "y", "label": 4}],
        {},
        "line 2: the score 4 is not from 0 to 1: divide all scores by the largest one, so that 1 is relevant",
    ),
    ([{"query": "a", "document": "x", "label": -0.5}], {}, "line 1: the score -0.5 is not from 0 to 1: divide"),
    ([{"query": "a", "document": "x", "label": "nan"}], {}, "line 1: the score nan is not from 0 to 1: divide"),
    ([{"query": "a", "document": "x", "label": "good"}], {}, "line 1: score 'good' is not a number: correct"),
    (
        [{"query": "a", "document": "x", "label": 1}, {"query": "a", "document": "y"}],
        {},
        "line 2 has no 'label': correct",
    ),
    ([{"query": "a", "document": " ", "label": 1}], {}, "line 1 has no 'document': correct or remove that line"),
    ([{"query": "", "document": "x", "label": 1}], {}, "line 1 has no 'query': correct or remove that line"),
    ([{"query": ["a"], "document": "x", "label": 1}], {}, "line 1: 'query' must be one text"),
    ([{"query": "a", "positive": "", "negative": "y"}], {}, "line 1 has no 'positive': correct or remove that line"),
    (
        [{"query": "a", "document": "x", "label": 1}],
        {},
        "all rows of .*rows.jsonl have one label: find irrelevant documents with --hard-neg",
    ),
    (
        [{"query": "a", "document": "x", "label": 1}, {"query": "b", "document": "y", "label": 0}],
        {},
        "no validation query in .* has both relevant and irrelevant documents: give more",
    ),
    (
        [{"query": "a", "positive": "x"}],
        {},
        "has neither a column of labels nor columns of irrelevant documents, .* find .* with --hard-negatives 5",
    ),
    ([{"a": "a", "b": "x"}], {}, r"has no columns anchor and positive, nor a usual pair \(a, b\): name"),
    ([{"a": "a", "b": "x"}], {"text_columns": "a"}, "--text-columns 'a' is not valid: name the columns of anchor"),
    ([{"a": "a", "b": "x"}], {"text_columns": "a,c"}, "has no column 'c'"),
    ([{"query": "a", "document": "x"}], {"label_column": "stars"}, "has no column 'stars'.*: give the name of the"),
    (
        [{"query": "a", "positive": "x", "negative": "y"}],
        {"hard_negatives": 2},
        r"finds irrelevant documents for rows without any, and .* has some \(negative\): leave --hard-negatives out",
    ),
    (
        [{"query": "a", "document": "x", "label": 1}, {"query": "a", "document": "y", "label": 0}],
        {"hard_negatives": 2},
        r"for rows without any, and .* has some \(.*line 2\): leave --hard-negatives out",
    ),
]


@pytest.mark.parametrize(("rows", "options", "message"), BAD)
def test_bad_input(rows: list[dict[str, Any]], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=message):
        read(tmp_path, rows, **options)


def test_no_file_too_few_queries_and_options_that_do_not_fit(tmp_path: Path, own_cache: None) -> None:
    with pytest.raises(CpuftError, match="--task rerank needs --train-file: give a file"):
        read_relevance(TASK, TrainConfig(task="rerank"))
    file = write_csv(tmp_path / "one.csv", ("query", "document", "label"), list(list_rows(1, 0)))
    with pytest.raises(CpuftError, match=r"one.csv has 1 different row in 'query', too few to take some"):
        read_relevance(TASK, TrainConfig(task="rerank", train_file=file))
    config = make_config(tmp_path, class_weights="balanced")
    with pytest.raises(CpuftError, match="--class-weights is for one class per example or word"):
        check_recipe(config, read_prepared(str(prepare(config))))
    unfit: list[dict[str, Any]] = [{"pooling": "cls"}, {"label_type": "number"}, {"mining_model": "minilm"}]
    for options in unfit:
        with pytest.raises(CpuftError, match=r"leave .*out"):
            refuse_conflicts(TrainConfig(task="rerank", **options))
    with pytest.raises(
        CpuftError, match="--hard-negatives has no effect with --task files: leave it out, or give --task pairs or"
    ):
        refuse_conflicts(TrainConfig(task="files", hard_negatives=2))


def test_what_is_said_of_the_data(tmp_path: Path, own_cache: None) -> None:
    config = make_config(tmp_path)
    prepared = read_prepared(str(prepare(config)))
    assert prepared.metrics == ("ndcg@10", "mrr@10", "map")
    assert prepared.train.labels.shape == (96,)
    assert prepared.validation[""].labels.shape == (40, 2)
    said = describe_data(prepared, config)
    assert "labels: scores from 0 to 1, 24 examples of 96 with relevant documents; columns: query, document" in said
    summary = summarize(config)
    assert summary.problems == []
    assert [split.scores for split in summary.splits] == [[0.0, 0.25, 1.0]] * 2
    assert format_summary(summary)[0] == "task       rerank: how relevant a document is to a query"


def ask(folder: Path, rows: list[dict[str, Any]], **options: Any) -> tuple[tuple[str, ...], Examples]:
    request = PredictConfig(file=write_rows(folder / "new.jsonl", rows), **options)
    task, examples = read_documents_to_predict(TASK, request, TrainConfig(task="rerank"))
    return task.texts, examples


def test_rows_to_predict_keep_their_order_and_may_have_labels(tmp_path: Path) -> None:
    rows = [{"query": query, "passage": text} for query, text in (("b", "x"), ("a", "x"), ("b", "x"))]
    columns, found = ask(tmp_path, rows)
    assert columns == ("query", "passage")
    assert (found.texts, found.has_labels) == ([("b", "x"), ("a", "x"), ("b", "x")], False)
    for label in ("", "nan"):
        _, found = ask(tmp_path, [{**row, "label": 1} for row in rows[1:]] + [{**rows[0], "label": label}])
        assert (len(found), found.has_labels) == (3, False)
    _, found = ask(tmp_path, [{**row, "label": 1} for row in rows])
    assert found.labels == [(1.0, 0.0), (1.0, 1.0), (1.0, 0.0)]
    assert found.has_labels
    _, found = ask(tmp_path, [{"query": "a", "positive": "x", "negative": "y"}])
    assert (found.texts, found.labels) == ([("a", "x"), ("a", "y")], [(1.0, 0.0), (0.0, 0.0)])
    assert number_queries(Examples([], [])).labels == []


ANIMALS = {
    "which animal barks": "Dogs bark at strangers.",
    "which animal purrs": "Cats purr when they are content.",
    "what do bees make": "Bees make honey from nectar.",
    "what do spiders spin": "Spiders spin webs of silk.",
    "which bird cannot fly": "Penguins swim but cannot fly.",
    "what do silkworms spin": "Silkworms spin cocoons of silk.",
}


@pytest.fixture
def plain(own_cache: None) -> Iterator[None]:
    """No kernels are compiled into the empty cache folder."""
    with plain_torch():
        yield


def mined(folder: Path, **options: Any) -> TrainConfig:
    rows: list[tuple[str, ...]] = [*ANIMALS.items(), ("which animal barks", "Seals bark, too.")]
    file = write_csv(folder / "animals.csv", ("question", "answer"), rows)
    usual = {"train_file": file, "validation_file": file, "hard_negatives": 2}
    return TrainConfig(**{"task": "rerank", **usual, **options})


def test_irrelevant_documents_are_found_once_for_each_query_and_kept(
    tmp_path: Path, plain: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = list_train(read_relevance(TASK, mined(tmp_path)))
    assert "finding hard negatives for 6 queries among 7 documents with minilm" in capsys.readouterr().err
    by_query = {query: [row[1:] for row in found if row[0] == query] for query in ANIMALS}
    spiders = by_query["what do spiders spin"]
    assert spiders[:2] == [(ANIMALS["what do spiders spin"], "1"), (ANIMALS["what do silkworms spin"], "0")]
    barking = by_query["which animal barks"]
    assert sorted(label for _, label in barking) == ["0", "0", "1", "1"], "both of its documents are relevant"
    assert len(found) == len({row[:2] for row in found})

    from cpuft.train import embedder

    def fail(*_: Any, **__: Any) -> Any:
        raise AssertionError("the result is in the cache")

    monkeypatch.setattr(embedder, "Embedder", fail)
    assert list_train(read_relevance(TASK, mined(tmp_path))) == found
    for path in cache_folder(os.environ).glob("negatives-*"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(AssertionError, match="in the cache"):
        read_relevance(TASK, mined(tmp_path))


def test_irrelevant_documents_for_validation_may_be_there_already(tmp_path: Path, plain: None) -> None:
    rows = [("a", "x", "1"), ("a", "y", "0")]
    validation = write_csv(tmp_path / "validation.csv", ("query", "document", "label"), list(rows))
    data = read_relevance(TASK, mined(tmp_path, validation_file=validation))
    assert data.validation[""].load().texts == [("a", "x"), ("a", "y")]
    assert len(data.train) == 7 + 2 * len(ANIMALS)


def test_pairs_get_the_same_number_of_negatives_in_each_row(tmp_path: Path, plain: None) -> None:
    data = read_pairs(TASKS["pairs"], mined(tmp_path, task="pairs"))
    assert data.task.texts == ("question", "answer", "negative_1", "negative_2")
    rows = {texts[0]: texts for texts in data.train.load().texts}
    assert rows["what do spiders spin"][2] == ANIMALS["what do silkworms spin"]
    assert {len(texts) for texts in rows.values()} == {4}


def test_what_finds_no_negatives(tmp_path: Path, plain: None) -> None:
    with pytest.raises(CpuftError, match=r"animals.csv has 7 different documents, too few for --hard-negatives 7"):
        read_relevance(TASK, mined(tmp_path, hard_negatives=7))
    with pytest.raises(CpuftError, match=r"needs an embedding model, and bert-base is none .*--mining-model minilm"):
        read_relevance(TASK, mined(tmp_path, from_config="bert-base"))
    with pytest.raises(CpuftError, match=r"there is no folder ./nowhere: give --mining-model the"):
        read_relevance(TASK, mined(tmp_path, mining_model="./nowhere"))
    empty = write_csv(tmp_path / "empty.csv", ("question", "answer"), [("", "")])
    with pytest.raises(CpuftError, match="has no rows with 'question' and 'answer': give rows of both"):
        read_relevance(TASK, mined(tmp_path, train_file=empty))
    assert hard_negatives.name_negatives(2) == ("negative_1", "negative_2")
