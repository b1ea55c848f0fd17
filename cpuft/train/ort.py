"""`--engine ort`: ONNX Runtime's ORTModule in place of our fast path, in fp32. Its last version is of 2024."""

from __future__ import annotations

from typing import Any


def wrap(model: Any) -> Any:
    """A model whose forward and backward passes are graphs of ONNX Runtime; parameters are the model's own."""
    from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule

    return ORTModule(model, DebugOptions(log_level=LogLevel.ERROR))
