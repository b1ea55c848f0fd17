"""Archives whose arrays are mapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuft.train.data.prepare import map_archive

ARRAYS: dict[str, Any] = {
    "a.ids": np.arange(1000, dtype=np.int32),
    "a.types": np.zeros(0, np.int8),
    "odd": np.arange(3, dtype=np.int8),
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
        found["odd"][0] = 1
