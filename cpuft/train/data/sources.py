"""Examples of a task: read from a GLUE download, the user's own files or the Hugging Face hub, or generated."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted, list_names
from cpuft.serialization import to_number
from cpuft.tasks import SENTENCE_TRANSFORMERS_KINDS, TASKS, Task
from cpuft.train.data.columnar import Cell
from cpuft.train.data.delimited import advise_conversion
from cpuft.train.data.tables import (
    Row,
    Rows,
    Table,
    find_column,
    find_longest_column,
    hint_header,
    load_from_hub,
    read_tables,
    read_text,
    split_names,
    split_table,
)

_EXAMPLES_AT_ONCE = 4096
_MAX_CLASSES = 100_000


@dataclass(frozen=True)
class Examples:
    """The examples of one split, in memory."""

    texts: list[tuple[str, ...]]
    """One or two texts for each example; for the kind tags, its words."""
    labels: list[Any]
    """Class numbers (as floats) or scores; for the kinds tags and labels, tuples of class numbers."""
    has_labels: bool = True
    """Whether the labels were read. If not, each is 0.0, or () for the kinds tags and labels."""
    ids: list[str] = field(default_factory=list, kw_only=True)
    """The id of each example, for `cpuft predict --id-column`; else empty."""

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def checksum(self) -> str:
        """Checksum of texts and labels, 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps([self.texts, self.labels]).encode()).hexdigest()

    def load(self) -> Examples:
        """Return the examples in memory: the object itself."""
        return self

    def first(self, count: int) -> Examples:
        """Return the first `count` examples with their labels; the object itself when `count` is 0."""
        return replace(self, texts=self.texts[:count], labels=self.labels[:count]) if count else self

    def batches(self) -> Iterator[Examples]:
        """Yield the examples in their order, 4096 at a time."""
        for start in range(0, len(self), _EXAMPLES_AT_ONCE):
            end = start + _EXAMPLES_AT_ONCE
            yield replace(self, texts=self.texts[start:end], labels=self.labels[start:end])

    def list_texts(self) -> Iterator[str]:
        """Iterate over all texts, example by example: both texts of a pair, or each word for the kind tags."""
        return chain.from_iterable(self.texts)


@dataclass(frozen=True)
class FileExamples:
    """The examples of one split in the user's files, which are read again each time they are needed."""

    table: Table
    """Rows that were checked by `check_rows`."""
    task: Task
    count: int
    """Number of examples: the first ones of the table."""
    checksum: str
    """Checksum of texts and labels of all rows of the table, 64 hexadecimal digits."""

    def __len__(self) -> int:
        return self.count

    def load(self) -> Examples:
        """Return the examples, all of them in memory. Raises CpuftError: a row does not fit any more."""
        return make_examples(self._list_rows(), self.task)

    def first(self, count: int) -> FileExamples:
        """Return the first `count` examples; the object itself when `count` is 0."""
        return replace(self, count=min(count, self.count)) if count else self

    def batches(self) -> Iterator[Examples]:
        """Read the examples in their order, 4096 at a time. CpuftError: a row does not fit, or too few are left."""
        rows, found = self._list_rows(), 0
        while batch := list(islice(rows, _EXAMPLES_AT_ONCE)):
            found += len(batch)
            yield make_examples(batch, self.task)
        if found != self.count:
            raise CpuftError(
                f"{self.table.source} had {counted(self.count, 'row')}, and has {found} now: leave the file as it is "
                f"while it is read, and start again"
            )

    def list_texts(self) -> Iterator[str]:
        """Read all texts: both of a pair, or each word for the kind tags. Raises CpuftError as `batches` does."""
        for batch in self.batches():
            yield from batch.list_texts()

    def _list_rows(self) -> Iterator[Row]:
        return islice(self.table.rows, self.count)


