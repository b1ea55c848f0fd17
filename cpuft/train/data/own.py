"""The user's own rows: what their columns hold tells what is to be learned from them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cpuft.config import PredictConfig, TrainConfig
from cpuft.errors import CpuftError, counted
from cpuft.train.data.tables import Cell, Table, find_column, parse_label, read_table, refuse_empty
from cpuft.train.data.tasks import Data, Rows, Task

BETWEEN_LABELS = "|"
"""In a cell of several labels, where the file has no lists."""

_TEXTS = (("sentence1", "sentence2"), ("text1", "text2"), ("premise", "hypothesis"), ("sentence",), ("text",))
_WORDS = ("tokens",)
_NAME_TEXTS = "name the columns of the texts with --text-columns"
_NAME_LABEL = "name the column of the labels with --label-column"
_ENTITY_MARKS = ("B", "I", "E", "S")


def read_own(task: Task, config: TrainConfig) -> Data:
    """Training and validation rows of CSV, TSV or JSON lines; their cells decide on the task's kind.

    Raises CpuftError: with the line, for what does not fit the other rows; labels that teach nothing.
    """
    if not config.train_file:
        raise CpuftError("--task files needs --train-file: name a CSV, TSV or JSON lines file with texts and labels")
    if not config.validation_file:
        raise CpuftError(
            "--task files needs --validation-file as well: name a second file (CSV, TSV or JSON lines) with the same "
            "columns and other examples, by which the model is evaluated"
        )
    train = read_table(Path(config.train_file), "--train-file")
    validation = read_table(Path(config.validation_file), "--validation-file")
    label = _choose_label(train, config.label_column)
    task = replace(task, texts=find_texts(train, config.text_columns, label), label=label)
    for table in (train, validation):
        for name in task.texts:
            find_column(table.columns, name, table.source, _NAME_TEXTS)
        find_column(table.columns, task.label, table.source, _NAME_LABEL)
    task = replace(task, kind=_find_kind(train, task, config.label_type))
    for table in (train, validation):
        check_cells(table, task)
    task = _find_labels(task, train, validation, config.label_type)
    return Data(task, make_rows(train, task), {"": make_rows(validation, task)})


def read_asked(task: Task, asked: PredictConfig, train: TrainConfig) -> tuple[Task, Rows]:
    """Rows for a model that has learned `task` by `train`, and the task with their columns. They have labels if all do.

    Raises CpuftError: as `read_own`, or a label that the task does not know.
    """
    option = "--file" if asked.file else "where the run's rows are, or name them with --file"
    table = read_table(Path(asked.file or train.validation_file), option)
    is_own = {name: name in table.columns for name in (*task.texts, task.label, train.label_column)}
    usual = task.label if is_own[task.label] and not is_own[train.label_column] else train.label_column
    label = asked.label_column or _choose_label(table, usual)
    wanted = asked.text_columns or train.text_columns
    texts = task.texts if task.texts and not wanted and all(map(is_own.get, task.texts)) else ()
    texts = texts or find_texts(table, wanted, label)
    for name in texts:
        find_column(table.columns, name, table.source, _NAME_TEXTS)
    if asked.label_column:
        find_column(table.columns, label, table.source, _NAME_LABEL)
    if task.texts and len(texts) != len(task.texts):
        count = counted(len(task.texts), "column")
        raise CpuftError(f"--task {task.name} has texts in {count}: name as many with --text-columns, a comma between")
    task = replace(task, texts=texts, label=label)
    every = any if task.kind == "labels" else all
    labelled = label in table.columns and every(_has_text(row.get(label, "")) for _, row in table.rows)
    check_cells(table, task, labelled)
    return task, make_rows(table, task, labelled)


def find_texts(table: Table, wanted: str, label: str) -> tuple[str, ...]:
    """The columns of texts: those `wanted`, a comma between, or the usual ones. Raises CpuftError: it has none."""
    if wanted:
        return tuple(name.strip() for name in wanted.split(","))[:2]
    for names in (*_TEXTS, _WORDS):
        if all(name in table.columns for name in names):
            return names
    others = [name for name in table.columns if name != label]
    if not others:
        raise CpuftError(f"{table.source} has no column but {label!r}: give a file that also has a column of texts")
    which = "the column of the texts"
    listed = ""
    if len(others) > 1:
        which += ", or the two columns of pairs of texts,"
        listed = f" (the file has {', '.join(others)})"
    raise CpuftError(
        f"no column of {table.source} is named text, sentence or sentence1: name {which} with --text-columns, "
        f"for example --text-columns {shlex.quote(others[0])}{listed}"
    )


def _choose_label(table: Table, wanted: str) -> str:
    """The label's column: beside words it may be called tags."""
    is_tags = wanted == "label" and wanted not in table.columns and "tags" in table.columns
    return "tags" if is_tags else wanted


_KINDS = {"class": "class", "number": "score", "multi": "labels"}
"""Kind of task by --label-type."""


