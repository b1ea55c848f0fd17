"""The trained model and its tokenizer, as `from_pretrained` loads them; written beside, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError
from cpuft.train.model import load_tokenizer

MODEL_DIR = "model"


def save_model(model: Any, source: str, run_dir: str) -> Path:
    """Write `run_dir`/model; a save that is cut short leaves none. Raises CpuftError: the disk is full."""
    target, beside = Path(run_dir) / MODEL_DIR, Path(run_dir) / f"{MODEL_DIR}.{os.getpid()}.tmp"
    try:
        model.save_pretrained(beside)
        load_tokenizer(source).save_pretrained(beside)
        shutil.rmtree(target, ignore_errors=True)  # of a run that broke off after this, and was resumed
        beside.rename(target)
    except Exception as error:  # safetensors raises a class of its own that is no OSError
        if "No space left" not in str(error):
            raise
        raise CpuftError(f"the disk of {run_dir} is full: make room for the model, or use --no-save-model") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target
