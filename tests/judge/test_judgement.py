"""What validation rows say about a model: the values of the libraries, and intervals that hold."""

from __future__ import annotations

import itertools
import math
import tracemalloc
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import classification_report as report_entities
from seqeval.metrics import f1_score as score_entities
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    accuracy_score,
    confusion_matrix,
    f1_score,
    matthews_corrcoef,
    mean_absolute_error,
    ndcg_score,
    precision_recall_fscore_support,
    root_mean_squared_error,
)
from sklearn.preprocessing import MultiLabelBinarizer

from cpuft.judge.judgement import MOST_CLASSES, Judgement, judge
from cpuft.judge.resampling import MetricEstimate
from tests.judge.made import FIVE, make_classes, make_five_classes, make_predictions


@pytest.fixture(autouse=True)
def _refuse_warnings() -> Iterator[None]:
    """Nothing is divided by zero with a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def draw_classes(rows: int, names: tuple[str, ...], seed: int = 0) -> tuple[NDArray[np.str_], NDArray[np.str_]]:
    generator = np.random.default_rng(seed)
    shares = np.arange(1, len(names) + 1) ** 2
    label = generator.choice(names, rows, p=shares / shares.sum())
    return label, np.where(generator.random(rows) < 0.7, label, generator.choice(names, rows))


def values(judgement: Judgement) -> dict[str, float]:
    return {name: one.value for name, one in judgement.metrics.items()}


@pytest.mark.parametrize("count", [2, 12, 30])
def test_classes_have_the_values_of_scikit_learn(count: int) -> None:
    names = tuple(f"c{number:02}" for number in range(count))
    label, found = draw_classes(400, names)
    metrics = {"matthews_correlation": float(matthews_corrcoef(label, found))}
    judgement = judge(make_classes(label.tolist(), found.tolist(), metrics, names))
    present = [one.name for one in judgement.classes]
    assert present == sorted({*label, *found})
    wanted = precision_recall_fscore_support(label, found, zero_division=math.nan)
    for one, precision, recall, f1, rows in zip(judgement.classes, *wanted):
        assert (one.f1.value, one.rows, one.predicted) == (f1, rows, (found == one.name).sum())
        assert np.array_equal([one.precision, one.recall], [precision, recall], equal_nan=True)
    expected = {
        **metrics,
        "accuracy": accuracy_score(label, found),
        "f1_macro": f1_score(label, found, average="macro"),
        "f1_weighted": f1_score(label, found, average="weighted"),
    }
    if count == 2:
        expected["f1"] = f1_score(label == names[1], found == names[1])
    assert values(judgement) == expected
    matrix = confusion_matrix(label, found)
    cells = {(one.label, one.prediction): one.rows for one in judgement.confusions}
    if count <= MOST_CLASSES:
        assert cells == {(present[a], present[b]): matrix[a, b] for a, b in zip(*np.nonzero(matrix))}
        assert all(one.f1.low < one.f1.value < one.f1.high for one in judgement.classes if 0 < one.f1.value < 1)
    else:
        np.fill_diagonal(matrix, 0)
        assert list(cells.values()) == sorted(matrix.ravel(), reverse=True)[: len(cells)]
    worst = judgement.classes[-1]
    wrong = [(found[(label == worst.name)] == name).sum() for name in present if name != worst.name]
    assert worst.mistaken == max(wrong)


def test_several_labels_have_the_values_of_scikit_learn() -> None:
    names, generator = ("a", "b", "c", "never"), np.random.default_rng(1)
    true = generator.random((150, 4)) < (0.5, 0.3, 0.1, 0)
    guess = true ^ (generator.random((150, 4)) < (0.1, 0.1, 0.2, 0))
    label, found = ([[names[place] for place in np.flatnonzero(row)] for row in rows] for rows in (true, guess))
    judgement = judge(make_predictions("labels", label, found, {"f1_micro": 0.5}, names))
    a, b = (MultiLabelBinarizer(classes=names).fit_transform(rows) for rows in (label, found))
    average = {name: f1_score(a, b, average=name, zero_division=0) for name in ("macro", "weighted")}
    assert values(judgement) == {
        "f1_micro": 0.5,  # what the record has is shown as it is
        "f1_macro": average["macro"],
        "accuracy": accuracy_score(a, b),
        "f1_weighted": average["weighted"],
    }
    wanted = precision_recall_fscore_support(a, b, zero_division=0)
    assert [(one.name, one.precision, one.recall, one.f1.value, one.rows) for one in judgement.classes] == [
        (names[place], *(float(part[place]) for part in wanted)) for place in range(3)
    ]


def test_entities_have_the_values_of_seqeval_and_other_tags_count_words() -> None:
    generator, tags = np.random.default_rng(2), ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    label = [generator.choice(tags, size).tolist() for size in generator.integers(3, 9, 120)]
    found = [
        [tag if generator.random() < 0.8 else str(generator.choice(tags)) for tag in sentence] for sentence in label
    ]
    judgement = judge(make_predictions("tags", label, found, {"f1": score_entities(label, found)}, tags))
    wanted = report_entities(label, found, output_dict=True)
    for one in judgement.classes:
        scores = (one.precision, one.recall, one.f1.value, one.rows)
        assert scores == pytest.approx(tuple(wanted[one.name].values()), rel=1e-12)
    averages = [wanted[f"{name} avg"]["f1-score"] for name in ("macro", "weighted")]
    assert [judgement.metrics[name].value for name in ("f1_macro", "f1_weighted")] == pytest.approx(averages, rel=1e-12)
    assert (judgement.unit, judgement.metrics["f1"].value) == ("entities", wanted["micro avg"]["f1-score"])
    assert judgement.classes[0].mistaken == max(
        sum(a[2:] == "LOC" and (b[2:] or b) == name for x, y in zip(label, found) for a, b in zip(x, y))
        for name in ("O", "PER")
    )

    words = [list(itertools.chain.from_iterable(rows)) for rows in (label, found)]
    judgement = judge(make_predictions("tags", label, found, {"accuracy": accuracy_score(*words)}, tags))
    assert judgement.unit == "words"
    assert values(judgement) == {
        "accuracy": accuracy_score(*words),
        "f1_macro": f1_score(*words, average="macro"),
        "f1_weighted": f1_score(*words, average="weighted"),
    }


def test_scores_have_the_values_of_scipy() -> None:
    generator = np.random.default_rng(3)
    label = generator.integers(0, 9, 300) / 2
    found = label + np.where(label > 3, 1.0, 0.0) + generator.normal(0, 0.3, 300)
    judgement = judge(make_predictions("score", label, found, {"pearson": pearsonr(label, found).statistic}))
    assert values(judgement) == pytest.approx(
        {
            "pearson": pearsonr(label, found).statistic,
            "spearman": spearmanr(label, found).statistic,
            "mean_absolute_error": mean_absolute_error(label, found),
            "mean_error": (found - label).mean(),
            "root_mean_squared_error": root_mean_squared_error(label, found),
        },
        rel=1e-12,
    )
    worst = max(judgement.ranges, key=lambda one: one.metrics["mean_error"].value)
    assert (worst.name, worst.rows) == ("3.5 to 4", (label >= 3.5).sum())
    assert worst.metrics["mean_error"].value == pytest.approx((found - label)[label >= 3.5].mean())


def test_the_bootstrap_draws_rows() -> None:
    generator, names = np.random.default_rng(4), ("a", "b", "c")
    label, found = draw_classes(150, names)
    scores = generator.normal(size=150)
    others = np.round(scores + generator.normal(size=150), 1)
    drawn = [generator.integers(0, 150, 150) for _ in range(1000)]
    judged = judge(make_classes(label.tolist(), found.tolist(), {}, names)).metrics
    judged |= judge(make_predictions("similarity", scores, others, {"spearman": 0.5})).metrics
    for name, samples in (
        ("f1_macro", [f1_score(label[rows], found[rows], average="macro") for rows in drawn]),
        ("spearman", [spearmanr(scores[rows], others[rows]).statistic for rows in drawn]),
    ):
        low, high = np.quantile(samples, (0.025, 0.975))
        assert (judged[name].low, judged[name].high) == pytest.approx((low, high), abs=0.02), name


def test_queries_are_drawn_as_a_whole() -> None:
    query = np.repeat(np.arange(20), 5)
    label, found = np.tile([1.0, 0, 0, 1, 0], 20), np.random.default_rng(5).random(100)
    wanted = [ndcg_score([label[start : start + 5]], [found[start : start + 5]], k=10) for start in range(0, 100, 5)]
    languages = np.where(query < 10, "en", "de").tolist()
    made = make_predictions("relevance", label, found, {"ndcg@10": 0.5}, query=query, slice=languages, slice_by="lang")
    reranked = judge(made)
    columns: dict[str, Any] = {"ndcg@10": np.asarray(wanted)}
    searched = judge(make_predictions("pairs", np.arange(20), np.arange(20), {"ndcg@10": 0.5}, **columns))
    for judgement in (reranked, searched):
        assert (judgement.unit, judgement.rows, judgement.lengths) == ("queries", 20, [])
        assert judgement.metrics == searched.metrics
    means = {one.name: (one.rows, one.metrics["ndcg@10"].value) for one in reranked.slices}
    assert means["en"] == pytest.approx((10, np.mean(wanted[:10])))
    assert means["de"] == pytest.approx((10, np.mean(wanted[10:])))


def test_calibration_is_that_of_scikit_learn_and_of_its_definition() -> None:
    generator = np.random.default_rng(6)
    sure = generator.random(500).astype(np.float32)
    right = generator.random(500) < sure * 0.8
    label, found = ["a"] * 500, np.where(right, "a", "b").tolist()
    calibration = judge(make_classes(label, found, {}, ("a", "b"), confidence=sure)).calibration
    assert calibration is not None
    shares, means = calibration_curve(right, sure.astype(np.float64), n_bins=15)
    assert [one.accuracy for one in calibration.bins] == pytest.approx(shares)
    assert [one.confidence for one in calibration.bins] == pytest.approx(means)
    counts = [one.rows for one in calibration.bins]
    assert calibration.error == pytest.approx(np.average(np.abs(shares - means), weights=counts))
    sure[:2] = math.nan
    calibration = judge(make_classes(label, found, {}, ("a", "b"), confidence=sure)).calibration
    assert calibration is not None
    assert sum(one.rows for one in calibration.bins) == 498
    assert judge(make_classes(label, found, {}, ("a", "b"), confidence=sure * math.nan)).calibration is None


def test_parts_are_judged_by_themselves() -> None:
    judgement = judge(make_five_classes())
    assert [one.name for one in judgement.lengths] == ["3 to 12", "13 to 22", "23 to 32", "33 to 42"]
    assert sum(one.rows for one in judgement.lengths) == judgement.rows == 414
    assert sorted(one.name for one in judgement.slices) == ["de", "en", "fr"]
    made = make_five_classes()
    label, found, language = (made.column(name) for name in ("label", "prediction", "slice"))
    (english,) = (one for one in judgement.slices if one.name == "en")
    wanted = accuracy_score(label[language == "en"], found[language == "en"])
    assert english.metrics["accuracy"].value == wanted

    many = judge(make_classes(label, found, {}, FIVE, slice=[str(row) for row in range(414)], slice_by="id"))
    assert (len(many.slices), many.values) == (20, 414)
    interval = many.slices[0].metrics["accuracy"]
    assert (interval.low, interval.high) in [pytest.approx((0.2065, 1), abs=1e-4), pytest.approx((0, 0.7935), abs=1e-4)]


def test_only_the_first_split_counts() -> None:
    splits = [""] * 4 + ["_mismatched"] * 4
    label, found = ["a", "b"] * 4, ["a", "b"] * 2 + ["a"] * 4
    made = make_classes(label, found, {"accuracy": 1.0, "accuracy_mismatched": 0.5}, ("a", "b"), split=splits)
    judgement = judge(made)
    assert judgement.rows == 4
    assert judgement.metrics["accuracy_mismatched"] == pytest.approx(
        MetricEstimate(0.5, math.nan, math.nan), nan_ok=True
    ) or (math.isnan(judgement.metrics["accuracy_mismatched"].low))


def test_what_is_undefined_is_no_number() -> None:
    judgement = judge(make_classes(["a", "a", "b"], ["a", "c", "a"], {}, ("a", "b", "c", "absent")))
    scores = [(one.name, one.rows, one.predicted, one.precision, one.recall) for one in judgement.classes]
    assert np.array_equal(
        np.asarray([row[1:] for row in scores]),
        np.asarray([(2, 2, 0.5, 0.5), (1, 0, math.nan, 0), (0, 1, 0, math.nan)]),
        equal_nan=True,
    )
    assert [row[0] for row in scores] == ["a", "b", "c"]

    # Without a mistake, the bootstrap says nothing; for a share of rows, there is an interval all the same.
    alone = judge(make_classes(["a"] * 30, ["a"] * 30, {"accuracy": 1.0, "f1": 0.0}, ("a", "b")))
    assert (alone.metrics["accuracy"].low, alone.metrics["accuracy"].high) == pytest.approx((0.8865, 1), abs=1e-4)
    assert math.isnan(alone.metrics["f1_macro"].low)
    assert [(one.name, one.mistaken) for one in alone.classes] == [("a", 0)]
    one_row = judge(make_classes(["a"], ["b"], {"accuracy": 0.0}, ("a", "b")))
    assert (one_row.rows, one_row.lengths) == (1, [])

    label = np.asarray([1.0, 2.0, 3.0, 4.0])
    broken = judge(make_predictions("score", label, [1.0, math.nan, 3.0, math.inf], {"pearson": math.nan}))
    assert all(math.isnan(one.value) and math.isnan(one.low) for one in broken.metrics.values())
    constant = judge(make_predictions("score", label, [1.0] * 4, {"pearson": 0.0}))
    assert constant.metrics["spearman"].value == 0


def test_ten_thousand_classes_take_little_memory() -> None:
    names = tuple(f"c{number}" for number in range(10_000))
    label, found = draw_classes(20_000, names)
    made = make_classes(label.tolist(), found.tolist(), {}, names)
    tracemalloc.start()
    try:
        judgement = judge(made)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 250e6  # a confusion matrix of all classes takes 800 MB
    macro = f1_score(label, found, average="macro", zero_division=0)  # adds the classes in another order
    assert judgement.metrics["f1_macro"].value == pytest.approx(macro, rel=1e-14)
    assert (len(judgement.confusions), len(judgement.classes)) == (20, len({*label, *found}))


def test_the_order_of_rows_changes_nothing() -> None:
    made = make_five_classes()
    mixed = replace(made, table=made.table.take(np.random.default_rng(0).permutation(len(made.table))))
    assert judge(mixed) == judge(made)
