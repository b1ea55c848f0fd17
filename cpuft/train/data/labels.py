"""Labels: which kind they are, which metrics they have, and the numbers that models learn."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from cpuft.errors import CpuftError, counted, list_names
from cpuft.serialization import to_number
from cpuft.tasks import Task
from cpuft.train.data.columnar import Cell
from cpuft.train.data.tables import Table, describe_empty, is_blank

SCORE_KINDS = ("score", "similarity", "relevance")
"""Kinds of tasks whose labels are numbers."""
_MAX_SCORE = 3e38
"""Larger scores are infinite in fp32, in which models compute."""


def parse_label(text: str, task: Task, where: str) -> float:
    """Return the class number of a label (1.0 and True are 1 if all labels are whole numbers) or, for the kinds score,
    similarity and relevance, the score, also with a decimal comma. CpuftError, which begins with `where`: another
    label, or no finite number.
    """
    text = text.strip()
    if task.kind in SCORE_KINDS:
        text = read_decimal_comma(text)
        if abs(score := to_number(text)) < _MAX_SCORE:
            return score
        others = ", or leave out rows without a label with --skip-unlabelled" * is_blank(text)
        raise CpuftError(f"{where}: score {text!r:.60} is not a number: correct that line{others}")
    number = list_label_numbers(task.labels).get(text, _number_values_of(task.labels).get(find_value(text)))
    if number is None:
        raise CpuftError(f"{where}: label {text!r:.60} is not one of {list_names(task.labels)}: correct that line")
    return number


_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")


def read_decimal_comma(text: str) -> str:
    """Return 0.5 for 0,5 and so on; other texts, also 1,250, which may mean 1250, are returned as they are."""
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) and not _THOUSANDS.fullmatch(text) else text


@cache
def list_label_numbers(labels: tuple[str, ...]) -> dict[str, float]:
    """Return each label's number: its place, from 0."""
    return {label: float(number) for number, label in enumerate(labels)}


@cache
def _number_values_of(labels: tuple[str, ...]) -> dict[str, float]:
    """Return the numbers of the classes by their labels' values; empty if the labels are not all whole numbers."""
    return list_label_numbers(tuple(map(find_value, labels))) if _are_whole(labels) else {}


BOOLEANS = {"true": "1", "false": "0"}
"""Labels that are written as words, in lower case, and as numbers."""


def find_value(label: str) -> str:
    """Return a label in the one form of its value: without a `.0` at its end (2 for 2.0, but also v1 for v1.0), 1 for
    true and 0 for false in any case; others, such as 2.50, as they are.
    """
    return re.sub(r"(?<=\d)\.0*$", "", BOOLEANS.get(label.lower(), label))


def _are_whole(labels: Iterable[str]) -> bool:
    """Return whether all labels are whole numbers; True and False are, if no other number than 0 and 1 is there."""
    values = set(map(find_value, labels))
    has_boolean = any(label.lower() in BOOLEANS for label in labels)
    return all(value.removeprefix("-").isdecimal() for value in values) and (not has_boolean or values <= {"0", "1"})


def _drop_equal_labels(labels: Iterable[str]) -> list[str]:
    """Return labels in alphabetical order; of 0 and 0.0, or other forms of one whole number, only the first one."""
    known = sorted(labels)
    return sorted({find_value(one): one for one in reversed(known)}.values()) if _are_whole(known) else known


LABEL_SEPARATOR = "|"
"""Separates several labels in a cell of a file without lists."""


def split_label(cell: Cell, task: Task) -> list[str]:
    """Return the labels in a cell that are not blank: parts of a list, those between bars (kind labels), or one."""
    if isinstance(cell, str):
        cell = cell.split(LABEL_SEPARATOR) if task.kind == "labels" else [cell]
    return [text for part in cell if (text := part.strip())]


def refuse_vectors(table: Table, task: Task, labels: Iterable[str]) -> None:
    """Raise CpuftError if all rows have lists of one length above 1, and all `labels` are 0 or 1 or some are fractions:
    vectors with a number for each label, such as [0, 1, 0].
    """
    try:
        numbers = {float(find_value(label)) for label in labels}
    except ValueError:
        return
    if numbers <= {0, 1} or not all(map(float.is_integer, numbers)):
        where = next(where for where, _ in table.rows)
        lengths = {len(cell) if isinstance(cell := row[task.label], list) else 0 for _, row in table.rows}
        if len(lengths) == 1 and max(lengths) > 1:
            raise CpuftError(
                f"{where}: {task.label!r} has a number for each label, as all lists of {table.source}: write the names "
                f"of the labels that an example has, such as ['sports', 'news'], or their numbers, such as [1] for "
                f"[0, 1, 0]"
            )


def refuse_case(labels: Mapping[str, str]) -> None:
    """Raise CpuftError if two labels (with their places) differ in case only, and are no forms of True or False."""
    seen: dict[str, str] = {}
    for label, where in labels.items():
        other = seen.setdefault(label.lower(), label)
        if other != label and not _are_whole((label, other)):
            raise CpuftError(
                f"{where} has the label {label!r:.60}, and {labels[other]} has {other!r:.60}: write one class alike "
                f"everywhere, or add --label-type class (or multi) if they are different classes"
            )


_FEW = 0.05
"""Share of the labels that is too small to decide on the kind of all of them."""
_PRINTED_LIST = re.compile(
    r"(?!\[[A-Za-z][\w-]*\]$)(array|tensor|set)?\(?[\[{].*[\]}](, dtype=.*)?\)?|\(['\"\d].*,.*\)", re.DOTALL
)
"""A list, set or tuple as Python prints it; a name in brackets, such as [NEG] or (1), is a label."""


