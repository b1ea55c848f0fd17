"""Small models with random weights of each family with pre-norm layers, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModel,
    EuroBertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    ModernBertConfig,
    Qwen3Config,
    SmolLM3Config,
)

LONGEST = 40
WINDOW = 5
"""Positions before its own that a query of a local layer looks at."""
_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_key_value_heads": 2, "use_cache": False}
_LOCAL: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW + 1}
_YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": LONGEST // 2}
CONFIGS: dict[str, Any] = {
    # Layers 0 and 3 are global.
    "modernbert": lambda: ModernBertConfig(
        **_SIZES, num_hidden_layers=4, local_attention=2 * WINDOW, cls_token_id=1, sep_token_id=2
    ),
    "eurobert": lambda: EuroBertConfig(**_SIZES, **_LAYERS),
    "llama": lambda: LlamaConfig(**_SIZES, **_LAYERS),
    "llama-yarn": lambda: LlamaConfig(**_SIZES, **_LAYERS, rope_parameters=_YARN, attention_bias=True),
    "qwen3": lambda: Qwen3Config(**_SIZES, **_LAYERS, head_dim=12),
    "qwen3-local": lambda: Qwen3Config(
        **_SIZES, **_LAYERS, head_dim=16, **_LOCAL, use_sliding_window=True, max_window_layers=0
    ),
    # The second layer is without rotation.
    "smollm3": lambda: SmolLM3Config(**_SIZES, **_LAYERS, no_rope_layer_interval=2),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, **_LAYERS, head_dim=16, **_LOCAL, query_pre_attn_scalar=16),
    "gemma3-encoder": lambda: Gemma3TextConfig(
        **_SIZES, **_LAYERS, head_dim=16, **_LOCAL, query_pre_attn_scalar=16, use_bidirectional_attention=True
    ),
}
"""Makes the configuration of each family."""
FAMILIES = tuple(CONFIGS)


def make_model(family: str, **settings: Any) -> Any:
    """The model without a head, in training mode, with weights from seed 0 and without dropout.

    `settings`: attributes of the configuration that are changed.
    """
    config = CONFIGS[family]()
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModel.from_config(config)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        # Large enough that attention is far from uniform; and norms and biases are not 1 and 0.
        if parameter.dim() > 1:
            parameter.data.mul_(2.0)
        else:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.train()


def make_batch(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Token ids and attention mask of rows with these lengths, padded to the longest on the right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.where(mask.bool(), ids, 0), "attention_mask": mask}


def compute_loss(model: Any, batch: dict[str, Tensor], seen: Tensor | None = None) -> Tensor:
    """A number that depends on every token of a batch in its own way, and on nothing that is padding.

    `seen`: (batch, length) bool, the tokens; None: those of the attention mask.
    """
    hidden = model(**batch).last_hidden_state
    seen = batch["attention_mask"].bool() if seen is None else seen
    weights = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(4))
    values: Tensor = torch.sin(hidden[seen]) @ weights
    return values.square().mean()
