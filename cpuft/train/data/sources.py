"""Examples of a task: read from a GLUE download, the user's own files or the Hugging Face hub, or generated."""

from __future__ import annotations

import csv
import io
import random
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from cpuft.config import PredictConfig, TrainConfig
from cpuft.errors import CpuftError, counted, near_names
from cpuft.serialization import load, parse_json
from cpuft.tasks import TASKS, Task
from cpuft.train.startup import find_hub_problem


@dataclass(frozen=True)
class Rows:
    """Texts (one or two a row; of tags, the row's words) and labels of one split."""

    texts: list[tuple[str, ...]]
    labels: list[Any]
    """Class numbers or scores; of tags and of several labels, tuples of class numbers."""
    labelled: bool = True
    """Whether the labels are the rows' own, and not there for the form's sake."""

    def list_texts(self) -> Iterator[str]:
        """All texts, row by row."""
        return chain.from_iterable(self.texts)


@dataclass(frozen=True)
class Data:
    """Everything a run trains and evaluates on."""

    task: Task
    train: Rows
    validation: dict[str, Rows]
    """By what is appended to the metrics' names; most tasks have one, of the empty name."""


def first_rows(rows: Rows, count: int) -> Rows:
    """The first `count` rows; all when `count` is 0."""
    return replace(rows, texts=rows.texts[:count], labels=rows.labels[:count]) if count else rows


_HUB_NAMES = {"dev": "validation", "dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"}
"""The hub's names of splits, where they are not the files'."""


def read_data(config: TrainConfig) -> Data:
    """Rows of `config.task`. Raises CpuftError for missing files, columns, labels and empty splits."""
    task = TASKS[config.task]
    if task.name == "files":
        return read_own(task, config)
    if task.name == "demo":
        return Data(task, _demo_rows(1600, config.seed), read_splits(task, config, task.validation))
    splits = read_splits(task, config, (("train", "train"), *task.validation))
    return Data(task, splits.pop("train"), splits)


def read_splits(task: Task, config: TrainConfig, splits: Sequence[tuple[str, str]]) -> dict[str, Rows]:
    """Rows of splits of a task that is not the user's own, by what is appended to metrics' names and by file stems."""
    if task.name == "demo":
        return {"": _demo_rows(400, config.seed + 1_000_003)}
    if not config.data_dir:
        return _read_hub(task, splits)
    return {key: _read_glue_split(task, Path(config.data_dir), stem) for key, stem in splits}


def name_tests(task: Task) -> tuple[tuple[str, str], ...]:
    """The splits without labels that GLUE scores, as `validation`; none for what is not GLUE's."""
    return tuple((key, stem.replace("dev", "test")) for key, stem in task.validation) if task.folder else ()


def _demo_rows(count: int, seed: int) -> Rows:
    pairs = make_pairs(count, seed)
    return Rows([(first, second) for first, second, _ in pairs], [float(same) for _, _, same in pairs])


def _read_glue_split(task: Task, folder: Path, stem: str) -> Rows:
    if not folder.is_dir():
        raise CpuftError(
            f"there is no folder {folder}: name the one that holds {task.folder}/{stem}.tsv with --data-dir"
        )
    places = [folder / task.folder / f"{stem}.tsv", folder / f"{stem}.tsv"]
    path = next((place for place in places if place.exists()), places[0])
    # Test files have a header line all, and labels none.
    task = replace(task, columns=(), label="") if stem.startswith("test") else task
    return parse_tsv(read_text(path), task, str(path))


def read_as_glue(task: Task, path: Path) -> Rows | None:
    """Rows of a file in the layout of the task's own, with labels or without; None of one in another."""
    if not task.folder or path.suffix != ".tsv":
        return None
    text = read_text(path, "--file")
    columns = text.partition("\n")[0].rstrip("\r").split("\t")
    if not set(task.texts) <= set(columns):
        return None
    return parse_tsv(text, replace(task, columns=(), label=task.label if task.label in columns else ""), str(path))


def parse_tsv(text: str, task: Task, source: str) -> Rows:
    """Rows of a GLUE file: tabs between columns, no quoting (a lone quotation mark is part of the text).

    Raises CpuftError: a missing column, a row with too few columns or an unknown label (with the line), no rows.
    """
    lines = text.split("\n")
    start = 0 if task.columns else 1
    columns = list(task.columns) or [column.strip() for column in lines[0].rstrip("\r").split("\t")]
    places = [find_column(columns, name, source) for name in (*task.texts, task.label) if name]
    rows = Rows([], [], labelled=bool(task.label))
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) <= max(places):
            raise CpuftError(
                f"{source}, line {number} has {counted(len(cells), 'column')}, {columns[max(places)]!r} is column "
                f"{max(places) + 1}: correct or remove that line"
            )
        rows.texts.append(tuple(cells[place] for place in places[: len(task.texts)]))
        where = f"{source}, line {number}"
        rows.labels.append(parse_label(cells[places[-1]], task, where) if task.label else 0.0)
    refuse_empty(rows.labels, source)
    return rows


