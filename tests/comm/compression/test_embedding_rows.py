"""The word embeddings that are exchanged by rows."""

from __future__ import annotations

import pytest
import torch
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

from cpuft.comm.compression.embedding_rows import find_embedding

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
