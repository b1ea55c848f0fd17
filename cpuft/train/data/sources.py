"""Examples of a task: read from a GLUE download, the user's own files or the Hugging Face hub, or generated."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shlex
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from cpuft.config import PredictConfig, TrainConfig
from cpuft.errors import CpuftError, counted, suggest_names
from cpuft.files import split_paths
from cpuft.serialization import load, parse_json
from cpuft.tasks import TASKS, Task
from cpuft.train.data.columnar import Cell, is_columnar, read_columnar
from cpuft.train.startup import find_hub_problem


@dataclass(frozen=True)
class Examples:
    """The examples of one split."""

    texts: list[tuple[str, ...]]
    """One or two texts for each example; for the kind tags, its words."""
    labels: list[Any]
    """Class numbers (as floats) or scores; for the kinds tags and labels, tuples of class numbers."""
    has_labels: bool = True
    """Whether the labels were read. If not, each is 0.0, or () for the kinds tags and labels."""

    def list_texts(self) -> Iterator[str]:
        """Iterate over all texts, example by example: both texts of a pair, or each word for the kind tags."""
        return chain.from_iterable(self.texts)


@dataclass(frozen=True)
class TaskData:
    """The examples that a run trains and evaluates on, and the task with their columns and labels."""

    task: Task
    """The task with the columns, labels, metrics and kind of these examples."""
    train: Examples
    validation: dict[str, Examples]
    """Validation splits by the suffix of the metrics' names: `""`, and for MNLI also `_mismatched`."""


def first_examples(examples: Examples, count: int) -> Examples:
    """Return the first `count` examples with their labels; the argument itself when `count` is 0."""
    return replace(examples, texts=examples.texts[:count], labels=examples.labels[:count]) if count else examples


def read_data(config: TrainConfig) -> TaskData:
    """Read the training and validation examples of `config.task`, which must not be text.

    Examples come from --train-file and --validation-file (files), a generator (demo: 1600 and 400 pairs), or, for
    GLUE's tasks, from --data-dir or without it from the Hugging Face hub.

    Raises CpuftError: a file, a column or a label is missing or wrong, a split is empty, or the hub does not answer.
    KeyError: no task has that name.
    """
    task = TASKS[config.task]
    if task.name == "files":
        return read_user_files(task, config)
    if task.name == "demo":
        return TaskData(task, _make_demo_examples(1600, config.seed), read_splits(task, config, task.validation))
    splits = read_splits(task, config, (("train", "train"), *task.validation))
    return TaskData(task, splits.pop("train"), splits)


def read_splits(task: Task, config: TrainConfig, splits: Sequence[tuple[str, str]]) -> dict[str, Examples]:
    """Read splits of a GLUE task from --data-dir, or without it from the hub, by the keys of `splits`.

    For the demo, `splits` has no effect: the result is its generated validation split of 400 pairs, with the key `""`.

    Parameters
    ----------
    splits: the key of each split in the result, and the stem of its file's name, such as ("", "dev"). Splits whose stem
        begins with test have no labels.

    Raises CpuftError: a folder, file or column is missing, a line is wrong, a split is empty, or the hub cannot be
    used.
    """
    if task.name == "demo":
        return {"": _make_demo_examples(400, config.seed + 1_000_003)}
    if not config.data_dir:
        return _read_hub(task, splits)
    return {key: _read_glue_split(task, Path(config.data_dir), stem) for key, stem in splits}


def list_test_splits(task: Task) -> tuple[tuple[str, str], ...]:
    """Return the splits without labels that GLUE's server scores: (suffix of its metrics' names, stem of its file).

    (("", "test"),) for most tasks, two for MNLI; empty for a task that is not GLUE's.
    """
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


def read_glue_file(task: Task, path: Path) -> Examples | None:
    """Read a file in the layout of the task's own GLUE files with a header line, with or without labels.

    Returns None if the task is not GLUE's, or the file is no .tsv file or lacks the task's text columns. The examples
    have labels if the file has the task's label column.

    Raises CpuftError: the .tsv file is missing or not UTF-8 text, a line has too few columns or an unknown label, or
    there are no examples.
    """
    if not task.folder or path.suffix != ".tsv":
        return None
    text = read_text(path, "--file")
    columns = text.partition("\n")[0].rstrip("\r").split("\t")
    if not set(task.texts) <= set(columns):
        return None
    label = task.label if task.label in columns else ""
    return parse_glue_tsv(text, replace(task, columns=(), label=label), str(path))