@dataclass(frozen=True)
class TaskData:
    """The examples that a run trains and evaluates on, and the task with their columns and labels."""

    task: Task
    train: Examples | FileExamples
    validation: Mapping[str, Examples | FileExamples]
    """Validation splits by the suffix of the metrics' names: `""`, and for MNLI also `_mismatched`."""
    notes: tuple[str, ...] = ()
    """What is to be said about how the rows were understood."""


def read_data(config: TrainConfig, check_labels: bool = True) -> TaskData:
    """Read the examples of GLUE, demo or files. CpuftError: they do not fit, or with `check_labels` labels of files."""
    task = TASKS[config.task]
    if task.name == "files":
        return read_user_files(task, config, check_labels)
    if task.name == "demo":
        return TaskData(task, _make_demo_examples(1600, config.seed), read_splits(task, config, task.validation))
    splits = read_splits(task, config, (("train", "train"), *task.validation))
    return TaskData(task, splits.pop("train"), splits)


def read_splits(task: Task, config: TrainConfig, splits: Sequence[tuple[str, str]]) -> dict[str, Examples]:
    """Read splits of a GLUE task from --data-dir, or without it from the hub, by the keys of `splits`.

    `splits` has keys and the stems of files, such as ("", "dev"); those that begin with test have no labels. For the
    demo, the result is its validation split. Raises CpuftError: a split is not there, or a line does not fit.
    """
    if task.name == "demo":
        return {"": _make_demo_examples(400, config.seed + 1_000_003)}
    if not config.data_dir:
        return _read_hub(task, splits)
    return {key: _read_glue_split(task, Path(config.data_dir), stem) for key, stem in splits}


def list_test_splits(task: Task) -> tuple[tuple[str, str], ...]:
    """Return the `splits` of `read_splits` without labels, (("", "test"),) for most GLUE tasks; () for other tasks."""
    return tuple((key, stem.replace("dev", "test")) for key, stem in task.validation) if task.folder else ()


# GLUE


def _read_glue_split(task: Task, folder: Path, stem: str) -> Examples:
    if not folder.is_dir():
        raise CpuftError(
            f"--data-dir {folder}: there is no such folder: give the folder that contains {task.folder}/{stem}.tsv"
        )
    candidates = [folder / task.folder / f"{stem}.tsv", folder / f"{stem}.tsv"]
    path = next((candidate for candidate in candidates if candidate.exists()), candidates[0])
    # All test files have a header line, and none has labels.
    task = replace(task, columns=(), label="") if stem.startswith("test") else task
    return parse_glue_tsv(read_text(path), task, str(path))


def read_glue_file(task: Task, path: Path, id_column: str = "") -> Examples | None:
    """Read a .tsv file with the columns of texts of the task's GLUE files, perhaps without labels. None for other files
    and tasks. Raises CpuftError: a line is too short or its label not the task's, there is no row, or no `id_column`.
    """
    if not task.folder or path.suffix != ".tsv":
        return None
    text = read_text(path, "--file")
    columns = text.partition("\n")[0].rstrip("\r").split("\t")
    if not set(task.texts) <= set(columns):
        return None
    label = task.label if task.label in columns else ""
    return parse_glue_tsv(text, replace(task, columns=(), label=label), str(path), id_column)


def parse_glue_tsv(text: str, task: Task, source: str, id_column: str = "") -> Examples:
    """Parse a GLUE file: columns separated by tabs, without quoting (a quotation mark is part of the text).

    With an empty `task.label`, the examples have no labels. With `task.columns`, the file has no header line. Blank
    lines are left out. CpuftError: a column is missing, a line too short, its label not the task's, or there is no row.
    """
    lines = text.split("\n")
    start = 0 if task.columns else 1
    columns = list(task.columns) or [column.strip() for column in lines[0].rstrip("\r").split("\t")]
    places = {name: find_column(columns, name, source) for name in (*task.texts, id_column, task.label) if name}
    last = max(places.values())
    examples = Examples([], [], has_labels=bool(task.label))
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line.strip():
            continue
        cells, where = line.rstrip("\r").split("\t"), f"{source}, line {number}"
        if len(cells) <= last:
            raise CpuftError(
                f"{where} has {counted(len(cells), 'column')}, {columns[last]!r} is column {last + 1}: correct or "
                f"remove that line"
            )
        examples.texts.append(tuple(cells[places[name]] for name in task.texts))
        if id_column:
            examples.ids.append(cells[places[id_column]])
        examples.labels.append(parse_label(cells[places[task.label]], task, where) if task.label else 0.0)
    if not examples.labels:
        raise CpuftError(_describe_empty(source))
    return examples


