"""Where a model errs: its worst predictions, similar texts with different labels, labels that are probably wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.errors import CpuftError, counted, escape_controls, requires
from cpuft.judge.contradictions import MOST_CHARACTERS, find_contradictions
from cpuft.judge.metrics import LEAST_RELEVANT, measure_rankings
from cpuft.judge.predictions import FILE_NAME, QUERY_KINDS, RunPredictions, explain_damage
from cpuft.judge.wrong_labels import name_opposites, rank_labels
from cpuft.terminal import WIDTH

_COLUMNS = {
    "class": ("label", "prediction", "confidence", "label_probability"),
    "pairs": (),
    "relevance": ("query", "label", "prediction"),
}
"""The columns that a kind needs beside split and row; other kinds need label and prediction."""
_NUMBER_KINDS = ("score", "similarity")
_FORM: Any = {"initial_indent": "    ", "subsequent_indent": "    ", "placeholder": " ..."}
"""The form of a text on a terminal."""


@dataclass(frozen=True)
class Example:
    """A validation row or a query, and what was predicted for it."""

    split: str
    row: int
    """Number of the row in its split, from 0; for pairs and relevance, the number of the query."""
    texts: tuple[str, ...]
    """The beginnings of its texts; empty if the run keeps none. For tags, one text, in which the tag and the predicted
    tag follow each wrong word. For relevance, the query and the document that is ranked first."""
    label: str
    prediction: str
    """The prediction; for a label that is probably wrong, the label that is more likely."""
    figure: float
    """What `Errors.figure` names; for a label that is probably wrong, the probability of this label."""
    is_suspect: bool


@dataclass(frozen=True)
class Contradiction:
    """Two rows with equal or near-identical texts and different labels."""

    first: Example
    second: Example
    similarity: float
    """From 0.9 to 1.0; 1.0 if the texts are equal but for case and spaces."""


@dataclass(frozen=True)
class Errors:
    """The errors of a run. Each list begins with the worst one, and may have fewer than the number before it."""

    run: str
    kind: str
    rows: int
    """Number of validation rows, or for pairs and relevance of queries."""
    figure: str
    """What sorts the worst predictions: probability (of the prediction), difference, wrong tags, or a metric's name."""
    wrong: int
    """Number of wrong predictions: of numbers, those that differ at all; of queries, those with a metric below 1."""
    worst: tuple[Example, ...]
    contradictory: int
    contradictions: tuple[Contradiction, ...]
    suspected: int
    suspects: tuple[Example, ...]


@dataclass(frozen=True)
class _Rating:
    figure: str
    figures: NDArray[np.float64]
    wrong: list[int]
    """The wrong rows, the worst one first."""
    predictions: Sequence[str] = field(default_factory=list)
    """What is shown as the prediction of each row, if it is not that of the table."""


def list_errors(run: str, predictions: RunPredictions, most: int) -> Errors:
    """Return the errors of a run, at most `most` of each sort. Raises CpuftError: a column is missing or damaged, or a
    library is missing.
    """
    kind, columns = predictions.about.kind, predictions.table.column_names
    needed = ("split", "row", *_COLUMNS.get(kind, ("label", "prediction")))
    if missing := next((name for name in needed if name not in columns), ""):
        raise CpuftError(f"{run}/{FILE_NAME} has no column {missing}: fetch or train the run again")
    with explain_damage(run), requires("train", "errors are found with scikit-learn"):
        rating, ranking = _rate(predictions), rank_labels(predictions)
        contradictions = find_contradictions(predictions, rating.wrong)
        suspects = ranking.order[: ranking.count].tolist() if ranking else []
        is_suspect = frozenset(suspects).__contains__

        def make(row: int, figures: Any, shown: Sequence[str]) -> Example:
            return _make_example(
                predictions, row, float(figures[row]), shown[row] if len(shown) else "", is_suspect(row)
            )

        return Errors(
            run,
            kind,
            len({*predictions.table.column("query").to_pylist()}) if kind == "relevance" else len(rating.figures),
            rating.figure,
            len(rating.wrong),
            tuple(make(row, rating.figures, rating.predictions) for row in rating.wrong[:most]),
            len(contradictions),
            tuple(
                Contradiction(make(first, rating.figures, ()), make(second, rating.figures, ()), similarity)
                for first, second, similarity in contradictions[:most]
            ),
            len(suspects),
            tuple(make(row, ranking.probabilities, ranking.likely) for row in suspects[:most] if ranking),
        )


