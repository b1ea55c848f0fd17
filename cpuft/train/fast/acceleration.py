"""glibc's allocator, told to keep what a training step frees: the next step asks for the same again."""

from __future__ import annotations

import ctypes
import os
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cpuft.errors import CpuftError
from cpuft.hardware import PRECISIONS, bf16_hardware, effective_flags
from cpuft.train.fast.adamw import MASTERS_ATTRIBUTE, Masters, put_on_masters
from cpuft.train.fast.elementwise import FastDropout
from cpuft.train.fast.embedding import quicken_words
from cpuft.train.fast.encoder import find_encoders, reads_first_token

# malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_NEVER = -1
_HEAD_ROOM = 64 << 20


def keep_freed_memory() -> bool:
    """Stop malloc from returning big blocks to the kernel. True where that was possible (glibc, not preloaded over).

    By default each block above 32 MB is mapped anew and each free top of the heap goes back, so that every step takes
    page faults for all its activations and gradients. Memory that the process freed stays with it: its peak is the
    same, its resident size does not fall after the peak.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _HEAD_ROOM))
    accepted = [mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings]
    return all(accepted)


Model = TypeVar("Model", bound=nn.Module)
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def has_bf16_products() -> bool:
    """Whether this CPU multiplies bf16 in hardware, and ONEDNN_MAX_CPU_ISA lets it; else bf16 is slower than fp32."""
    flags = tuple(name for name, there in torch.cpu.get_capabilities().items() if there)
    return bool(bf16_hardware(effective_flags(flags, os.environ.get("ONEDNN_MAX_CPU_ISA", ""))))


def accelerate(
    model: Model,
    optimizer: AnyOptimizer,
    *,
    precision: str = "auto",
    first_token: bool = True,
    adapters: bool = False,
) -> tuple[Model, AnyOptimizer]:
    """Train `model` with `optimizer` faster; nothing else of the training loop changes.

    Both come back as the same objects, changed in place: call it after the model is loaded and the optimizer is made,
    before DistributedDataParallel or a trainer gets them. Encoders of BERT's kind (BERT, RoBERTa, XLM-RoBERTa,
    CamemBERT, ELECTRA, DistilBERT) get the fast layers; in any other model only dropout modules change.

    What stays true: parameter names; `state_dict`, `save_pretrained` and checkpoints in fp32 (the masters); gradient
    clipping, accumulation, learning rate schedulers; the probability distribution of dropout, not its very numbers.
    What changes: gradients of the encoder's linear layers are bf16, so accumulation over many micro-batches and
    all-reduce under DistributedDataParallel round to 8 bits at each addition (half the traffic), and the norm that
    clipping sees has that precision. Hidden states that are asked for come in bf16. The word embeddings' gradient is
    memory that the next backward pass writes to again, and what is written to it through `.data` is not noticed.

    Parameters
    ----------
    precision: bf16 compute weights and activations with fp32 masters, or fp32; auto: bf16 where the hardware has it;
        int8: fp32, but in training the encoder's linear layers' outputs and their inputs' gradients are products of
        8-bit numbers (layers with adapters stay as they are).
    first_token: in sequence classifiers, the last layer computes only the first token, which alone is read.
    adapters: layers with peft's LoRA (plain, no dropout) become fast ones, too. Their encoder's frozen linear weights
        have no masters: with bf16 they are rounded for good, so save adapters, and merge them into a fresh model.

    Raises CpuftError: for a model wrapped by DistributedDataParallel, one whose weights are not fp32, an unknown
    precision, and int8 where there are no such layers.
    """
    put_on_masters(optimizer, quicken(model, precision, first_token, adapters))
    return model, optimizer


def quicken(model: nn.Module, precision: str = "auto", first_token: bool = True, adapters: bool = False) -> Masters:
    """What `accelerate` does to a model: all that one needs that is only asked. Raises CpuftError as that does."""
    _check(model, precision)
    if precision == "auto":
        precision = "bf16" if has_bf16_products() else "fp32"
    keep_freed_memory()
    _replace_dropout(model)
    masters: Masters | None = getattr(model, MASTERS_ATTRIBUTE, None)
    return masters or _quicken(model, precision, first_token, adapters)


def _check(model: nn.Module, precision: str) -> None:
    if precision not in PRECISIONS:
        raise CpuftError(f"precision {precision!r} is unknown: choose one of {', '.join(PRECISIONS)}")
    if isinstance(model, DistributedDataParallel):
        raise CpuftError("accelerate changes weights that DistributedDataParallel has counted: wrap the model after it")
    if hasattr(model, MASTERS_ATTRIBUTE):
        return
    low = next((name for name, p in model.named_parameters() if p.dtype in (torch.bfloat16, torch.float16)), None)
    if low is not None:
        raise CpuftError(f"{low} is not fp32, so there is no master to train: load the model with dtype=torch.float32")


def _quicken(model: nn.Module, precision: str, first_token: bool, adapters: bool) -> Masters:
    encoders = find_encoders(model, adapters)
    if precision == "int8" and not encoders:
        raise CpuftError(
            f"int8 is for layers of BERT's kind, and {type(model).__name__} has none: use another precision"
        )
    linears = [linear for encoder in encoders for linear in encoder.linears]
    low: list[nn.Parameter] = [p for linear in linears for p in linear.parameters()] if precision == "bf16" else []
    masters = Masters(model, [p for p in low if p.requires_grad or not adapters])
    for parameter in low:
        if masters.get(parameter) is None:
            parameter.data = parameter.detach().to(torch.bfloat16)
    for encoder in encoders:
        encoder.install(precision)
    masters.words = quicken_words(model) if encoders else None
    if first_token and len(encoders) == 1 and reads_first_token(model):
        encoders[0].watch_head(model)
    return masters


def _replace_dropout(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                fast = FastDropout(child.p, child.inplace)
                fast.training = child.training
                setattr(module, name, fast)
