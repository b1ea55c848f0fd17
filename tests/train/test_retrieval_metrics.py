"""The metrics of search equal those of sentence-transformers' evaluator to the last digit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cpuft.judge.metrics import average_searches
from cpuft.train import retrieval_metrics
from cpuft.train.retrieval_metrics import measure_queries, rank_documents

NAMES = tuple(
    f"{metric}@{depth}"
    for metric, depths in {
        "accuracy": (1, 3, 10),
        "precision": (1, 3, 10),
        "recall": (1, 3, 10),
        "mrr": (2, 10),
        "ndcg": (3, 10),
        "map": (5, 100),
    }.items()
    for depth in depths
)
Floats = NDArray[np.float32]


def compute_metrics(names: tuple[str, ...], *search: Any) -> dict[str, float]:
    return average_searches(measure_queries(names, *search)[1])


class GivenEmbeddings:
    """In place of a model of sentence-transformers: embeddings that are there already."""

    def __init__(self, queries: Floats, documents: Floats, similarity: str) -> None:
        from sentence_transformers.util import cos_sim, dot_score

        self.queries, self.documents = queries, documents
        self.similarity_fn_name = similarity
        self.similarity = cos_sim if similarity == "cosine" else dot_score
        self.model_card_data = self

    def set_evaluation_metrics(self, *_: Any, **__: Any) -> None:
        """The evaluator notes its metrics for a model card."""

    def encode_query(self, texts: list[str], **_: Any) -> torch.Tensor:
        return torch.from_numpy(self.queries[[int(text) for text in texts]])

    def encode_document(self, texts: list[str], **_: Any) -> torch.Tensor:
        return torch.from_numpy(self.documents[[int(text) for text in texts]])


def evaluate(queries: Floats, documents: Floats, relevant: NDArray[np.int32], similarity: str) -> dict[str, float]:
    """The evaluator's metrics. Ids are numbers of equally many digits, so that their order is that of the numbers."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    judged: dict[str, set[str]] = {}
    for query, document, score in relevant:
        if score > 0:
            judged.setdefault(f"{query:06}", set()).add(f"{document:06}")
    depths = {metric: [int(name.split("@")[1]) for name in NAMES if name.startswith(metric)] for metric in METRICS}
    evaluator = InformationRetrievalEvaluator(
        {f"{number:06}": f"{number}" for number in range(len(queries))},
        {f"{number:06}": f"{number}" for number in range(len(documents))},
        judged,
        accuracy_at_k=depths["accuracy"],
        precision_recall_at_k=depths["precision"],
        mrr_at_k=depths["mrr"],
        ndcg_at_k=depths["ndcg"],
        map_at_k=depths["map"],
        write_csv=False,
    )
    found = evaluator(GivenEmbeddings(queries, documents, similarity))
    return {name: float(found[f"{similarity}_{name}"]) for name in NAMES}


METRICS = ("accuracy", "precision", "recall", "mrr", "ndcg", "map")


def judge(generator: np.random.Generator, queries: int, documents: int, count: int) -> NDArray[np.int32]:
    places = generator.choice(queries * documents, min(count, queries * documents), replace=False)
    scores = generator.integers(-1, 3, len(places))
    scores[0] = 1
    return np.stack([places // documents, places % documents, scores], axis=1).astype(np.int32)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    queries=st.integers(1, 40),
    documents=st.integers(1, 130),
    levels=st.sampled_from([1, 2, 1000]),
    similarity=st.sampled_from(["cosine", "dot"]),
    block=st.sampled_from([3, 16, 10_000]),
)
def test_every_digit_is_the_evaluator_s(
    seed: int, queries: int, documents: int, levels: int, similarity: str, block: int
) -> None:
    generator = np.random.default_rng(seed)
    # Small whole numbers, whose products are exact, so that equal scores are equal in each order of additions. Vectors
    # of four ones have the length 2.
    if similarity == "cosine":
        signs = generator.integers(0, 2, (queries + documents, 4)) * 2 - 1
        texts = (signs * generator.choice([1, 2, 4], (queries + documents, 1))).astype(np.float32)
    else:
        texts = generator.integers(-levels, levels + 1, (queries + documents, 4)).astype(np.float32)
    relevant = judge(generator, queries, documents, int(generator.integers(1, 3 * queries + 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval_metrics, "_QUERIES_AT_ONCE", block)
        patch.setattr(retrieval_metrics, "_DOCUMENTS_AT_ONCE", block)
        found = compute_metrics(NAMES, texts[:queries], texts[queries:], relevant, similarity)
    assert found == evaluate(texts[:queries], texts[queries:], relevant, similarity)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_real_embeddings_over_several_blocks(similarity: str) -> None:
    generator = np.random.default_rng(5)
    documents = generator.standard_normal((20_000, 24)).astype(np.float32)
    relevant = judge(generator, 300, len(documents), 900)
    noise = generator.standard_normal((300, 24)).astype(np.float32)
    queries = documents[generator.permutation(len(documents))[:300]] + 0.8 * noise
    relevant[:, 1] = np.where(
        generator.random(900) < 0.5, (queries[relevant[:, 0]] @ documents.T).argmax(1), relevant[:, 1]
    )
    found = compute_metrics(NAMES, queries, documents, relevant, similarity)
    assert found == evaluate(queries, documents, relevant, similarity)
    assert 0.05 < found["mrr@10"] < 0.95


def test_a_small_search_by_hand() -> None:
    documents = np.asarray([[1, 0], [0, 1], [1, 1]], np.float32)
    queries = np.asarray([[1, 0], [0, 2], [5, 5]], np.float32)
    # The first query ranks 0, 2, 1; the second 1, 2, 0. Nothing is relevant to the third, so that it does not count.
    relevant = np.asarray([[0, 2, 1], [0, 1, 3], [1, 1, 1], [2, 0, 0]], np.int32)
    names = ("accuracy@1", "accuracy@2", "precision@2", "recall@2", "mrr@10", "map@100", "ndcg@10", "precision@10")
    found = compute_metrics(names, queries, documents, relevant, "cosine")
    discounts = 1 / np.log2([2, 3, 4])
    assert found == {
        "accuracy@1": 0.5,
        "accuracy@2": 1.0,
        "precision@2": 0.5,
        "recall@2": 0.75,
        "mrr@10": 0.75,
        "map@100": ((1 / 2 + 2 / 3) / 2 + 1) / 2,
        "ndcg@10": ((discounts[1] + discounts[2]) / (discounts[0] + discounts[1]) + 1) / 2,
        "precision@10": (0.2 + 0.1) / 2,
    }


def test_equal_scores_are_ranked_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_metrics, "_DOCUMENTS_AT_ONCE", 4)
    documents = np.ones((11, 3), np.float32)
    documents[[6, 9]] = 2
    assert rank_documents(documents[:1], documents, 5, "dot").tolist() == [[6, 9, 0, 1, 2]]
    assert rank_documents(documents[:1], documents, 99, "dot").tolist() == [[6, 9, 0, 1, 2, 3, 4, 5, 7, 8, 10]]


def test_what_is_no_metric() -> None:
    texts = np.ones((1, 2), np.float32)
    relevant = np.asarray([[0, 0, 1]], np.int32)
    with pytest.raises(ValueError, match="f1 is no metric"):
        compute_metrics(("f1@3",), texts, texts, relevant, "dot")
    with pytest.raises(ValueError, match="no query has a relevant document"):
        compute_metrics(("mrr@3",), texts, texts, relevant * 0, "dot")