_HUB_SPLITS = {"dev": "validation", "dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"}
"""The hub's names of splits by the stems of GLUE's files, where they differ."""


def _read_hub(task: Task, splits: Sequence[tuple[str, str]]) -> dict[str, Examples]:
    advice = f"give --data-dir a folder that contains {task.folder}/train.tsv, from a GLUE download, or use --task demo"
    tables = load_from_hub(
        f"the data of --task {task.name}", advice, f"or {advice}", path="nyu-mll/glue", name=task.name
    )
    found = {}
    for key, stem in splits:
        table, has_labels = tables[_HUB_SPLITS.get(stem, stem)], not stem.startswith("test")
        texts = zip(*(map(str, table[column]) for column in task.hub_texts or task.texts))
        labels = [float(label) if has_labels else 0.0 for label in table["label"]]
        found[key] = Examples(list(texts), labels, has_labels)
    return found


# The user's own files


def _describe_empty(source: str) -> str:
    return f"{source} has no rows: give a file with at least one row below its header"


SCORE_KINDS = ("score", "similarity", "relevance")
"""Kinds of tasks whose labels are numbers."""
_MAX_SCORE = 3e38
"""Larger scores are infinite in fp32, in which models compute."""


def parse_label(text: str, task: Task, where: str) -> float:
    """Return the class number of a label (1.0 and True are 1 if all labels are whole numbers) or, for SCORE_KINDS, the
    score, also with a decimal comma. CpuftError, which begins with `where`: another label, or no finite number.
    """
    text = text.strip()
    if task.kind in SCORE_KINDS:
        text = read_decimal_comma(text)
        if abs(score := to_number(text)) < _MAX_SCORE:
            return score
        others = ", or leave out rows without a label with --skip-unlabelled" * is_blank(text)
        raise CpuftError(f"{where}: score {text!r:.60} is not a number: correct that line{others}")
    number = _number_labels_of(task.labels).get(text, _number_values_of(task.labels).get(find_value(text)))
    if number is None:
        raise CpuftError(f"{where}: label {text!r:.60} is not one of {list_names(task.labels)}: correct that line")
    return number


_DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")


def read_decimal_comma(text: str) -> str:
    """Return 0.5 for 0,5 and so on; other texts, also 1,250, which may mean 1250, are returned as they are."""
    return text.replace(",", ".") if _DECIMAL_COMMA.fullmatch(text) and not _THOUSANDS.fullmatch(text) else text


@cache
def _number_labels_of(labels: tuple[str, ...]) -> dict[str, float]:
    return {label: float(number) for number, label in enumerate(labels)}


@cache
def _number_values_of(labels: tuple[str, ...]) -> dict[str, float]:
    """Return the numbers of the classes by their labels' values; empty if the labels are not all whole numbers."""
    return _number_labels_of(tuple(map(find_value, labels))) if _are_whole(labels) else {}


BOOLEANS = {"true": "1", "false": "0"}
"""Labels that are written as words, in lower case, and as numbers."""


def find_value(label: str) -> str:
    """Return a label in the one form of its value: 1 for 1.0 and True, 0 for False; other labels as they are."""
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


MISSING = ("nan", "NaN", "None", "null", "NULL", "NA", "N/A", "<NA>")
"""What other programs write for a cell without a value."""


def is_blank(cell: Cell) -> bool:
    """Return whether a cell is a text that is empty, has only spaces, or is one of MISSING, such as nan."""
    return isinstance(cell, str) and (not cell or cell.isspace() or (len(cell) < 9 and cell.strip() in MISSING))