def _read_hub(task: Task, splits: Sequence[tuple[str, str]]) -> dict[str, Rows]:
    """GLUE from the Hugging Face hub, through `datasets`."""
    problem = find_hub_problem()
    from datasets import load_dataset

    try:
        tables = load_dataset("nyu-mll/glue", task.name)
    except Exception as error:  # the hub's client raises whatever its layers raise
        if problem:
            raise CpuftError(
                f"the data of --task {task.name} is not in the cache of data sets, and {problem}: check the network "
                f"and the proxy settings, name a folder with a GLUE download with --data-dir, or use --task demo"
            ) from None
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CpuftError(
            f"the hub did not give {task.name} ({said}): name a GLUE download with --data-dir, or use --task demo"
        ) from None
    columns = task.hub_texts or task.texts

    def rows_of(stem: str) -> Rows:
        table: Any = tables[_HUB_NAMES.get(stem, stem)]
        texts = list(zip(*(table[column] for column in columns)))
        labelled = not stem.startswith("test")
        labels = [float(label) if labelled else 0.0 for label in table["label"]]
        return Rows([tuple(map(str, row)) for row in texts], labels, labelled)

    return {key: rows_of(stem) for key, stem in splits}


_MOST_SCORE = 3e38  # larger ones are infinite as float32, which models compute in

Cell = str | list[str]
"""A text; in JSON lines, a list of texts too."""


@dataclass(frozen=True)
class Table:
    """A user's file: its column names, and each row with its line number."""

    source: str
    columns: list[str]
    rows: list[tuple[int, dict[str, Cell]]]


def read_table(path: Path, option: str = "--train-file") -> Table:
    """A CSV or TSV file with a header line (quoting as RFC 4180 has it), or JSON lines (.json, .jsonl).

    Raises CpuftError: it is not there (`option` named it), empty, no UTF-8 text, or has a line that does not fit the
    others.
    """
    text = read_text(path, option)
    if not text.strip():
        raise CpuftError(f"{path} is empty: give a file with rows")
    if path.suffix in (".json", ".jsonl", ".ndjson"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        _refuse_array(lines[0][1], path)
        found = [parse_json_row(line, f"{path}, line {number}", number) for number, line in lines]
        # Not those of the first line alone: if that lacks a column, the error is to name the line.
        return Table(str(path), sorted({name for _, row in found for name in row}), found)
    (_, columns), *rows = _split_cells(text, "\t" if path.suffix == ".tsv" else ",", str(path))
    _refuse_delimiter(columns, path)
    for number, cells in rows:
        if len(cells) != len(columns):
            separator = "tab" if path.suffix == ".tsv" else "comma"
            quotes = f"put a text that contains a {separator} in quotation marks"
            raise CpuftError(
                f"{path}, line {number} has {counted(len(cells), 'column')}, but the header has {len(columns)}: "
                f"{quotes if len(cells) > len(columns) else 'correct that line'}"
            )
    return Table(str(path), columns, [(number, {**dict(zip(columns, cells))}) for number, cells in rows])


def read_text(path: Path, option: str = "--data-dir") -> str:
    """A file that `option` has named, whole. Raises CpuftError: it is not there, or no UTF-8 text."""
    content = b""
    try:
        if path.is_dir():
            raise CpuftError(_describe_folder(path, option))
        content = path.read_bytes()
        if how := _describe_format(path, content):
            raise CpuftError(how)
        return content.decode("utf-8-sig")  # line ends stay: inside quotation marks they are text
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}: check {option}") from None
    except UnicodeDecodeError as error:
        # Behind a byte order mark the decoder counts from where that ends.
        start = error.start + (len(content) - len(error.object))
        raise CpuftError(describe_encoding(path, content[:start].count(b"\n") + 1, error)) from None
    except OSError as error:
        raise CpuftError(f"{path} cannot be read ({error.strerror}): check its permissions and {option}") from None


