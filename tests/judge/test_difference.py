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
from sklearn.metrics import f1_score

from cpuft.errors import CpuftError
from cpuft.judge import resampling
from cpuft.judge.difference import compare_predictions, describe_better, describe_difference
from cpuft.judge.paired import list_paired_metrics
from cpuft.judge.predictions import RunPredictions
from cpuft.judge.resampling import judge_chance
from cpuft.train.objective.labels import compute_label_metrics, compute_tag_metrics
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
        return make_predictions("class", metrics, labels, **columns), compute_label_metrics(metrics, found, true)
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
        return made, compute_label_metrics(metrics, found, true)
    metrics, queries = ("ndcg@3", "mrr@10", "map"), random.integers(0, 5, rows)
    made = make_predictions("relevance", metrics, label=true, prediction=found, query=queries)
    return made, compute_reranking_metrics(metrics, found.astype(np.float32), true >= 0.5, queries)


@pytest.mark.parametrize("kind", ["class", "binary", "labels", "tags", "score", "relevance"])
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_metrics_are_those_of_training(kind: str, rows: int) -> None:
    for seed in range(3):
        made, wanted = predict(kind, np.random.default_rng(seed), rows)
        found = {name: judge_chance(one.paired).b for name, one in list_paired_metrics(made, made).items()}
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


def brute_force(paired: resampling.Paired) -> float:
    """The p-value over all ways to swap the predictions of rows that are not in cells."""
    change = paired.b - paired.a
    a, b = paired.counts @ paired.a, paired.counts @ paired.b
    observed = abs(paired.compute(b) - paired.compute(a))
    swaps = np.asarray([*itertools.product((0, 1), repeat=len(change))]) @ change
    return float((np.abs(paired.compute(b - swaps) - paired.compute(a + swaps)) >= observed - 1e-12).mean())


@pytest.mark.parametrize("kind, name", [("labels", "f1_micro"), ("tags", "f1"), ("score", "spearman")])
def test_p_values_are_those_of_all_swaps(kind: str, name: str) -> None:
    random = np.random.default_rng(7)
    a, _ = predict(kind, random, 12)
    column = a.table.column("prediction").to_pylist()
    label = a.table.column("label").to_pylist()
    better = [true if number % 2 else one for number, (one, true) in enumerate(zip(column, label))]
    b = replace(a, table=a.table.set_column(3, "prediction", [better]))
    paired = list_paired_metrics(a, b)[name].paired
    found = judge_chance(paired)
    assert found.p == pytest.approx(brute_force(paired), abs=0.02)
    assert found.p < 0.3
    assert found.b > found.a
    swapped = judge_chance(list_paired_metrics(b, a)[name].paired)
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


def test_chance_alone_is_called_a_difference_in_one_of_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of models of which both are right with probability 0.8, and pairs of which one is 0.05 better."""
    monkeypatch.setattr(resampling, "_MOST_RESAMPLES", 500)
    random, p, covered = np.random.default_rng(11), list[tuple[float, ...]](), list[tuple[bool, ...]]()
    truth = (0.05, f1_score([1, 0] * 100, [1] * 85 + [0] * 15 + [0] * 85 + [1] * 15) - 0.8)
    assert truth[1] == pytest.approx(0.05, abs=0.1)
    for shift in (0.0, 0.05) * 200:
        shared = random.random(200) < 0.5
        right = [np.where(shared, random.random(200) < 0.8, True) for _ in range(2)]
        del right
        label, chance = random.integers(2, size=200), random.random((2, 200))
        is_right = [chance[0] < 0.8, np.where(shared, chance[0], chance[1]) < 0.8 + shift]
        guesses = [np.take(("no", "yes"), np.where(one, label, 1 - label)) for one in is_right]
        names = np.take(("no", "yes"), label)
        made = [
            make_predictions("class", ("accuracy", "f1"), ("no", "yes"), label=names, prediction=one) for one in guesses
        ]
        found = compare_predictions(*made).found
        if shift == 0:
            p.append(tuple(one.p for one in found))
        covered.append(tuple(one.interval is not None and one.interval[0] <= shift <= one.interval[1] for one in found))
    accuracy, f1 = np.asarray(p).T
    print((accuracy < .05).mean(), (f1<.05).mean(), [(f1<q).mean() for q in (.1,.25,.5,.75)], [(accuracy<q).mean() for q in (.1,.25,.5,.75)], np.mean(covered,0), np.mean(covered[::2],0), np.mean(covered[1::2],0))
