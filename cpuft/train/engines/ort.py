"""`--engine ort`: ONNX Runtime's ORTModule (last released in 2024), in fp32."""

from __future__ import annotations

import copy
from typing import Any

import torch


def optimize_by_ort(model: Any) -> None:
    """Put a model into training mode and let ONNX Runtime compute its passes, in place.

    From then on, all its sessions in this process have as many threads as torch. Call this after `check_engine` and
    before the exchange is made. The parameters, and what is saved, stay the model's own.
    """
    import onnxruntime
    from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
        """Session options with as many threads as torch has; by default each rank would use all cores of its host."""

        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = torch.get_num_threads()

    # ORTModule makes its own options, and has no argument for them.
    onnxruntime.SessionOptions = Options
    graphs = ORTModule(copy.copy(model.train()), DebugOptions(log_level=LogLevel.ERROR))
    model.forward = graphs.forward
