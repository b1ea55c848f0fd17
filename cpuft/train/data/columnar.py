"""Rows of Parquet files, Arrow files and folders that `save_to_disk` of the library datasets has written, as texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, install_command
from cpuft.serialization import load, parse_json

Cell = str | list[str]
"""A text, or a list of texts."""
_PARQUET, _ARROW = b"PAR1", b"ARROW1"
"""The first bytes of the files. Arrow files of the library datasets are streams, which begin with other bytes."""
_ROWS_AT_ONCE = 4096


def is_columnar(path: Path) -> bool:
    """Return whether a path is a Parquet or Arrow file, by its first bytes or its name, or a folder of datasets. Raises
    OSError: it cannot be opened.
    """
    if path.is_dir():
        return (path / "state.json").exists()
    with path.open("rb") as file:
        return file.read(6).startswith((_PARQUET, _ARROW)) or path.suffix in (".parquet", ".arrow", ".feather")


def list_columns(path: Path, option: str) -> list[str]:
    """Return the names of the columns of a path for which `is_columnar` is true, without nested columns. Raises
    CpuftError: the file is damaged, or pyarrow is not installed.
    """
    with _explain_failures(path, option):
        schema = _read_schema(path)
        return [field.name for field in schema if not _is_nested(field.type)]


def read_columnar(path: Path, option: str) -> Iterator[dict[str, Cell]]:
    """Yield the cells of each row, by name of the column, of a file or folder for which `is_columnar` is true.

    Numbers become texts as in a CSV file (fp32 numbers with the digits that fp32 has), true becomes `True`, null an
    empty text, and numbers of a ClassLabel of the library datasets the names of the classes. A column of lists of texts
    or numbers becomes lists of texts; other nested columns are left out. Raises CpuftError: the file is damaged, or
    pyarrow is not installed.
    """
    with _explain_failures(path, option):
        names = _read_class_names(_read_schema(path).metadata or {})
        for batch in _read_batches(path):
            batch.validate(full=True)  # damaged positions would make the process read outside of the columns
            yield from _list_rows(batch, names)


def list_dataset_columns(data: Any) -> list[str]:
    """Return the names of the columns of a `datasets.Dataset`, without nested columns."""
    return [field.name for field in data.features.arrow_schema if not _is_nested(field.type)]


def read_dataset(data: Any) -> Iterator[dict[str, Cell]]:
    """Yield the cells of each row of a `datasets.Dataset`, as `read_columnar` does, 4096 rows at a time."""
    names = _read_class_names(data.features.arrow_schema.metadata or {})
    for batch in data.with_format("arrow").iter(_ROWS_AT_ONCE):
        yield from _list_rows(batch, names)


def _list_rows(batch: Any, names: dict[str, list[str]]) -> Iterator[dict[str, Cell]]:
    """Yield the cells of each row of a record batch or table; `names` are those of the classes, by column."""
    columns = {
        field.name: _to_cells(column, names.get(field.name, []))
        for field, column in zip(batch.schema, batch.columns)
        if not _is_nested(field.type)
    }
    for cells in zip(*columns.values()):
        yield dict(zip(columns, cells))


@contextmanager
def _explain_failures(path: Path, option: str) -> Iterator[None]:
    try:
        import pyarrow
    except ImportError:
        raise CpuftError(f"reading {path} needs pyarrow, which is not installed: {install_command('train')}") from None
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:150]
        raise CpuftError(
            f"{path} is cut off or damaged ({reason}): copy or download it again, or check {option}"
        ) from None


def _read_schema(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    if path.is_dir():
        return _read_schema(_list_files(path, "_data_files")[0])
    if _is_parquet(path):
        return parquet.read_schema(path)
    with pyarrow.memory_map(str(path)) as source:
        return _open_arrow(path, source).schema


def _read_batches(path: Path) -> Iterator[Any]:
    """Yield the rows as record batches of pyarrow."""
    import pyarrow
    from pyarrow import parquet

    if path.is_dir():
        files = _list_files(path, "_data_files")
        selected = _list_files(path, "_indices_files")  # of a data set whose rows were selected
        if not selected:
            for file in files:
                yield from _read_batches(file)
            return
        table = pyarrow.Table.from_batches(batch for file in files for batch in _read_batches(file))
        table.validate(full=True)
        for file in selected:
            for batch in _read_batches(file):
                batch.validate(full=True)
                for start in range(0, len(batch), _ROWS_AT_ONCE):
                    yield from table.take(batch.column(0).slice(start, _ROWS_AT_ONCE)).to_batches()
    elif _is_parquet(path):
        with parquet.ParquetFile(path) as opened:
            yield from opened.iter_batches(_ROWS_AT_ONCE)
    else:
        with pyarrow.memory_map(str(path)) as source:
            reader = _open_arrow(path, source)
            is_stream = isinstance(reader, pyarrow.RecordBatchStreamReader)
            yield from reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))


def _list_files(folder: Path, entry: str) -> list[Path]:
    """Return the files of a folder that `save_to_disk` has written, which `entry` of its state.json names."""
    state = load(dict[str, Any], parse_json((folder / "state.json").read_text(encoding="utf-8")))
    names = [load(dict[str, str], one)["filename"] for one in load(list[Any], state.get(entry) or [])]
    if not names and entry == "_data_files":
        raise ValueError("state.json names no files")
    return [folder / Path(name).name for name in names]


def _is_parquet(path: Path) -> bool:
    return _begins_with(path, _PARQUET) or path.suffix == ".parquet"


def _open_arrow(path: Path, source: Any) -> Any:
    import pyarrow

    return pyarrow.ipc.open_file(source) if _begins_with(path, _ARROW) else pyarrow.ipc.open_stream(source)


def _begins_with(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _read_class_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """Return the names of the classes of each ClassLabel column, from what the library datasets stores in a schema."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {
            name: [str(label) for label in feature["names"]]
            for name, feature in features.items()
            if feature.get("_type") == "ClassLabel"
        }
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _is_nested(kind: Any) -> bool:
    """Return whether the values of a type of pyarrow are neither single values nor lists of them; also for bytes."""
    import pyarrow

    if _is_list(kind):
        return bool(pyarrow.types.is_nested(kind.value_type))
    types = pyarrow.types
    return bool(types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind))


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _to_cells(column: Any, names: list[str]) -> list[Cell]:
    """Return the cells of a column that is not nested, as texts or lists of texts."""
    kind = column.type
    if _is_list(kind):
        return [[_to_text(value, kind.value_type, []) for value in values or ()] for values in column.to_pylist()]
    return [_to_text(value, kind, names) for value in column.to_pylist()]


def _to_text(value: Any, kind: Any, names: list[str]) -> str:
    import numpy as np
    import pyarrow

    if value is None:
        return ""
    if names and isinstance(value, int):
        return names[value] if 0 <= value < len(names) else str(value)
    if pyarrow.types.is_float32(kind):
        return str(np.float32(value))
    return str(value)