def _rate(predictions: RunPredictions) -> _Rating:
    kind, table = predictions.about.kind, predictions.table
    if kind in QUERY_KINDS:
        return _rate_queries(predictions)
    if kind == "class":
        is_wrong = predictions.column("label") != predictions.column("prediction")
        return _sort("probability", predictions.column("confidence"), is_wrong)
    if kind == "labels" and "probabilities" in table.column_names:
        is_label, is_predicted = (predictions.mark_classes(name) for name in ("label", "prediction"))
        probabilities = predictions.probabilities()
        wrong = np.where(is_label == is_predicted, -1.0, np.where(is_predicted, probabilities, 1 - probabilities))
        shown = name_opposites(predictions.about.classes, wrong.argmax(1), is_label)
        return _sort("probability", wrong.max(1), (is_label != is_predicted).any(1), shown)
    if kind in ("labels", "tags"):
        rows = zip(table.column("label").to_pylist(), table.column("prediction").to_pylist())
        counts = [len({*a} ^ {*b}) if kind == "labels" else sum(map(str.__ne__, a, b)) for a, b in rows]
        figures = np.asarray(counts, np.float64)
        return _sort(f"wrong {kind}", figures, figures > 0)
    label, prediction = predictions.column("label"), predictions.column("prediction")
    if kind == "similarity":  # cosines have another scale than the labels, and only their order counts
        label, prediction = _rank(label), _rank(prediction)
    figures = np.abs(label - prediction)
    return _sort("difference" if kind == "score" else "difference of ranks", figures, figures > 0)


def _sort(
    figure: str, figures: NDArray[np.float64], is_wrong: NDArray[np.bool_], predictions: Sequence[str] = ()
) -> _Rating:
    """Return the rating by a figure of each row, whose highest values are the worst."""
    figures = np.nan_to_num(figures.astype(np.float64))  # of a model whose loss has diverged
    order = np.argsort(-figures, kind="stable")
    return _Rating(figure, figures, order[is_wrong.astype(bool)[order]].tolist(), predictions)