def parse_glue_tsv(text: str, task: Task, source: str) -> Examples:
    """Parse a GLUE file: columns separated by tabs, without quoting (a quotation mark is part of the text).

    Blank lines are skipped. Labels become class numbers or scores.

    Parameters
    ----------
    task: its `texts` and `label` name the columns; with an empty `label`, the examples have no labels. With `columns`,
        the file has these columns and no header line.
    source: name of the file, for messages.

    Raises CpuftError: a column is missing; a line has too few columns or an unknown label; there are no examples.
    """
    lines = text.split("\n")
    start = 0 if task.columns else 1
    columns = list(task.columns) or [column.strip() for column in lines[0].rstrip("\r").split("\t")]
    places = [find_column(columns, name, source) for name in (*task.texts, task.label) if name]
    examples = Examples([], [], has_labels=bool(task.label))
    for number, line in enumerate(lines[start:], start=start + 1):
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) <= max(places):
            raise CpuftError(
                f"{source}, line {number} has {counted(len(cells), 'column')}, {columns[max(places)]!r} is column "
                f"{max(places) + 1}: correct or remove that line"
            )
        examples.texts.append(tuple(cells[place] for place in places[: len(task.texts)]))
        where = f"{source}, line {number}"
        examples.labels.append(parse_label(cells[places[-1]], task, where) if task.label else 0.0)
    refuse_empty(examples.labels, source)
    return examples


_HUB_SPLITS = {"dev": "validation", "dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"}
"""The hub's names of splits by the stems of GLUE's files, where they differ."""


