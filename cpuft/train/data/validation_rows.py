"""What is kept of validation rows as they were read, whatever the tokenizer, for the file of a run's predictions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.train.data.archive import ValidationRows
from cpuft.train.data.embedding_pairs import RetrievalExamples
from cpuft.train.data.labels import LABEL_SEPARATOR
from cpuft.train.data.sources import Examples, FileExamples, TaskData
from cpuft.train.data.tables import find_column

Slices = tuple[NDArray[np.int32], tuple[str, ...]]
"""The number of each row's value of --slice-by, and the values; both empty without --slice-by."""
MOST_VALUES = 100
"""Largest number of different values that the column of --slice-by may have."""
_MOST_CHARACTERS = 500


def checksum_rows(data: TaskData) -> str:
    """Return a checksum, 16 hexadecimal digits, of all validation rows; it depends on no tokenizer and no prompt."""
    digest = hashlib.sha256()
    for suffix, split in data.validation.items():
        checksum = split.rows_checksum if isinstance(split, RetrievalExamples) else split.checksum
        digest.update(f"{suffix} {checksum}\n".encode())
    return digest.hexdigest()[:16]


def keep_beginnings(kept: list[list[str]], rows: Iterable[Sequence[str]], most: int, are_words: bool = False) -> None:
    """Add the first 500 characters of each text of the rows to `kept`, which gets no longer than `most` rows; with
    `are_words`, a row's words become one text with spaces.
    """
    for texts in islice(rows, max(0, most - len(kept))):
        parts = [" ".join(texts[:_MOST_CHARACTERS])] if are_words else texts
        kept.append([text[:_MOST_CHARACTERS] for text in parts])


def make_validation_rows(kept: list[list[str]], slices: Slices) -> ValidationRows:
    """Return `kept`, the texts of each row as `keep_beginnings` cut them, with the values of --slice-by."""
    content = json.dumps(kept, ensure_ascii=False).encode(errors="replace")
    return ValidationRows(np.frombuffer(content, np.uint8), *slices)


def read_slices(split: Examples | FileExamples, column: str) -> Slices:
    """Return the number of each row's value in the column of --slice-by, int32, and the values, cut to 500 characters,
    in the order in which they first appear; both empty for "". CpuftError: the split lacks the column, has more than
    100 values in it, or is not read from files.
    """
    if not column:
        return np.zeros(0, np.int32), ()
    if not isinstance(split, FileExamples):
        raise CpuftError(f"--slice-by {column} names a column of the files of --task files: leave it out")
    table = split.table
    find_column(table.columns, column, table.source, "name one of them with --slice-by, or leave --slice-by out")
    values = dict[str, int]()
    numbers = list[int]()
    for _, cells in table.rows:
        cell = cells.get(column, "")
        text = (cell if isinstance(cell, str) else LABEL_SEPARATOR.join(cell)).strip()[:_MOST_CHARACTERS]
        numbers.append(values.setdefault(text, len(values)))
        if len(values) > MOST_VALUES:
            raise CpuftError(
                f"{table.source} has more than {MOST_VALUES} values in {column!r}: give --slice-by a column with fewer"
            )
    return np.asarray(numbers, np.int32), tuple(values)
