"""The context a forward pass runs in."""

from __future__ import annotations

import contextlib

import torch


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    """bf16 products by autocast, or fp32 as it is."""
    if precision == "bf16":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()
