"""`--engine ort`: ONNX Runtime's ORTModule in place of our fast path, in fp32. Its last version is of 2024."""

from __future__ import annotations

import copy
from typing import Any


def optimize(model: Any) -> None:
    """Make a model's passes graphs of ONNX Runtime, in place: exported in the first pass of training and of evaluation.

    Parameters and what is kept of the model stay its own. To be called before DistributedDataParallel gets it.
    """
    import onnxruntime
    import torch
    from onnxruntime.training.ortmodule import DebugOptions, LogLevel, ORTModule

    class Options(onnxruntime.SessionOptions):  # type: ignore[misc]
        """Of a graph, with as many threads as torch has here: by default each rank's are pinned to all of its host."""

        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = torch.get_num_threads()

    # ORTModule makes its own, and has no argument for them.
    onnxruntime.SessionOptions = Options
    graphs = ORTModule(copy.copy(model.train()), DebugOptions(log_level=LogLevel.ERROR))
    model.forward = graphs.forward