LABEL_SEPARATOR = "|"
"""Separates several labels in a cell of a file without lists."""

_USUAL_TEXTS = (
    ("sentence1", "sentence2"),
    ("text1", "text2"),
    ("premise", "hypothesis"),
    ("sentence",),
    ("text",),
    ("tokens",),
)
_NAME_TEXTS = "give their names with --text-columns, for example --text-columns question,answer"
_NAME_LABEL = "give the name of the column of the labels with --label-column"


def read_user_files(task: Task, config: TrainConfig, check_labels: bool = True) -> TaskData:
    """Read --train-file and --validation-file. Their cells decide on the task's kind, columns, labels and metrics.

    Labels are numbered in alphabetical order. `check_labels` refuses fewer than two, and those that only validation
    examples have, which otherwise follow the others. Raises CpuftError: a file, column or row does not fit.
    """
    train, validation = read_both_files(config, "texts and labels")
    label = _choose_label_column(train, config.label_column)
    task = replace(task, texts=_choose_text_columns(train, config.text_columns, label), label=label)
    if label in task.texts:
        raise CpuftError(f"the column {label!r} cannot be text and label: name another one with --text-columns")
    tables = [train, validation] if validation else [train]
    for table in tables:
        check_columns(table, task, _NAME_TEXTS, _NAME_LABEL)
    if config.skip_unlabelled:
        tables = [drop_unlabelled(table, label) for table in tables]
    train, validation = tables if validation else split_table(tables[0], config.validation_split)
    kind, decided = _choose_kind(train, validation, task, config.label_type)
    task = replace(task, kind=kind)
    (examples, labels), (validated, others) = (scan_rows(table, task) for table in (train, validation))
    if kind == "labels":
        _refuse_vectors(train, task, labels)
    if check_labels and config.label_type == "auto" and kind in ("class", "labels"):
        _refuse_case(labels | others | labels)
    task = _number_labels(task, labels, others, train.source, check_labels)
    notes = (*(note for table in tables for note in table.notes), *([decided] if decided else []))
    return TaskData(task, replace(examples, task=task), {"": replace(validated, task=task)}, notes)


def read_both_files(config: TrainConfig, what: str) -> tuple[Table, Table | None]:
    """Open --train-file, with rows of `what`, and --validation-file (else None). CpuftError: one cannot be read."""
    if not config.train_file:
        raise CpuftError(
            f"--task {config.task} needs --train-file: give a CSV, TSV, JSON lines, Parquet or Arrow file with {what}"
        )
    train = read_tables(config.train_file, "--train-file", config)
    if not config.validation_file:
        return train, None
    return train, read_tables(config.validation_file, "--validation-file", config, "validation")


def check_columns(table: Table, task: Task, name_texts: str, name_label: str) -> None:
    """Raise CpuftError, with advice for texts or label, if the table lacks a column of the task."""
    for name in task.texts:
        find_column(table.columns, name, table.source, name_texts)
    if task.label:
        find_column(table.columns, task.label, table.source, name_label)


def drop_unlabelled(table: Table, label: str) -> Table:
    """Return a table without the rows whose label is blank or one of MISSING, and with a note on them if any."""
    kept = Rows(lambda: (row for row in table.rows if not is_blank(row[1].get(label, ""))))
    count = sum(1 for _ in table.rows) - sum(1 for _ in kept)
    note = f"{counted(count, 'row')} of {table.source} without a label left out"
    return replace(table, rows=kept, notes=(*table.notes, note) if count else table.notes)


def _refuse_vectors(table: Table, task: Task, labels: Iterable[str]) -> None:
    """Raise CpuftError if the lists of labels are vectors with a number for each label, such as [0, 1, 0]."""
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


def _refuse_case(labels: Mapping[str, str]) -> None:
    """Raise CpuftError if two labels differ in case only: most likely, they are one class."""
    seen: dict[str, str] = {}
    for label, where in labels.items():
        other = seen.setdefault(label.lower(), label)
        if other != label and not _are_whole((label, other)):
            raise CpuftError(
                f"{where} has the label {label!r:.60}, and {labels[other]} has {other!r:.60}: write one class alike "
                f"everywhere, or add --label-type class (or multi) if they are different classes"
            )


