"""What is said of a model's layers: how many the fast path has replaced, or why none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    DebertaV2Config,
    GPT2Config,
    ModernBertConfig,
)

from cpuft.config.train import TrainConfig
from cpuft.train.fast.acceleration import accelerate, describe_layers
from cpuft.train.optimizer import describe_fast_path
from tests.train.fast.encoders import DEBERTA

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
UNKNOWN = (
    "(it knows the layers of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT, MPNet, ALBERT, DeBERTa-v2/v3, "
    "ModernBERT, EuroBERT, Llama, Qwen3, SmolLM3 and Gemma 3 (text))"
)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (BertConfig(**SMALL), "2 of 2 layers replaced"),
        # ALBERT has one layer, which it runs as often as the configuration says.
        (AlbertConfig(**SMALL, embedding_size=16), "1 of 1 layer replaced"),
        (AlbertConfig(**SMALL, embedding_size=16, num_hidden_groups=2), "2 of 2 layers replaced"),
        (DebertaV2Config(**SMALL, **DEBERTA), "2 of 2 layers replaced"),
        (
            DebertaV2Config(**SMALL, **DEBERTA, conv_kernel_size=3),
            "0 of 2 layers replaced, because it does not know the convolution after the first layer",
        ),
        (
            DebertaV2Config(**SMALL, **DEBERTA | {"pos_att_type": ["c2p"]}),
            "0 of 2 layers replaced, because it does not know attention without both c2p and p2c in pos_att_type",
        ),
        (
            DebertaV2Config(**SMALL),
            "0 of 2 layers replaced, because it does not know attention without both c2p and p2c in pos_att_type",
        ),
        (ModernBertConfig(**SMALL, pad_token_id=0), "2 of 2 layers replaced"),
        (
            ModernBertConfig(**SMALL, pad_token_id=0, hidden_activation="relu"),
            "0 of 2 layers replaced, because it does not know the activation relu",
        ),
        (
            GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4),
            f"0 of 2 layers replaced, because it does not know GPT2Block {UNKNOWN}",
        ),
        (
            BertConfig(**SMALL, chunk_size_feed_forward=4),
            "0 of 2 layers replaced, because it does not know chunked feed-forward",
        ),
        (
            BertConfig(**SMALL, is_decoder=True),
            "0 of 2 layers replaced, because it does not know decoders with layers like BERT's",
        ),
    ],
    ids=[
        "bert",
        "albert",
        "albert-groups",
        "deberta",
        "convolution",
        "c2p",
        "absolute",
        "modernbert",
        "activation",
        "gpt2",
        "chunked",
        "decoder",
    ],
)
def test_how_many_layers_are_replaced(config: Any, said: str) -> None:
    model = AutoModelForSequenceClassification.from_config(config)
    accelerate(model, torch.optim.AdamW(model.parameters()))
    assert describe_layers(model) == said


def test_an_encoder_that_is_entered_at_its_model_is_not_replaced_alone() -> None:
    encoder = AutoModelForSequenceClassification.from_config(DebertaV2Config(**SMALL, **DEBERTA)).deberta.encoder
    accelerate(encoder, torch.optim.AdamW(encoder.parameters()))
    why = "it does not know a DebertaV2Encoder without its model around it"
    assert describe_layers(encoder) == f"0 of 2 layers replaced, because {why}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fast_path": False}, "not used, because of --no-fast-path"),
        ({"engine": "deepspeed"}, "not used, because of --engine deepspeed"),
        ({}, "0 of 0 layers replaced, because it does not know Linear " + UNKNOWN),
    ],
)
def test_why_the_fast_path_is_not_used(options: dict[str, Any], said: str) -> None:
    assert describe_fast_path(torch.nn.Linear(2, 2), TrainConfig(**options)) == said
