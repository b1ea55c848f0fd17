"""What is listed of each kind of predictions, and how it is shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cpuft.errors import CpuftError
from cpuft.judge.model_errors import format_errors, list_errors, list_sections, summarize
from cpuft.judge.predictions import RunPredictions
from tests.conftest import Golden
from tests.judge.predicted import make_predictions

GREAT = "A great film, and a great evening, which I would spend like this again at any time."


def make_reviews(**changes: Any) -> RunPredictions:
    """Reviews, most of them good, with a wrong label in row 2 and a contradiction in rows 2 and 4."""
    texts = ["Not \x1b[31mbad\x1b[0m\nat all\u202e", "x" * 1_000_000, GREAT, "Awful", GREAT.upper(), "Boring " * 60]
    labels = ["good", "bad", "bad", "bad", "good", "bad"]
    good = np.asarray([0.4, 0.55, 0.97, 0.1, 0.98, 0.2], np.float32)
    is_good = np.asarray(labels) == "good"
    columns: dict[str, Any] = {
        "text": [[text] for text in texts],
        "label": labels,
        "prediction": np.where(good > 0.5, "good", "bad").astype(object),
        "confidence": np.maximum(good, 1 - good),
        "label_probability": np.where(is_good, good, 1 - good),
        "probabilities": list(np.stack([1 - good, good], 1)),
    }
    return make_predictions("class", ("accuracy",), ("bad", "good"), **columns | changes)


def test_errors_on_a_terminal(golden: Golden) -> None:
    found = list_errors("runs/reviews", make_reviews(), 20)
    text = format_errors(found)
    golden("errors.txt", text)
    assert all(character.isprintable() or character == "\n" for character in text)
    assert [one.row for one in found.worst] == [2, 0, 1]
    assert [one.row for one in list_errors("", make_reviews(), 1).worst] == [2]
    assert max(len(text) for one in found.worst for text in one.texts) == 500


def test_a_label_that_is_not_among_the_worst_predictions_is_listed_by_itself() -> None:
    found = list_errors("", make_reviews(), 20)
    assert (found.suspected, [one.row for one in found.suspects]) == (2, [2, 0])
    assert [heading for heading, _ in list_sections(found)] == [
        "Worst predictions, sorted by probability",
        "Similar texts with different labels",
    ]
    heading, others = list_sections(dataclasses.replace(found, worst=found.worst[:1]))[-1]
    assert heading == "Other labels that may be wrong"
    assert [description for description, _ in others] == ["row 0: label good (0.400), more likely bad"]


QUERIES = np.asarray([0, 0, 0, 1, 1, 2])
KINDS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (
        "labels",
        {
            "label": [["a"], ["a", "b"], [], ["a"], ["c"]],
            "prediction": [["a"], ["b", "c"], [], ["a"], []],
            "probabilities": [[0.9, 0.1, 0.1], [0.2, 0.9, 0.7], [0.1, 0.1, 0.1], [0.9, 0.1, 0.1], [0.1, 0.1, 0.1]],
        },
        "2 of 5 validation rows are predicted wrongly. Labels that may be wrong: 2. Rows are counted from 0.",
        [
            "row 4: label c, prediction not c, probability 0.900; the label may be wrong",
            "row 1: label a, b, prediction not a, probability 0.800; the label may be wrong",
        ],
    ),
    (
        "labels",
        {"label": [["a"], ["a", "b"], []], "prediction": [["a"], ["b", "c"], ["c"]]},
        "2 of 3 validation rows are predicted wrongly. Rows are counted from 0.",
        [
            "row 1: label a, b, prediction b, c, wrong labels 2",
            "row 2: label none, prediction c, wrong labels 1",
        ],
    ),
    (
        "tags",
        {"label": [["O", "O"], ["O", "PER", "O"]], "prediction": [["O", "PER"], ["PER", "O", "O"]]},
        "2 of 2 validation rows are predicted wrongly. Rows are counted from 0.",
        ["row 1: wrong tags 2", "row 0: wrong tags 1"],
    ),
    (
        "score",
        {"label": [1.0, 2.0, 5.0], "prediction": [1.0, 2.5, 1.25]},
        "3 validation rows. Rows are counted from 0.",
        ["row 2: label 5, prediction 1.25, difference 3.75", "row 1: label 2, prediction 2.5, difference 0.5"],
    ),
    (
        "similarity",
        {"label": [0.0, 1.0, 5.0, 4.0], "prediction": [0.1, 0.2, 0.25, 0.99]},
        "4 validation rows. Rows are counted from 0.",
        [
            "row 2: label 5, prediction 0.25, difference of ranks 0.25",
            "row 3: label 4, prediction 0.99, difference of ranks 0.25",
        ],
    ),
    (
        "pairs",
        {"mrr@10": [1.0, 0.0, 0.5], "ndcg@10": [1.0, 0.25, 0.125]},
        "ndcg@10 is below 1 for 2 of 3 queries.",
        ["query 2: ndcg@10 0.1250", "query 1: ndcg@10 0.2500"],
    ),
    (
        "relevance",
        {"query": QUERIES, "label": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], "prediction": [0.1, 0.9, 0.5, 0.2, 0.8, 0.3]},
        "ndcg@10 is below 1 for 1 of 3 queries.",
        ["query 0: ndcg@10 0.5000"],
    ),
]


@pytest.mark.parametrize("kind, columns, summary, worst", KINDS)
def test_each_kind_is_sorted_by_what_is_wrong_with_it(
    kind: str, columns: dict[str, Any], summary: str, worst: list[str]
) -> None:
    predictions = make_predictions(
        kind, ("loss", "ndcg@10") if kind == "pairs" else ("ndcg@10",), ("a", "b", "c"), **columns
    )
    found = list_errors("run", predictions, 20)
    assert summarize(found) == summary
    assert [description for description, _ in list_sections(found)[0][1]] == worst


def test_the_document_that_is_ranked_first_stands_below_a_query() -> None:
    predictions = make_predictions(
        "relevance",
        ("mrr@10",),
        query=QUERIES,
        label=[1.0, 0.0, 0.0, 0.0, 1.0, 1.0],
        prediction=[0.1, 0.9, 0.5, 0.2, 0.8, 0.3],
        text=[["why?", f"document {number}"] for number in range(6)],
    )
    (one,) = list_errors("run", predictions, 20).worst
    assert one.texts == ("why?", "document 1")
    assert one.figure == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "text, marked",
    [
        ("Ada met Bob", "Ada [PER, predicted O] met Bob [PER, predicted ORG]"),
        ("Ada met Bob in York", "Ada met Bob in York [word 1: PER, predicted O] [word 3: PER, predicted ORG]"),
    ],
)
def test_wrong_tags_stand_beside_their_words(text: str, marked: str) -> None:
    columns: dict[str, Any] = {"text": [[text]], "label": [["PER", "O", "PER"]], "prediction": [["O", "O", "ORG"]]}
    (one,) = list_errors("run", make_predictions("tags", ("f1",), **columns), 20).worst
    assert one.texts == (marked,)


def test_without_texts_and_without_errors() -> None:
    private = make_reviews()
    private = RunPredictions(private.about, private.table.drop_columns("text"))
    said = format_errors(list_errors("run", private, 20))
    assert "\nThey have no texts: a run keeps " in said
    assert "row 2: label bad, prediction good, probability 0.970; the label may be wrong\n" in said
    right = make_reviews()
    right = RunPredictions(right.about, right.table.filter(np.asarray([False, False, False, True, True, True])))
    assert format_errors(list_errors("run", right, 20)) == "run: No wrong prediction in 3 validation rows.\n"


def test_a_model_that_has_diverged_is_listed_nevertheless() -> None:
    nothing = np.full(6, np.nan, np.float32)
    lost = make_reviews(confidence=nothing, label_probability=nothing, probabilities=list(np.stack([nothing] * 2, 1)))
    found = list_errors("run", lost, 20)
    assert (found.wrong, found.suspected, found.worst[0].figure) == (3, 0, 0.0)


def test_a_column_that_is_missing_is_named() -> None:
    found = make_reviews()
    with pytest.raises(CpuftError, match=r"^run/predictions.parquet has no column confidence: fetch or train the run"):
        list_errors("run", RunPredictions(found.about, found.table.drop_columns("confidence")), 20)
