"""`cpuft.accelerate`: patch the fast path into a loaded model and its optimizer, from outside and in place."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cpuft.compiler import read_cpu_flags
from cpuft.errors import CpuftError, counted
from cpuft.hardware import PRECISIONS, bf16_hardware
from cpuft.train.fast.adamw import use_masters
from cpuft.train.fast.architectures import ARCHITECTURES, reads_first_token
from cpuft.train.fast.elementwise import FastDropout
from cpuft.train.fast.frozen import list_frozen_weights
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE, MasterWeights
from cpuft.train.fast.stack import FastLayer, find_stacks, list_stacks
from cpuft.train.fast.token_embedding import patch_embedding

Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

# Options of mallopt, from malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1
_TOP_PAD_BYTES = 64 << 20


def has_bf16_products() -> bool:
    """Return whether this CPU multiplies bf16 in hardware, and the variable ONEDNN_MAX_CPU_ISA does not hide that."""
    # Nothing is measured as `find_precision` does: ranks of a loop that is not ours may measure differently, and
    # DistributedDataParallel cannot sum bf16 gradients of one with fp32 gradients of another.
    return bool(bf16_hardware(read_cpu_flags(os.environ)))


def accelerate(
    model: Model, optimizer: AnyOptimizer, *, precision: str = "auto", first_token: bool = True, adapters: bool = False
) -> tuple[Model, AnyOptimizer]:
    """Make training of `model` with `optimizer` faster. The training loop does not change.

    Returns (model, optimizer), the same two objects, changed in place. Call this after the model is loaded and the
    optimizer is made, and before DistributedDataParallel or a trainer gets them. Layers of BERT, RoBERTa, XLM-RoBERTa,
    CamemBERT, ELECTRA, DistilBERT, MPNet, ALBERT, DeBERTa-v2/v3, ModernBERT, EuroBERT, Llama, Qwen3, SmolLM3 and Gemma
    3 (text) become fast, also inside of another module such as a SentenceTransformer; in any other model only dropout
    modules change. To generate with keys and values of earlier tokens, or to return hidden states or attentions of all
    layers, models use their own layers, with bf16 under autocast. A model that has been accelerated before keeps its
    layers and precision; the optimizer is connected to its master weights. For the whole process, malloc keeps freed
    memory (see `keep_freed_memory`).

    What stays the same: parameter names; `state_dict`, `save_pretrained` and checkpoints in fp32 (the master weights);
    gradient clipping, gradient accumulation and learning rate schedulers; the probability of dropout, though not its
    random numbers.

    What changes: gradients of the encoder's linear layers are bf16. Accumulation over many micro-batches, over the runs
    of ALBERT's shared layers and in the all-reduce of DistributedDataParallel rounds to 8 bits at each addition, with
    half the bytes sent, and the norm for clipping has that precision. The token embedding's gradient is a buffer that
    the next backward pass reuses; do not write to it through `.data`, which goes unnoticed.

    Parameters
    ----------
    precision: bf16 (compute weights and activations in bf16, with fp32 masters), fp32, int8, or auto: bf16 where the
        hardware multiplies it, else fp32. int8 is fp32 with 8-bit operands in the products, during training, that give
        the outputs of the encoder's linear layers and the gradients of their inputs; layers with adapters stay fp32.
    first_token: in sequence classifiers of transformers with one encoder, also those of a CrossEncoder, compute only
        the first token in the last layer, as the head reads no other.
    adapters: make layers with LoRA adapters of peft fast, too (without dropout, bias or variant). The encoder's frozen
        linear weights get no masters: bf16 rounds them for good, so save the adapters and merge them into a model that
        is loaded anew.

    Raises
    ------
    CpuftError: the model is wrapped by DistributedDataParallel, a parameter is bf16 or fp16, the precision is unknown,
        or it is int8 and the model has no layers that can be fast.
    """
    use_masters(optimizer, patch_model(model, precision, first_token, adapters))
    return model, optimizer


def patch_model(
    model: nn.Module, precision: str = "auto", first_token: bool = True, adapters: bool = False
) -> MasterWeights:
    """Do what `accelerate` does to a model, and raise the same; without bf16, the result holds no master weights."""
    _check(model, precision)
    if precision == "auto":
        precision = "bf16" if has_bf16_products() else "fp32"
    keep_freed_memory()
    _replace_dropout(model)
    masters: MasterWeights | None = getattr(model, MASTERS_ATTRIBUTE, None)
    return masters or _patch(model, precision, first_token, adapters)


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep memory that this process frees; return whether it took all settings, False without it.

    Otherwise every training step takes page faults for all its activations and gradients. The resident size does not
    fall any more. Another allocator that is preloaded (jemalloc, tcmalloc) may accept without any effect.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES))
    accepted = [mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings]
    return all(accepted)


def _return_free_memory() -> None:
    """Return free pages to the kernel: copied weights leave gaps, which were a quarter of a 470-million decoder."""
    with suppress(OSError, AttributeError):  # without glibc
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _check(model: nn.Module, precision: str) -> None:
    if precision not in PRECISIONS:
        raise CpuftError(f"precision {precision!r} is unknown: choose one of {', '.join(PRECISIONS)}")
    if isinstance(model, DistributedDataParallel):
        raise CpuftError("the model is in DistributedDataParallel already: call accelerate first, then wrap the model")
    if hasattr(model, MASTERS_ATTRIBUTE):
        return
    frozen = {id(p) for p in list_frozen_weights(model)}
    low = next(
        (n for n, p in model.named_parameters() if p.dtype in (torch.bfloat16, torch.float16) and id(p) not in frozen),
        None,
    )
    if low is not None:
        raise CpuftError(f"parameter {low} is not fp32, as training needs it: load the model with dtype=torch.float32")


def _patch(model: nn.Module, precision: str, first_token: bool, adapters: bool) -> MasterWeights:
    found = find_stacks(model, adapters)
    if precision == "int8" and not found:
        raise CpuftError(f"precision int8 needs fast layers, which {type(model).__name__} lacks: choose another one")
    linears = [linear for one in found for linear in one.linears]
    frozen = {id(p) for p in list_frozen_weights(model)}
    low: list[nn.Parameter] = []
    if precision == "bf16":
        low = [p for linear in linears for p in linear.parameters() if id(p) not in frozen]
    masters = MasterWeights(model, [p for p in low if p.requires_grad or not adapters])
    for parameter in low:
        if masters.get(parameter) is None:
            parameter.data = parameter.detach().to(torch.bfloat16)
    for one in found:
        one.install(precision)
    if found:
        _return_free_memory()
    masters.embedding = patch_embedding(model) if found else None
    encoders = [one for one in found if not one.is_pre_norm]
    if first_token and len(encoders) == 1:
        for module in list(model.modules()):
            if reads_first_token(module):
                encoders[0].watch_head(module)
    return masters


def _replace_dropout(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                fast = FastDropout(child.p, child.inplace)
                fast.training = child.training
                setattr(module, name, fast)


def describe_layers(model: nn.Module) -> str:
    """Return how many layers `accelerate` has replaced: "6 of 6 layers replaced", or if none "0 of 6 layers replaced,
    because it does not know ..." with the obstacle or the classes of the layers.
    """
    layers = _find_layers(model)
    replaced = sum(isinstance(layer, FastLayer) for layer in layers)
    counts = f"{replaced} of {counted(len(layers), 'layer')} replaced"
    if replaced:
        return counts
    obstacles = (stack.find_obstacle(adapters) for stack in list_stacks(model) for adapters in (True, False))
    if obstacle := next(filter(None, obstacles), ""):
        why = f"it does not know {obstacle}"
    else:
        names = ", ".join(dict.fromkeys(type(layer).__name__ for layer in layers)) or type(model).__name__
        *titles, last = (one.title for one in ARCHITECTURES)
        why = f"it does not know {names} (it knows the layers of {', '.join(titles)} and {last})"
    return f"{counts}, because {why}"


def _find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the outermost members of any ModuleList whose class is named a layer or a block."""
    found, inside = list[nn.Module](), set[nn.Module]()
    for module in model.modules():
        for layer in module if isinstance(module, nn.ModuleList) and module not in inside else ():
            if type(layer).__name__.endswith(("Layer", "Block")):
                found.append(layer)
                inside.update(layer.modules())
    return found