def _find_kind(table: Table, task: Task, wanted: str) -> str:
    """Kind of task that --label-type or the cells say; whether one label for each row is a score is found later."""
    refuse_empty(table.rows, table.source)
    if isinstance(table.rows[0][1].get(task.texts[0]), list):
        if wanted != "auto":
            what = f"{table.source} has lists of words in {task.texts[0]!r}, which take one tag for each word"
            raise CpuftError(f"{what}: leave --label-type {wanted} out, or name a column of texts with --text-columns")
        return "tags"
    if wanted != "auto":
        return _KINDS[wanted]
    cells = [row.get(task.label, "") for _, row in table.rows]
    return "labels" if any(isinstance(cell, list) or BETWEEN_LABELS in cell for cell in cells) else "class"


def check_cells(table: Table, task: Task, labelled: bool = True) -> None:
    """Refuse rows that do not fit the task or each other; `labelled` says whether labels are looked at.

    Raises CpuftError, with the line: a row lacks a column (JSON lines may) or what is needed in it, has a list for a
    text or the other way round, or not one tag for each word. Also where there are no rows.
    """
    refuse_empty(table.rows, table.source)
    if task.kind == "tags" and len(task.texts) > 1:
        raise CpuftError(f"{table.source} has words, which stand in one column: name one with --text-columns")
    lists = dict.fromkeys(task.texts, task.kind == "tags")
    if labelled:
        several = any(isinstance(row.get(task.label), list) for _, row in table.rows)
        lists[task.label] = several if task.kind == "labels" else task.kind == "tags"
    for number, row in table.rows:
        where = f"{table.source}, line {number}"
        for name, is_list in lists.items():
            if name not in row or (_is_needed(name, task) and not _has_text(row[name])):
                raise CpuftError(f"{where} has no {name!r}: correct or remove that line")
            if isinstance(row[name], list) != is_list:
                form = "a list" if is_list else "one text"
                raise CpuftError(f"{where}: {name!r} has to be {form}, as it is elsewhere: correct that line")
        if task.kind == "tags" and labelled:
            words, tags = len(row[task.texts[0]]), sum(bool(tag.strip()) for tag in row[task.label])
            if words != tags:
                raise CpuftError(f"{where} has {counted(words, 'token')} and {counted(tags, 'tag')}: correct that line")


def _is_needed(name: str, task: Task) -> bool:
    """Whether a cell of this column must not be empty: a row may have none of several labels, and an empty text."""
    return task.kind == "tags" or (task.kind != "labels" and name == task.label)


def _has_text(cell: Cell) -> bool:
    return bool(cell.strip()) if isinstance(cell, str) else any(map(str.strip, cell))


def _split_label(cell: Cell, task: Task) -> list[str]:
    """The label texts of a cell."""
    if isinstance(cell, str):
        cell = cell.split(BETWEEN_LABELS) if task.kind == "labels" else [cell]
    return [text for part in cell if (text := part.strip())]


def _find_labels(task: Task, train: Table, validation: Table, wanted: str) -> Task:
    """The task with the classes that the training rows have, or as one of scores where labels are numbers.

    Raises CpuftError: training rows have one class only, or validation rows one more.
    """
    found = sorted({text for _, row in train.rows for text in _split_label(row[task.label], task)})
    others = {text: number for number, row in reversed(validation.rows) for text in _split_label(row[task.label], task)}
    if task.kind == "score" or (wanted == "auto" and task.kind == "class" and _are_scores([*found, *others])):
        return replace(task, labels=(), metrics=("pearson", "spearman"), kind="score")
    if len(found) < 2:
        what = f"all rows of {train.source} have the label {found[0]!r}" if found else f"{train.source} has no labels"
        raise CpuftError(f"{what}: give rows of two labels or more")
    for label, number in others.items():
        if label not in found:
            raise CpuftError(
                f"{validation.source}, line {number}: no row of {train.source} has the label {label!r}: correct that "
                f"line, or train on rows that have it"
            )
    return replace(task, labels=tuple(found), metrics=choose_metrics(task.kind, found))


def choose_metrics(kind: str, labels: Sequence[str]) -> tuple[str, ...]:
    """What rows of the user's own are measured by."""
    if kind == "score":
        return ("pearson", "spearman")
    if kind == "labels":
        return ("f1_micro", "f1_macro", "accuracy")
    if kind == "tags":
        # Of parts of speech and their like there are no entities, whose words seqeval would count as one.
        entities = all(tag == "O" or tag.split("-")[0] in _ENTITY_MARKS for tag in labels)
        return ("f1", "precision", "recall", "accuracy") if entities else ("accuracy",)
    return ("accuracy", "f1") if len(labels) == 2 else ("accuracy",)


def _are_scores(labels: Sequence[str]) -> bool:
    """Whether labels are numbers to be met: all parse, and some are no whole numbers."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return False
    return any(not number.is_integer() for number in numbers)


def make_rows(table: Table, task: Task, labelled: bool = True) -> Rows:
    """Rows of cells that `check_cells` has seen. Raises CpuftError, with the line: a label is not the task's."""
    rows = Rows([], [], labelled)
    for number, row in table.rows:
        cells = [row[name] for name in task.texts]
        rows.texts.append(tuple(cells[0] if task.kind == "tags" else map(str, cells)))
        texts = _split_label(row[task.label], task) if labelled else []
        numbers = [parse_label(text, task, f"{table.source}, line {number}") for text in texts]
        several = task.kind in ("labels", "tags")
        rows.labels.append(tuple(map(int, numbers)) if several else numbers[0] if labelled else 0.0)
    return rows
