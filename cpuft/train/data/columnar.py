"""Rows of Parquet files, Arrow files and folders that `save_to_disk` of the library datasets has written, as texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, install_command
from cpuft.serialization import load, parse_json

Cell = str | list[str]
"""A text, or a list of texts."""
_PARQUET, _ARROW = b"PAR1", b"ARROW1"
"""The first bytes of the files. Arrow files of the library datasets are streams, which begin with other bytes."""


def is_columnar(path: Path) -> bool:
    """Return whether a path is a Parquet or Arrow file, by its first bytes or its name, or a folder of datasets.

    Raises OSError: the file cannot be read.
    """
    if path.is_dir():
        return (path / "state.json").exists()
    with path.open("rb") as file:
        return file.read(6).startswith((_PARQUET, _ARROW)) or path.suffix in (".parquet", ".arrow", ".feather")


def read_columnar(path: Path, option: str) -> tuple[list[str], list[dict[str, Cell]]]:
    """Read all rows of a file or folder for which `is_columnar` is true.

    Numbers become texts as in a CSV file (fp32 numbers with the digits that fp32 has), true becomes `True`, and null an
    empty text. Numbers of a ClassLabel of the library datasets become the names of the classes. A column of lists of
    texts or numbers becomes lists of texts; other nested columns are left out.

    Parameters
    ----------
    option: the option that named the path, for messages.

    Returns
    -------
    The names of the columns, and the cells of each row by name of the column.

    Raises CpuftError: pyarrow is not installed, or the file is cut off or damaged.
    """
    try:
        import pyarrow
    except ImportError:
        raise CpuftError(f"reading {path} needs pyarrow, which is not installed: {install_command('train')}") from None
    try:
        table = _read_table(path)
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:150]
        raise CpuftError(
            f"{path} is cut off or damaged ({reason}): copy or download it again, or check {option}"
        ) from None
    names = _read_class_names(table.schema.metadata or {})
    columns = {
        field.name: cells
        for field, column in zip(table.schema, table.columns)
        if (cells := _to_cells(column, names.get(field.name, []))) is not None
    }
    return list(columns), [dict(zip(columns, row)) for row in zip(*columns.values())]


def _read_table(path: Path) -> Any:
    import pyarrow
    from pyarrow import parquet

    if path.is_dir():
        state = load(dict[str, Any], parse_json((path / "state.json").read_text(encoding="utf-8")))
        files = [load(dict[str, str], one)["filename"] for one in load(list[Any], state["_data_files"])]
        parts = [_read_table(path / Path(name).name) for name in files]
        table = pyarrow.concat_tables(parts)
        indices = load(list[Any], state.get("_indices_files") or [])  # of a data set whose rows were selected
        if indices:
            names = [load(dict[str, str], one)["filename"] for one in indices]
            order = pyarrow.concat_tables([_read_table(path / Path(name).name) for name in names])
            table = table.take(order.column(0))
        return table
    if _begins_with(path, _PARQUET) or path.suffix == ".parquet":
        table = parquet.ParquetFile(path).read()
    else:
        with pyarrow.memory_map(str(path)) as source:
            is_file = _begins_with(path, _ARROW)
            reader = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
            table = reader.read_all()
    table.validate(full=True)  # damaged positions would make the process read outside of the columns
    return table


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


def _to_cells(column: Any, names: list[str]) -> list[Cell] | None:
    """Return the cells of a column as texts or lists of texts; None if its values are neither."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        if pyarrow.types.is_nested(kind.value_type):
            return None
        return [[_to_text(value, kind.value_type, []) for value in values or ()] for values in column.to_pylist()]
    if pyarrow.types.is_nested(kind) or pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind):
        return None
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