def _read_hub(task: Task, splits: Sequence[tuple[str, str]]) -> dict[str, Examples]:
    """Read GLUE from the Hugging Face hub with the package datasets."""
    problem = find_hub_problem()
    from datasets import load_dataset

    try:
        tables = load_dataset("nyu-mll/glue", task.name)
    except Exception as error:  # the hub's client raises many kinds of errors
        if problem:
            raise CpuftError(
                f"the data of --task {task.name} is not in the cache of data sets, and {problem}: either check the "
                f"network and the proxy settings; or give --data-dir a folder that contains "
                f"{task.folder}/train.tsv, from a GLUE download; or use --task demo"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CpuftError(
            f"the data of --task {task.name} could not be loaded from the Hugging Face hub ({reason}): give a folder "
            f"with a GLUE download with --data-dir, or use --task demo"
        ) from None
    columns = task.hub_texts or task.texts

    def read(stem: str) -> Examples:
        table: Any = tables[_HUB_SPLITS.get(stem, stem)]
        texts = list(zip(*(table[column] for column in columns)))
        has_labels = not stem.startswith("test")
        labels = [float(label) if has_labels else 0.0 for label in table["label"]]
        return Examples([tuple(map(str, row)) for row in texts], labels, has_labels)

    return {key: read(stem) for key, stem in splits}


# The user's own files


@dataclass(frozen=True)
class Table:
    """The rows of one file or of several files."""

    source: str
    """The paths of the files, for messages."""
    columns: list[str]
    """Names of the columns in the order of the header; in JSON lines those of all lines, in alphabetical order. Of
    several files, the columns that all of them have, in the order of the first one."""
    rows: list[tuple[str, dict[str, Cell]]]
    """Of each row, where it is (`train.csv, line 3`, for messages), and its cells. In JSON lines a row may lack
    columns."""


def read_tables(paths: str, option: str = "--train-file") -> Table:
    """Read files as `read_table` does: paths and patterns, separated by commas, one after another.

    Raises CpuftError: a file cannot be read.
    """
    tables = [read_table(Path(path), option) for path in split_paths(paths)]
    if len(tables) == 1:
        return tables[0]
    columns = [name for name in tables[0].columns if all(name in table.columns for table in tables)]
    return Table(paths, columns, [row for table in tables for row in table.rows])


def read_table(path: Path, option: str = "--train-file") -> Table:
    """Read a file with rows, whose format the name and the first bytes tell.

    The formats are CSV and TSV with a header line (quoting as in RFC 4180), JSON lines (.json, .jsonl, .ndjson), each
    also compressed with gzip (.gz); Parquet; Arrow; and a folder of `datasets.save_to_disk`. A name that ends in .tsv
    means tabs between columns, all other names commas. Blank lines are skipped. A file with only a header gives a table
    without rows.

    Parameters
    ----------
    option: the option that named the file, for messages.

    Raises CpuftError: the file is missing, empty, cut off or not UTF-8 text; another format, such as a spreadsheet, a
    JSON array, or CSV with another delimiter; or a line does not have the header's number of columns or is no JSON
    object.
    """
    with suppress(OSError):  # of a file that is missing; reading it as text says what to do
        if is_columnar(path):
            columns, found = read_columnar(path, option)
            return Table(str(path), columns, [(f"{path}, row {n}", row) for n, row in enumerate(found, start=1)])
    text = read_text(path, option)
    if not text.strip():
        raise CpuftError(f"{path} is empty: give a file with rows")
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix in (".json", ".jsonl", ".ndjson"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        _refuse_json_array(lines[0][1], path)
        rows = [(where := f"{path}, line {number}", parse_json_cells(line, where)) for number, line in lines]
        # All lines' columns, not the first line's: if that lacks a column, the error must name the line.
        return Table(str(path), sorted({name for _, row in rows for name in row}), rows)
    (_, columns), *cell_rows = _split_cells(text, "\t" if suffix == ".tsv" else ",", str(path))
    _refuse_other_delimiter(columns, path, suffix)
    for number, cells in cell_rows:
        if len(cells) != len(columns):
            separator = "tab" if suffix == ".tsv" else "comma"
            quotes = f"put a text that contains a {separator} in quotation marks"
            raise CpuftError(
                f"{path}, line {number} has {counted(len(cells), 'column')}, but the header has {len(columns)}: "
                f"{quotes if len(cells) > len(columns) else 'correct that line'}"
            )
    return Table(
        str(path), columns, [(f"{path}, line {number}", {**dict(zip(columns, cells))}) for number, cells in cell_rows]
    )


def read_text(path: Path, option: str = "--data-dir") -> str:
    """Return the text of a file that `option` has named, with its line ends, but without a byte order mark.

    A file that is compressed with gzip is decompressed.

    Raises CpuftError: it is missing, cannot be read, is a folder, cut off, or not UTF-8 text, or has the format of
    Parquet, Arrow or a spreadsheet. The message tells how to convert it.
    """
    content = b""
    try:
        if path.is_dir():
            raise CpuftError(_describe_folder(path, option))
        content = path.read_bytes()
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        if problem := _describe_format(path, content):
            raise CpuftError(problem)
        return content.decode("utf-8-sig")  # line ends stay as they are: inside quotation marks they are text
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}: check {option}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise CpuftError(f"{path} is cut off or damaged: copy or download it again, or check {option}") from None
    except UnicodeDecodeError as error:
        # The decoder does not count a byte order mark at the beginning.
        start = error.start + (len(content) - len(error.object))
        raise CpuftError(describe_encoding(path, content[:start].count(b"\n") + 1, error)) from None
    except OSError as error:
        raise CpuftError(f"{path} cannot be read ({error.strerror}): check its permissions and {option}") from None


_PANDAS = 'python -c "import pandas; pandas.{}"'
_MAGIC = ((b"PAR1", "a Parquet file"), (b"ARROW1", "an Arrow file"))
"""The first bytes of files of other formats."""
_GZIP = b"\x1f\x8b"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def _describe_format(path: Path, content: bytes) -> str:
    """Say that a file has a format that is not supported, and how to convert it; empty if it may be text."""
    name = next((name for magic, name in _MAGIC if content.startswith(magic)), "")
    target = str(path.with_suffix(".jsonl"))
    what = f"{path} is {{}}, which cpuft does not read"
    if name == "a Parquet file":
        command = _PANDAS.format(f"read_parquet({str(path)!r}).to_json({target!r}, orient='records', lines=True)")
    elif name == "an Arrow file":
        command = _PANDAS.format(f"read_feather({str(path)!r}).to_json({target!r}, orient='records', lines=True)")
    elif path.suffix in (".xlsx", ".xls", ".ods"):
        advice = "save it as CSV in UTF-8 with commas between the columns, then give the CSV file instead"
        return f"{what.format('a spreadsheet')}: {advice}"
    elif content.startswith(_UTF_16):
        name = "in UTF-16"
        command, target = _convert_from("UTF-16", path)
    return f"{what.format(name)}: {_advise_command(command, target)}" if name else ""


def _advise_command(command: str, target: str) -> str:
    """Advise to run `command`, which writes `target`. The command ends the message so that it can be copied."""
    return f"convert it with this command, then give {target} instead: {command}"


def _describe_folder(path: Path, option: str) -> str:
    """Say that a folder was given in place of a file, or of the folder of one split that the library datasets saved."""
    if (path / "dataset_dict.json").exists():
        splits = sorted(one.parent.name for one in path.glob("*/state.json"))
        return (
            f"{path} holds several splits that the Hugging Face library datasets saved ({', '.join(splits)}): give the "
            f"folder of one split, for example {option} {path / (splits or ['train'])[-1]}"
        )
    return (
        f"{path} is a folder, and {option} takes files of rows: give a CSV, TSV, JSON lines, Parquet or Arrow file, or "
        f"all files of the folder, for example {option} '{path}/*.csv'"
    )


def _convert_from(encoding: str, path: Path) -> tuple[str, str]:
    """Return the command that converts a file to UTF-8, and the path of the file that it writes."""
    target = str(path.with_name(f"{path.stem}-utf8{path.suffix}"))
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(target)}", target


