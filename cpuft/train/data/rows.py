"""Rows of a task: from a GLUE download, from the user's own CSV, TSV or JSON lines, from the hub, or made."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, counted, near_names
from cpuft.loader import load, parse_json
from cpuft.options.fields import TrainConfig
from cpuft.train.data.demo import make_pairs
from cpuft.train.data.tasks import TASKS, Task

_MOST_SCORE = 3e38  # larger ones are infinite as float32, which models compute in


@dataclass(frozen=True)
class Rows:
    """Texts (one or two a row) and labels (class numbers, or scores) of one split."""

    texts: list[tuple[str, ...]]
    labels: list[float]


@dataclass(frozen=True)
class Data:
    """Everything a run trains and evaluates on."""

    task: Task
    train: Rows
    validation: dict[str, Rows]
    """By what is appended to the metrics' names; most tasks have one, of the empty name."""


def read_data(config: TrainConfig) -> Data:
    """Rows of `config.task`. Raises CpuftError for missing files, columns, labels and empty splits."""
    task = TASKS[config.task]
    if task.name == "files":
        return _read_files(task, config)
    if task.name == "demo":
        return Data(task, _demo_rows(1600, config.seed), {"": _demo_rows(400, config.seed + 1_000_003)})
    if config.data_dir:
        return _read_glue(task, Path(config.data_dir))
    return _read_hub(task)


def first_rows(rows: Rows, count: int) -> Rows:
    """The first `count` rows; all when `count` is 0."""
    return Rows(rows.texts[:count], rows.labels[:count]) if count else rows


def _demo_rows(count: int, seed: int) -> Rows:
    pairs = make_pairs(count, seed)
    return Rows([(first, second) for first, second, _ in pairs], [float(same) for _, _, same in pairs])


def _read_glue(task: Task, folder: Path) -> Data:
    if not folder.is_dir():
        raise CpuftError(
            f"there is no folder {folder}: name the one that holds {task.folder}/train.tsv with --data-dir"
        )
    home = next((f for f in (folder / task.folder, folder) if (f / "train.tsv").exists()), folder / task.folder)
    train = _read_glue_split(task, home / "train.tsv")
    return Data(task, train, {key: _read_glue_split(task, home / f"{stem}.tsv") for key, stem in task.validation})


def _read_glue_split(task: Task, path: Path) -> Rows:
    return parse_tsv(_read_text(path), task, str(path))


def _read_text(path: Path, option: str = "--data-dir") -> str:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # a line end inside quotation marks is text
            return file.read()
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}: check {option}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CpuftError(f"{path} cannot be read ({error}): it must be a UTF-8 text file you may read") from None


def parse_tsv(text: str, task: Task, source: str) -> Rows:
    """Rows of a GLUE file: tabs between columns, no quoting (a lone quotation mark is part of the text).

    Raises CpuftError: a missing column, a row with too few columns or an unknown label (with the line), no rows.
    """
    lines = text.split("\n")
    start = 0 if task.columns else 1
    columns = list(task.columns) or [column.strip() for column in lines[0].rstrip("\r").split("\t")]
    places = [_find_column(columns, name, source) for name in (*task.texts, task.label)]
    rows = Rows([], [])
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) <= max(places):
            raise CpuftError(
                f"{source}, line {number} has {counted(len(cells), 'column')}, {columns[max(places)]!r} is column "
                f"{max(places) + 1}: mend or remove that line"
            )
        rows.texts.append(tuple(cells[place] for place in places[:-1]))
        rows.labels.append(parse_label(cells[places[-1]], task, f"{source}, line {number}"))
    _refuse_empty(rows.labels, source)
    return rows


def _refuse_empty(rows: Sequence[object], source: str) -> None:
    if not rows:
        raise CpuftError(f"{source} has no rows: give a file with at least one row below its header")


def _find_column(columns: Sequence[str], name: str, source: str) -> int:
    if name not in columns:
        raise CpuftError(f"{source} has no column {name!r}: {near_names(name, columns)}")
    return columns.index(name)


def parse_label(text: str, task: Task, where: str) -> float:
    """A class number, or a score for regression. Raises CpuftError for what is neither."""
    text = text.strip()
    if task.is_regression:
        with suppress(ValueError):
            if abs(float(text)) < _MOST_SCORE:
                return float(text)
        raise CpuftError(f"{where}: score {text!r} is no number: mend that line")
    if text not in task.labels:
        raise CpuftError(f"{where}: label {text!r} is not one of {', '.join(task.labels)}: mend that line")
    return float(task.labels.index(text))


def _read_files(task: Task, config: TrainConfig) -> Data:
    for flag, path in (("--train-file", config.train_file), ("--validation-file", config.validation_file)):
        if not path:
            raise CpuftError(f"--task files needs {flag}: name a CSV, TSV or JSON lines file")
    tables = [
        read_table(Path(config.train_file), "--train-file"),
        read_table(Path(config.validation_file), "--validation-file"),
    ]
    texts = _text_columns(tables[0], config)
    task = replace(task, texts=texts, label=config.label_column)
    for table in tables:
        for name in (*texts, task.label):
            _find_column(table.columns, name, table.source)
        _refuse_gaps(table, texts, task.label)
    task = _find_labels(task, *tables)
    train, validation = (_table_rows(table, task) for table in tables)
    return Data(task, train, {"": validation})


