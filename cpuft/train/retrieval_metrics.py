"""Metrics of search by embeddings, equal to those of sentence-transformers' InformationRetrievalEvaluator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_QUERIES_AT_ONCE, _DOCUMENTS_AT_ONCE = 256, 16_384
"""Size of the blocks in which scores are computed: 16 MB of them at a time."""


def compute_retrieval_metrics(
    names: Sequence[str],
    queries: NDArray[np.float32],
    documents: NDArray[np.float32],
    relevant: NDArray[np.int32],
    similarity: str,
) -> dict[str, float]:
    """Return means over queries of metrics accuracy@K, precision@K, recall@K, mrr@K, ndcg@K and map@K, by name.

    `queries` and `documents` are embeddings, (texts, dimensions); `relevant` has query number, document number and
    relevance of each judgement, (judgements, 3). A document counts as relevant or not; how relevant it is has no
    effect. Queries without relevant documents are left out. Raises ValueError: there are no others, or a metric or the
    similarity is unknown.
    """
    _, values = measure_queries(names, queries, documents, relevant, similarity)
    return {
        # The evaluator adds reciprocal ranks one after another.
        name: float(np.cumsum(found)[-1]) / len(found) if name.startswith("mrr@") else float(np.mean(found))
        for name, found in values.items()
    }


def measure_queries(
    names: Sequence[str],
    queries: NDArray[np.float32],
    documents: NDArray[np.float32],
    relevant: NDArray[np.int32],
    similarity: str,
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Return the numbers of the queries that have relevant documents, and each metric of each of them, fp64,
    (queries,). Arguments and errors are those of `compute_retrieval_metrics`.
    """
    depths = [(metric, int(depth)) for metric, _, depth in (name.partition("@") for name in names)]
    pairs = np.unique(relevant[relevant[:, 2] > 0, :2].astype(np.int64), axis=0)
    asked, counts = np.unique(pairs[:, 0], return_counts=True)
    if not len(asked):
        raise ValueError("no query has a relevant document")
    best = rank_documents(queries[asked], documents, max((depth for _, depth in depths), default=1), similarity)
    hits = np.isin(asked[:, None] * len(documents) + best, pairs[:, 0] * len(documents) + pairs[:, 1])
    return asked, {name: _measure(metric, depth, hits, counts) for name, (metric, depth) in zip(names, depths)}


def _measure(metric: str, depth: int, hits: NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a metric of each query, with the additions in the evaluator's order, so that no digit differs.

    `hits` tells whether each of the best documents is relevant, best first, (queries, documents); `counts` is the
    number of relevant documents of each query.
    """
    hits = hits[:, :depth]
    ranks = np.arange(1, hits.shape[1] + 1)
    found: NDArray[np.float64]
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
    return found


def rank_documents(
    queries: NDArray[np.float32], documents: NDArray[np.float32], count: int, similarity: str
) -> NDArray[np.int64]:
    """Return the numbers of the `count` documents that score highest for each query by cosine or dot, best first.

    The shape is (queries, count), or (queries, documents) if there are fewer documents. Documents with equal scores are
    in the order of their numbers. Scores are computed in blocks, so that memory does not grow with the product of
    queries and documents. Raises ValueError: the similarity is another one.
    """
    if similarity not in ("cosine", "dot"):
        raise ValueError(f"{similarity} is no similarity of embeddings")
    asked = _prepare(queries, similarity)
    scores = torch.empty(len(asked), 0)
    numbers = torch.empty(len(asked), 0, dtype=torch.int64)
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        block = _prepare(documents[start : start + _DOCUMENTS_AT_ONCE], similarity)
        found = [
            _choose_best(asked[first : first + _QUERIES_AT_ONCE] @ block.T, count)
            for first in range(0, len(asked), _QUERIES_AT_ONCE)
        ]
        scores = torch.cat([scores, torch.cat([part for part, _ in found])], dim=1)
        numbers = torch.cat([numbers, torch.cat([part for _, part in found]) + start], dim=1)
        # Numbers of earlier blocks are smaller and stand first, so that a stable sort keeps the order of equal scores.
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, numbers = scores[:, :count], numbers.gather(1, order[:, :count])
    result: NDArray[np.int64] = numbers.numpy()
    return result


def _prepare(embeddings: NDArray[np.float32], similarity: str) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(embeddings, np.float32))
    return torch.nn.functional.normalize(made, p=2, dim=-1) if similarity == "cosine" else made


def _choose_best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` highest scores of each row and their columns in ascending order; ties go to lower columns."""
    width = scores.shape[1]
    if count >= width:
        return scores, torch.arange(width).expand(scores.shape)
    values, columns = scores.topk(count, dim=1, sorted=False)
    lowest = values.min(dim=1, keepdim=True).values
    # topk chooses any of several equal scores.
    tied = (scores >= lowest).sum(dim=1) > count
    if tied.any():
        rows, bounds = scores[tied], lowest[tied]
        places = torch.arange(width).expand(rows.shape)
        keys = torch.where(rows > bounds, places, torch.where(rows == bounds, places + width, 2 * width))
        columns[tied] = keys.topk(count, dim=1, largest=False).indices
    columns = columns.sort(dim=1).values
    return scores.gather(1, columns), columns
