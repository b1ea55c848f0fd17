"""How well the documents of each query are ordered by their scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

METRICS = ("ndcg", "mrr", "map")
"""Metrics of rerankers, without @K."""
LEAST_RELEVANT = 0.5
"""Score from which on the metrics count a document as relevant."""


def measure_queries(
    name: str, scores: NDArray[np.float32], relevant: NDArray[np.bool_], queries: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return a metric of each query, from 0 to 1, in the order of their numbers; its mean is the metric.

    It equals that of sentence-transformers' CrossEncoderRerankingEvaluator, which computes it with scikit-learn. A
    query without relevant documents counts as 0, and one whose only document is relevant as 1. Names are ndcg@K and
    mrr@K, each with a number K, and map (average precision over all documents of a query); the arrays have the score,
    relevance and query number of each example, shape (examples,). Raises ValueError for any other name.
    """
    # Relevant documents are first, as the evaluator lists them: of equal scores, it ranks the last one first.
    order = np.lexsort((~relevant, queries))
    starts = np.flatnonzero(np.diff(queries[order])) + 1
    return np.asarray([_measure(name, relevant[group], scores[group]) for group in np.split(order, starts)])


def _measure(name: str, relevant: NDArray[np.bool_], scores: NDArray[np.float32]) -> float:
    from sklearn.metrics import average_precision_score, ndcg_score

    metric, _, depth = name.partition("@")
    if metric not in METRICS:
        raise ValueError(f"{name} is no metric of rerankers")
    if not relevant.any():
        return 0.0
    if metric == "map":
        return float(average_precision_score(relevant, scores))
    if metric == "ndcg":
        return float(ndcg_score([relevant], [scores], k=int(depth))) if len(scores) > 1 else 1.0
    ranking = np.argsort(scores)[::-1][: int(depth)]
    return next((1 / rank for rank, place in enumerate(ranking, start=1) if relevant[place]), 0.0)
