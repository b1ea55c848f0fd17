"""What a model has said of rows, as tables: CSV for people and programs, and GLUE's form."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.files import refuse_special, written_beside
from cpuft.train.data.own import BETWEEN_LABELS
from cpuft.train.data.prepare import UNTAGGED, Tokens
from cpuft.train.data.tasks import Rows, Task

Outputs = NDArray[np.float32]
"""A head's, of all rows: shape (rows, classes), of tags (rows, longest row, classes)."""
Cells = tuple[object, ...]

_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_MOST_SCORE = 5.0
"""GLUE's only scores, STS-B's, are from 0 to this."""


def format_classes(task: Task, rows: Rows, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """A row's likeliest class, and the probability of each."""
    yield ("index", "label", *_name_classes(task))
    for index, chances in enumerate(_softmax(outputs)):
        yield (index, guard_formula(task.labels[int(chances.argmax())]), *_format(chances))


def format_scores(task: Task, rows: Rows, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """A row's score."""
    yield ("index", "score")
    for index, (score,) in enumerate(outputs.tolist()):
        yield (index, f"{score:.6g}")


def format_several(task: Task, rows: Rows, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """A row's classes that are likelier than not, and the probability of each by itself."""
    yield ("index", "labels", *_name_classes(task))
    for index, chances in enumerate(1 / (1 + np.exp(-outputs.astype(np.float64)))):
        likely = (label for label, chance in zip(task.labels, chances) if chance > 0.5)
        yield (index, guard_formula(BETWEEN_LABELS.join(likely)), *_format(chances))


def format_tags(task: Task, rows: Rows, outputs: Outputs, tokens: Tokens) -> Iterator[Cells]:
    """A line a word: its likeliest tag, and the probability of each; nothing of words that the model did not see.

    `tokens` has words' numbers for labels.
    """
    yield ("index", "token", "tag", *_name_classes(task))
    for index, words in enumerate(rows.texts):
        numbers = tokens.labels[tokens.offsets[index] : tokens.offsets[index + 1]]
        places = np.flatnonzero(numbers != UNTAGGED)
        seen = zip(numbers[places].tolist(), _softmax(outputs[index, places]))
        labels = [guard_formula(label) for label in task.labels]
        told = {number: (labels[chances.argmax()], *_format(chances)) for number, chances in seen}
        for number, word in enumerate(words):
            yield (index, guard_formula(word), *told.get(number, [""] * (1 + len(task.labels))))


TABLES: dict[str, Callable[[Task, Rows, Outputs, Tokens], Iterator[Cells]]] = {
    "class": format_classes,
    "score": format_scores,
    "labels": format_several,
    "tags": format_tags,
}
"""By the task's kind."""


def guard_formula(text: str) -> str:
    """The text, with an apostrophe in front where a spreadsheet would run it as a formula.

    That is a text of two characters or more that begins with =, +, -, @, a tab or a carriage return, and is no number.
    """
    if len(text) < 2 or not text.startswith(_FORMULAS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def add_input(rows: Rows, names: Sequence[str], table: Iterator[Cells]) -> Iterator[Cells]:
    """The table with each row's texts behind its index, under `names`; input_NAME where a column has the name."""
    header = next(table)
    yield (header[0], *(guard_formula(f"input_{name}" if name in header else name) for name in names), *header[1:])
    for texts, cells in zip(rows.texts, table, strict=True):
        yield (cells[0], *map(guard_formula, texts), *cells[1:])


def format_submission(task: Task, outputs: Outputs) -> Iterator[Cells]:
    """What the GLUE benchmark takes: each row's label as its files have it, or its score."""
    yield ("index", "prediction")
    for index, row in enumerate(outputs):
        answer = task.labels[int(row.argmax())] if task.labels else f"{min(max(float(row[0]), 0.0), _MOST_SCORE):.3f}"
        yield (index, answer)


def name_submission(task: Task, suffix: str) -> str:
    """The file's name among those that GLUE takes, of a split by what is appended to its metrics' names."""
    part = {"": "-m", "_mismatched": "-mm"}[suffix] if len(task.validation) > 1 else ""
    return f"{task.folder}{part}.tsv"


def _name_classes(task: Task) -> tuple[str, ...]:
    return tuple(f"p_{label}" for label in task.labels)


def _softmax(outputs: Outputs) -> NDArray[np.float64]:
    """Over the last axis."""
    powers = np.exp(outputs - outputs.max(-1, keepdims=True), dtype=np.float64)
    shares: NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
    return shares


def _format(chances: NDArray[np.float64]) -> list[str]:
    return [f"{chance:.6f}" for chance in chances]


def check_output(path: Path, overwrite: bool = False) -> None:
    """Do nothing when predictions may be written to `path`.

    Raises
    ------
    CpuftError: something is there; with `overwrite` only if it is something else than predictions.
    """
    refuse_special(path)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            begin = file.read(6)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CpuftError(f"{path} cannot be written ({error.strerror}): name another --output") from None
    if begin not in ("index,", "index\t", ""):
        raise CpuftError(f"{path} is there already, and holds no predictions: name another --output")
    if begin and not overwrite:
        raise CpuftError(f"{path} holds predictions already: add --overwrite to replace them, or name another --output")


def write_table(path: Path, rows: Iterator[Cells]) -> None:
    """Write a table whole or not at all: CSV, or with tabs between where the name ends in .tsv."""
    with written_beside(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, "excel-tab" if path.suffix == ".tsv" else "excel", lineterminator="\n").writerows(rows)
