"""Rows that are prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig
from cpuft.train.data.prepare import prepare, read_prepared


def test_rows_that_others_could_have_written_are_not_read(own_cache: None) -> None:
    path = prepare(TrainConfig(max_train_samples=8))
    assert prepare(TrainConfig(max_train_samples=8)) == path
    path.parent.chmod(0o777)
    with pytest.raises(CpuftError, match=r"is open to others' writing \(mode 777\)"):
        prepare(TrainConfig(max_train_samples=8))


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04-\x00", b"PK\x05\x06" + bytes(18), b"\x93NUMPY\x01\x00"])
def test_an_archive_that_is_none_of_ours(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    path.write_bytes(data)
    with pytest.raises(CpuftError, match=r"data\.npz is no prepared data \(.+\): remove it, and start again"):
        read_prepared(str(path))