def describe_encoding(path: Path, line: int, error: UnicodeDecodeError) -> str:
    """Return the error message for a line that is not UTF-8.

    It ends with the command that converts the file from Windows-1252, its most likely encoding. For a file with null
    bytes, it says that the file is binary.

    Parameters
    ----------
    line: number of the line, counted from 1.
    error: the error of the decoder, with the bytes that it was given.
    """
    if b"\0" in error.object:
        return f"{path} is a binary file, which cpuft does not read: give CSV, TSV or JSON lines in UTF-8"
    byte = error.object[error.start]
    advice = _advise_command(*_convert_from("WINDOWS-1252", path))
    return (
        f"{path}, line {line} is not UTF-8 text (byte 0x{byte:02x}): correct that line; or, if the file comes from "
        f"Windows or Excel, {advice}"
    )


def _refuse_json_array(first_line: str, path: Path) -> None:
    """Raise CpuftError if the file is one JSON array instead of one object on each line."""
    if first_line.lstrip().startswith("["):
        target = str(path.with_name(f"{path.stem}-lines.jsonl"))
        code = f"import json; [print(json.dumps(row)) for row in json.load(open({str(path)!r}))]"
        what = f"{path} is a JSON array, and cpuft reads JSON lines, one object a line"
        command = f'python -c "{code}" > {shlex.quote(target)}'
        raise CpuftError(f"{what}: {_advise_command(command, target)}")


_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars", ",": "commas"}


def _refuse_other_delimiter(columns: Sequence[str], path: Path, suffix: str) -> None:
    """Raise CpuftError if the header has one column that contains another delimiter than the file's `suffix` tells."""
    wanted = "tabs" if suffix == ".tsv" else "commas"
    for character, name in _DELIMITERS.items():
        if len(columns) == 1 and character in columns[0] and name != wanted:
            if name in ("tabs", "commas"):
                ending = ".tsv" if name == "tabs" else ".csv"
                raise CpuftError(f"{path} has {name} between its columns: give it a name that ends in {ending}")
            target = str(path.with_name(f"{path.stem}-{wanted}{path.suffix}"))
            options = f"sep={character!r}, dtype=str, keep_default_na=False"  # texts such as NA stay texts
            code = f"read_csv({str(path)!r}, {options}).to_csv({target!r}, index=False)"
            what = f"{path} has {name} between its columns, and cpuft reads {wanted}"
            raise CpuftError(f"{what}: {_advise_command(_PANDAS.format(code), target)}")


def _split_cells(text: str, delimiter: str, source: str) -> list[tuple[int, list[str]]]:
    """Return line number and cells of each row that has any; of a row that spans several lines, the last number."""
    csv.field_size_limit(sys.maxsize)  # the format has no limit
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        return [(reader.line_num, cells) for cells in reader if cells]
    except csv.Error as error:
        raise CpuftError(f"{source}, line {reader.line_num} is not CSV ({error}): correct that line") from None


