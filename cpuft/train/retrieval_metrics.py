"""Metrics of search by embeddings, equal to those of sentence-transformers' InformationRetrievalEvaluator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.judge.metrics import measure_searches

_QUERIES_AT_ONCE, _DOCUMENTS_AT_ONCE = 256, 16_384
"""Size of the blocks in which scores are computed: 16 MB of them at a time."""


def measure_queries(
    names: Sequence[str],
    queries: NDArray[np.float32],
    documents: NDArray[np.float32],
    relevant: NDArray[np.int32],
    similarity: str,
) -> tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]:
    """Return the numbers of the queries with relevant documents, and each metric of each of them, for a search by
    embeddings, (texts, dimensions). `relevant` has query number, document number and relevance, (judgements, 3), and
    `names` those of `measure_searches`, such as ndcg@10. ValueError: nothing is relevant, or a metric is unknown.
    """

    def rank(asked: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return rank_documents(queries[asked], documents, count, similarity)

    return measure_searches(names, relevant, len(documents), rank)


def rank_documents(
    queries: NDArray[np.float32], documents: NDArray[np.float32], count: int, similarity: str
) -> NDArray[np.int64]:
    """Return the numbers of the `count` documents that score highest for each query, best first.

    `similarity` is cosine or dot. The shape is (queries, count), or (queries, documents) if these are fewer; equal
    scores are in the order of the documents. Memory does not grow with queries times documents.
    """
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
