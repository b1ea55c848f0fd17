"""The word embeddings that are exchanged by rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    PreTrainedModel,
)

from cpuft.comm.compression.embedding_rows import find_embedding, plan_row_routes

SMALL = {"vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


@pytest.mark.parametrize(
    "model",
    [
        BertForSequenceClassification(BertConfig(**SMALL)),
        ElectraForSequenceClassification(ElectraConfig(**SMALL, embedding_size=8)),
        DistilBertForSequenceClassification(DistilBertConfig(vocab_size=100, dim=8, n_heads=1, n_layers=1)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_classifiers_word_embedding_is_exchanged_by_rows(model: PreTrainedModel) -> None:
    found = find_embedding(model)
    assert found is not None
    assert found.weight.shape[0] == 100


def test_a_weight_that_is_shared_or_frozen_is_exchanged_whole() -> None:
    # The output layer shares the weight; BART's encoder and decoder look up different tokens.
    assert find_embedding(BertForMaskedLM(BertConfig(**SMALL))) is None
    bart = BartConfig(vocab_size=100, d_model=16, encoder_layers=1, decoder_layers=1, pad_token_id=1)
    assert find_embedding(BartForSequenceClassification(bart)) is None
    frozen = BertForSequenceClassification(BertConfig(**SMALL))
    frozen.get_input_embeddings().requires_grad_(False)
    assert find_embedding(frozen) is None
    assert find_embedding(torch.nn.Linear(2, 2)) is None


def test_a_model_without_a_known_embedding_is_exchanged_whole() -> None:
    class Silent(torch.nn.Module):
        def get_input_embeddings(self) -> torch.nn.Module:
            raise NotImplementedError

    assert find_embedding(Silent()) is None


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=60), min_size=1, max_size=6).filter(any),
)
def test_what_a_rank_sends_is_what_the_others_receive(lists: list[list[int]]) -> None:
    tokens = [torch.tensor(one, dtype=torch.int64) for one in lists]
    routes = [plan_row_routes(tokens, 41, rank) for rank in range(len(tokens))]
    for rank, one in enumerate(routes):
        assert sorted(one.own.tolist()) == sorted(set(lists[rank]))
        assert sorted(one.rows.tolist()) == sorted(set().union(*lists))
        averagers = [row % len(tokens) for row in one.rows.tolist()]
        assert averagers == sorted(averagers)
        assert one.row_counts == [averagers.count(other) for other in range(len(tokens))]
        for to, other in enumerate(routes):
            sent = torch.split(one.own, one.own_counts)[to]
            averaged = torch.split(other.rows, other.row_counts)[to]
            expected = [] if to == rank else sent.tolist()
            assert averaged[other.received[rank]].tolist() == expected


@pytest.mark.parametrize("token", [-1, 41])
def test_a_token_that_is_no_row_is_refused(token: int) -> None:
    with pytest.raises(RuntimeError, match=f"{token} is out of bounds"):
        plan_row_routes([torch.tensor([3, token]), torch.tensor([4])], 41, 0)