def parse_json_cells(line: str, where: str) -> dict[str, Cell]:
    """Parse one JSON object into cells, by column: texts, and lists of texts.

    Numbers become texts, true becomes `True`, null becomes an empty text; in a list, too, numbers become texts. A value
    that is an object, or a list that contains null, lists or objects, is left out as if the column were missing.

    Parameters
    ----------
    where: the file and the line, for the message.

    Raises CpuftError: it is not a JSON object.
    """
    try:
        values = load(dict[str, Any], parse_json(line))
        lists = {k: list(map(str, v)) for k, v in values.items() if isinstance(v, list) and _is_flat(v)}
        cells = {k: "" if v is None else str(v) for k, v in values.items() if not isinstance(v, (list, dict))}
        return {**load(dict[str, str], cells), **load(dict[str, list[str]], lists)}
    except ValueError as error:
        raise CpuftError(
            f"{where} is not a JSON object ({error}): write one object a line, {{'text': ..., 'label': ...}}"
        ) from None


def _is_flat(values: list[Any]) -> bool:
    return not any(value is None or isinstance(value, (list, dict)) for value in values)


def refuse_empty(rows: Sequence[object], source: str) -> None:
    """Raise CpuftError if there are no rows; the message names `source`, the file."""
    if not rows:
        raise CpuftError(f"{source} has no rows: give a file with at least one row below its header")


def find_column(columns: Sequence[str], name: str, source: str, advice: str = "") -> int:
    """Return the index of the column `name`. Raises CpuftError if no column has that name.

    Parameters
    ----------
    source: the file, for the message.
    advice: says which option names the column; without it, the message lists the most similar names.
    """
    if name not in columns:
        there = f" (its columns are {', '.join(map(repr, columns))})" if advice else ""
        raise CpuftError(f"{source} has no column {name!r}{there}: {advice or suggest_names(name, columns)}")
    return columns.index(name)


_MAX_SCORE = 3e38
"""Larger scores are infinite in fp32, in which models compute."""


def parse_label(text: str, task: Task, where: str) -> float:
    """Return the class number of a label, or the score for a task of the kind score.

    Spaces around the text are ignored.

    Parameters
    ----------
    where: the file and the line, for the message.

    Raises CpuftError: the label is not one of `task.labels`, or the score is no number, not finite, or 3e38 or more.
    """
    text = text.strip()
    if task.kind == "score":
        with suppress(ValueError):
            if abs(float(text)) < _MAX_SCORE:
                return float(text)
        raise CpuftError(f"{where}: score {text!r} is not a number: correct that line")
    if text not in task.labels:
        raise CpuftError(f"{where}: label {text!r} is not one of {', '.join(task.labels)}: correct that line")
    return float(task.labels.index(text))


LABEL_SEPARATOR = "|"
"""Separates several labels in a cell of a file without lists."""

_USUAL_TEXTS = (("sentence1", "sentence2"), ("text1", "text2"), ("premise", "hypothesis"), ("sentence",), ("text",))
_USUAL_WORDS = ("tokens",)
_NAME_TEXTS = "give their names with --text-columns, for example --text-columns question,answer"
_NAME_LABEL = "give the name of the column of the labels with --label-column"


def read_user_files(task: Task, config: TrainConfig) -> TaskData:
    """Read --train-file and --validation-file. Their cells decide on the task's kind, columns, labels and metrics.

    Labels are numbered in alphabetical order. The validation split has the key `""`.

    Raises CpuftError: a file is not given or not readable, a column is missing, a line does not fit the others (the
    message names it), all training examples have the same label, or a validation example has a label that none of them
    has.
    """
    if not config.train_file:
        raise CpuftError(
            "--task files needs --train-file: give a CSV, TSV, JSON lines, Parquet or Arrow file with texts and labels"
        )
    train = read_tables(config.train_file, "--train-file")
    if config.validation_file:
        validation = read_tables(config.validation_file, "--validation-file")
    else:
        train, validation = split_table(train, config.validation_split)
    label = _choose_label_column(train, config.label_column)
    task = replace(task, texts=choose_text_columns(train, config.text_columns, label), label=label)
    for table in (train, validation):
        for name in task.texts:
            find_column(table.columns, name, table.source, _NAME_TEXTS)
        find_column(table.columns, task.label, table.source, _NAME_LABEL)
    task = replace(task, kind=_choose_kind(train, task, config.label_type))
    for table in (train, validation):
        check_cells(table, task)
    task = _find_labels(task, train, validation, config.label_type)
    return TaskData(task, make_examples(train, task), {"": make_examples(validation, task)})