def merge_options(config: PredictConfig, train: TrainConfig) -> TrainConfig:
    """Return `train` with --delimiter, --quoting and --encoding of `config` where these are not the defaults."""
    given = {name: getattr(config, name) for name in ("delimiter", "quoting", "encoding")}
    return replace(train, **{name: value for name, value in given.items() if value != getattr(PredictConfig, name)})


def read_file_to_predict(task: Task, config: PredictConfig, train: TrainConfig) -> tuple[Task, Examples]:
    """Read the examples of `cpuft predict` from --file, or without it from the validation data of the run, and return
    the task with the columns of the file.

    The examples have labels if every row has one (kind labels: if any has one). Raises CpuftError: a file, column or
    row does not fit.
    """
    option = "--file" if config.file else "where the run's rows are, or name them with --file"
    options = merge_options(config, train)
    if config.file or train.validation_file:
        split = "test" if config.file else "validation"
        table = read_tables(config.file or train.validation_file, option, options, split)
    else:
        table = read_tables(train.train_file, option, options)
        if train.skip_unlabelled:
            table = drop_unlabelled(table, _choose_label_column(table, train.label_column))
        table = split_table(table, train.validation_split)[1]
    is_usual = train.label_column not in table.columns and task.label in table.columns
    label = config.label_column or _choose_label_column(table, task.label if is_usual else train.label_column)
    texts, wanted = task.texts, config.text_columns or train.text_columns
    if wanted or not texts or not set(texts) <= set(table.columns):
        texts = _choose_text_columns(table, wanted, label)
    if task.texts and len(texts) != len(task.texts):
        count = counted(len(task.texts), "text column")
        raise CpuftError(f"--task {task.name} has {count}: give as many with --text-columns, separated by a comma")
    task = replace(task, texts=texts, label=label)
    check_columns(table, task if config.label_column else replace(task, label=""), _NAME_TEXTS, _NAME_LABEL)
    if config.id_column:
        find_column(table.columns, config.id_column, table.source)
    every = any if task.kind == "labels" else all
    has_labels = label in table.columns and every(_has_text(row.get(label, "")) for _, row in table.rows)
    return task, make_examples(check_rows(table, task, has_labels), task, has_labels, config.id_column)


def _choose_text_columns(table: Table, wanted: str, label: str) -> tuple[str, ...]:
    """Return the names of the text columns: `wanted`, separated by commas, else usual names in the table."""
    if named := split_names(wanted):
        if len(named) > 2:
            raise CpuftError(f"--text-columns {wanted!r:.80} names {len(named)} columns: name one column or two")
        return named
    for names in _USUAL_TEXTS:
        if set(names) <= set(table.columns):
            return names
    others = [name for name in table.columns if name != label]
    if not others:
        raise CpuftError(f"{table.source} has no column but {label!r}: give a file that also has a column of texts")
    is_one = len(others) == 1
    which = "the column of the texts" if is_one else "the column of the texts, or the two columns of pairs of texts,"
    listed = "" if is_one else f" (the file has {list_names(others)})"
    raise CpuftError(
        f"no column of {table.source} is named text, sentence or sentence1: name {which} with --text-columns, "
        f"for example --text-columns {shlex.quote(find_longest_column(table, others))}{listed}{hint_header(others)}"
    )


def _choose_label_column(table: Table, wanted: str) -> str:
    """Return `wanted`, or tags where that is the default and only a column tags exists."""
    is_tags = wanted == "label" and wanted not in table.columns and "tags" in table.columns
    return "tags" if is_tags else wanted


