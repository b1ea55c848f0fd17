"""Rows that are prepared once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.prepare import prepare


def test_rows_that_others_could_have_written_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = prepare(TrainConfig(max_train_samples=8))
    assert prepare(TrainConfig(max_train_samples=8)) == path
    path.parent.chmod(0o777)
    with pytest.raises(CpuftError, match=r"is open to others' writing \(mode 777\)"):
        prepare(TrainConfig(max_train_samples=8))
