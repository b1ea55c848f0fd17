"""Metrics of search, equal to those of sentence-transformers' InformationRetrievalEvaluator. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rank = Callable[[NDArray[np.int64], int], NDArray[np.int64]]
"""Returns for each of the queries with these numbers the numbers of the best documents, best first, of at most so many
of them; shape (queries, documents)."""


def measure_searches(
    names: Sequence[str], relevant: NDArray[np.int32], documents: int, rank: Rank
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Return the numbers of the queries that have relevant documents, and each metric of each of them, fp64,
    (queries,).

    Metrics are accuracy@K, precision@K, recall@K, mrr@K, ndcg@K and map@K. `relevant` has query number, document number
    and relevance of each judgement, (judgements, 3). A document counts as relevant or not; how relevant it is has no
    effect. Raises ValueError: no query has a relevant document, or a metric is unknown.
    """
    depths = [(metric, int(depth)) for metric, _, depth in (name.partition("@") for name in names)]
    pairs = np.unique(relevant[relevant[:, 2] > 0, :2].astype(np.int64), axis=0)
    asked, counts = np.unique(pairs[:, 0], return_counts=True)
    if not len(asked):
        raise ValueError("no query has a relevant document")
    best = rank(asked, max((depth for _, depth in depths), default=1))
    hits = np.isin(asked[:, None] * documents + best, pairs[:, 0] * documents + pairs[:, 1])
    return asked, {name: _measure(metric, depth, hits, counts) for name, (metric, depth) in zip(names, depths)}


def average_searches(values: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return the mean of each metric over the queries."""
    return {
        # The evaluator adds reciprocal ranks one after another.
        name: float(np.cumsum(found)[-1]) / len(found) if name.startswith("mrr@") else float(np.mean(found))
        for name, found in values.items()
    }


def _measure(metric: str, depth: int, hits: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a metric of each query, with the additions in the evaluator's order, so that no digit differs.

    `hits` tells whether each of the best documents is relevant, best first, (queries, documents); `counts` is the
    number of relevant documents of each query.
    """
    hits = hits[:, :depth]
    ranks = np.arange(1, hits.shape[1] + 1)
    found: Any
    if metric == "accuracy":
        found = hits.any(1).astype(np.float64)
    elif metric == "precision":
        found = hits.sum(1) / depth
    elif metric == "recall":
        found = hits.sum(1) / counts
    elif metric == "mrr":
        found = np.where(hits.any(1), 1.0 / (hits.argmax(1) + 1), 0.0)
    elif metric == "ndcg":
        discounts = np.asarray([1 / np.log2(rank + 1) for rank in range(1, depth + 1)])
        ideal = np.cumsum(discounts)[np.minimum(counts, depth) - 1]
        found = np.cumsum(hits * discounts[: hits.shape[1]], axis=1)[:, -1] / ideal
    elif metric == "map":
        precisions = np.cumsum(hits, axis=1) / ranks
        found = np.cumsum(hits * precisions, axis=1)[:, -1] / np.minimum(counts, depth)
    else:
        raise ValueError(f"{metric} is no metric of retrieval")
    values: NDArray[np.float64] = found
    return values