_CONVERT = 'python -c "import pandas; pandas.{}"'
_MAGIC = ((b"PAR1", "a Parquet file"), (b"ARROW1", "an Arrow file"), (b"\x1f\x8b", "compressed with gzip"))
"""How files of other formats begin."""
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def _describe_format(path: Path, content: bytes) -> str:
    """What to say of a file of a format that is not read, and how it is converted; empty for what may be text."""
    name = next((name for magic, name in _MAGIC if content.startswith(magic)), "")
    target = str(path.with_suffix(".jsonl"))
    what = f"{path} is {{}}, which cpuft does not read"
    if name == "a Parquet file":
        how = _CONVERT.format(f"read_parquet({str(path)!r}).to_json({target!r}, orient='records', lines=True)")
    elif name == "an Arrow file":
        how = _CONVERT.format(f"read_feather({str(path)!r}).to_json({target!r}, orient='records', lines=True)")
    elif name:
        how, target = f"gunzip {shlex.quote(str(path))}", str(path.with_suffix(""))
    elif path.suffix in (".xlsx", ".xls", ".ods"):
        advice = "save it as CSV in UTF-8 with commas between the columns, then give the CSV file instead"
        return f"{what.format('a spreadsheet')}: {advice}"
    elif content.startswith(_UTF_16):
        name = "in UTF-16"
        how, target = _convert_from("UTF-16", path)
    return f"{what.format(name)}: {_advise_command(how, target)}" if name else ""


def _advise_command(command: str, target: str) -> str:
    """The advice to convert a file with `command`, which writes `target`. The command ends the line, to be copied."""
    return f"convert it with this command, then give {target} instead: {command}"


def _describe_folder(path: Path, option: str) -> str:
    """What to say of a folder where a file of rows is needed."""
    if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        what = f"{path} is a folder that the package datasets saved, which cpuft does not read"
        if (path / "dataset_dict.json").exists():
            code = f"[split.to_json(name + '.jsonl') for name, split in datasets.load_from_disk({str(path)!r}).items()]"
            target = "the file of the split that you need, such as train.jsonl,"
        else:
            target = f"{path.absolute().name}.jsonl"
            code = f"datasets.load_from_disk({str(path)!r}).to_json({target!r})"
        command = f'python -c "import datasets; {code}"'
        return f"{what}: {_advise_command(command, target)}"
    return f"{path} is a folder, and {option} takes one file of rows: name a CSV, TSV or JSON lines file"


def _convert_from(encoding: str, path: Path) -> tuple[str, str]:
    """The command that converts a file to UTF-8, and the name of the file that it writes."""
    target = str(path.with_name(f"{path.stem}-utf8{path.suffix}"))
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(target)}", target


def describe_encoding(path: Path, line: int, error: UnicodeDecodeError) -> str:
    """What to say of a line that is no UTF-8, and the command that converts the file from its likeliest encoding."""
    if b"\0" in error.object:
        return f"{path} is a binary file, which cpuft does not read: give CSV, TSV or JSON lines in UTF-8"
    byte = error.object[error.start]
    advice = _advise_command(*_convert_from("WINDOWS-1252", path))
    return (
        f"{path}, line {line} is not UTF-8 text (byte 0x{byte:02x}): correct that line; or, if the file comes from "
        f"Windows or Excel, {advice}"
    )


def _refuse_array(line: str, path: Path) -> None:
    """Raises CpuftError where the file is one JSON array, in place of an object on each line."""
    if line.lstrip().startswith("["):
        target = str(path.with_name(f"{path.stem}-lines.jsonl"))
        code = f"import json; [print(json.dumps(row)) for row in json.load(open({str(path)!r}))]"
        what = f"{path} is a JSON array, and cpuft reads JSON lines, one object a line"
        command = f'python -c "{code}" > {shlex.quote(target)}'
        raise CpuftError(f"{what}: {_advise_command(command, target)}")


_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars", ",": "commas"}


def _refuse_delimiter(columns: Sequence[str], path: Path) -> None:
    """Raises CpuftError where the header is one cell that looks like several, with something else between them."""
    wanted = "tabs" if path.suffix == ".tsv" else "commas"
    for character, name in _OTHER_DELIMITERS.items():
        if len(columns) == 1 and character in columns[0] and name != wanted:
            if name in ("tabs", "commas"):
                ending = ".tsv" if name == "tabs" else ".csv"
                raise CpuftError(f"{path} has {name} between its columns: give it a name that ends in {ending}")
            target = str(path.with_name(f"{path.stem}-{wanted}{path.suffix}"))
            how = f"read_csv({str(path)!r}, sep={character!r}, dtype=str).to_csv({target!r}, index=False)"
            what = f"{path} has {name} between its columns, and cpuft reads {wanted}"
            raise CpuftError(f"{what}: {_advise_command(_CONVERT.format(how), target)}")


