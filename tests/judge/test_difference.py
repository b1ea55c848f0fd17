"""Whether two runs differ: metrics, tests and intervals against others' and brute force, and what is said."""

from __future__ import annotations

import itertools
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow
import pytest
from scipy import stats

from cpuft.errors import CpuftError
from cpuft.judge import resampling
from cpuft.judge.difference import compare_predictions, describe_better, describe_difference
from cpuft.judge.metrics import compute_label_metrics, compute_tag_metrics
from cpuft.judge.predictions import RunPredictions
from cpuft.judge.weighted_metrics import observe
from cpuft.train.objective.relevance import compute_reranking_metrics
from tests.judge.predicted import make_classes, make_predictions

TAGS = ("O", "B-PER", "I-PER", "B-LOC")
LABELS = ("a", "b", "c", "d")


def predict(kind: str, random: np.random.Generator, rows: int) -> tuple[RunPredictions, dict[str, float]]:
    """Random predictions, and their metrics as training computes them."""
    metrics: tuple[str, ...]
    if kind in ("class", "binary"):
        labels = LABELS if kind == "class" else LABELS[:2]
        true, found = random.integers(len(labels), size=(2, rows))
        metrics = ("accuracy", "matthews_correlation", "f1_macro", *(("f1",) if kind == "binary" else ()))
        columns: dict[str, Any] = {name: np.take(labels, one) for name, one in (("label", true), ("prediction", found))}
        return make_predictions("class", metrics, labels, **columns), compute_label_metrics(
            metrics, found, true.astype(np.float32)
        )
    if kind == "labels":
        true, found = (random.random((2, rows, 4)) < 0.4).astype(np.float32)
        metrics = ("accuracy", "f1_micro", "f1_macro")
        names = [[[one for one, bit in zip(LABELS, row) if bit] for row in rows] for rows in (true, found)]
        made = make_predictions(kind, metrics, LABELS, label=names[0], prediction=names[1])
        return made, compute_label_metrics(metrics, found, true)
    if kind == "tags":
        words = random.integers(1, 6, rows)
        tags, guesses = [[[*map(str, random.choice(TAGS, count))] for count in words] for _ in range(2)]
        metrics = ("f1", "precision", "recall", "accuracy")
        made = make_predictions(kind, metrics, TAGS, label=tags, prediction=guesses)
        return made, compute_tag_metrics(metrics, guesses, tags)
    true = random.integers(0, 5, rows) / 4
    found = random.integers(0, 5, rows) / 2 + true
    if kind == "score":
        metrics = ("pearson", "spearman")
        made = make_predictions(kind, metrics, label=true, prediction=found)
        return made, compute_label_metrics(metrics, found, true.astype(np.float32))
    metrics, queries = ("ndcg@3", "mrr@10", "map"), random.integers(0, 5, rows)
    made = make_predictions("relevance", metrics, label=true, prediction=found, query=queries)
    return made, compute_reranking_metrics(metrics, found.astype(np.float32), true >= 0.5, queries)


@pytest.mark.parametrize("kind", ["class", "binary", "labels", "tags", "score", "relevance"])
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metrics_are_those_of_training(kind: str, rows: int) -> None:
    for seed in range(3):
        made, wanted = predict(kind, np.random.default_rng(seed), rows)
        found = {one.metric: one.b for one in compare_predictions(made, made).found}
        assert found == pytest.approx(wanted, abs=1e-9), seed


def test_rows_of_each_split_are_matched_by_their_numbers() -> None:
    a, b = make_classes(5, 2, 1)
    metrics = dict.fromkeys(("accuracy", "accuracy_mismatched", "f1_mismatched", "bleu"), 0.0)
    splits = pyarrow.array(["", "_mismatched"] * 4)
    a, b = (
        replace(one, about=replace(one.about, metrics=metrics), table=one.table.set_column(0, "split", splits))
        for one in (a, b)
    )
    found = compare_predictions(a, replace(b, table=b.table.take(np.arange(8)[::-1])))
    # Only A is right in rows 5 and 6, and only B in row 7.
    told = [(one.metric, one.rows, one.better) for one in found.found]
    assert told == [("accuracy", 4, (1, 0)), ("accuracy_mismatched", 4, (1, 1)), ("f1_mismatched", 4, (1, 1))]
    assert (found.first.a, found.first.b) == (1.0, 0.75)


