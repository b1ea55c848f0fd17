"""Small encoders with random weights, one of each kind, and a batch for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ElectraConfig,
    ElectraForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
DISTIL_SIZES = {
    "vocab_size": 64,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 40,
}
KINDS = ("bert", "roberta", "distilbert", "electra", "mpnet", "albert", "deberta-v2")
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 8,
    "max_relative_positions": -1,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
"""Settings of all checkpoints of DeBERTa-v2 and v3 but the number of buckets, which is 256."""
LENGTHS = (17, 9, 5, 3)


def make_model(kind: str, dropout: float = 0.0, **sizes: Any) -> Any:
    """A classifier of two classes, two layers, 32 hidden, in training mode; weights from seed 0.

    `sizes`: other settings than `SIZES`; not for DistilBERT.
    """
    torch.manual_seed(0)
    usual = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, **SIZES, **sizes}
    makers = {
        "bert": lambda: BertForSequenceClassification(BertConfig(**usual)),
        "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**usual)),
        "mpnet": lambda: MPNetForSequenceClassification(MPNetConfig(**usual)),
        "electra": lambda: ElectraForSequenceClassification(ElectraConfig(embedding_size=16, **usual)),
        "albert": lambda: AlbertForSequenceClassification(
            AlbertConfig(**{"embedding_size": 16, "classifier_dropout_prob": dropout, **usual})
        ),
        "deberta-v2": lambda: DebertaV2ForSequenceClassification(DebertaV2Config(**{**DEBERTA, **usual})),
        "distilbert": lambda: DistilBertForSequenceClassification(
            DistilBertConfig(dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout, **DISTIL_SIZES)
        ),
    }
    model: Any = makers[kind]()
    for name, parameter in model.named_parameters():
        # Large enough that attention is far from uniform and GELU from linear.
        parameter.data.mul_(50.0 if name.endswith(("relative_attention_bias.weight", "rel_embeddings.weight")) else 3.0)
    return model.train()


def make_batch(lengths: tuple[int, ...] = LENGTHS) -> dict[str, Tensor]:
    """Token ids, attention mask and labels of rows with these lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.where(mask.bool(), ids, 1)
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(len(lengths)) % 2}


def make_pair(kind: str) -> tuple[Any, Any]:
    """Two copies of one model, without dropout."""
    model = make_model(kind)
    return model, copy.deepcopy(model)


def make_optimizer(model: torch.nn.Module, **options: Any) -> torch.optim.AdamW:
    """AdamW with learning rate 1e-3 and no decay, unless told otherwise."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, "weight_decay": 0.0, **options})


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what was wanted."""
    found, wanted = found.detach().double(), wanted.detach().double()
    difference = torch.linalg.vector_norm(found - wanted)
    return float(difference / torch.linalg.vector_norm(wanted).clamp_min(1e-12))