_FEW = 0.05
"""Share of the labels that is too small to decide on the kind of all of them."""
_PRINTED_LIST = re.compile(
    r"(?!\[[A-Za-z][\w-]*\]$)(array|tensor|set)?\(?[\[{].*[\]}](, dtype=.*)?\)?|\(['\"\d].*,.*\)", re.DOTALL
)
"""A list, set or tuple as Python prints it; a name in brackets, such as [NEG] or (1), is a label."""
_PRINTED_WORDS = re.compile(r"\[\s*(['\"]).*\1\s*\]", re.DOTALL)


def _choose_kind(train: Table, validation: Table, task: Task, wanted: str) -> tuple[str, str]:
    """Return the task's kind, by --label-type or by the cells, and a note on the row that decided."""
    first = next(iter(train.rows), None)
    if first is None:
        raise CpuftError(_describe_empty(train.source))
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
                raise CpuftError(_describe_printed_list(where, task.label, cell))
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
            f"{missing}, and all others are numbers: leave out rows without a label with --skip-unlabelled, correct "
            f"that line, or add --label-type class if it is the name of a class"
        )
    if with_comma:
        raise CpuftError(
            f"{with_comma} is a number with a comma: add --label-type number if the comma stands for a decimal point, "
            f"or --label-type class if the labels are names of classes"
        )
    if with_fraction:
        _refuse_few(with_fraction, count, "with a fraction means that numbers are learned by regression", "number")
        return "score", f"numbers are learned by regression, because the label in {with_fraction[0]} has a fraction"
    return "class", ""


def _refuse_few(places: Sequence[str], count: int, what: str, label_type: str) -> None:
    """Raise CpuftError if too few of `count` labels, those at `places`, have what decides on the kind of all."""
    if len(places) < _FEW * count:
        verb = "has" if len(places) == 1 else "have"
        raise CpuftError(
            f"a label {what}, and only {len(places)} of {counted(count, 'label')} {verb} one, first in {places[0]}: "
            f"correct that line, or add --label-type {label_type}, or --label-type class for classes of that name"
        )


def _describe_printed_list(where: str, name: str, cell: str) -> str:
    """Say that a cell holds a list as Python or NumPy prints it, and name the command that converts a CSV file."""
    what = f"{where}: {name!r} is a list that was printed as text ({cell!r:.60})"
    path = Path(where.partition(", line ")[0])
    if path.suffix != ".csv":
        return f"{what}: write a list in JSON lines or Parquet instead"
    # NumPy puts no commas between the parts, so that Python would join its texts.
    is_python = cell.lstrip()[0] in "[({" and ("," in cell or not re.search(r"\S\s+\S", cell))
    parse = "ast.literal_eval(c)" if is_python else "re.findall(r'[^][(){},\\s\\x22\\x27]+', c.strip('array'))"
    code = (
        f"import ast, csv, json, re; [print(json.dumps(row | {{{name!r}: list({parse})}})) "
        f"for row in csv.DictReader(open({str(path)!r}, newline='')) for c in [row[{name!r}]]]"
    )
    return f"{what}: {advise_conversion(path, '-lists.jsonl', f'python -c {shlex.quote(code)}')}"


def check_rows(table: Table, task: Task, has_labels: bool = True) -> Iterator[Row]:
    """Yield all rows, each checked to fit the task, except for the label's value. Raises CpuftError: one does not, or
    there are none.
    """
    if task.kind == "tags" and len(task.texts) > 1:
        raise CpuftError(f"{table.source} has lists of words, which need exactly one column: give it by --text-columns")
    needs_list = dict.fromkeys(task.texts, task.kind == "tags")
    if has_labels and task.label:
        several = task.kind == "labels" and any(isinstance(row.get(task.label), list) for _, row in table.rows)
        needs_list[task.label] = several or task.kind == "tags"
    # Words, tags, single labels, and texts of embedding models and rerankers must not be empty; other texts may.
    needs_all = task.kind in ("tags", *SENTENCE_TRANSFORMERS_KINDS)
    needed = {name for name in needs_list if needs_all or (name == task.label and task.kind != "labels")}
    is_empty, rows = True, iter(table.rows)
    for where, row in rows:
        for name in task.texts if is_empty else ():
            if isinstance(cell := row.get(name), str) and _PRINTED_WORDS.fullmatch(cell.strip()):
                raise CpuftError(_describe_printed_list(where, name, cell))
        is_empty = False
        for name, is_list in needs_list.items():
            if name not in row or (name in needed and not _has_text(row[name])):
                raise CpuftError(_describe_gap(where, name, task, rows))
            if isinstance(row[name], list) != is_list:
                form = "a list" if is_list else "one text"
                raise CpuftError(f"{where}: {name!r} must be {form}, as in the other lines: correct that line")
        if task.kind == "tags" and has_labels:
            words, tags = len(row[task.texts[0]]), sum(bool(tag.strip()) for tag in row[task.label])
            if words != tags:
                raise CpuftError(f"{where} has {counted(words, 'token')} and {counted(tags, 'tag')}: correct that line")
        yield where, row
    if is_empty:
        raise CpuftError(_describe_empty(table.source))


