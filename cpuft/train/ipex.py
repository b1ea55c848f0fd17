"""`--engine ipex`: Intel's archived extension for PyTorch (IPEX) in place of our fast path."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def optimize(model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: str) -> None:
    """Put IPEX's layers into a model, and its fp32 master weights into the optimizer, in place.

    To be called before DistributedDataParallel counts the parameters. `state_dict` stays fp32, under the same names.
    """
    import intel_extension_for_pytorch as ipex
    import torch

    from cpuft.train.fast.allocator import keep_freed_memory

    # It warns of its own defaults, and torch of its layer norm, whose gradients are right nevertheless.
    logging.getLogger("IPEX").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "aten::layer_norm: an autograd kernel was not registered")
    # IPEX's own launcher preloads an allocator to the same end.
    keep_freed_memory()
    model.train()
    ipex.optimize(model, dtype=torch.bfloat16 if precision == "bf16" else None, optimizer=optimizer, inplace=True)
