"""Examples of a task: read from a GLUE download, the user's own files or the Hugging Face hub, or those of the demo."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted, list_names
from cpuft.tasks import SENTENCE_TRANSFORMERS_KINDS, TASKS, Task
from cpuft.train.data.columnar import Cell
from cpuft.train.data.demo import make_pairs
from cpuft.train.data.labels import (
    SCORE_KINDS,
    choose_kind,
    describe_printed_list,
    list_label_numbers,
    number_labels,
    parse_label,
    refuse_case,
    refuse_vectors,
    split_label,
)
from cpuft.train.data.tables import (
    Row,
    Rows,
    Table,
    describe_empty,
    find_column,
    hint_header,
    is_blank,
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
        """Return the examples, all of them in memory. Raises CpuftError as `batches` does."""
        return make_examples(self._list_rows(), self.task)

    def first(self, count: int) -> FileExamples:
        """Return the first `count` examples; the object itself when `count` is 0."""
        return replace(self, count=min(count, self.count)) if count else self

    def batches(self) -> Iterator[Examples]:
        """Read the examples in their order, 4096 at a time. CpuftError: a row does not fit, or too few are left."""
        rows = self._list_rows()
        while batch := list(islice(rows, _EXAMPLES_AT_ONCE)):
            yield make_examples(batch, self.task)

    def list_texts(self) -> Iterator[str]:
        """Read all texts: both of a pair, or each word for the kind tags. Raises CpuftError as `batches` does."""
        for batch in self.batches():
            yield from batch.list_texts()

    def _list_rows(self) -> Iterator[Row]:
        found = 0
        for row in islice(self.table.rows, self.count):
            found += 1
            yield row
        if found != self.count:
            raise CpuftError(f"{self.table.source} had {counted(self.count, 'row')}, and has {found} now: start again")


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
    """Read the examples of GLUE, demo or files. Raises CpuftError: they do not fit the task, or, with `check_labels`,
    files have fewer than two labels for training, or others for validation.
    """
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
    """Return the `splits` of `read_splits` without labels: (("", "test"),), for mnli (("", "test_matched"),
    ("_mismatched", "test_mismatched")); () for tasks that are not of GLUE.
    """
    return tuple((key, stem.replace("dev", "test")) for key, stem in task.validation) if task.folder else ()


# GLUE


def _read_glue_split(task: Task, folder: Path, stem: str) -> Examples:
    if not folder.is_dir():
        raise CpuftError(f"--data-dir {folder} does not exist: give the folder that contains {task.folder}/{stem}.tsv")
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
        raise CpuftError(describe_empty(source))
    return examples


_HUB_SPLITS = {"dev": "validation", "dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"}


def _read_hub(task: Task, splits: Sequence[tuple[str, str]]) -> dict[str, Examples]:
    advice = f"give --data-dir a folder that contains {task.folder}/train.tsv, from a GLUE download, or use --task demo"
    tables = load_from_hub(f"the data of --task {task.name}", advice, path="nyu-mll/glue", name=task.name)
    found = {}
    for key, stem in splits:
        table, has_labels = tables[_HUB_SPLITS.get(stem, stem)], not stem.startswith("test")
        texts = zip(*(map(str, table[column]) for column in task.hub_texts or task.texts))
        labels = [float(label) if has_labels else 0.0 for label in table["label"]]
        found[key] = Examples(list(texts), labels, has_labels)
    return found


# The user's own files


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
    kind, decided = choose_kind(train, validation, task, config.label_type)
    task = replace(task, kind=kind)
    (examples, labels), (validated, others) = (scan_rows(table, task) for table in (train, validation))
    if kind == "labels":
        refuse_vectors(train, task, labels)
    if check_labels and config.label_type == "auto" and kind in ("class", "labels"):
        refuse_case(labels | others | labels)
    task = number_labels(task, labels, others, train.source, check_labels)
    notes = (*(note for table in tables for note in table.notes), *([decided] if decided else []))
    return TaskData(task, replace(examples, task=task), {"": replace(validated, task=task)}, notes)


def read_both_files(config: TrainConfig, what: str) -> tuple[Table, Table | None]:
    """Open --train-file, and --validation-file (else None). CpuftError: one cannot be read, or --train-file is not
    given, which the message says with `what`, the rows that it needs.
    """
    if not config.train_file:
        raise CpuftError(f"--task {config.task} needs --train-file: give a file with {what}")
    train = read_tables(config.train_file, "--train-file", config)
    if not config.validation_file:
        return train, None
    return train, read_tables(config.validation_file, "--validation-file", config, "validation")


def check_columns(table: Table, task: Task, name_texts: str, name_label: str) -> None:
    """Raise CpuftError if the table lacks a column of the task; it ends with `name_texts` or, for the label,
    `name_label`: advice on how to name the column, such as "give its name with --label-column".
    """
    for name in task.texts:
        find_column(table.columns, name, table.source, name_texts)
    if task.label:
        find_column(table.columns, task.label, table.source, name_label)


def drop_unlabelled(table: Table, label: str) -> Table:
    """Return a table without the rows whose label is blank or missing (nan, null), and with a note on them if any."""
    kept = Rows(lambda: (row for row in table.rows if not is_blank(row[1].get(label, ""))))
    count = sum(1 for _ in table.rows) - sum(1 for _ in kept)
    note = f"{counted(count, 'row')} of {table.source} without a label left out"
    return replace(table, rows=kept, notes=(*table.notes, note) if count else table.notes)


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
    if own := config.file or train.validation_file:
        table = read_tables(own, option, options, "test" if config.file else "validation")
    else:
        table = read_tables(train.train_file, option, options)
    if train.skip_unlabelled and not config.file:
        table = drop_unlabelled(table, _choose_label_column(table, train.label_column))
    if not own:
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
    has_labels = label in table.columns and every(has_label(row.get(label, ""), task) for _, row in table.rows)
    return task, make_examples(check_rows(table, task, has_labels), task, has_labels, config.id_column)


def _choose_text_columns(table: Table, wanted: str, label: str) -> tuple[str, ...]:
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
    raise CpuftError(
        f"no column of {table.source} is named text, sentence or sentence1 (it has {list_names(others)}): name the "
        f"column of the texts, or two columns for pairs, with --text-columns{hint_header(others)}"
    )


def _choose_label_column(table: Table, wanted: str) -> str:
    """Return `wanted`, or tags where that is the default and only a column tags exists."""
    is_tags = wanted == "label" and wanted not in table.columns and "tags" in table.columns
    return "tags" if is_tags else wanted


_PRINTED_WORDS = re.compile(r"\[\s*(['\"]).*\1\s*\]", re.DOTALL)


def check_rows(table: Table, task: Task, has_labels: bool = True) -> Iterator[Row]:
    """Yield all rows, each checked to fit the task, except for the label's value. Raises CpuftError: one lacks a
    column, has a list for a text or the reverse, or an empty cell (of texts, only if the kind needs them); or there are
    none.
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
    is_empty = True
    for where, row in table.rows:
        for name in task.texts if is_empty else ():
            if isinstance(cell := row.get(name), str) and _PRINTED_WORDS.fullmatch(cell.strip()):
                raise CpuftError(describe_printed_list(where, name, cell))
        is_empty = False
        for name, is_list in needs_list.items():
            if name not in row or (name in needed and not _has_text(row[name])):
                others = ", or leave out rows with --skip-unlabelled" * (name == task.label)
                raise CpuftError(f"{where} has no {name!r}: correct or remove that line{others}")
            if isinstance(row[name], list) != is_list:
                form = "a list" if is_list else "one text"
                raise CpuftError(f"{where}: {name!r} must be {form}, as in the other lines: correct that line")
        if task.kind == "tags" and has_labels:
            words, tags = len(row[task.texts[0]]), sum(bool(tag.strip()) for tag in row[task.label])
            if words != tags:
                raise CpuftError(f"{where} has {counted(words, 'token')} and {counted(tags, 'tag')}: correct that line")
        yield where, row
    if is_empty:
        raise CpuftError(describe_empty(table.source))