def brute_force(a: RunPredictions, b: RunPredictions, name: str) -> float:
    """The p-value over all ways to swap the predictions of two rows."""
    observations = observe([a, b])
    swaps = np.asarray([*itertools.product((0.0, 1.0), repeat=observations.count)])
    of_a, of_b = (
        observations.measure([name], observations.terms, np.hstack(one))[name]
        for one in ([1 - swaps, swaps], [swaps, 1 - swaps])
    )
    found = np.abs(of_b - of_a)
    return float((found >= found[0] - 1e-12).mean())


@pytest.mark.parametrize("kind, name", [("labels", "f1_micro"), ("tags", "f1"), ("score", "spearman")])
def test_p_values_are_those_of_all_swaps(kind: str, name: str) -> None:
    random = np.random.default_rng(7)
    a, _ = predict(kind, random, 12)
    column = a.table.column("prediction").to_pylist()
    label = a.table.column("label").to_pylist()
    better = [true if number % 2 else one for number, (one, true) in enumerate(zip(column, label))]
    b = replace(a, table=a.table.set_column(3, "prediction", [better]))
    found = next(one for one in compare_predictions(a, b).found if one.metric == name)
    assert found.p == pytest.approx(brute_force(a, b, name), abs=0.02)
    assert found.p < 0.9
    assert found.b > found.a
    swapped = next(one for one in compare_predictions(b, a).found if one.metric == name)
    assert (swapped.p, swapped.a, swapped.b) == pytest.approx((found.p, found.b, found.a), abs=0.02)


def test_accuracy_is_tested_by_mcnemar() -> None:
    (one, _) = compare_predictions(*make_classes(100, 3, 12, 20)).found
    assert one.p == pytest.approx(stats.binomtest(12, 15).pvalue)
    # Agresti and Min (2005), example of table 1 turned around: 0.5 is added to each cell.
    n, b, c = 137, 3.5, 12.5
    off = stats.norm.ppf(0.975) * np.sqrt((b + c) - (c - b) ** 2 / n) / n
    assert one.interval == pytest.approx(((c - b) / n - off, (c - b) / n + off))
    # 15 rows differ; 12 to 3 is clear (p 0.035), and 11 to 4 is not (p 0.12).
    assert one.smallest == pytest.approx(9 / 135)


def test_intervals_are_those_of_scipys_bootstrap() -> None:
    random = np.random.default_rng(3)
    label = random.random(80)
    of_a, of_b = (label + random.normal(size=80) * noise for noise in (0.5, 0.3))
    made = [make_predictions("score", ("spearman", "pearson"), label=label, prediction=one) for one in (of_a, of_b)]
    found = compare_predictions(*made).found
    for one, correlate in zip(found, (stats.spearmanr, stats.pearsonr)):

        def subtract(label: Any, a: Any, b: Any, correlate: Any = correlate) -> float:
            return float(correlate(label, b).statistic - correlate(label, a).statistic)

        wanted = stats.bootstrap(
            (label, of_a, of_b), subtract, paired=True, vectorized=False, n_resamples=2000, method="percentile", rng=1
        ).confidence_interval
        assert one.interval == pytest.approx((wanted.low, wanted.high), abs=0.02)


