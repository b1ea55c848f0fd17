"""Embedding models: from hidden states to one vector for each text, and from texts to their embeddings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.train.data.tokenizer import load_tokenizer
from cpuft.train.embedding_form import EmbeddingForm, find_embedding_model, read_form
from cpuft.train.fast.acceleration import patch_model
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE
from cpuft.train.fast.packed_weights import PackedWeights
from cpuft.train.model import count_positions, describe_load_failure, load_weights, read_config
from cpuft.train.precision import autocast, find_precision

Embeddings = NDArray[np.float32]
"""Embeddings of texts, fp32, shape (texts, dimensions)."""

_BATCH_TOKENS, _LEAST_TOKENS = {"fp32": 1024, "bf16": 4096}, 128
"""Most tokens of a forward pass of one thread by precision, and the fewest to which a small job is divided. In fp32,
the activations stay in the cache. With AMX, preparing the weights would take a fifth of the time with 1024 tokens."""


def pool(pooling: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return one vector for each text, fp32, (texts, hidden size), from the hidden states of the last layer.

    `hidden` is (texts, length, hidden size), and `mask`, (texts, length), 1 for tokens and 0 for padding, which is at
    the end; each text has a token. Raises KeyError: `pooling` is none of POOLINGS.
    """
    if pooling == "cls":
        return hidden[:, 0].float()
    if pooling == "lasttoken":
        return hidden[torch.arange(hidden.shape[0]), mask.sum(1) - 1].float()
    if pooling != "mean":
        raise KeyError(pooling)
    weights = mask.to(hidden.dtype).unsqueeze(1)
    # A product reads the hidden states once, and does not store them multiplied by the mask.
    sums = torch.bmm(weights, hidden)[:, 0]
    return sums.float() / mask.sum(1, keepdim=True)


def normalize(embeddings: torch.Tensor) -> torch.Tensor:
    """Return embeddings, (..., dimensions), scaled to length 1; those of zeros stay zeros."""
    return torch.nn.functional.normalize(embeddings, dim=-1)


