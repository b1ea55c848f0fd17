"""The file of a run's predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpuft.errors import CpuftError
from cpuft.judge.predictions import FILE_NAME, About, read_predictions, write_predictions

ABOUT = About("class", ("no", "yes"), {"accuracy": 0.5}, "abc", 12)


def test_predictions_are_read_as_they_were_written(tmp_path: Path) -> None:
    columns = {
        "row": np.arange(2),
        "label": ["no", "yes"],
        "text": [["a", "b"], ["c", "d"]],
        "probabilities": np.asarray([[0.9, 0.1], [0.8, 0.2]], np.float32).tolist(),
    }
    write_predictions(tmp_path, ABOUT, columns)
    found = read_predictions(str(tmp_path))
    assert found.about == ABOUT
    assert found.column("row").tolist() == [0, 1]
    assert found.column("label").tolist() == ["no", "yes"]
    assert [list(texts) for texts in found.column("text")] == [["a", "b"], ["c", "d"]]


@pytest.mark.parametrize("content", [None, b"", b"PAR1 but no table"])
def test_a_run_without_usable_predictions_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(CpuftError, match="has no" if content is None else "is damaged"):
        read_predictions(str(tmp_path))