def _has_text(cell: Cell) -> bool:
    return bool(cell.strip()) if isinstance(cell, str) else any(map(str.strip, cell))


def has_label(cell: Cell, task: Task) -> bool:
    """Return whether a cell has a label to compare with: not blank or missing (nan, null), unless a class has that
    name.
    """
    return _has_text(cell) and (not is_blank(cell) or str(cell).strip() in task.labels)


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
                for label in split_label(row[task.label], task):
                    labels.setdefault(label, where)
        if len(labels) > _MAX_CLASSES:
            raise CpuftError(
                f"{table.source} has more than {_MAX_CLASSES:,} different labels in {task.label!r}: name another "
                f"column with --label-column, or learn numbers by regression with --label-type number"
            )
    return FileExamples(table, task, count, digest.hexdigest()), labels


def make_examples(rows: Iterable[Row], task: Task, has_labels: bool = True, id_column: str = "") -> Examples:
    """Make examples of rows of `check_rows`; without `has_labels`, labels are not read, but 0.0 or (). CpuftError: a
    label is not one of the task's, or no number; or an id is missing.
    """
    has_labels = has_labels and bool(task.label)
    examples = Examples([], [], has_labels)
    several = task.kind in ("labels", "tags")
    known = list_label_numbers(task.labels)
    for where, row in rows:
        cells = [row[name] for name in task.texts]
        examples.texts.append(tuple(cells[0] if task.kind == "tags" else map(str, cells)))
        if id_column:
            examples.ids.append(get_text(row, id_column, where))
        labels = split_label(row[task.label], task) if has_labels else []
        numbers = [known[label] if label in known else parse_label(label, task, where) for label in labels]
        examples.labels.append(tuple(map(int, numbers)) if several else numbers[0] if has_labels else 0.0)
    return examples


def get_text(row: Mapping[str, Cell], column: str, where: str, may_be_blank: bool = True) -> str:
    """Return the text in a column of a row. CpuftError: the column is missing there, has a list or, unless it
    `may_be_blank`, has no text.
    """
    cell = row.get(column)
    if not isinstance(cell, str) or not (may_be_blank or cell.strip()):
        raise CpuftError(f"{where} has no text in the column {column!r}: correct or remove that row")
    return cell


def _make_demo_examples(count: int, seed: int) -> Examples:
    pairs = make_pairs(count, seed)
    return Examples([(first, second) for first, second, _ in pairs], [float(same) for _, _, same in pairs])