def _refuse_gaps(table: Table, texts: Sequence[str], label: str) -> None:
    """Raises CpuftError for no rows, a row without one of these columns (JSON lines may), or with an empty label."""
    _refuse_empty(table.rows, table.source)
    for number, row in table.rows:
        missing = [name for name in texts if name not in row] + [label] * (not row.get(label, "").strip())
        if missing:
            raise CpuftError(f"{table.source}, line {number} has no {missing[0]!r}: mend or remove that line")


def _find_labels(task: Task, train: Table, validation: Table) -> Task:
    """The task with the classes that the training rows have, or as a regression where labels are scores.

    Raises CpuftError: training rows have one class only, or validation rows one more.
    """
    found = sorted({row[task.label].strip() for _, row in train.rows})
    others = {row[task.label].strip(): number for number, row in reversed(validation.rows)}
    if _are_scores([*found, *others]):
        return replace(task, labels=(), metrics=("pearson", "spearman"))
    if len(found) < 2:
        raise CpuftError(f"all rows of {train.source} have the label {found[0]!r}: give rows of two labels or more")
    for label, number in others.items():
        if label not in found:
            raise CpuftError(
                f"{validation.source}, line {number}: no row of {train.source} has the label {label!r}: mend that "
                f"line, or train on rows that have it"
            )
    return replace(task, labels=tuple(found), metrics=("accuracy", "f1") if len(found) == 2 else ("accuracy",))


@dataclass(frozen=True)
class Table:
    """A user's file: its column names, and each row with its line number."""

    source: str
    columns: list[str]
    rows: list[tuple[int, dict[str, str]]]


def read_table(path: Path, option: str = "--train-file") -> Table:
    """A CSV or TSV file with a header line (quoting as RFC 4180 has it), or JSON lines (.json, .jsonl).

    Raises CpuftError: it is not there (`option` named it), empty, no UTF-8 text, or has a line that does not fit the
    others.
    """
    text = _read_text(path, option)
    if not text.strip():
        raise CpuftError(f"{path} is empty: give a file with rows")
    if path.suffix in (".json", ".jsonl", ".ndjson"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        found = [_parse_json_row(line, f"{path}, line {number}", number) for number, line in lines]
        return Table(str(path), sorted(found[0][1]), found)
    (_, columns), *rows = _split_cells(text, "\t" if path.suffix == ".tsv" else ",", str(path))
    for number, cells in rows:
        if len(cells) != len(columns):
            quotes = " (a text with a comma stands in quotation marks)" if len(cells) > len(columns) else ""
            raise CpuftError(
                f"{path}, line {number} has {counted(len(cells), 'column')}, its header {len(columns)}: "
                f"mend that line{quotes}"
            )
    return Table(str(path), columns, [(number, dict(zip(columns, cells))) for number, cells in rows])


def _split_cells(text: str, delimiter: str, source: str) -> list[tuple[int, list[str]]]:
    """The cells of each line that has any, with the line's number; of cells that span lines the last one's."""
    csv.field_size_limit(sys.maxsize)  # the format knows no limit
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise CpuftError(f"{source}, line {reader.line_num} is no CSV ({error}): mend that line") from None


def _parse_json_row(line: str, where: str, number: int) -> tuple[int, dict[str, str]]:
    """Lists and objects are no cells: of the columns that are asked for, they count as missing."""
    try:
        values = load(dict[str, Any], parse_json(line))
        cells = {k: "" if v is None else str(v) for k, v in values.items() if not isinstance(v, (list, dict))}
        return number, load(dict[str, str], cells)
    except ValueError as error:
        raise CpuftError(
            f"{where} is not a JSON object ({error}): write one object a line, {{'text': ..., 'label': ...}}"
        ) from None


def _text_columns(table: Table, config: TrainConfig) -> tuple[str, ...]:
    if config.text_columns:
        return tuple(name.strip() for name in config.text_columns.split(","))[:2]
    for names in (("sentence1", "sentence2"), ("text1", "text2"), ("premise", "hypothesis"), ("sentence",), ("text",)):
        if all(name in table.columns for name in names):
            return names
    others = ", ".join(name for name in table.columns if name != config.label_column) or "none"
    raise CpuftError(f"{table.source} has no column sentence1 or text: name one or two of {others} with --text-columns")


def _are_scores(labels: Sequence[str]) -> bool:
    """Whether labels are numbers to be met: all parse, and some are no whole numbers."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return False
    return any(not number.is_integer() for number in numbers)


def _table_rows(table: Table, task: Task) -> Rows:
    rows = Rows([], [])
    for number, row in table.rows:
        rows.texts.append(tuple(row[name] for name in task.texts))
        rows.labels.append(parse_label(row[task.label], task, f"{table.source}, line {number}"))
    return rows


def _read_hub(task: Task) -> Data:
    """GLUE from the Hugging Face hub, through `datasets`."""
    from datasets import load_dataset

    try:
        splits = load_dataset("nyu-mll/glue", task.name)
    except Exception as error:  # the hub's client raises whatever its layers raise
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CpuftError(
            f"the hub did not give {task.name} ({said}): name a GLUE download with --data-dir, or use --task demo"
        ) from None
    names = {"dev": "validation", "dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"}
    columns = task.hub_texts or task.texts

    def rows_of(split: str) -> Rows:
        table = splits[split]
        texts = list(zip(*(table[column] for column in columns)))
        return Rows([tuple(map(str, row)) for row in texts], [float(label) for label in table["label"]])

    return Data(task, rows_of("train"), {key: rows_of(names[stem]) for key, stem in task.validation})