def test_chance_alone_is_rarely_called_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models are right in 80 % of the rows or the second one in 86 %, mostly in the same ones.

    The classes are equally frequent and wrong, so F1 is as large as accuracy.
    """
    monkeypatch.setattr(resampling, "_DIFFERENCE_SAMPLES", (400, 400, 0))
    random, rows = np.random.default_rng(11), 300
    p, covered = list[tuple[float, ...]](), list[tuple[bool, ...]]()
    for shift in (0.0, 0.06) * 100:
        label, luck = random.integers(2, size=rows), random.random((3, rows))
        luck[1] = np.where(luck[2] < 0.6, luck[0], luck[1])
        found = [np.where(one < 0.8 + more, label, 1 - label) for one, more in zip(luck, (0, shift))]
        named = [np.take(("no", "yes"), one) for one in (label, *found)]
        made = [
            make_predictions("class", ("accuracy", "f1"), ("no", "yes"), label=named[0], prediction=one)
            for one in named[1:]
        ]
        chances = compare_predictions(*made).found
        if not shift:
            p.append(tuple(one.p for one in chances))
        covered.append(
            tuple(one.interval is not None and one.interval[0] <= shift <= one.interval[1] for one in chances)
        )
    # Few rows differ, so that many swaps give the same difference: p is rather too large, and never too small.
    for share in (0.05, 0.1, 0.25, 0.5):
        assert (np.asarray(p) <= share).mean(0).max() <= share + 3 * np.sqrt(share * (1 - share) / len(p)), share
    assert (np.asarray(p) <= 0.5).mean(0).min() >= 0.25
    assert np.reshape(covered, (100, 2, 2)).mean(0).min() >= 0.89


def test_p_values_of_equal_models_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "_DIFFERENCE_SAMPLES", (400, 400, 0))
    random, chances = np.random.default_rng(13), list[tuple[resampling.Difference, ...]]()
    for _ in range(100):
        label, shared, *noise = random.normal(size=(4, 100))
        made = [
            make_predictions("score", ("pearson", "spearman"), label=label, prediction=label + shared + one)
            for one in noise
        ]
        chances.append(compare_predictions(*made).found)
    for found in zip(*chances):
        assert stats.kstest([one.p for one in found], "uniform").pvalue > 0.01
        assert sum(one.interval is not None and one.interval[0] <= 0 <= one.interval[1] for one in found) >= 89


def test_a_bootstrap_without_pairs_would_fail() -> None:
    """Two models that agree nearly everywhere: intervals of each are 8 % wide, and that of the difference is 1 %."""
    (accuracy, f1) = compare_predictions(*make_classes(320, 0, 8, 80)).found
    assert accuracy.is_real
    assert f1.is_real
    for one in (accuracy, f1):
        assert one.interval is not None
        assert one.interval[1] - one.interval[0] < 0.03


@pytest.mark.parametrize(
    "counts, verdict",
    [
        (
            (300, 10, 25, 73),
            "B is better: accuracy 0.7598 -> 0.7966 (+0.0368, 95 % interval +0.0081 to +0.0650): the difference is "
            "real (p = 0.017)",
        ),
        (
            (300, 25, 10, 73),
            "A is better: accuracy 0.7966 -> 0.7598 (-0.0368, 95 % interval -0.0650 to -0.0081): the difference is "
            "real (p = 0.017)",
        ),
        (
            (300, 15, 20, 73),
            "No difference can be shown: accuracy 0.7721 -> 0.7843 (+0.0123, 95 % interval -0.0165 to +0.0409) may be "
            "chance (p = 0.5). With 408 rows, less than about 0.032 cannot be told apart",
        ),
        ((400, 0, 0, 8), "No difference: accuracy is 0.9804 in both, and the same in each of 408 rows"),
        ((408, 0, 0, 0), "No difference: accuracy is 1.0000 in both, and the same in each of 408 rows"),
        ((1, 0, 0, 0), "No difference: accuracy is 1.0000 in both, and the same in each of 1 row"),
        (
            (0, 0, 5, 0),
            "No difference can be shown: accuracy 0.0000 -> 1.0000 (+1.0000, 95 % interval +0.0000 to +1.0000) may be "
            "chance (p = 0.062). With 5 rows, no difference can be told from chance, however large",
        ),
        (
            (60, 0, 100, 0),
            "B is better: accuracy 0.3750 -> 1.0000 (+0.6250, 95 % interval +0.5415 to +0.6931): the difference is "
            "real (p < 0.001)",
        ),
    ],
)
def test_what_is_said(counts: tuple[int, ...], verdict: str) -> None:
    found = compare_predictions(*make_classes(*counts))
    assert describe_difference(found) == verdict
    rows = "1 row" if sum(counts) == 1 else f"{sum(counts)} rows"
    assert describe_better(found) == f"of {rows}, only A is right in {counts[1]}, and only B in {counts[2]}"
    # A test that finds nothing and an interval without 0 would contradict each other.
    for one in found.found:
        assert one.is_real or one.interval is None or one.interval[0] <= 0 <= one.interval[1]


def test_queries_are_the_rows_of_search() -> None:
    random = np.random.default_rng(5)
    of_a, of_b = random.random(50), random.random(50) + 0.5
    columns: list[dict[str, Any]] = [{"ndcg@10": one, "mrr@10": one} for one in (of_a, of_b)]
    made = [make_predictions("pairs", ("ndcg@10", "mrr@10"), **one) for one in columns]
    found = compare_predictions(*made)
    assert describe_difference(found).startswith("B is better: ndcg@10 ")
    better = int((of_a > of_b).sum())
    assert describe_better(found) == f"of 50 queries, A is better for {better}, and B for {50 - better}, by ndcg@10"
    wanted = stats.ttest_rel(of_b, of_a).confidence_interval()
    assert found.first.interval == pytest.approx((wanted.low, wanted.high), abs=0.02)
    columns = [{"accuracy@1": np.repeat(one, 25)} for one in ([1.0, 0], [1.0, 1])]
    made = [make_predictions("pairs", ("accuracy@1",), **one) for one in columns]
    assert compare_predictions(*made).first.p == pytest.approx(0.5**24)


def test_scores_of_another_scale_are_no_difference() -> None:
    label, noise = np.random.default_rng(2).random((2, 200))
    made = [
        make_predictions("score", ("pearson", "spearman"), label=label, prediction=one)
        for one in (label + noise, 5 * (label + noise) + 7)
    ]
    found = compare_predictions(*made)
    assert [round(one.difference, 12) for one in found.found] == [0, 0]
    assert [one.is_real for one in found.found] == [False, False]
    assert describe_better(found) == ""


def test_the_scale_of_scores_does_not_change_what_is_found() -> None:
    random = np.random.default_rng(9)
    label = random.random(100)
    one, other = (label + random.normal(size=100) * noise for noise in (0.4, 0.3))
    made = [
        make_predictions("score", ("pearson", "spearman"), label=label, prediction=found)
        for found in (one, other, 50 * other + 7)
    ]
    usual, scaled = (compare_predictions(made[0], b).found for b in made[1:])
    assert [found.p for found in usual] == [found.p for found in scaled]
    assert [found.smallest for found in usual] == pytest.approx([found.smallest for found in scaled])


def test_many_classes_take_little_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resampling, "_DIFFERENCE_SAMPLES", (20, 20, 0))
    random, classes = np.random.default_rng(1), tuple(map(str, range(10_000)))
    label, of_a, of_b = np.take(classes, random.integers(10_000, size=(3, 20_000)))
    metrics = ("accuracy", "f1_macro", "matthews_correlation")
    made = [make_predictions("class", metrics, classes, label=label, prediction=one) for one in (of_a, of_b)]
    tracemalloc.start()
    try:
        assert len(compare_predictions(*made).found) == 3
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


ONE, OTHER = make_classes(10, 2, 1, 3)


@pytest.mark.parametrize(
    "other, message",
    [
        (replace(OTHER, about=replace(OTHER.about, rows="others")), "have different validation rows"),
        (replace(OTHER, table=OTHER.table.slice(1)), "have different validation rows"),
        (replace(OTHER, about=replace(OTHER.about, kind="score")), "the runs predict class and score: give two runs"),
        (
            replace(OTHER, about=replace(OTHER.about, classes=("no", "si"))),
            r"different classes \(si, yes\): train",
        ),
        (replace(OTHER, about=replace(OTHER.about, classes=("yes", "no"))), r"classes \(in another order\)"),
        (replace(OTHER, about=replace(OTHER.about, metrics={"bleu": 0.5})), r"report no metric that"),
        (replace(OTHER, table=OTHER.table.drop_columns("prediction")), "do not fit together"),
        (replace(OTHER, table=OTHER.table.set_column(3, "label", [["no"] * 16])), "different values of label: train"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: RunPredictions, message: str) -> None:
    with pytest.raises(CpuftError, match=message):
        compare_predictions(ONE, other)


def test_predictions_that_are_no_numbers_are_refused() -> None:
    made = [make_predictions("score", ("pearson",), label=[0.0, 1, 2], prediction=[0.5, one, 1]) for one in (1, np.nan)]
    with pytest.raises(CpuftError, match="predicts no numbers"):
        compare_predictions(*made)
