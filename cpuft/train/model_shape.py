"""The sizes of a model that decide how much memory its training takes, read from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.config.train import TrainConfig
from cpuft.tasks import DECODER_KINDS, find_task
from cpuft.train.fast.architectures import POST_NORM_ARCHITECTURES, SIZE_SETTINGS
from cpuft.train.model import find_model, load_config, read_config_file

FAST_DECODERS = ("llama", "qwen3", "smollm3", "gemma3_text")
"""Decoders with fast layers (`architectures.PRE_NORM_ARCHITECTURES`), by their model_type in config.json."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of an encoder like BERT or of a decoder like Llama. Without `layers`, activations are unknown."""

    linear_parameters: int
    """Parameters of the layers' linear modules, which the fast path computes in bf16."""
    other_parameters: int
    """Parameters of embeddings, norms, and the pooler or head."""
    layers: int = 0
    """Number of layers, counted as often as the encoder runs them; if it is not known, 0, as all other sizes are."""
    hidden: int = 0
    inner: int = 0
    """The intermediate size, between the products of feed-forward."""
    query: int = 0
    """Width of all query heads together."""
    key: int = 0
    """Width of all key heads together, and of all value heads."""
    vocab_size: int = 0
    tables: int = 0
    """Number of parameters of the embeddings, and of a decoder's head that does not share the token embedding's."""
    norms: int = 0
    """Norms of the hidden size in a decoder's layer: 4 in Gemma 3, else 2; 0 for an encoder."""
    norms_heads: bool = False
    """Whether queries and keys are normed in each head, as in Qwen3 and Gemma 3."""
    may_be_fast: bool = True
    """Whether there are fast layers for this architecture."""


def find_shape(config: TrainConfig, vocab_size: int) -> ModelShape:
    """Return the shape of the model that the options name; `vocab_size` is the tokenizer's, for an untrained model. An
    unknown architecture, or a model on the hub, has 0 layers, and a quarter of its folder's safetensors bytes as other
    parameters. Raises CpuftError: the model or the configuration is missing.
    """
    if config.from_config:
        return _read_shape(config, load_config(config, {}, vocab_size).to_dict()) or ModelShape(0, 0)
    nbytes = sum(path.stat().st_size for path in Path(find_model(config.model)).glob("*.safetensors"))
    return _read_shape(config, read_config_file(config)) or ModelShape(0, nbytes // 4)


def _read_shape(config: TrainConfig, settings: Mapping[str, Any]) -> ModelShape | None:
    predicts_tokens = find_task(config.task, config.causal).kind in DECODER_KINDS
    if predicts_tokens or settings.get("model_type") in FAST_DECODERS:
        return read_decoder_shape(settings, predicts_tokens)
    return read_encoder_shape(settings)


def _read_size(settings: Mapping[str, Any], *names: str) -> int:
    """Return the size with the first of these names in config.json that is there; 0 if it is no positive number."""
    found = next((settings[name] for name in names if name in settings), 0)
    return found if type(found) is int and found > 0 else 0


def read_encoder_shape(settings: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape of an encoder by its config.json; None if the fast path does not know it or lacks a size."""
    sizes = [_read_size(settings, *names) for names in SIZE_SETTINGS.values()]
    architecture = next((one for one in POST_NORM_ARCHITECTURES if one.model_type == settings.get("model_type")), None)
    if architecture is None or not all(sizes):
        return None
    layers, hidden, inner, _, vocab_size, positions = sizes
    different = layers
    if architecture.shared_layers is not None:
        groups, in_group = (_read_size(settings, name) or 1 for name in architecture.shared_layers.counts)
        layers, different = layers * in_group, groups * in_group
    linears = different * (4 * (hidden + 1) * hidden + 2 * hidden * inner + hidden + inner)
    width = _read_size(settings, "embedding_size") or hidden
    tables = (vocab_size + positions + _read_size(settings, "type_vocab_size")) * width
    # Norms; the pooler, or what a head has in its place; and the projection of narrow embeddings (ELECTRA, ALBERT).
    others = tables + 2 * width
    others += (different * 4 + hidden + 1 + (width != hidden) * (width + 1)) * hidden
    return ModelShape(linears, others, layers, hidden, inner, hidden, hidden, vocab_size, tables)


def read_decoder_shape(settings: Mapping[str, Any], predicts_tokens: bool = True) -> ModelShape | None:
    """Return the shape of a decoder by its config.json; None if it is none like Llama or a size is missing. Without
    `predicts_tokens`, its head is small and not counted.
    """
    *sizes, _ = (_read_size(settings, *names) for names in SIZE_SETTINGS.values())
    if not all(sizes) or "num_key_value_heads" not in settings:
        return None
    layers, hidden, inner, heads, vocab_size = sizes
    kind = str(settings.get("model_type"))
    head_size = _read_size(settings, "head_dim") or hidden // heads
    query, key = heads * head_size, (_read_size(settings, "num_key_value_heads") or heads) * head_size
    is_tied = settings.get("tie_word_embeddings", kind.startswith("gemma") or kind == "smollm3") is True
    tables = (2 if predicts_tokens and not is_tied else 1) * vocab_size * hidden
    norms = 4 if kind.startswith(("gemma2", "gemma3")) else 2
    return ModelShape(
        layers * hidden * (2 * query + 2 * key + 3 * inner),
        tables + (layers * norms + 1) * hidden,
        layers,
        hidden,
        inner,
        query,
        key,
        vocab_size,
        tables,
        norms=norms,
        norms_heads=kind.startswith(("qwen3", "gemma3")),
        may_be_fast=kind in FAST_DECODERS,
    )
