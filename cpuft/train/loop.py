"""The training loop: forward, backward with gradients summed over ranks, update."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError
from cpuft.record import StepLine
from cpuft.train.batches import Batch, Order, count_updates, deal, make_batch, plan_updates
from cpuft.train.precision import autocast
from cpuft.train.prepare import Prepared
from cpuft.train.world import Place


class Clock:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds = {"data": 0.0, "forward": 0.0, "backward": 0.0, "update": 0.0}
        self.start = self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now


class LastGradient:
    """When DDP had the last bucket of gradients ready: what backward takes after that is waiting for others."""

    def __init__(self) -> None:
        self.at = 0.0

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Note the time, then average the bucket over all ranks."""
        self.at = time.perf_counter()
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


class Loop:
    """Everything a step needs, made once."""

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, prepared: Prepared, precision: str, place: Place
    ) -> None:
        self.config, self.prepared, self.precision, self.place = config, prepared, precision, place
        self.global_batch = config.batch_size * config.accumulation * place.size
        self.updates = count_updates(len(prepared.train), self.global_batch, config.epochs, config.max_steps)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            group_parameters(model, config.weight_decay), config.learning_rate, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.last_gradient = LastGradient()
        self.parallel: torch.nn.Module = model
        if place.size > 1:
            self.parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
            # A lambda, because DDP compares a function's annotations with classes, and ours are texts.
            self.parallel.register_comm_hook(None, lambda _, bucket: self.last_gradient.reduce(bucket))
        # Ranks share weights, not dropout masks.
        torch.manual_seed(config.seed + 1 + place.rank)

    def _rate(self, update: int) -> float:
        return learning_rate_factor(update, self.updates, self.config.warmup_ratio)


def learning_rate_factor(update: int, updates: int, warmup_ratio: float) -> float:
    """Share of the peak rate: linear from 0 over the warm-up, then linear down to 0 at the end."""
    warmup = math.ceil(updates * warmup_ratio)
    if update < warmup:
        return update / warmup
    return max(0.0, (updates - update) / max(1, updates - warmup))


def group_parameters(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: decay for matrices, none for biases and norms (one-dimensional)."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def train(loop: Loop) -> Iterator[StepLine]:
    """Run all updates; a line for each.

    Raises
    ------
    CpuftError: the loss is no finite number.
    """
    config = loop.config
    loop.parallel.train()
    orders = plan_updates(
        loop.prepared.train, loop.global_batch, config.seed, loop.updates, config.padding == "dynamic"
    )
    for number, (_, rows) in enumerate(orders, start=1):
        yield _update(loop, number, rows)


def _update(loop: Loop, number: int, rows: Order) -> StepLine:
    clock = Clock()
    micro = _micro_batches(loop, rows)
    clock.lap("data")
    loss_sum = torch.zeros(())
    for index, (batch, weight) in enumerate(micro):
        last = index == len(micro) - 1
        with contextlib.nullcontext() if last or loop.place.size == 1 else loop.parallel.no_sync():  # type: ignore[operator]
            with autocast(loop.precision):
                losses = _losses(loop.parallel(**batch.inputs).logits, batch.labels)
            clock.lap("forward")
            # DDP averages over ranks: with this weight the sum is the mean over all rows of the update.
            torch.autograd.backward(losses.sum() * (weight * loop.place.size / len(rows)))
            clock.lap("backward")
        loss_sum += losses.detach().sum() * weight
    if loop.config.clip_norm:
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), loop.config.clip_norm)
    rate = float(loop.schedule.get_last_lr()[0])
    loop.optimizer.step()
    loop.schedule.step()
    loop.optimizer.zero_grad(set_to_none=loop.place.size == 1)
    clock.lap("update")
    waited = max(0.0, clock.last - clock.seconds["update"] - loop.last_gradient.at) if loop.place.size > 1 else 0.0
    totals = torch.tensor([float(loss_sum), float(sum(b.tokens for b, w in micro if w))], dtype=torch.float64)
    dist.all_reduce(totals)
    loss = float(totals[0]) / len(rows)
    if not math.isfinite(loss):
        raise CpuftError(f"step {number}: the loss is {loss}: lower --learning-rate, or check the data's scores")
    return StepLine(
        step=number,
        loss=loss,
        learning_rate=rate,
        samples=len(rows),
        tokens=int(totals[1]),
        data_seconds=clock.seconds["data"],
        forward_seconds=clock.seconds["forward"],
        backward_seconds=clock.seconds["backward"] - waited,
        communication_seconds=waited,
        update_seconds=clock.seconds["update"],
        step_seconds=time.perf_counter() - clock.start,
    )


def _micro_batches(loop: Loop, rows: Order) -> list[tuple[Batch, float]]:
    """This rank's forward passes of an update, each with its weight: 0 for a row that is only there to keep step."""
    share = deal(rows, loop.place.rank, loop.place.size)
    weight = 1.0 if loop.place.rank < len(rows) else 0.0
    size = loop.config.batch_size
    width = loop.config.max_length if loop.config.padding == "max_length" else 0
    regression = not loop.prepared.labels
    return [
        (make_batch(loop.prepared.train, share[i : i + size], loop.prepared.pad_id, width, regression), weight)
        for i in range(0, len(share), size)
    ]


def _losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss of each row, fp32, shape (rows,): cross entropy of classes, or the square of the error of scores."""
    if labels.dtype.is_floating_point:
        return (logits[:, 0].float() - labels) ** 2
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