def split_table(table: Table, share: float) -> tuple[Table, Table]:
    """Return a table without the rows that are kept for validation, and a table of these rows.

    The rows are drawn at random, and the same ones whatever the seed of the training is, so that runs can be compared.
    Equal rows, with the same cells, stay together: no validation example is a training example, too.

    Parameters
    ----------
    share: of the rows for validation; at least one row is taken.

    Raises CpuftError: there are fewer than two different rows.
    """
    keys = [json.dumps(cells, sort_keys=True) for _, cells in table.rows]
    different = sorted(set(keys))
    if len(different) < 2:
        raise CpuftError(
            f"{table.source} has {counted(len(different), 'different row')}, too few to take some for validation: give "
            f"more rows, or other rows with --validation-file"
        )
    count = min(len(different) - 1, max(1, round(share * len(different))))
    chosen = set(random.Random(0).sample(different, count))
    rows = [(key in chosen, row) for key, row in zip(keys, table.rows)]
    train, validation = ([row for is_chosen, row in rows if is_chosen is wanted] for wanted in (False, True))
    return replace(table, rows=train), replace(table, rows=validation)


def read_file_to_predict(task: Task, config: PredictConfig, train: TrainConfig) -> tuple[Task, Examples]:
    """Read the examples of `cpuft predict` from --file, or without it from the validation file of the run.

    Parameters
    ----------
    task: the task that the model was trained on, with its labels.
    train: the options of that training.

    Returns
    -------
    The task with the columns of this file, and the examples, which have labels if every row has one (for several labels
    per example: if any row has one).

    Raises CpuftError: the file cannot be read or has no rows, lacks a text column or the column of --label-column, has
    another number of text columns than the task, a line does not fit the others, or a label is none of the task's.
    """
    option = "--file" if config.file else "where the run's rows are, or name them with --file"
    if config.file or train.validation_file:
        table = read_tables(config.file or train.validation_file, option)
    else:
        table = split_table(read_tables(train.train_file, option), train.validation_split)[1]
    has_column = {name: name in table.columns for name in (*task.texts, task.label, train.label_column)}
    usual = task.label if has_column[task.label] and not has_column[train.label_column] else train.label_column
    label = config.label_column or _choose_label_column(table, usual)
    wanted = config.text_columns or train.text_columns
    texts = task.texts if task.texts and not wanted and all(map(has_column.get, task.texts)) else ()
    texts = texts or choose_text_columns(table, wanted, label)
    for name in texts:
        find_column(table.columns, name, table.source, _NAME_TEXTS)
    if config.label_column:
        find_column(table.columns, label, table.source, _NAME_LABEL)
    if task.texts and len(texts) != len(task.texts):
        count = counted(len(task.texts), "text column")
        raise CpuftError(f"--task {task.name} has {count}: give as many with --text-columns, separated by a comma")
    task = replace(task, texts=texts, label=label)
    every = any if task.kind == "labels" else all
    has_labels = label in table.columns and every(_has_text(row.get(label, "")) for _, row in table.rows)
    check_cells(table, task, has_labels)
    return task, make_examples(table, task, has_labels)


def choose_text_columns(table: Table, wanted: str, label: str) -> tuple[str, ...]:
    """Return the names of the text columns: the first two of `wanted`, else usual names in the table.

    The usual names are, in this order: sentence1 and sentence2, text1 and text2, premise and hypothesis, sentence,
    text, tokens.

    Parameters
    ----------
    wanted: names separated by commas, which are not looked up in the table; empty for the usual names.
    label: name of the label column, which no message proposes.

    Raises CpuftError: nothing is wanted, and the table has no column with a usual name.
    """
    if wanted:
        return tuple(name.strip() for name in wanted.split(","))[:2]
    for names in (*_USUAL_TEXTS, _USUAL_WORDS):
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


def _choose_label_column(table: Table, wanted: str) -> str:
    """Return `wanted`, or tags where that is the default and only a column tags exists."""
    is_tags = wanted == "label" and wanted not in table.columns and "tags" in table.columns
    return "tags" if is_tags else wanted


