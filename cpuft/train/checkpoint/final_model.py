"""Saving the trained model or its adapters, with the tokenizer, so that `from_pretrained` loads them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cpuft.errors import DiskFullError
from cpuft.train.data.tokenizer import load_tokenizer, make_tokenizer
from cpuft.train.lora import has_adapters, save_adapters
from cpuft.train.model import load_weights

MODEL_DIR = "model"


def save_model(
    model: Any,
    source: str,
    run_dir: str,
    merged: bool = False,
    tokenizer_json: str = "",
    finish: Callable[[Path, Any], None] = lambda folder, model: None,
) -> Path:
    """Write the model and its tokenizer to `run_dir`/model, whose earlier content stays if this fails; return the path.

    Adapters are saved with their head or, if `merged`, as a whole model. `source` is the folder or hub name whose
    tokenizer is saved, unless `tokenizer_json` is not "". `finish(folder, model)` writes more files before the folder
    gets its name. Raises DiskFullError, CpuftError, and whatever transformers and safetensors raise.
    """
    target, beside = Path(run_dir) / MODEL_DIR, Path(run_dir) / f"{MODEL_DIR}.{os.getpid()}.tmp"
    try:
        _write_weights(model, beside, merged)
        (make_tokenizer(tokenizer_json) if tokenizer_json else load_tokenizer(source)).save_pretrained(beside)
        finish(beside, model)
        shutil.rmtree(target, ignore_errors=True)  # of a run that broke off after saving it, and was resumed
        beside.rename(target)
    except Exception as error:  # safetensors raises a class of its own that is no OSError
        if "No space left" not in str(error):
            raise
        raise DiskFullError(str(target), "make room for the model, or use --no-save-model") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def _write_weights(model: Any, folder: Path, merged: bool) -> None:
    if not has_adapters(model):
        model.save_pretrained(folder)
        return
    save_adapters(model, folder)
    if merged:
        # Adapters are merged into weights that are loaded again: those in memory may be rounded to bf16.
        read = partial(type(model.get_base_model()).from_pretrained, config=model.config)
        whole, _ = load_weights(read, str(folder))
        shutil.rmtree(folder)
        whole.save_pretrained(folder)
