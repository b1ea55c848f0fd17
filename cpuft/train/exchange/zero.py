"""`--engine deepspeed`: DeepSpeed's ZeRO-1 in the loop. Each rank keeps its part of the fp32 weights and of moments."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.optim import Optimizer

from cpuft.config import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.fast.acceleration import keep_freed_memory


class ZeroExchange(Exchange):
    """DeepSpeed's engine around the model, and its optimizer around ours, which also clips.

    It reduces gradients in the course of backward, over the process group that is there.
    """

    def __init__(self, own: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(own, optimizer, config, precision)
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", ".* is deprecated. Please use `torch.distributed", FutureWarning)
        # It would be compiled now, by ninja, and is for inference.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        keep_freed_memory()
        settings = {
            "train_micro_batch_size_per_gpu": config.batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": config.max_grad_norm,
            "bf16": {"enabled": precision == "bf16"},
            "zero_optimization": {"stage": 1},
        }
        engine, self.optimizer, *_ = deepspeed.initialize(
            model=own, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self._engine = self.model = engine

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Gradients are reduced in the last one."""
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def average(self, name_tokens: Callable[[], torch.Tensor]) -> float:
        """Nothing is left to do after backward."""
        return 0.0

    def clip(self) -> None:
        """The optimizer's step does it."""