_KINDS = {"class": "class", "number": "score", "multi": "labels"}
"""Kind of a task by --label-type."""


def _choose_kind(table: Table, task: Task, wanted: str) -> str:
    """Return the task's kind by --label-type or by the cells. Whether single labels are scores is found out later."""
    refuse_empty(table.rows, table.source)
    if isinstance(table.rows[0][1].get(task.texts[0]), list):
        if wanted != "auto":
            what = f"{table.source} has lists of words in {task.texts[0]!r}, which take one tag for each word"
            raise CpuftError(f"{what}: leave --label-type {wanted} out, or give a column of texts with --text-columns")
        return "tags"
    if wanted != "auto":
        return _KINDS[wanted]
    cells = [row.get(task.label, "") for _, row in table.rows]
    return "labels" if any(isinstance(cell, list) or LABEL_SEPARATOR in cell for cell in cells) else "class"


def check_cells(table: Table, task: Task, has_labels: bool = True) -> None:
    """Check that all rows fit the task and each other; without `has_labels`, labels are not checked.

    Texts may be empty, and so may the cell of several labels; words, tags and single labels must not. Whether a label
    is one of the task's is not checked.

    Raises CpuftError, which names the line: a row lacks a column or its cell is empty, has a list in place of a text or
    the other way round, or has not one tag for each word. Also raised if there are no rows, or for words in two
    columns.
    """
    refuse_empty(table.rows, table.source)
    if task.kind == "tags" and len(task.texts) > 1:
        raise CpuftError(f"{table.source} has lists of words, which need exactly one column: give it by --text-columns")
    needs_list = dict.fromkeys(task.texts, task.kind == "tags")
    if has_labels:
        several = any(isinstance(row.get(task.label), list) for _, row in table.rows)
        needs_list[task.label] = several if task.kind == "labels" else task.kind == "tags"
    for where, row in table.rows:
        for name, is_list in needs_list.items():
            if name not in row or (_must_not_be_empty(name, task) and not _has_text(row[name])):
                raise CpuftError(f"{where} has no {name!r}: correct or remove that line")
            if isinstance(row[name], list) != is_list:
                form = "a list" if is_list else "one text"
                raise CpuftError(f"{where}: {name!r} must be {form}, as in the other lines: correct that line")
        if task.kind == "tags" and has_labels:
            words, tags = len(row[task.texts[0]]), sum(bool(tag.strip()) for tag in row[task.label])
            if words != tags:
                raise CpuftError(f"{where} has {counted(words, 'token')} and {counted(tags, 'tag')}: correct that line")


def _must_not_be_empty(name: str, task: Task) -> bool:
    """A text may be empty, and so may a cell of several labels; words, tags and single labels must not."""
    return task.kind == "tags" or (task.kind != "labels" and name == task.label)


def _has_text(cell: Cell) -> bool:
    return bool(cell.strip()) if isinstance(cell, str) else any(map(str.strip, cell))


def _split_label(cell: Cell, task: Task) -> list[str]:
    """Return the labels in a cell."""
    if isinstance(cell, str):
        cell = cell.split(LABEL_SEPARATOR) if task.kind == "labels" else [cell]
    return [text for part in cell if (text := part.strip())]


def _find_labels(task: Task, train: Table, validation: Table, wanted: str) -> Task:
    """Return the task with the labels of the training examples, or with the kind score if labels are fractions.

    Raises CpuftError: training examples have fewer than two labels, or a validation example has another label.
    """
    found = sorted({text for _, row in train.rows for text in _split_label(row[task.label], task)})
    others = {text: where for where, row in reversed(validation.rows) for text in _split_label(row[task.label], task)}
    if task.kind == "score" or (wanted == "auto" and task.kind == "class" and _are_scores([*found, *others])):
        return replace(task, labels=(), metrics=choose_metrics("score", ()), kind="score")
    if len(found) < 2:
        what = f"all rows of {train.source} have the label {found[0]!r}" if found else f"{train.source} has no labels"
        raise CpuftError(f"{what}: give rows with at least two different labels")
    for label, where in others.items():
        if label not in found:
            raise CpuftError(
                f"{where}: no row of {train.source} has the label {label!r}: correct that "
                f"line, or train on rows that have it"
            )
    return replace(task, labels=tuple(found), metrics=choose_metrics(task.kind, found))