def _split_cells(text: str, delimiter: str, source: str) -> list[tuple[int, list[str]]]:
    """The cells of each line that has any, with the line's number; of cells that span lines the last one's."""
    csv.field_size_limit(sys.maxsize)  # the format knows no limit
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise CpuftError(f"{source}, line {reader.line_num} is no CSV ({error}): correct that line") from None


def parse_json_row(line: str, where: str, number: int) -> tuple[int, dict[str, Cell]]:
    """Objects, and lists of anything but texts and numbers, are no cells: of columns asked for, they are missing."""
    try:
        values = load(dict[str, Any], parse_json(line))
        lists = {k: list(map(str, v)) for k, v in values.items() if isinstance(v, list) and _is_flat(v)}
        cells = {k: "" if v is None else str(v) for k, v in values.items() if not isinstance(v, (list, dict))}
        return number, {**load(dict[str, str], cells), **load(dict[str, list[str]], lists)}
    except ValueError as error:
        raise CpuftError(
            f"{where} is not a JSON object ({error}): write one object a line, {{'text': ..., 'label': ...}}"
        ) from None


def _is_flat(values: list[Any]) -> bool:
    return not any(value is None or isinstance(value, (list, dict)) for value in values)


def refuse_empty(rows: Sequence[object], source: str) -> None:
    """Raises CpuftError when there are no rows."""
    if not rows:
        raise CpuftError(f"{source} has no rows: give a file with at least one row below its header")


def find_column(columns: Sequence[str], name: str, source: str, advice: str = "") -> int:
    """The number of a column. Raises CpuftError when there is none of that name.

    `advice` says which option names that column; without it, the error lists the names that are most like it.
    """
    if name not in columns:
        listed = f"{advice} (the file has {', '.join(columns)})" if advice else near_names(name, columns)
        raise CpuftError(f"{source} has no column {name!r}: {listed}")
    return columns.index(name)


def parse_label(text: str, task: Task, where: str) -> float:
    """A class number, or a score where the task has those. Raises CpuftError for what is neither."""
    text = text.strip()
    if task.kind == "score":
        with suppress(ValueError):
            if abs(float(text)) < _MOST_SCORE:
                return float(text)
        raise CpuftError(f"{where}: score {text!r} is no number: correct that line")
    if text not in task.labels:
        raise CpuftError(f"{where}: label {text!r} is not one of {', '.join(task.labels)}: correct that line")
    return float(task.labels.index(text))


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


_PEOPLE = (
    "the nurse", "the pilot", "the farmer", "the lawyer", "the baker", "the engineer", "the teacher", "the painter",
    "the sailor", "the mayor", "the judge", "the student",
)  # fmt: skip

# Participles of one meaning; active sentences take the same word as past tense.
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


@dataclass(frozen=True)
class Event:
    """The facts that a sentence tells; numbers index the tables above."""

    agent: int
    patient: int
    action: int
    place: int
    time: int


def make_pairs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """`count` pairs of sentences, and 1 where both say the same, else 0. The same seed gives the same pairs."""
    generator = random.Random(seed)
    return [_make_pair(generator) for _ in range(count)]


def _make_pair(generator: random.Random) -> tuple[str, str, int]:
    agent, patient = generator.sample(range(len(_PEOPLE)), 2)
    event = Event(agent, patient, *(generator.randrange(len(table)) for table in (_ACTIONS, _PLACES, _TIMES)))
    same = generator.random() < 0.5
    other = event if same else _change_facts(event, generator)
    return _tell(event, generator), _tell(other, generator), int(same)


def _change_facts(event: Event, generator: random.Random) -> Event:
    sizes = {"agent": _PEOPLE, "action": _ACTIONS, "place": _PLACES, "time": _TIMES}
    for field in generator.sample(sorted(sizes), 2):
        taken = {event.agent, event.patient} if field == "agent" else {getattr(event, field)}
        choices = [index for index in range(len(sizes[field])) if index not in taken]
        event = replace(event, **{field: generator.choice(choices)})
    return event


def _tell(event: Event, generator: random.Random) -> str:
    agent, patient = _PEOPLE[event.agent], _PEOPLE[event.patient]
    action, place, time = (
        generator.choice(words) for words in (_ACTIONS[event.action], _PLACES[event.place], _TIMES[event.time])
    )
    core = f"{patient} was {action} by {agent}" if generator.random() < 0.5 else f"{agent} {action} {patient}"
    text = generator.choice((f"{time}, {core} {place}", f"{core} {place} {time}"))
    return text[0].upper() + text[1:] + "."
