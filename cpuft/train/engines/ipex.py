"""`--engine ipex`: the layers of IPEX, Intel's archived extension for PyTorch."""

from __future__ import annotations

import logging
import warnings

import torch

from cpuft.train.fast.acceleration import keep_freed_memory


def optimize_by_ipex(model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: str) -> None:
    """Put a model into training mode, IPEX's layers into it and its fp32 masters into the optimizer, in place. Call it
    after `check_engine`, before the exchange is made. `state_dict` stays fp32, with the same names.
    glibc keeps freed memory.
    """
    import intel_extension_for_pytorch as ipex

    # IPEX warns of its own defaults, and torch of IPEX's layer norm, whose gradients are right nevertheless.
    logging.getLogger("IPEX").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "aten::layer_norm: an autograd kernel was not registered")
    # IPEX's own launcher preloads an allocator for the same purpose.
    keep_freed_memory()
    model.train()
    ipex.optimize(model, dtype=torch.bfloat16 if precision == "bf16" else None, optimizer=optimizer, inplace=True)
