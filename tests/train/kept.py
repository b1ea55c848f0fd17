"""A small encoder, and what its forward pass keeps for backward, counted."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification

from cpuft.config.train import TrainConfig
from cpuft.train.optimizer import make_optimizer
from cpuft.train.precision import autocast

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
}


def make_encoder(layers: int, **options: Any) -> Any:
    """A classifier with dropout, in training mode, as a run loads it."""
    settings = BertConfig(num_hidden_layers=layers, **{**SIZES, **options})
    settings._attn_implementation = "eager"
    return BertForSequenceClassification(settings).train()


def make_full_batch(rows: int, length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    """Rows of one length, the last of them but for `padding` tokens."""
    ids = torch.randint(3, 100, (rows, length))
    mask = torch.ones_like(ids)
    mask[1:, length - padding :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}


def count_kept(model: Any, batch: dict[str, torch.Tensor], config: TrainConfig) -> int:
    """Bytes that autograd holds once the forward pass is over, weights left out; the model gets its engine."""
    make_optimizer(model, config, config.precision)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(config.precision):
        model(**batch)
    return sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
