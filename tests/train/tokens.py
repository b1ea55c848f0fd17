"""Tokenised rows that no tokenizer made."""

from __future__ import annotations

import numpy as np

from cpuft.train.data.archive import Tokens


def make_tokens(lengths: list[int], types: bool = True) -> Tokens:
    """Row i holds the number i + 1 `lengths[i]` times."""
    ids = np.concatenate([np.full(length, row + 1, np.int32) for row, length in enumerate(lengths)])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Tokens(
        ids, (ids % 2).astype(np.int8) if types else np.zeros(0, np.int8), offsets, np.ones(len(lengths), np.float32)
    )