def plan_text_batches(
    lengths: NDArray[np.int64], threads: int, batch_size: int = 0, precision: str = "fp32"
) -> list[NDArray[np.int64]]:
    """Return the numbers of the texts that have tokens, in the batches of all forward passes, the longest texts first.

    With `batch_size` 0, a batch has at least one text and at most 1024 tokens with padding (4096 in bf16), in a small
    job at most all tokens / (4 * `threads`), but 128 or more. Raises KeyError then for other precisions.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    if batch_size:
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    limit = min(_BATCH_TOKENS[precision], max(_LEAST_TOKENS, int(lengths.sum()) // (4 * threads)))
    batches, start = list[NDArray[np.int64]](), 0
    while start < len(order):
        count = max(1, limit // int(lengths[order[start]]))
        batches.append(order[start : start + count])
        start += count
    return batches


class Embedder:
    """An embedding model with the layers of the fast path, which computes embeddings of texts. Making one loads it.

    `name` is a hub name, or the folder of a model or finished run; `precision` is auto, fp32 or bf16; an empty
    `pooling` is the model's own. Texts are cut at the form's length, else the number of positions, else 512. Raises
    CpuftError: the model cannot be used, or the CPU does not multiply bf16.
    """

    def __init__(self, name: str, precision: str = "auto", pooling: str = "") -> None:
        import transformers

        self.source = find_embedding_model(name)
        self.form = read_form(self.source, pooling)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.tokenizer = load_tokenizer(self.source)
        self.model, settings = load_encoder(self.source)
        self.max_length = self.form.max_length or count_positions(settings) or 512
        self.precision = find_precision(precision)
        # Otherwise the fast layers would compute what only a backward pass needs.
        self.model.requires_grad_(False)
        patch_model(self.model, self.precision, first_token=False)
        self._models = [self.model]
        self._packed = PackedWeights()

    @property
    def dimensions(self) -> int:
        """Number of dimensions of the embeddings."""
        return self.form.dimensions or int(self.model.config.hidden_size)

    def embed(self, texts: Sequence[str], prompt: str = "", batch_size: int = 0) -> Embeddings:
        """Return the embeddings of texts, each after `prompt` and cut at `max_length`, in their order: fp32, (texts,
        dimensions), zeros for a text without any token, even a special one. `batch_size` is that of
        `plan_text_batches`. No two threads may call it at once.
        """
        return self.embed_encoded(self.encode(texts, prompt), batch_size)

    def encode(self, texts: Sequence[str], prompt: str = "") -> list[list[int]]:
        """Return each text's token ids after `prompt`, with special tokens, cut at `max_length`. No two threads may
        call it at once.
        """
        if not texts:
            return []
        found = self.tokenizer([prompt + text for text in texts], truncation=True, max_length=self.max_length)
        ids: list[list[int]] = found["input_ids"]
        return ids

    def embed_encoded(self, encoded: Sequence[Sequence[int]], batch_size: int = 0) -> Embeddings:
        """Return the embeddings of token ids, which are not cut: fp32, (texts, dimensions), zeros for an empty text."""
        lengths = np.asarray([len(ids) for ids in encoded], np.int64)
        found = np.zeros((len(encoded), self.dimensions), np.float32)
        threads = torch.get_num_threads()
        batches = plan_text_batches(lengths, threads, batch_size, self.precision)
        waiting = iter(batches)

        def compute(model: torch.nn.Module) -> None:
            for part in waiting:
                mask = np.arange(lengths[part[0]]) < lengths[part, None]
                ids = np.full(mask.shape, self.tokenizer.pad_token_id or 0, np.int64)
                ids[mask] = np.concatenate([encoded[place] for place in part])
                inputs = torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))
                found[part] = self.embed_tokens(*inputs, model).numpy()

        if threads == 1 or len(batches) < 2 * threads:
            compute(self.model)
        else:
            self._compute_on_threads(compute, threads)
        return found

    def _compute_on_threads(self, compute: Callable[[torch.nn.Module], None], threads: int) -> None:
        """Call a function on several threads at once, each with a model of its own that shares the weights."""
        while len(self._models) < threads:
            self._models.append(_copy_with_same_weights(self.model))

        def compute_on_one_core(model: torch.nn.Module) -> None:
            torch.set_num_threads(1)  # threads inside of an operator would wait for each other at each end
            compute(model)

        try:
            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(compute_on_one_core, self._models[:threads]):
                    pass
        finally:
            torch.set_num_threads(threads)

    def embed_tokens(self, ids: torch.Tensor, mask: torch.Tensor, model: torch.nn.Module | None = None) -> torch.Tensor:
        """Return the embeddings of tokenised texts, fp32, (texts, dimensions), by this object's model or a copy of it.
        `ids` (int64) and `mask` (1 for tokens, 0 for padding at the end) are (texts, length).
        """
        with torch.inference_mode(), self._packed, autocast(self.precision):
            hidden = (model or self.model)(input_ids=ids, attention_mask=mask).last_hidden_state
        return finish_embeddings(self.form, pool(self.form.pooling, hidden, mask))


def finish_embeddings(form: EmbeddingForm, pooled: torch.Tensor) -> torch.Tensor:
    """Return embeddings cut to `form.dimensions` (0: whole) and then, if `form.normalize`, scaled to length 1. `pooled`
    has the shape (texts, hidden size).
    """
    cut = pooled[:, : form.dimensions] if form.dimensions else pooled
    return normalize(cut) if form.normalize else cut


def load_encoder(source: str) -> tuple[Any, Any]:
    """Return the encoder of a model's folder or hub name, in fp32 and evaluation mode without the fast path, and its
    transformers configuration. Raises CpuftError: the model cannot be read.
    """
    import transformers

    try:
        settings = read_config(source)
        load = transformers.AutoModel.from_pretrained
        read = partial(load, config=settings, attn_implementation="eager", trust_remote_code=False)
        model, _ = load_weights(read, source)
    except CpuftError:
        raise
    except Exception as error:  # safetensors, pickle and zipfile raise errors of their own classes
        raise CpuftError(describe_load_failure(source, error)) from None
    return model.eval(), settings


def _copy_with_same_weights(model: torch.nn.Module) -> torch.nn.Module:
    # While it runs, the fast encoder stores the layout of the batch, so that each thread needs one of its own.
    tensors: list[Any] = [*model.parameters(), *model.buffers(), getattr(model, MASTERS_ATTRIBUTE, None)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
