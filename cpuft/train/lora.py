"""LoRA (`--lora-rank N`): train small adapters of rank N, made by peft, instead of the whole model.

Only the adapters and the head are trained, sent and saved, at ten times the learning rate of the whole model, which is
best whatever the rank (Schulman and others, LoRA Without Regret, 2025), and scaled by 2, as in peft's example for MRPC.
Of encoders, the linear layers of attention are adapted: with those of feed-forward, MiniLM at rank 16 would send 6 %
of the bytes of the whole model, not 2.6 %. Of decoders all but the head are: attention alone learns less.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, describe_error
from cpuft.train.fast.architectures import ATTENTION_MODULE_NAMES

_TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
}
"""peft's task types by the end of the model class's name, for its AutoPeftModelForSequenceClassification."""


def add_adapters(model: Any, rank: int, source: str, new: Collection[str]) -> Any:
    """Add adapters to the linear layers of `find_target_layers` in place, freeze the rest, and return peft's model.

    The head, and modules with parameters named in `new`, which were not loaded, are trained whole. `source` is the
    folder or hub name that is saved with the adapters. Raises CpuftError: there are no such layers.
    """
    from peft import LoraConfig, get_peft_model

    whole, kind = find_whole_modules(model, new), type(model).__name__
    targets = [name for name in find_target_layers(model) if name not in whole]
    if not targets:
        raise CpuftError(f"--lora-rank finds no linear layers in the attention of {source} ({kind}): leave it out")
    task_type = next((task_type for end, task_type in _TASK_TYPES.items() if kind.endswith(end)), None)
    settings = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, modules_to_save=whole or None, task_type=task_type
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of a function that peft calls
        adapted = get_peft_model(model, settings)
    adapted.peft_config["default"].base_model_name_or_path = source
    return adapted


def get_encoder_prefix(model: Any) -> str:
    """Return how the names of the encoder's parameters begin, such as `bert.`; "" for an encoder without a head."""
    return f"{model.base_model_prefix}." if hasattr(model, model.base_model_prefix) else ""


def find_target_layers(model: Any) -> list[str]:
    """Return dotted names of the linear layers to adapt: in attention; of decoders like Llama, all but the head's."""
    from torch import nn

    encoder = get_encoder_prefix(model)
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name.startswith(encoder)]
    if hasattr(model.config.get_text_config(), "num_key_value_heads"):  # of Llama and its descendants only
        return linears
    return [name for name in linears if any(part in name.lower() for part in ATTENTION_MODULE_NAMES)]


def find_whole_modules(model: Any, new: Collection[str]) -> list[str]:
    """Return the names of the modules that are trained whole: a classifier's head, then modules with parameters of
    `new` (a pooler), but no head of a language model, which is large, and may share the token embedding's weight.
    """
    outputs = model.get_output_embeddings()
    heads = [
        name
        for name, module in model.named_children()
        if outputs is None
        and get_encoder_prefix(model)
        and name != model.base_model_prefix
        and any(True for _ in module.parameters())
    ]
    modules = dict(model.named_modules())
    others = {name.rpartition(".")[0] for name in new if name.split(".")[0] not in heads}
    return heads + sorted(n for n in others if modules[n] is not outputs and not any(modules[n].children()))


def merge_adapters(model: Any, folder: str) -> Any:
    """Merge the adapters in a folder into `model`, in place, and return the model without adapters. Raises CpuftError:
    the adapters do not fit the model.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a head of other sizes
            return PeftModel.from_pretrained(model, folder, ignore_mismatched_sizes=True).merge_and_unload()
    except Exception as error:  # peft, safetensors and pickle raise many kinds of errors
        reason, kind = describe_error(error), type(model).__name__
        if "merge_and_unload" in reason:
            reason = "they are no changes of its weights, but for example prompts, which cannot be merged"
        raise CpuftError(f"the adapters in {folder} do not fit {kind} ({reason}): give another --model") from None


def has_adapters(model: Any) -> bool:
    """Return whether this is a model of peft, which wraps the model with its adapters."""
    return type(model).__module__.startswith("peft.")


def save_adapters(model: Any, folder: Path) -> None:
    """Write adapters and head in peft's format, and the configuration of the model, with its labels, into a folder."""
    model.save_pretrained(folder, save_embedding_layers=False)  # else peft asks the hub for the vocabulary's size
    model.config.save_pretrained(folder)
