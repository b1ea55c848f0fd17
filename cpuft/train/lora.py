"""`--lora-rank N`: adapters of rank N, by peft, are trained in a model's place; they alone travel and are kept.

Their learning rate is ten times that of whole models: the best one for LoRA is, whatever the rank (Schulman and others,
LoRA Without Regret, 2025). They are scaled by 2: alpha is twice the rank, as in peft's example for MRPC. Of attention
all is adapted. With the layers between, too, MiniLM at rank 16 would send 6 % of what a whole model does, and not 2.6.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError, install_command
from cpuft.train.fast.architectures import ATTENTION_MODULE_NAMES

_TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS"}
"""By the end of a class's name: what peft calls its task, so that AutoPeftModelForSequenceClassification loads it."""


def check_lora(config: TrainConfig, package: str = "peft") -> None:
    """Raises CpuftError when adapters are asked for, and what makes them is not installed."""
    if config.lora_rank:
        check_peft("--lora-rank", package)


def check_peft(wanted_by: str, package: str = "peft") -> None:
    """Raises CpuftError when peft is not installed."""
    if importlib.util.find_spec(package) is None:
        raise CpuftError(f"{wanted_by} needs peft, which is not installed: {install_command('train')}")


def adapt(model: Any, rank: int, source: str, fresh: Collection[str]) -> Any:
    """peft's model around `model`, which is changed in place: adapters in attention, and what is trained whole.

    Parameters
    ----------
    source: where the model came from, for whoever loads its adapters.
    fresh: names of parameters that did not come from there.

    Raises CpuftError: it has no linear layers in its attention.
    """
    from peft import LoraConfig, get_peft_model

    whole, kind = find_whole(model, fresh), type(model).__name__
    targets = [name for name in find_targets(model) if name not in whole]
    if not targets:
        raise CpuftError(f"--lora-rank finds no linear layers in the attention of {source} ({kind}): leave it out")
    task = next((task for end, task in _TASKS.items() if kind.endswith(end)), None)
    settings = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=targets, modules_to_save=whole or None, task_type=task
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of what peft asks it
        adapted = get_peft_model(model, settings)
    adapted.peft_config["default"].base_model_name_or_path = source
    return adapted


def find_targets(model: Any) -> list[str]:
    """Names of the linear layers in the attention of a model's encoder."""
    from torch import nn

    inside = f"{model.base_model_prefix}."
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name.startswith(inside)]
    return [name for name in linears if any(word in name.lower() for word in ATTENTION_MODULE_NAMES)]


def find_whole(model: Any, fresh: Collection[str]) -> list[str]:
    """Names of the modules that are trained whole: the head, and what came with no weights, a pooler say.

    A head whose output layer is the word embeddings once more is as large as they, and came with them.
    """
    outputs = model.get_output_embeddings()
    heads = [
        name
        for name, module in model.named_children()
        if outputs is None and name != model.base_model_prefix and any(True for _ in module.parameters())
    ]
    modules = dict(model.named_modules())
    begun = {name.rpartition(".")[0] for name in fresh if name.split(".")[0] not in heads}
    return heads + sorted(n for n in begun if modules[n] is not outputs and not any(modules[n].children()))


def merge(model: Any, folder: str) -> Any:
    """`model`, changed in place: the adapters of a folder in its weights. A head of other sizes stays as it is.

    Raises CpuftError: peft is not installed, or does not take them for this model's.
    """
    check_peft(f"{folder}, which holds adapters,")
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of such a head
            return PeftModel.from_pretrained(model, folder, ignore_mismatched_sizes=True).merge_and_unload()
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        kind = type(model).__name__
        raise CpuftError(f"the adapters in {folder} do not fit {kind} ({said}): name another --model") from None


def is_adapted(model: Any) -> bool:
    """Whether peft holds this model."""
    return type(model).__module__.startswith("peft.")


def save_adapters(model: Any, folder: Path) -> None:
    """Write adapters and head as peft reads them, and beside them the model's configuration, with labels."""
    model.save_pretrained(folder, save_embedding_layers=False)  # peft would ask the hub about the words
    model.config.save_pretrained(folder)