def _rank(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the place of each value in their ascending order as a share of their number."""
    from scipy.stats import rankdata

    ranks: NDArray[np.float64] = rankdata(values) / max(1, len(values))
    return ranks


def _rate_queries(predictions: RunPredictions) -> _Rating:
    """Rate queries by the first metric. A reranker's query has the row of the document that is ranked first."""
    is_reranker = predictions.about.kind == "relevance"
    metrics = [name for name in predictions.about.metrics if is_reranker or name in predictions.table.column_names]
    if not metrics:
        raise CpuftError(f"{FILE_NAME} has no column of a metric: fetch or train the run again")
    if is_reranker:
        queries, scores = predictions.column("query"), predictions.column("prediction")
        best = np.lexsort((-scores, queries))
        best = best[np.flatnonzero(np.diff(queries[best], prepend=-1))]
        figures = np.ones(len(queries))
        relevant = predictions.column("label") >= LEAST_RELEVANT
        figures[best] = measure_rankings(metrics[0], scores, relevant, queries)
    else:
        figures = predictions.column(metrics[0]).astype(np.float64)
    order = np.argsort(figures, kind="stable")
    return _Rating(metrics[0], figures, order[figures[order] < 1].tolist())


def _make_example(predictions: RunPredictions, row: int, figure: float, shown: str, is_suspect: bool) -> Example:
    (cells,) = predictions.table.slice(row, 1).to_pylist()
    kind, texts = predictions.about.kind, [text[:MOST_CHARACTERS] for text in cells.get("text") or ()]
    label, prediction = cells.get("label", ""), cells.get("prediction", "")
    if kind == "tags":
        texts, label, prediction = _mark_words(texts, label, prediction), "", ""
    elif kind in QUERY_KINDS:
        label, prediction = "", ""
    number = cells["query"] if kind == "relevance" else cells["row"]
    return Example(
        cells["split"], number, tuple(texts), _format(label), shown or _format(prediction), figure, is_suspect
    )


def _mark_words(texts: Sequence[str], tags: Sequence[str], predicted: Sequence[str]) -> list[str]:
    """Return a text of words with both tags after each word where they differ, or at the end if words are missing."""
    words = " ".join(texts).split(" ")
    marks = [f" [{tag}, predicted {other}]" if tag != other else "" for tag, other in zip(tags, predicted)]
    if len(words) == len(marks):
        return [" ".join(map("".join, zip(words, marks)))]
    numbered = (f" [word {number}: {mark[2:]}" for number, mark in enumerate(marks, start=1) if mark)
    return ["".join([*texts, *numbered])] if texts else []


def _format(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def summarize(errors: Errors) -> str:
    """Return sentences: how many rows are predicted wrongly and, if any, how many labels may be wrong and how many
    pairs of similar texts have different labels; for queries, how many have a metric below 1; for scores and
    similarities, only how many rows.
    """
    count = counted(errors.rows, "validation row")
    if errors.kind in QUERY_KINDS:
        return f"{errors.figure} is below 1 for {errors.wrong} of {errors.rows} queries."
    if errors.kind in _NUMBER_KINDS:
        return f"{count}. Rows are counted from 0."
    if not errors.wrong:
        return f"No wrong prediction in {count}."
    parts = [f"{errors.wrong} of {count} {'is' if errors.wrong == 1 else 'are'} predicted wrongly."]
    parts += [f"Labels that may be wrong: {errors.suspected}."] * bool(errors.suspected)
    parts += [f"Pairs of similar texts with different labels: {errors.contradictory}."] * bool(errors.contradictory)
    return " ".join([*parts, "Rows are counted from 0."])


def list_sections(errors: Errors) -> list[tuple[str, list[tuple[str, tuple[str, ...]]]]]:
    """Return (heading, [(description, texts) of each example]) for each sort of errors that the run has; [] for none.

    Suspects that are among the worst predictions are not repeated.
    """
    shown = {(one.split, one.row) for one in errors.worst}
    others = [one for one in errors.suspects if (one.split, one.row) not in shown]
    pairs = list[tuple[str, tuple[str, ...]]]()
    for pair in errors.contradictions:
        first, second = _describe(pair.first), _describe(pair.second)
        if pair.similarity == 1:
            pairs.append((f"{first}; {second}; equal texts", pair.first.texts))
        else:
            pairs += [(first, pair.first.texts), (f"{second}, similarity {pair.similarity:.2f}", pair.second.texts)]
    worst = [(_describe_worst(errors, one), one.texts) for one in errors.worst]
    suspects = [(f"{_describe(one)} ({one.figure:.3f}), more likely {one.prediction}", one.texts) for one in others]
    sections = [
        (f"Worst predictions, sorted by {errors.figure}", worst),
        ("Similar texts with different labels", pairs),
        ("Other labels that may be wrong", suspects),
    ]
    return [(heading, examples) for heading, examples in sections if examples]


def _describe(example: Example) -> str:
    split = f" of {example.split.strip('_')}" if example.split else ""
    return f"row {example.row}{split}" + (f": label {example.label}" if example.label else "")


def _describe_worst(errors: Errors, example: Example) -> str:
    if errors.kind in QUERY_KINDS:
        return f"query {example.row}: {errors.figure} {example.figure:.4f}"
    if errors.kind == "tags":
        return f"{_describe(example)}: {errors.figure} {example.figure:.0f}"
    form = ".3f" if errors.figure == "probability" else ".4g"
    doubt = "; the label may be wrong" if example.is_suspect else ""
    return f"{_describe(example)}, prediction {example.prediction}, {errors.figure} {example.figure:{form}}{doubt}"


def format_errors(errors: Errors) -> str:
    """Return the errors as text that ends with a newline; control characters are escaped, texts cut to three lines."""
    lines = [f"{errors.run}: {summarize(errors)}"]
    sections = list_sections(errors)
    if sections and not any(texts for _, examples in sections for _, texts in examples):
        lines.append("They have no texts: a run keeps those of its first 100,000 rows, and none with --no-examples.")
    for heading, examples in sections:
        lines += ["", heading]
        for description, texts in examples:
            lines += ["", description]
            lines += [line for text in texts for line in textwrap.wrap(text, WIDTH, max_lines=3, **_FORM)]
    return "\n".join(map(escape_controls, lines)) + "\n"
