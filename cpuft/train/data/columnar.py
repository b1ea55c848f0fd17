"""Rows of Parquet files, Arrow files and folders that `save_to_disk` of the library datasets has written, as texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, install_command

Cell = str | list[str]
"""A text, or a list of texts."""
_PARQUET, _ARROW = b"PAR1", b"ARROW1"
"""The first bytes of the files. Arrow files of the library datasets are streams, which begin with other bytes."""
_ROWS_AT_ONCE = 4096


def is_columnar(path: Path) -> bool:
    """Return whether a path is a Parquet or Arrow file, by its first bytes or by .parquet, .arrow or .feather at its
    end, or a folder that `save_to_disk` of datasets has written. OSError: it is missing or cannot be read.
    """
    if path.is_dir():
        return (path / "state.json").exists()
    with path.open("rb") as file:
        return file.read(6).startswith((_PARQUET, _ARROW)) or path.suffix in (".parquet", ".arrow", ".feather")


def list_columns(path: Path) -> list[str]:
    """Return the names of the columns that `read_columnar` reads, in their order. Raises CpuftError as that does."""
    with _explain_failures(path), _open(path) as (schema, _):
        return _list_flat(schema)


def read_columnar(path: Path) -> Iterator[dict[str, Cell]]:
    """Yield the cells of each row, by name of the column, of a file or folder for which `is_columnar` is true.

    Numbers become texts (fp32 numbers with the digits that fp32 has), true becomes `True`, null an empty text, numbers
    of a ClassLabel of the library datasets the names of the classes, and lists of texts or numbers lists of texts;
    other nested and binary columns are left out. Raises CpuftError: the file is damaged or missing, or pyarrow is
    missing.
    """
    with _explain_failures(path), _open(path) as (schema, batches):
        yield from _list_rows(schema, batches)


def list_dataset_columns(data: Any) -> list[str]:
    """Return the names of those columns of a `datasets.Dataset` that `read_dataset` yields, in their order."""
    return _list_flat(data.features.arrow_schema)


def read_dataset(data: Any) -> Iterator[dict[str, Cell]]:
    """Yield the cells of each row of a `datasets.Dataset`, as `read_columnar` does."""
    return _list_rows(*_open_dataset(data))


def _open_dataset(data: Any) -> tuple[Any, Iterator[Any]]:
    return data.features.arrow_schema, data.with_format("arrow").iter(_ROWS_AT_ONCE)


@contextmanager
def _open(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Let the schema of pyarrow and the rows, as record batches or tables, be read inside of the context."""
    import pyarrow
    from pyarrow import parquet

    if path.is_dir():
        import datasets

        try:
            data = datasets.load_from_disk(str(path))
        except Exception as error:  # of many kinds if the folder is damaged
            raise ValueError(f"{type(error).__name__}: {error}") from None
        yield _open_dataset(data)
    elif _begins_with(path, _PARQUET) or path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            yield file.schema_arrow, file.iter_batches(_ROWS_AT_ONCE)
    else:
        with pyarrow.memory_map(str(path)) as source:
            if _begins_with(path, _ARROW):
                reader = pyarrow.ipc.open_file(source)
                yield reader.schema, map(reader.get_batch, range(reader.num_record_batches))
            else:
                stream = pyarrow.ipc.open_stream(source)
                yield stream.schema, stream


def _list_flat(schema: Any) -> list[str]:
    return [field.name for field in schema if _is_flat(field.type)]


def _is_flat(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if _is_list(kind) else kind
    return not (types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind))


def _list_rows(schema: Any, batches: Iterable[Any]) -> Iterator[dict[str, Cell]]:
    names = _read_class_names(schema.metadata or {})
    for batch in batches:
        batch.validate(full=True)  # damaged positions would make the process read outside of the columns
        columns = {
            field.name: _to_cells(column, names.get(field.name, []))
            for field, column in zip(batch.schema, batch.columns)
            if _is_flat(field.type)
        }
        for cells in zip(*columns.values()):
            yield dict(zip(columns, cells))


@contextmanager
def _explain_failures(path: Path) -> Iterator[None]:
    try:
        import pyarrow
    except ImportError:
        raise CpuftError(f"reading {path} needs pyarrow, which is not installed: {install_command('train')}") from None
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:150]
        raise CpuftError(f"{path} is cut off or damaged ({reason}): copy or download it again") from None


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


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _to_cells(column: Any, names: list[str]) -> list[Cell]:
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
