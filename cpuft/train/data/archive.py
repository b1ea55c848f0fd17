"""Prepared data: tokenised examples in one uncompressed NumPy archive, whose arrays are memory-mapped."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.files import written_beside
from cpuft.serialization import load, parse_json

EMPTY: NDArray[Any] = np.zeros(0, np.int8)


UNKNOWN = -1


UNTAGGED = -100
"""The label of a token that has none: torch's cross entropy leaves it out."""


@dataclass(frozen=True)
class Tokens:
    """Tokenised rows of one split, one after another."""

    ids: NDArray[np.int32]
    """Token numbers, shape (all tokens,)."""
    types: NDArray[np.int8]
    """0 in a row's first text, 1 in its second; shape (all tokens,), or (0,) where the model takes none."""
    offsets: NDArray[np.int64]
    """Row i is ids[offsets[i] : offsets[i + 1]]; shape (rows + 1,)."""
    labels: NDArray[Any]
    """What the task's kind needs: class numbers or scores, shape (rows,); of several labels, 1 for those that a row
    has, shape (rows, classes); of tags, class numbers of words' first tokens, else UNTAGGED, shape (all tokens,);
    of texts nothing, shape (0,)."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, shape (rows,)."""
        return np.diff(self.offsets)

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens of these rows stand among all, one row after another."""
        return np.concatenate([np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows])


@dataclass(frozen=True)
class Prepared:
    """All a rank needs of the data."""

    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    checksum: str
    """Of rows, labels, tokenizer and lengths: equal checksums mean the same data."""
    pad_id: int
    train: Tokens
    validation: dict[str, Tokens]
    kind: str = "class"
    """What is learned: the task's kind, by which `make_objective` chooses."""
    mask_id: int = 0
    word_kinds: NDArray[np.int8] = field(default_factory=lambda: EMPTY)
    """What each word is to who masks some, by `sort_words`; of texts only."""
    words: int = 0
    """Of the tokenizer."""
    tokenizer: str = ""
    """One that was made here, as JSON."""
    texts: tuple[str, ...] = ()
    """Names of the columns that hold the texts."""
    label: str = ""
    """Name of the column that holds the label; empty where there is none."""
    cut: int = UNKNOWN
    """Training examples that were longer than the maximum length and lost their ends, or UNKNOWN."""
    unknown: float = 0.0
    """Share of the training texts' tokens that the tokenizer does not know."""


def write_prepared(path: Path, meta: dict[str, Any], splits: dict[str, Tokens], others: dict[str, Any]) -> None:
    """Write an archive. Raises CpuftError: its folder does not take it."""
    arrays = {"meta": np.asarray(json.dumps(meta)), **others}
    for key, tokens in splits.items():
        arrays |= {f"{key}.{name}": value for name, value in vars(tokens).items()}
    try:
        with written_beside(path) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        said = f"cannot take the rows ({error.strerror}): make room there, or set XDG_CACHE_HOME"
        raise CpuftError(f"the cache folder {path.parent} {said} to another") from None


def read_prepared(path: str) -> Prepared:
    """The archive at `path`. Rows are read as they are looked at: they may be more than memory holds.

    Raises CpuftError when it is none of ours.
    """
    try:
        meta, arrays = map_archive(path)
        splits = {
            key: _check_tokens(Tokens(*(arrays[f"{key}.{name}"] for name in ("ids", "types", "offsets", "labels"))))
            for key in ("train", *(f"validation{name}" for name in meta["validation"]))
        }
        validation = {name: splits[f"validation{name}"] for name in meta["validation"]}
        values = (tuple(meta["labels"]), tuple(meta["metrics"]), meta["checksum"], meta["pad_id"], splits["train"])
        told = (meta["kind"], meta["mask_id"], arrays.get("word_kinds", EMPTY), meta["words"], meta["tokenizer"])
        return Prepared(*values, validation, *told, tuple(meta["texts"]), meta["label"], meta["cut"], meta["unknown"])
    except Exception as error:  # zipfile and NumPy raise whatever their layers raise
        raise CpuftError(f"{path} is no prepared data ({error!r}): remove it, and start again") from None


_KINDS: dict[str, tuple[tuple[type[np.generic], int], ...]] = {
    "ids": ((np.int32, 1),),
    "types": ((np.int8, 1),),
    "offsets": ((np.int64, 1),),
    "labels": ((np.float32, 1), (np.float32, 2), (np.int32, 1), (np.int8, 1)),
    "word_kinds": ((np.int8, 1),),
}
"""Type and number of axes that arrays of an archive may have, by the last part of their names."""


def _check_tokens(tokens: Tokens) -> Tokens:
    """The tokens, when their arrays fit each other. Raises ValueError: they do not."""
    offsets, size = tokens.offsets, len(tokens.ids)
    if not len(offsets) or offsets[0] or offsets[-1] != size or (np.diff(offsets) < 0).any():
        raise ValueError("the examples' offsets do not fit the token ids")
    if len(tokens.types) not in (0, size) or len(tokens.labels) not in (0, size, len(tokens)):
        raise ValueError("token types or labels are not as many as tokens or examples")
    return tokens


def map_archive(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What JSON holds in the array `meta`, and all others, mapped. Raises whatever NumPy, zipfile and JSON do."""
    with np.load(path, allow_pickle=False) as archive:
        meta = load(dict[str, Any], parse_json(str(archive["meta"])))
        return meta, {name: _map(path, archive, name) for name in archive if name != "meta"}


def _map(path: str, archive: Any, name: str) -> Any:
    """An array where it lies in the file, which is not compressed. NumPy maps none in an archive by itself."""
    with open(path, "rb") as file:
        file.seek(archive.zip.getinfo(f"{name}.npy").header_offset)
        # A file in an archive begins with 30 bytes, the last four of which say how long the two texts after them are.
        file.seek(sum(struct.unpack("<26xHH", file.read(30))), os.SEEK_CUR)
        np.lib.format.read_magic(file)
        shape, by_columns, kind = np.lib.format.read_array_header_1_0(file)
        # A memory map would take an object array's bytes for pointers, and packed ones for numbers.
        kinds = _KINDS.get(name.rpartition(".")[2], ())
        if not any(kind == allowed and len(shape) == axes for allowed, axes in kinds):
            raise ValueError(f"array {name!r:.60} of type {kind!s:.60} and {len(shape)} axes is none of ours")
        if by_columns or archive.zip.getinfo(f"{name}.npy").compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"array {name!r:.60} is compressed, or not stored row by row")
        return np.memmap(path, kind, "r", file.tell(), shape) if np.prod(shape) else np.zeros(shape, kind)