def _describe_gap(where: str, name: str, task: Task, rows: Iterator[Row]) -> str:
    """Return the message for a cell that is missing. `rows` are those after it, whose labels are counted."""
    if name != task.label:
        return f"{where} has no {name!r}: correct or remove that line"
    others = sum(not _has_text(row.get(name, "")) for _, row in rows)
    several = f", and {counted(others, 'later line')} {'has' if others == 1 else 'have'} none" if others else ""
    what = "those lines" if others else "that line"
    return f"{where} has no {name!r}{several}: correct or remove {what}, or leave out rows with --skip-unlabelled"


def _has_text(cell: Cell) -> bool:
    return bool(cell.strip()) if isinstance(cell, str) else any(map(str.strip, cell))


def _split_label(cell: Cell, task: Task) -> list[str]:
    if isinstance(cell, str):
        cell = cell.split(LABEL_SEPARATOR) if task.kind == "labels" else [cell]
    return [text for part in cell if (text := part.strip())]


def scan_rows(table: Table, task: Task) -> tuple[FileExamples, dict[str, str]]:
    """Check all rows; return the examples, and where each label is first found (empty for scores). Raises CpuftError: a
    row does not fit, there is no row, or there are more than 100,000 labels.
    """
    digest, count, labels = hashlib.sha256(), 0, dict[str, str]()
    names = (*task.texts, *([task.label] if task.label else []))
    rows = check_rows(table, task)
    while batch := list(islice(rows, _EXAMPLES_AT_ONCE)):
        count += len(batch)
        digest.update(json.dumps([[row[name] for name in names] for _, row in batch]).encode())
        for where, row in batch if task.label else ():
            if task.kind in SCORE_KINDS:
                parse_label(str(row[task.label]), task, where)
            else:
                for label in _split_label(row[task.label], task):
                    labels.setdefault(label, where)
        if len(labels) > _MAX_CLASSES:
            raise CpuftError(
                f"{table.source} has more than {_MAX_CLASSES:,} different labels in {task.label!r}: name another "
                f"column with --label-column, or learn numbers by regression with --label-type number"
            )
    return FileExamples(table, task, count, digest.hexdigest()), labels


def _number_labels(
    task: Task, train: Iterable[str], others: Mapping[str, str], source: str, check_labels: bool
) -> Task:
    """Return the task with metrics and labels: those of `train`, sorted; then, without `check_labels`, new `others`."""
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
            f"{others[new[0]]}: no row of {source} has the label {new[0]!r}: correct that line, or train on rows that "
            f"have it"
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


def make_examples(rows: Iterable[Row], task: Task, has_labels: bool = True, id_column: str = "") -> Examples:
    """Make examples of rows of `check_rows`; without `has_labels`, labels are not read, but 0.0 or (). CpuftError: a
    label is not one of the task's, or no number; or an id is missing.
    """
    has_labels = has_labels and bool(task.label)
    examples = Examples([], [], has_labels)
    several = task.kind in ("labels", "tags")
    known = _number_labels_of(task.labels)
    for where, row in rows:
        cells = [row[name] for name in task.texts]
        examples.texts.append(tuple(cells[0] if task.kind == "tags" else map(str, cells)))
        if id_column:
            examples.ids.append(get_id(row, id_column, where))
        labels = _split_label(row[task.label], task) if has_labels else []
        numbers = [known[label] if label in known else parse_label(label, task, where) for label in labels]
        examples.labels.append(tuple(map(int, numbers)) if several else numbers[0] if has_labels else 0.0)
    return examples