_ENTITY_PREFIXES = ("B", "I", "E", "S")
"""How tags of named entities begin (IOB2, IOBES)."""


def choose_metrics(kind: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the metrics for the user's own examples of a kind, with these labels.

    score: pearson, spearman. labels: f1_micro, f1_macro, accuracy. tags: f1, precision, recall, accuracy if all labels
    are IOB2 or IOBES tags, else accuracy. class: accuracy, and f1 if there are exactly two labels.
    """
    if kind == "score":
        return ("pearson", "spearman")
    if kind == "labels":
        return ("f1_micro", "f1_macro", "accuracy")
    if kind == "tags":
        # Other tags, such as parts of speech, have no entities: seqeval would join words to entities.
        entities = all(tag == "O" or tag.split("-")[0] in _ENTITY_PREFIXES for tag in labels)
        return ("f1", "precision", "recall", "accuracy") if entities else ("accuracy",)
    return ("accuracy", "f1") if len(labels) == 2 else ("accuracy",)


def _are_scores(labels: Sequence[str]) -> bool:
    """Whether all labels are numbers, and some are not whole."""
    try:
        numbers = [float(label) for label in labels]
    except ValueError:
        return False
    return any(not number.is_integer() for number in numbers)


def make_examples(table: Table, task: Task, has_labels: bool = True) -> Examples:
    """Make examples of the rows of a table that passed `check_cells`, in their order.

    Labels are class numbers (floats) or scores; for the kinds labels and tags, tuples of class numbers (int). Without
    `has_labels`, cells of labels are not read: each label is 0.0, or () for the kinds labels and tags.

    Raises CpuftError, which names the line: a label is not one of `task.labels`, or a score is no finite number.
    """
    examples = Examples([], [], has_labels)
    for where, row in table.rows:
        cells = [row[name] for name in task.texts]
        examples.texts.append(tuple(cells[0] if task.kind == "tags" else map(str, cells)))
        texts = _split_label(row[task.label], task) if has_labels else []
        numbers = [parse_label(text, task, where) for text in texts]
        several = task.kind in ("labels", "tags")
        examples.labels.append(tuple(map(int, numbers)) if several else numbers[0] if has_labels else 0.0)
    return examples


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


@dataclass(frozen=True)
class Event:
    """The facts of a sentence, as indices: agent and patient of _PEOPLE, the others of _ACTIONS, _PLACES and _TIMES."""

    agent: int
    patient: int
    action: int
    place: int
    time: int


def make_pairs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """Return `count` tuples of two sentences and 1 if both tell the same event, else 0; determined by the seed."""
    generator = random.Random(seed)
    return [_make_pair(generator) for _ in range(count)]


def _make_pair(generator: random.Random) -> tuple[str, str, int]:
    agent, patient = generator.sample(range(len(_PEOPLE)), 2)
    event = Event(agent, patient, *(generator.randrange(len(table)) for table in (_ACTIONS, _PLACES, _TIMES)))
    same = generator.random() < 0.5
    other = event if same else _change_facts(event, generator)
    return _write_sentence(event, generator), _write_sentence(other, generator), int(same)


def _change_facts(event: Event, generator: random.Random) -> Event:
    sizes = {"agent": _PEOPLE, "action": _ACTIONS, "place": _PLACES, "time": _TIMES}
    for field in generator.sample(sorted(sizes), 2):
        taken = {event.agent, event.patient} if field == "agent" else {getattr(event, field)}
        choices = [index for index in range(len(sizes[field])) if index not in taken]
        event = replace(event, **{field: generator.choice(choices)})
    return event


def _write_sentence(event: Event, generator: random.Random) -> str:
    agent, patient = _PEOPLE[event.agent], _PEOPLE[event.patient]
    action, place, time = (
        generator.choice(words) for words in (_ACTIONS[event.action], _PLACES[event.place], _TIMES[event.time])
    )
    core = f"{patient} was {action} by {agent}" if generator.random() < 0.5 else f"{agent} {action} {patient}"
    text = generator.choice((f"{time}, {core} {place}", f"{core} {place} {time}"))
    return text[0].upper() + text[1:] + "."


def _make_demo_examples(count: int, seed: int) -> Examples:
    pairs = make_pairs(count, seed)
    return Examples([(first, second) for first, second, _ in pairs], [float(same) for _, _, same in pairs])
