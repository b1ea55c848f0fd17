"""Prepared data: tokenised examples in an uncompressed NumPy archive, whose arrays are memory-mapped."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.files import write_atomically
from cpuft.serialization import load, parse_json

EMPTY: NDArray[Any] = np.zeros(0, np.int8)
"""An array of shape (0,), int8, in the place of an array that a task does not need."""
UNKNOWN = -1
"""Value of `Prepared.truncated` if the tokenizer does not tell which examples it cut."""
UNTAGGED = -100
"""Label of a token that has none. torch's cross entropy ignores it."""
_KEY_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: an odd number whose powers spread over all bits (Knuth, TAOCP 3, section 6.4)."""
_HASHED_AT_ONCE = 1 << 16
"""Tokens whose hashes are computed together, so that they fit into the cache of a core."""


@dataclass(frozen=True)
class Tokens:
    """The tokenised examples of one split, one after another."""

    ids: NDArray[np.int32]
    """Token ids, shape (all tokens,)."""
    types: NDArray[np.int8]
    """Token type ids: 0 in an example's first text, 1 in its second; shape (all tokens,), or (0,) if the model takes
    none. For embedding models, the number of the text in its example; (0,) if examples have one text. For the kind
    chat with --pack, 1 at the first token of each conversation, else 0."""
    offsets: NDArray[np.int64]
    """Example i is ids[offsets[i] : offsets[i + 1]]; shape (examples + 1,)."""
    labels: NDArray[Any]
    """By the task's kind. class, score: class numbers or scores, fp32, shape (examples,). labels: 1 for each label that
    an example has, else 0, fp32, shape (examples, classes). tags: class numbers of the words' first tokens, else
    UNTAGGED, int32, shape (all tokens,). masked, causal: shape (0,). chat: 1 for each token that the assistant says,
    else 0, int8, shape (all tokens,). similarity: scores, fp32, shape (examples,). pairs: shape (0,) for training; for
    validation the judgements of a retrieval set, int32, shape (judgements, 3): query number, document number,
    relevance. relevance: scores, fp32, shape (examples,) for training; for validation shape (examples, 2): score, and
    number of the query."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each example, shape (examples,)."""
        return np.diff(self.offsets)

    def positions(self, examples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in `ids` of all tokens of these examples, one after another; of none, ValueError."""
        return np.concatenate([np.arange(self.offsets[one], self.offsets[one + 1]) for one in examples])


def hash_sequences(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of 64 bits, 0 if empty, of each sequence; `ids` has `lengths[0]` tokens of the first, and so on."""
    ends = lengths.cumsum()
    factors = np.full(int(lengths.max(initial=0)), _KEY_FACTOR, np.uint64).cumprod()
    place_in_sequence = np.arange(len(ids)) - np.repeat(ends - lengths, lengths)
    products = (ids.astype(np.uint64) + np.uint64(1)) * factors[place_in_sequence]
    hashes = np.zeros(len(lengths), np.uint64)
    if len(ids):
        hashes[lengths > 0] = np.add.reduceat(products, (ends - lengths)[lengths > 0])
    return hashes


def count_classes(labels: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """Return how many of these labels each class has, shape (classes,): numbers below `classes`, or -100 for none."""
    return np.bincount(labels[labels != UNTAGGED].astype(np.int64), minlength=classes)


def count_repeated(train: Tokens, validation: Tokens) -> int:
    """Return how many validation examples, equal ones too, have exactly the tokens of one of the training examples."""
    return int(np.isin(_hash_examples(validation), _hash_examples(train)).sum())


def _hash_examples(tokens: Tokens) -> NDArray[np.uint64]:
    """Return a hash of each example's tokens, which may be more than fit into memory."""
    later = range(_HASHED_AT_ONCE, len(tokens.ids), _HASHED_AT_ONCE)
    bounds = [0, *np.searchsorted(tokens.offsets, later), len(tokens)]
    parts = [tokens.offsets[first : last + 1] for first, last in pairwise(bounds)]
    return np.concatenate([hash_sequences(tokens.ids[part[0] : part[-1]], np.diff(part)) for part in parts])


@dataclass(frozen=True)
class ValidationRows:
    """What is kept of the rows of a validation split as they were read."""

    texts: NDArray[np.uint8]
    """The beginnings of the texts of the first rows, or of none: a JSON list of lists, in UTF-8."""
    slice_numbers: NDArray[np.int32]
    """Number of each row's value of --slice-by in `slice_values`, shape (rows,); (0,) without --slice-by."""
    slice_values: tuple[str, ...] = ()

    def list_texts(self, rows: NDArray[np.int64]) -> list[list[str] | None]:
        """Return the beginnings of the texts of each of these rows, and None for rows whose texts are not kept."""
        kept = load(list[list[str]], parse_json(self.texts.tobytes().decode()))
        return [kept[row] if row < len(kept) else None for row in rows]


@dataclass(frozen=True)
class Prepared:
    """All data that a rank needs."""

    labels: tuple[str, ...]
    """Names of the classes, in the order of their numbers; empty for the kinds score and masked."""
    metrics: tuple[str, ...]
    checksum: str
    """Checksum of the examples, labels, tokenizer and maximum length: equal checksums mean the same data."""
    pad_id: int
    train: Tokens
    validation: dict[str, Tokens]
    """Validation splits by the suffix of the metrics' names: `""`, and for MNLI also `_mismatched`."""
    kind: str = "class"
    """What is predicted: `Task.kind`."""
    mask_id: int = 0
    """Id of the mask token; 0 if the tokenizer has none."""
    token_kinds: NDArray[np.int8] = field(default_factory=lambda: EMPTY)
    """For the kind masked, what `classify_tokens` returns; else empty."""
    vocab_size: int = 0
    """Rows that an embedding for this tokenizer needs."""
    tokenizer: str = ""
    """The tokenizer as JSON, if it was trained on these texts; else empty."""
    texts: tuple[str, ...] = ()
    """Names of the columns that hold the texts."""
    label: str = ""
    """Name of the column that holds the label; empty if there is none."""
    truncated: int = UNKNOWN
    """Number of training examples that were longer than the maximum length and were cut, or UNKNOWN."""
    unknown_share: float = 0.0
    """Share of the training texts' tokens that the tokenizer does not know."""
    note: str = ""
    """What else is to be said of the training examples, in a clause; empty if nothing."""
    repeated: int = 0
    """Number of validation examples whose tokens a training example has; 0 for kinds without labels."""
    rows: str = ""
    """Checksum of the validation rows, independent of the tokenizer; empty for kinds that predict tokens of texts."""
    validation_rows: dict[str, ValidationRows] = field(default_factory=dict)
    """What is kept of the rows of each validation split; empty if `rows` is."""


_ROW_ARRAYS = ("texts", "slice_numbers")


def write_prepared(
    path: Path,
    meta: dict[str, Any],
    splits: Mapping[str, Tokens],
    rows: Mapping[str, ValidationRows],
    token_kinds: NDArray[np.int8] = EMPTY,
) -> None:
    """Write an archive that `read_prepared` opens, completely or not at all.

    `meta` has fields of `Prepared` that JSON can hold. The keys of `splits` are `train`, and `validation` with the
    suffix of the metrics' names; those of `rows` only the suffix. Raises CpuftError: the folder cannot be written.
    """
    values = {name: one.slice_values for name, one in rows.items()}
    names = [key.removeprefix("validation") for key in splits if key != "train"]
    text = json.dumps({"fields": meta, "validation": names, "slice_values": values})
    arrays: dict[str, Any] = {"meta": np.asarray(text), "token_kinds": token_kinds}
    for key, tokens in splits.items():
        arrays |= {f"{key}.{name}": value for name, value in vars(tokens).items()}
    arrays |= {f"validation{name}.{part}": getattr(one, part) for name, one in rows.items() for part in _ROW_ARRAYS}
    with explain_cache_failures(path.parent), write_atomically(path) as beside, beside.open("wb") as file:
        np.savez(file, **arrays)


@contextmanager
def explain_cache_failures(folder: Path, what: str = "the prepared data") -> Iterator[None]:
    """Raise any OSError of the block, which writes `what` to the cache folder and may read files elsewhere, as a
    CpuftError that says what to do.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, str) and not Path(error.filename).is_relative_to(folder):
            raise CpuftError(f"{error.filename} cannot be read ({error.strerror}): start again when it can") from None
        raise CpuftError(
            f"{what} cannot be written to the cache folder {folder} ({error.strerror}): free space "
            f"there, or set XDG_CACHE_HOME to another folder"
        ) from None


def read_prepared(path: str) -> Prepared:
    """Open an archive as read-only maps of its file, which must stay. Raises CpuftError: it is missing or damaged."""
    try:
        meta, arrays = map_archive(path)

        def read_split(key: str) -> Tokens:
            return _check_tokens(Tokens(*(arrays[f"{key}.{name}"] for name in ("ids", "types", "offsets", "labels"))))

        validation = {name: read_split(f"validation{name}") for name in meta["validation"]}
        rows = {
            name: ValidationRows(
                **{part: arrays[f"validation{name}.{part}"] for part in _ROW_ARRAYS},
                slice_values=tuple(map(str, values)),
            )
            for name, values in meta["slice_values"].items()
        }
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in meta["fields"].items()
        }
        return Prepared(
            **fields,
            train=read_split("train"),
            validation=validation,
            token_kinds=arrays["token_kinds"],
            validation_rows=rows,
        )
    except Exception as error:  # zipfile and NumPy raise many kinds of errors
        raise CpuftError(f"{path} is not prepared data ({error!r}): remove it, and start again") from None


def _check_tokens(tokens: Tokens) -> Tokens:
    offsets, size = tokens.offsets, len(tokens.ids)
    if not len(offsets) or offsets[0] or offsets[-1] != size or (np.diff(offsets) < 0).any():
        raise ValueError("the examples' offsets do not fit the token ids")
    is_judged = tokens.labels.dtype == np.int32 and tokens.labels.ndim == 2  # a retrieval set
    if len(tokens.types) not in (0, size) or not (is_judged or len(tokens.labels) in (0, size, len(tokens))):
        raise ValueError("token types or labels are not as many as tokens or examples")
    return tokens


def map_archive(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON object in the array `meta` of a NumPy archive, and its other arrays by name, as read-only maps.

    Raises ValueError: an array is compressed, has objects or is not stored row by row; for a missing or damaged file,
    the libraries' exceptions pass through.
    """
    with np.load(path, allow_pickle=False) as archive:
        meta = load(dict[str, Any], parse_json(str(archive["meta"])))
        return meta, {name: _map_array(path, archive, name) for name in archive if name != "meta"}


def _map_array(path: str, archive: Any, name: str) -> Any:
    """Map an array of an uncompressed archive, which NumPy itself does not do."""
    with open(path, "rb") as file:
        file.seek(archive.zip.getinfo(f"{name}.npy").header_offset)
        # A file in a zip archive begins with 30 bytes, the last four of which are the lengths of its name and extras.
        file.seek(sum(struct.unpack("<26xHH", file.read(30))), os.SEEK_CUR)
        np.lib.format.read_magic(file)
        shape, by_columns, kind = np.lib.format.read_array_header_1_0(file)
        # A memory map would take the bytes of an object array for pointers, and compressed ones for numbers.
        is_compressed = archive.zip.getinfo(f"{name}.npy").compress_type != zipfile.ZIP_STORED
        if kind.hasobject or by_columns or is_compressed:
            raise ValueError(f"array {name!r:.60} has objects, is compressed, or is not stored row by row")
        return np.memmap(path, kind, "r", file.tell(), shape) if np.prod(shape) else np.zeros(shape, kind)
