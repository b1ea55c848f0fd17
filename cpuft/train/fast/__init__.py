"""The fast path: cheaper pieces for a loaded model, put in from outside. `accelerate` is the way in."""

from cpuft.train.fast.acceleration import accelerate, has_bf16_products, quicken
from cpuft.train.fast.adamw import clip_gradients, fp32_weights, note_rows
from cpuft.train.fast.encoder import describe_layers
from cpuft.train.fast.kernels import kernel_status

__all__ = [
    "accelerate",
    "clip_gradients",
    "describe_layers",
    "fp32_weights",
    "has_bf16_products",
    "kernel_status",
    "note_rows",
    "quicken",
]
