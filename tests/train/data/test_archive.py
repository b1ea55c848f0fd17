"""Archives of prepared data: their arrays are memory-mapped, and damaged or foreign ones are refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuft.errors import CpuftError
from cpuft.train.data.archive import explain_cache_failures, map_archive, read_prepared

ARRAYS: dict[str, Any] = {
    "a.ids": np.arange(1000, dtype=np.int32),
    "a.types": np.zeros(0, np.int8),
    "token_kinds": np.arange(3, dtype=np.int8),
    "offsets": np.arange(7, dtype=np.int64),
    "labels": np.linspace(0, 1, 12, dtype=np.float32).reshape(4, 3),
}


def test_arrays_come_back_and_stay_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, meta=np.asarray('{"n": [1]}'), **ARRAYS)
    meta, found = map_archive(str(path))
    assert (meta, found.keys()) == ({"n": [1]}, ARRAYS.keys())
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].tolist()) == (array.dtype, array.tolist())
        assert isinstance(found[name], np.memmap) == bool(array.size)
    with pytest.raises(ValueError, match="read-only"):
        found["token_kinds"][0] = 1


TOKENS: dict[str, Any] = {
    "ids": np.arange(4, dtype=np.int32),
    "types": np.zeros(4, np.int8),
    "offsets": np.asarray([0, 1, 4]),
    "labels": np.zeros(2, np.float32),
}
META: dict[str, Any] = {
    "fields": {"kind": "class", "labels": ["a", "b"], "metrics": ["accuracy"], "checksum": "0", "pad_id": 0},
    "validation": [""],
    "slice_values": {},
}


def save(path: Path, changes: dict[str, Any], compress: bool = False) -> str:
    arrays = {f"{split}.{name}": value for split in ("train", "validation") for name, value in TOKENS.items()}
    arrays["token_kinds"] = np.zeros(0, np.int8)
    (np.savez_compressed if compress else np.savez)(path, meta=np.asarray(json.dumps(META)), **{**arrays, **changes})
    return str(path)


@pytest.mark.parametrize(
    "name, array, problem",
    [
        # As a memory map this would be taken for pointers.
        ("train.ids", np.asarray([{}, "x", 1, 2], object), r"array 'train\.ids' has objects"),
        ("train.labels", np.asfortranarray(np.zeros((2, 3), np.float32)), "or is not stored row by row"),
        ("train.offsets", np.asarray([0, 9, 4]), "the examples' offsets do not fit the token ids"),
        ("train.offsets", np.asarray([0, 1, 5]), "the examples' offsets do not fit the token ids"),
        ("train.offsets", np.asarray([-1, 1, 4]), "the examples' offsets do not fit the token ids"),
        ("train.types", np.zeros(3, np.int8), "token types or labels are not as many"),
        ("train.labels", np.zeros(3, np.float32), "token types or labels are not as many"),
    ],
)
def test_arrays_of_other_types_and_sizes_are_refused(name: str, array: Any, problem: str, tmp_path: Path) -> None:
    path = save(tmp_path / "x.npz", {name: array})
    with pytest.raises(CpuftError, match=rf"x\.npz is not prepared data \(.*{problem}.*\): remove it, and start again"):
        read_prepared(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    """Its bytes are no numbers that could be mapped."""
    assert len(read_prepared(save(tmp_path / "x.npz", {})).train) == 2
    with pytest.raises(CpuftError, match=r"x\.npz is not prepared data"):
        read_prepared(save(tmp_path / "x.npz", {}, compress=True))


@pytest.mark.parametrize(
    "path, said",
    [
        ("/cache/x", r"the prepared data cannot be written to the cache folder /cache \(.*\): free space there"),
        ("/data/rows.csv", r"/data/rows\.csv cannot be read \(.*\): start again when it can"),
    ],
)
def test_only_files_in_the_cache_are_blamed_on_it(path: str, said: str) -> None:
    with pytest.raises(CpuftError, match=said), explain_cache_failures(Path("/cache")):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