def get_id(row: Mapping[str, Cell], id_column: str, where: str) -> str:
    """Return the text in the row's column `id_column`, perhaps "". CpuftError: the column is missing or has a list."""
    if not isinstance(cell := row.get(id_column), str):
        raise CpuftError(f"{where} has no text in the column {id_column!r}: correct that row, or name another column")
    return cell


# The demo: do both sentences of a pair tell the same event?
#
# Synonyms, voice and word order are random. In half of the pairs two facts differ: agent, action, place or time. So
# neither length nor grammar tells the label, shared words alone mislead, and an untrained head is near chance.

_PEOPLE = (
    "the nurse", "the pilot", "the farmer", "the lawyer", "the baker", "the engineer", "the teacher", "the painter",
    "the sailor", "the mayor", "the judge", "the student",
)  # fmt: skip

# Participles with the same meaning, which are also past tenses, for active sentences.
_ACTIONS = (
    ("called", "phoned"),
    ("helped", "assisted"),
    ("hired", "employed"),
    ("paid", "reimbursed"),
    ("taught", "instructed"),
    ("rescued", "saved"),
    ("praised", "applauded"),
    ("visited", "met"),
)
_PLACES = (
    ("at the station", "in the train station"),
    ("at the market", "in the marketplace"),
    ("in the hospital", "at the clinic"),
    ("at the harbour", "at the port"),
    ("in the library", "among the books"),
    ("at the airport", "near the planes"),
)
_TIMES = (
    ("at noon", "at midday"),
    ("at night", "after dark"),
    ("in winter", "in January"),
    ("in summer", "in July"),
    ("yesterday", "the day before"),
)


def make_pairs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """Return `count` tuples of two sentences and 1 if both tell the same event, else 0; determined by the seed."""
    generator = random.Random(seed)
    return [_make_pair(generator) for _ in range(count)]


def _make_pair(generator: random.Random) -> tuple[str, str, int]:
    tables = {"action": _ACTIONS, "place": _PLACES, "time": _TIMES}
    agent, patient = generator.sample(range(len(_PEOPLE)), 2)
    event = {"agent": agent, "patient": patient} | {
        fact: generator.randrange(len(table)) for fact, table in tables.items()
    }
    other, same = dict(event), generator.random() < 0.5
    for fact in generator.sample(["action", "agent", "place", "time"], 2) if not same else ():
        taken = {agent, patient} if fact == "agent" else {event[fact]}
        size = len(tables.get(fact, _PEOPLE))
        other[fact] = generator.choice([index for index in range(size) if index not in taken])
    return _write_sentence(event, generator), _write_sentence(other, generator), int(same)


def _write_sentence(event: dict[str, int], generator: random.Random) -> str:
    """Return a sentence that tells an event, whose facts are indices of the tables."""
    agent, patient = _PEOPLE[event["agent"]], _PEOPLE[event["patient"]]
    action = generator.choice(_ACTIONS[event["action"]])
    place = generator.choice(_PLACES[event["place"]])
    time = generator.choice(_TIMES[event["time"]])
    core = f"{patient} was {action} by {agent}" if generator.random() < 0.5 else f"{agent} {action} {patient}"
    text = generator.choice((f"{time}, {core} {place}", f"{core} {place} {time}"))
    return text[0].upper() + text[1:] + "."


def _make_demo_examples(count: int, seed: int) -> Examples:
    pairs = make_pairs(count, seed)
    return Examples([(first, second) for first, second, _ in pairs], [float(same) for _, _, same in pairs])
