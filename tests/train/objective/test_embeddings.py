"""Losses, batches and metrics of embedding models, held against sentence-transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.losses import (
    CoSENTLoss,
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling

from cpuft.train.data.archive import Tokens
from cpuft.train.embedder import pool
from cpuft.train.embedding_form import EmbeddingForm
from cpuft.train.objective.base import Batch
from cpuft.train.objective.embeddings import Pairs, ScoredPairs

NO_MODEL: Any = torch.nn.Identity()
ALL_DIFFERENT = torch.arange(1000)


def draw(examples: int, texts: int, seed: int = 0, hidden: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(examples, texts, hidden, generator=generator).requires_grad_()


def make_pairs(**settings: Any) -> Pairs:
    return Pairs((), ("ndcg@10",), 0, **settings)


def compare(own: torch.Tensor, theirs: torch.Tensor, embeddings: torch.Tensor) -> None:
    """Mean losses and gradients are equal."""
    torch.testing.assert_close(own.mean(), theirs)
    first = torch.autograd.grad(own.mean(), embeddings, retain_graph=True)[0]
    second = torch.autograd.grad(theirs, embeddings)[0]
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("texts", [2, 4])
@pytest.mark.parametrize("dimensions", [(), (12, 8, 4)])
def test_contrastive_losses_are_those_of_sentence_transformers(texts: int, dimensions: tuple[int, ...]) -> None:
    embeddings = draw(6, texts)
    keys = ALL_DIFFERENT[: 6 * texts].view(6, texts)
    own = make_pairs(texts=texts, matryoshka=dimensions).joint_losses(embeddings.flatten(1), keys)
    loss = MultipleNegativesRankingLoss(NO_MODEL, scale=20.0)
    theirs = sum(
        loss.compute_loss_from_embeddings([embeddings[:, i, :size] for i in range(texts)], torch.zeros(0))
        for size in dimensions or (12,)
    )
    assert isinstance(theirs, torch.Tensor)
    compare(own, theirs, embeddings)


@pytest.mark.parametrize(("name", "theirs"), [("cosent", CoSENTLoss), ("mse", CosineSimilarityLoss)])
def test_losses_of_scores_are_those_of_sentence_transformers(name: str, theirs: Any) -> None:
    embeddings, scores = draw(7, 2), torch.tensor([0.1, 0.9, 0.5, 0.5, 0.0, 1.0, 0.7])
    cosines = torch.nn.functional.cosine_similarity(embeddings[:, 0], embeddings[:, 1])
    own = ScoredPairs((), (), 0, loss=name).joint_losses(cosines[:, None], scores)
    compare(
        own, theirs(NO_MODEL).compute_loss_from_embeddings([embeddings[:, 0], embeddings[:, 1]], scores), embeddings
    )


def test_scores_that_are_all_equal_have_a_loss_of_0_with_a_gradient() -> None:
    cosines = torch.tensor([[0.5], [0.7]], requires_grad=True)
    losses = ScoredPairs((), (), 0).joint_losses(cosines, torch.ones(2))
    torch.autograd.backward(losses.sum())
    assert losses.tolist() == [0.0, 0.0]
    assert cosines.grad is not None
    assert cosines.grad.abs().sum() == 0


def test_dot_products_are_not_normalised() -> None:
    embeddings = draw(4, 2)
    form = EmbeddingForm(similarity="dot")
    own = make_pairs(form=form, temperature=1.0).joint_losses(embeddings.flatten(1), ALL_DIFFERENT[:8].view(4, 2))
    scores = embeddings[:, 0] @ embeddings[:, 1].T
    torch.testing.assert_close(own, torch.nn.functional.cross_entropy(scores, torch.arange(4), reduction="none"))


def test_a_text_that_equals_the_own_positive_is_no_negative() -> None:
    # Examples 0 and 2 have the same positive; so the positive of the one is no negative of the other.
    embeddings = draw(3, 2)
    keys = torch.tensor([[1, 2], [3, 4], [5, 2]])
    own = make_pairs().joint_losses(embeddings.flatten(1), keys)
    alone = make_pairs().joint_losses(embeddings[:2].flatten(1), keys[:2])
    assert own[0].item() == pytest.approx(alone[0].item())
    assert own[1].item() > alone[1].item()


def test_positives_of_the_same_anchor_are_no_negatives() -> None:
    embeddings = draw(3, 2)
    own = make_pairs().joint_losses(embeddings.flatten(1), torch.tensor([[1, 2], [3, 4], [1, 6]]))
    alone = make_pairs().joint_losses(embeddings[:2].flatten(1), torch.tensor([[1, 2], [3, 4]]))
    assert own[0].item() == pytest.approx(alone[0].item())


def test_a_negative_that_equals_the_positive_of_another_example_is_its_positive_too() -> None:
    embeddings = draw(2, 3)
    own = make_pairs(texts=3).joint_losses(embeddings.flatten(1), torch.tensor([[1, 2, 3], [4, 5, 2]]))
    # Example 0 has the negatives 5 and 3 only.
    anchors, others = embeddings[:, 0], torch.stack([embeddings[0, 1], embeddings[1, 1], embeddings[0, 2]])
    cosines = torch.nn.functional.cosine_similarity(anchors[0][None], others)
    wanted = -torch.log_softmax(20 * cosines, 0)[0]
    assert own[0].item() == pytest.approx(wanted.item(), rel=1e-5)


def make_texts(lengths: list[list[int]], seed: int = 0) -> Tokens:
    """Examples whose texts have these numbers of tokens."""
    flat = np.asarray(lengths).ravel()
    ids = np.random.default_rng(seed).integers(5, 100, flat.sum()).astype(np.int32)
    types = np.repeat(np.tile(np.arange(len(lengths[0]), dtype=np.int8), len(lengths)), flat)
    return Tokens(ids, types, np.append(0, np.asarray(lengths).sum(1).cumsum()), np.zeros(0, np.float32))


def test_a_batch_has_all_first_texts_then_all_second_ones() -> None:
    tokens = make_texts([[2, 3], [1, 1], [4, 2]])
    batch = make_pairs().make_batch(tokens, np.array([2, 0]))
    assert batch.tokens == 11
    assert batch.inputs["attention_mask"].sum(1).tolist() == [4, 2, 2, 3]
    ids = batch.inputs["input_ids"]
    assert ids[0].tolist() == tokens.ids[7:11].tolist()
    assert ids[3, :3].tolist() == tokens.ids[2:5].tolist()
    assert ids[3, 3].item() == 0
    assert batch.labels.shape == (2, 2)


@settings(max_examples=50)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_keys_are_equal_only_for_equal_texts(lengths: list[list[int]], seed: int) -> None:
    tokens = make_texts(lengths, seed)
    tokens.ids[:] %= 3  # so that equal texts are common
    objective = make_pairs(texts=3)
    keys = objective.make_labels(tokens, np.arange(len(tokens)), np.zeros(0, bool)).ravel().tolist()
    ends = np.asarray(lengths).ravel().cumsum()
    texts = [tuple(part.tolist()) for part in np.split(tokens.ids, ends[:-1])]
    assert len(set(zip(keys, texts))) == len(set(texts)) == len(set(keys))


class Encoder(torch.nn.Module):
    def forward(self, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=torch.arange(60.0).view(1, 5, 12).expand(len(attention_mask), -1, -1))


def test_texts_are_evaluated_with_the_dimensions_that_the_saved_model_has() -> None:
    batch = Batch({"attention_mask": torch.ones(3, 5, dtype=torch.int64)}, torch.zeros(0), 15)
    found = make_pairs(form=EmbeddingForm(normalize=True, dimensions=4)).predict(Encoder(), batch)
    assert found.shape == (3, 4)
    assert np.linalg.norm(found, axis=1) == pytest.approx(1.0)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_poolings_are_those_of_sentence_transformers(pooling: Any, dtype: torch.dtype) -> None:
    hidden = torch.randn(3, 5, 8).to(dtype)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 1, 0, 0]])
    theirs = Pooling(8, pooling)({"token_embeddings": hidden, "attention_mask": mask})["sentence_embedding"]
    assert isinstance(theirs, torch.Tensor)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(pool(pooling, hidden, mask), theirs.float(), rtol=tolerance, atol=tolerance)


def test_a_pooling_that_is_not_known_is_refused() -> None:
    with pytest.raises(KeyError):
        pool("max", torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.int64))
