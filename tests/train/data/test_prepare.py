"""Rows that are prepared once."""

from __future__ import annotations

import pytest

from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig
from cpuft.train.data.prepare import prepare


def test_rows_that_others_could_have_written_are_not_read(own_cache: None) -> None:
    path = prepare(TrainConfig(max_train_samples=8))
    assert prepare(TrainConfig(max_train_samples=8)) == path
    path.parent.chmod(0o777)
    with pytest.raises(CpuftError, match=r"is open to others' writing \(mode 777\)"):
        prepare(TrainConfig(max_train_samples=8))
