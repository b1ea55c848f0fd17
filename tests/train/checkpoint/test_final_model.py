"""Saving the trained model."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.checkpoint.final_model import save_model
from cpuft.train.objective.labels import Classification


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_fills_up_leaves_no_half_model(tmp_path: Path) -> None:
    model = Classification(("0", "1"), (), 0).load_model(TrainConfig())
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", "small"], check=True)
    try:
        with pytest.raises(CpuftError, match=r"small/model on host .*: make room for the model, or use"):
            save_model(model, "minilm", "small")
        assert list((tmp_path / "small").iterdir()) == []
    finally:
        subprocess.run(["umount", "small"], check=True)


def test_labels_and_weights_read_back(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = Classification(("no", "yes"), (), 0).load_model(TrainConfig())
    saved = AutoModelForSequenceClassification.from_pretrained(save_model(model, "minilm", str(tmp_path)))
    assert saved.config.id2label == {0: "no", 1: "yes"}
    assert all((a == b).all() for a, b in zip(saved.state_dict().values(), model.state_dict().values()))
