"""Metrics as scikit-learn, SciPy, seqeval and sentence-transformers define them. Imports no torch.

Those of sentence-transformers are summed in the order of its evaluators, so that no digit differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

RERANKING_METRICS = ("ndcg", "mrr", "map")
"""Metrics of rerankers, without @K."""
LEAST_RELEVANT = 0.5
"""Score from which on the metrics of rerankers count a document as relevant."""
Rank = Callable[[NDArray[np.int64], int], NDArray[np.int64]]
"""(numbers of queries, K) -> numbers of the K best documents of each query, or of all if they are fewer, best first;
shape (queries, documents)."""


def compute_label_metrics(
    names: tuple[str, ...], predictions: NDArray[Any], labels: NDArray[np.float32]
) -> dict[str, float]:
    """Return by name: accuracy, f1 (of class 1), f1_micro and f1_macro, from 0 to 1, matthews_correlation, pearson and
    spearman, from -1 to 1; KeyError for another name.

    Predictions and labels are class numbers or scores, shape (examples,), or 0 and 1, shape (examples, classes), where
    accuracy is of whole rows. The correlation with a constant is 0, and so is an F1 without any positive.
    """
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    constant = bool(np.ptp(predictions) == 0 or np.ptp(labels) == 0)

    def correlate(function: Any) -> float:
        return 0.0 if constant else float(function(predictions, labels).statistic)

    def f1(average: str) -> Any:
        return f1_score(labels, predictions, average=average, zero_division=0.0)

    compute: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: accuracy_score(labels, predictions),
        "f1": lambda: f1("binary"),
        "f1_micro": lambda: f1("micro"),
        "f1_macro": lambda: f1("macro"),
        "matthews_correlation": lambda: matthews_corrcoef(labels, predictions),
        "pearson": lambda: correlate(pearsonr),
        "spearman": lambda: correlate(spearmanr),
    }
    return {name: float(compute[name]()) for name in names}


def compute_tag_metrics(
    names: tuple[str, ...], predicted: Sequence[list[str]], tags: Sequence[list[str]]
) -> dict[str, float]:
    """Return metrics of the tags of each example's words by name, from 0 to 1; KeyError for an unknown name.

    f1, precision and recall are those of whole entities, as in conlleval, 0 if there are none; accuracy is of words.
    """
    from seqeval import metrics

    compute: dict[str, Callable[[], Any]] = {
        "f1": lambda: metrics.f1_score(tags, predicted, zero_division=0),
        "precision": lambda: metrics.precision_score(tags, predicted, zero_division=0),
        "recall": lambda: metrics.recall_score(tags, predicted, zero_division=0),
        "accuracy": lambda: metrics.accuracy_score(tags, predicted),
    }
    return {name: float(compute[name]()) for name in names}


def measure_rankings(
    name: str, scores: NDArray[np.float32], relevant: NDArray[np.bool_], queries: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return ndcg@K, mrr@K or map of each query, by ascending number, from 0 to 1; ValueError for other names.

    The arrays have the score, relevance and query number of each example, shape (examples,). The values equal those of
    sentence-transformers' CrossEncoderRerankingEvaluator. A query without relevant documents counts as 0, and one whose
    only document is relevant as 1.
    """
    # Relevant documents are first, as the evaluator lists them: of equal scores, it ranks the last one first.
    order = np.lexsort((~relevant, queries))
    starts = np.flatnonzero(np.diff(queries[order])) + 1
    return np.asarray([_measure_ranking(name, relevant[group], scores[group]) for group in np.split(order, starts)])


def _measure_ranking(name: str, relevant: NDArray[np.bool_], scores: NDArray[np.float32]) -> float:
    from sklearn.metrics import average_precision_score, ndcg_score

    metric, _, depth = name.partition("@")
    if metric not in RERANKING_METRICS:
        raise ValueError(f"{name} is no metric of rerankers")
    if not relevant.any():
        return 0.0
    if metric == "map":
        return float(average_precision_score(relevant, scores))
    if metric == "ndcg":
        return float(ndcg_score([relevant], [scores], k=int(depth))) if len(scores) > 1 else 1.0
    ranking = np.argsort(scores)[::-1][: int(depth)]
    return next((1 / rank for rank, place in enumerate(ranking, start=1) if relevant[place]), 0.0)


def measure_searches(
    names: Sequence[str], relevant: NDArray[np.int32], documents: int, rank: Rank
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Return the numbers of the queries that have relevant documents, and each metric of each of them, (queries,).

    Metrics are accuracy@K, precision@K, recall@K, mrr@K, ndcg@K and map@K, equal to those of sentence-transformers'
    InformationRetrievalEvaluator. `relevant` has query number, document number and relevance of each judgement,
    (judgements, 3); each relevance above 0 counts alike. ValueError: nothing is relevant, or a metric is unknown.
    """
    depths = [(metric, int(depth)) for metric, _, depth in (name.partition("@") for name in names)]
    pairs = np.unique(relevant[relevant[:, 2] > 0, :2].astype(np.int64), axis=0)
    asked, counts = np.unique(pairs[:, 0], return_counts=True)
    if not len(asked):
        raise ValueError("no query has a relevant document")
    best = rank(asked, max((depth for _, depth in depths), default=1))
    hits = np.isin(asked[:, None] * documents + best, pairs[:, 0] * documents + pairs[:, 1])
    return asked, {name: _measure_search(metric, depth, hits, counts) for name, (metric, depth) in zip(names, depths)}


def average_searches(values: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return the mean of each metric over the queries, at least one."""
    return {
        # The evaluator adds reciprocal ranks one after another.
        name: float(np.cumsum(found)[-1]) / len(found) if name.startswith("mrr@") else float(np.mean(found))
        for name, found in values.items()
    }


def _measure_search(metric: str, depth: int, hits: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a metric of each query.

    `hits` tells whether each of the best documents is relevant, best first, (queries, documents); `counts` is the
    number of relevant documents of each query.
    """
    hits = hits[:, :depth]
    shown = hits.shape[1]
    discounts = np.asarray([1 / np.log2(rank + 1) for rank in range(1, depth + 1)])
    ideal = np.cumsum(discounts)[np.minimum(counts, depth) - 1]
    precisions = np.cumsum(hits, axis=1) / np.arange(1, shown + 1)
    compute: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: hits.any(1),
        "precision": lambda: hits.sum(1) / depth,
        "recall": lambda: hits.sum(1) / counts,
        "mrr": lambda: np.where(hits.any(1), 1.0 / (hits.argmax(1) + 1), 0.0),
        "ndcg": lambda: np.cumsum(hits * discounts[:shown], axis=1)[:, -1] / ideal,
        "map": lambda: np.cumsum(hits * precisions, axis=1)[:, -1] / np.minimum(counts, depth),
    }
    if metric not in compute:
        raise ValueError(f"{metric} is no metric of retrieval")
    return np.asarray(compute[metric](), np.float64)