def choose_kind(train: Table, validation: Table, task: Task, wanted: str) -> tuple[str, str]:
    """Return the kind of a task, and a note on the row that decided, or "".

    Lists of words as texts give tags. Otherwise `wanted`, --label-type, decides: class, number (kind score), multi
    (kind labels) or auto. With auto, lists of labels or labels with a bar give labels, numbers of which some have a
    fraction score, others class. CpuftError: `train` has no rows, a label leaves it in doubt, or `wanted` does not suit
    lists of words.
    """
    first = next(iter(train.rows), None)
    if first is None:
        raise CpuftError(describe_empty(train.source))
    if isinstance(first[1].get(task.texts[0]), list):
        if wanted != "auto":
            what = f"{train.source} has lists of words in {task.texts[0]!r}, which take one tag for each word"
            raise CpuftError(f"{what}: leave --label-type {wanted} out, or give a column of texts with --text-columns")
        return "tags", ""
    if wanted in ("class", "number"):
        return "class" if wanted == "class" else "score", ""
    with_bar, with_fraction, with_comma, missing = list[str](), list[str](), "", ""
    count, train_count, are_numbers = 0, 0, True
    for table in (train, validation):
        for where, row in table.rows:
            cell = row.get(task.label, "")
            if isinstance(cell, list):
                if table is train:
                    return "labels", ""
                are_numbers = False
            elif is_blank(cell):
                missing = missing or (f"{where} has the label {cell.strip()!r}" if cell.strip() else "")
                continue
            elif _PRINTED_LIST.fullmatch(cell.strip()):
                raise CpuftError(describe_printed_list(where, task.label, cell))
            elif table is train and LABEL_SEPARATOR in cell:
                with_bar.append(where)
                are_numbers = False
            elif _DECIMAL_COMMA.fullmatch(cell.strip()):
                with_comma = with_comma or f"{where}: the label {cell!r:.60}"
            elif are_numbers:
                try:
                    if not float(cell).is_integer():
                        with_fraction.append(where)
                except ValueError:
                    are_numbers = False
            count, train_count = count + 1, train_count + (table is train)
    if wanted == "multi":
        return "labels", ""
    if with_bar:
        _refuse_few(with_bar, train_count, "with a bar, such as a|b, means several labels", "multi")
        return "labels", f"an example may have several labels, because the label in {with_bar[0]} has a bar"
    if not are_numbers:
        return "class", ""
    if missing:
        raise CpuftError(
            f"{missing}, and all others are numbers: correct that line, or add --skip-unlabelled or --label-type class"
        )
    if with_comma:
        raise CpuftError(
            f"{with_comma} is a number with a comma: add --label-type number, or --label-type class for names"
        )
    if with_fraction:
        _refuse_few(with_fraction, count, "with a fraction means that numbers are learned by regression", "number")
        return "score", f"numbers are learned by regression, because the label in {with_fraction[0]} has a fraction"
    return "class", ""


def _refuse_few(places: Sequence[str], count: int, what: str, label_type: str) -> None:
    if len(places) < _FEW * count:
        verb = "has" if len(places) == 1 else "have"
        raise CpuftError(
            f"a label {what}, and only {len(places)} of {counted(count, 'label')} {verb} one, first in {places[0]}: "
            f"correct that line, or add --label-type {label_type}, or --label-type class for classes of that name"
        )


def describe_printed_list(where: str, name: str, cell: str) -> str:
    """Return the message that the cell of the column `name` holds a list as Python or NumPy prints it."""
    what = f"{where}: {name!r} is a list that was printed as text ({cell!r:.60})"
    return f"{what}: write the rows as JSON lines or Parquet, which have lists"


def number_labels(task: Task, train: Iterable[str], others: Mapping[str, str], source: str, check_labels: bool) -> Task:
    """Return the task with metrics and labels: those of `train`, sorted (kind class: of 0 and 0.0 only one); then,
    without `check_labels`, new `others` (labels, and where each is). None for the kind score. CpuftError, with
    `check_labels`: `train` has fewer than two labels, or `others` new ones.
    """
    if task.kind == "score":
        return replace(task, labels=(), metrics=choose_metrics("score", ()))
    found = _drop_equal_labels(train) if task.kind == "class" else sorted(train)
    known = {*found, *(_number_values_of(tuple(found)) if task.kind == "class" else ())}
    new = [label for label in others if not {label, find_value(label)} & known]
    if check_labels and len(found) < 2:
        what = f"all rows of {source} have the label {found[0]!r}" if found else f"{source} has no labels"
        raise CpuftError(f"{what}: give rows with at least two different labels")
    if check_labels and new:
        raise CpuftError(
            f"{others[new[0]]}: no row of {source} has the label {new[0]!r}: correct that line, or train on such rows"
        )
    return replace(task, labels=(*found, *sorted(new)), metrics=choose_metrics(task.kind, found))


def choose_metrics(kind: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return a kind's metrics: pearson, spearman (score); f1_micro, f1_macro, accuracy (labels); f1, precision, recall,
    accuracy (tags, if all are of entities: O, B-x, I-x and so on); otherwise accuracy, and for two classes also f1.
    """
    if kind == "score":
        return ("pearson", "spearman")
    if kind == "labels":
        return ("f1_micro", "f1_macro", "accuracy")
    if kind == "tags":
        # Other tags, such as parts of speech, have no entities: seqeval would join words to entities.
        entities = all(tag == "O" or tag.split("-")[0] in ("B", "I", "E", "S") for tag in labels)
        return ("f1", "precision", "recall", "accuracy") if entities else ("accuracy",)
    return ("accuracy", "f1") if len(labels) == 2 else ("accuracy",)
