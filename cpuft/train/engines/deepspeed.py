"""`--engine deepspeed`: DeepSpeed's ZeRO stage 1. Each rank keeps a shard of the fp32 weights and of the moments."""

from __future__ import annotations

import logging
import warnings

import torch
from torch.optim import Optimizer

from cpuft.config.train import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.fast.acceleration import keep_freed_memory


class DeepSpeedExchange(Exchange):
    """DeepSpeed's engine around the model, which reduces gradients during the backward pass, and its optimizer, which
    also clips, around the given one.
    """

    allows_warm_up = False  # DeepSpeed counts every backward pass as a part of an update

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(model, optimizer, config, precision)
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", ".* is deprecated. Please use `torch.distributed", FutureWarning)
        # It would be compiled by ninja now, and serves inference only.
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
            model=model, optimizer=optimizer, config=settings, dist_init_required=False
        )
        self._engine = self.forward_model = engine

    def begin_pass(self, is_last: bool) -> None:
        """Tell DeepSpeed to reduce gradients in the next backward pass only if it is the last one of an update."""
        self._engine.set_gradient_accumulation_boundary(is_last)

    def clip_gradients(self) -> None:
        """Do nothing: the step of DeepSpeed's optimizer clips."""
