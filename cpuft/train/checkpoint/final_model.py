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
"""Name of the folder of the trained model in a run's folder."""


def save_model(
    model: Any,
    source: str,
    run_dir: str,
    merged: bool = False,
    made: str = "",
    finish: Callable[[Path, Any], None] = lambda folder, model: None,
) -> Path:
    """Write the model and its tokenizer to `run_dir`/model and return that path.

    A model of peft is saved as its adapters and head. An existing folder of that name is replaced once everything is
    written; if the save fails before, it stays as it is.

    Parameters
    ----------
    source: folder or hub name whose tokenizer is saved with the model; unused if there is a `made`.
    merged: save a model of peft whole instead, with the adapters merged into weights that are loaded again; ignored
        for other models.
    made: the JSON of a tokenizer that was made for this run, which is saved in place of that of `source`; "" if there
        is none.
    finish: writes more files into the folder, before it gets its name.

    Raises
    ------
    DiskFullError
        The disk is full.
    CpuftError
        The tokenizer of `source` cannot be loaded; with `merged`, the base model cannot be loaded or the adapters do
        not fit it.
    Exception
        Whatever else transformers and safetensors raise, such as OSError for a folder that cannot be written.
    """
    target, beside = Path(run_dir) / MODEL_DIR, Path(run_dir) / f"{MODEL_DIR}.{os.getpid()}.tmp"
    try:
        _write_weights(model, beside, merged)
        (make_tokenizer(made) if made else load_tokenizer(source)).save_pretrained(beside)
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
