"""Embedding models: from hidden states to one vector for each text, and from texts to their embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.hardware import choose_precision
from cpuft.train.checkpoint.final_model import MODEL_DIR
from cpuft.train.data.tokenizer import load_tokenizer
from cpuft.train.embedding_form import read_form
from cpuft.train.fast.acceleration import patch_model
from cpuft.train.model import find_model, load_weights
from cpuft.train.precision import autocast, read_cpu

Embeddings = NDArray[np.float32]
"""Embeddings of texts, fp32, shape (texts, dimensions)."""


def pool(pooling: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return one vector for each text from the hidden states of its tokens, fp32, shape (texts, hidden size).

    Parameters
    ----------
    pooling: one of POOLINGS.
    hidden: hidden states of the last layer, shape (texts, length, hidden size).
    mask: 1 for tokens and 0 for padding, which is at the end of each row; shape (texts, length). Each text has a token.

    Raises KeyError: `pooling` is none of POOLINGS.
    """
    if pooling == "cls":
        return hidden[:, 0].float()
    if pooling == "lasttoken":
        return hidden[torch.arange(len(hidden)), mask.sum(1) - 1].float()
    if pooling != "mean":
        raise KeyError(pooling)
    weights = mask.to(hidden.dtype).unsqueeze(1)
    # A product reads the hidden states once, and does not store them multiplied by the mask.
    sums = torch.bmm(weights, hidden)[:, 0]
    return sums.float() / mask.sum(1, keepdim=True)


def normalize(embeddings: torch.Tensor) -> torch.Tensor:
    """Return embeddings scaled to length 1, in the same shape; those of zeros stay zeros."""
    return torch.nn.functional.normalize(embeddings, dim=-1)


class Embedder:
    """An embedding model that computes embeddings of texts, with the layers of the fast path.

    Making it loads the model. Raises CpuftError: the model or its tokenizer cannot be found or read, or cpuft cannot
    compute its form of embeddings.

    Parameters
    ----------
    name: folder or hub name of the model, or minilm; also the folder of a finished run.
    precision: bf16, fp32, or auto: bf16 where the CPU multiplies it, else fp32.
    max_length: number of tokens at which texts are cut; 0: that of the model's form, else its number of positions.
    pooling: one of POOLINGS; empty: that of the model's form.
    """

    def __init__(self, name: str, precision: str = "auto", max_length: int = 0, pooling: str = "") -> None:
        import transformers

        is_run = Path(name, MODEL_DIR, "config.json").exists()
        self.source = str(Path(name, MODEL_DIR)) if is_run else find_model(name)
        self.form = read_form(self.source, pooling)
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.tokenizer = load_tokenizer(self.source)
        settings = transformers.AutoConfig.from_pretrained(self.source)
        read = partial(transformers.AutoModel.from_pretrained, config=settings, attn_implementation="eager")
        self.model, _ = load_weights(read, self.source)
        self.model.eval()
        positions = getattr(settings, "max_position_embeddings", 0) or 0
        self.max_length = max_length or self.form.max_length or positions or 512
        self.precision = choose_precision(precision, False, read_cpu().flags).name
        patch_model(self.model, self.precision, first_token=False)

    def embed(self, texts: Sequence[str], prompt: str = "", batch_size: int = 64) -> Embeddings:
        """Return the embeddings of texts in their order, fp32, shape (texts, dimensions).

        Parameters
        ----------
        prompt: put in front of each text.
        batch_size: number of texts of a forward pass; texts of similar length are computed together.
        """
        encoded = self.tokenizer([prompt + text for text in texts], truncation=True, max_length=self.max_length)[
            "input_ids"
        ]
        lengths = np.asarray([len(ids) for ids in encoded])
        found = np.zeros((len(texts), self.form.dimensions or self.model.config.hidden_size), np.float32)
        order = np.argsort(-lengths, kind="stable")
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            mask = np.arange(lengths[part].max()) < lengths[part, None]
            ids = np.full(mask.shape, self.tokenizer.pad_token_id or 0, np.int64)
            ids[mask] = np.concatenate([encoded[place] for place in part])
            found[part] = self.embed_tokens(torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))).numpy()
        return found

    def embed_tokens(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokenised texts, fp32, shape (texts, dimensions).

        Parameters
        ----------
        ids: int64, shape (texts, length), padded at the end.
        mask: 1 for tokens and 0 for padding, of the same shape.
        """
        with torch.inference_mode(), autocast(self.precision):
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        embeddings = pool(self.form.pooling, hidden, mask)
        if self.form.dimensions:
            embeddings = embeddings[:, : self.form.dimensions]
        return normalize(embeddings) if self.form.normalize else embeddings
