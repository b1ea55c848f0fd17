"""The training loop: forward, backward with gradients summed over ranks, update."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cpuft.comm import take_traffic
from cpuft.comm.choice.choosing import BUCKET_BYTES
from cpuft.comm.gradients.compression import Reduce, make_reduce
from cpuft.comm.gradients.embedding_rows import RowExchange, exchange_rows
from cpuft.comm.gradients.local_updates import average_parameters
from cpuft.errors import CpuftError
from cpuft.options.fields import TrainConfig
from cpuft.rank.world import World
from cpuft.record import StepLine
from cpuft.train import ipex
from cpuft.train.data.batches import Batch, Order, count_updates, deal, make_batch, name_tokens, plan_updates
from cpuft.train.data.prepare import Prepared
from cpuft.train.fast import accelerate, clip_gradients, fp32_weights
from cpuft.train.precision import autocast


class Clock:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("data", "forward", "backward", "update", "communication"), 0.0)
        self.start = self.last = time.perf_counter()

    def lap(self, phase: str) -> float:
        """Count the time since the last lap to `phase`, and return it."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        self.seconds[phase] += seconds
        return seconds


class LastGradient:
    """When the last gradient was ready: what backward takes after that is waiting for others."""

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self.at = 0.0

    def note(self, *_: object) -> None:
        """A gradient is ready."""
        self.at = time.perf_counter()

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Note the time, then average the bucket over all ranks."""
        self.note()
        return self._reduce(bucket)


class Loop:
    """Everything a step needs, made once."""

    def __init__(
        self, model: torch.nn.Module, config: TrainConfig, prepared: Prepared, precision: str, world: World
    ) -> None:
        self.config, self.prepared, self.precision, self.world = config, prepared, precision, world
        self.global_batch = config.batch_size * config.accumulation * world.size
        self.updates = count_updates(len(prepared.train), self.global_batch, config.epochs, config.max_steps)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            group_parameters(model, config.weight_decay), config.learning_rate, fused=True
        )
        if config.engine == "ipex":
            ipex.optimize(model, self.optimizer, precision)
        elif config.compile:
            # The fast layers call kernels of their own, which a graph cannot hold. Lengths differ from step to step.
            model.compile(dynamic=True)
        elif not config.plain:
            accelerate(model, self.optimizer, precision=precision)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)
        self.parallel: torch.nn.Module = model
        self.last_gradient: LastGradient | None = None
        self.rows: RowExchange | None = None
        if world.size > 1 and config.sync_every == 1:
            self._exchange_gradients(choose_compression(config, precision))
        # Ranks share weights, not dropout masks.
        torch.manual_seed(config.seed + 1 + world.rank)

    def _exchange_gradients(self, compression: str) -> None:
        """Layers' gradients by DDP, in the course of backward; word embeddings' after it, by rows."""
        assert dist.group.WORLD is not None
        self.rows = exchange_rows(self.model, compression, dist.group.WORLD)
        last = self.last_gradient = LastGradient(make_reduce(compression, dist.group.WORLD))
        if self.rows:
            self.rows.weight.register_post_accumulate_grad_hook(last.note)  # type: ignore[no-untyped-call]
        self.parallel = DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_BYTES / 2**20
        )
        # A lambda, because DDP compares a function's annotations with classes, and ours are texts.
        self.parallel.register_comm_hook(None, lambda _, bucket: last.reduce(bucket))

    def _rate(self, update: int) -> float:
        return learning_rate_factor(update, self.updates, self.config.warmup_ratio)


def choose_compression(config: TrainConfig, precision: str) -> str:
    """What gradients are sent as: what was asked for; by default bf16 where training is bf16."""
    if config.grad_compression != "auto":
        return config.grad_compression
    return "bf16" if precision == "bf16" else "none"


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
    take_traffic()  # what was sent while the ranks met is no step's
    orders = plan_updates(
        loop.prepared.train, loop.global_batch, config.seed, loop.updates, config.padding == "dynamic"
    )
    for number, (_, rows) in enumerate(orders, start=1):
        yield _update(loop, number, rows)


def _update(loop: Loop, number: int, rows: Order) -> StepLine:
    clock = Clock()
    micro = _micro_batches(loop, rows)
    clock.lap("data")
    loss_sum = sum(
        _forward_backward(loop, clock, batch, weight, len(rows), last=index == len(micro) - 1)
        for index, (batch, weight) in enumerate(micro)
    )
    waited = max(0.0, clock.last - loop.last_gradient.at) if loop.last_gradient else 0.0
    if loop.rows:
        loop.rows.average(name_tokens(loop.prepared.train, rows, loop.prepared.pad_id))
        waited += clock.lap("communication")
    if loop.config.clip_norm:
        clip_gradients(loop.optimizer, loop.model.parameters(), loop.config.clip_norm)
    rate = float(loop.schedule.get_last_lr()[0])
    loop.optimizer.step()
    loop.schedule.step()
    # DDP's gradients are views of its buckets, and must stay where they are.
    loop.optimizer.zero_grad(set_to_none=loop.parallel is loop.model)
    if loop.rows:
        loop.rows.clear()
    clock.lap("update")
    if loop.world.size > 1 and loop.parallel is loop.model and _is_due(loop, number):
        with fp32_weights(loop.model):
            average_parameters(loop.model.parameters())
    totals = torch.tensor([loss_sum, sum(b.tokens for b, weight in micro if weight)], dtype=torch.float64)
    dist.all_reduce(totals)
    waited += clock.lap("communication")
    return _line(clock, number, rate, len(rows), totals.tolist(), waited)


def _is_due(loop: Loop, number: int) -> bool:
    """Whether parameters are averaged after this update."""
    return number % loop.config.sync_every == 0 or number == loop.updates


def _forward_backward(loop: Loop, clock: Clock, batch: Batch, weight: float, rows: int, last: bool) -> float:
    """One forward and backward pass; the sum of its rows' losses. Ranks exchange gradients in the last one only."""
    wrapped = loop.parallel is not loop.model
    with loop.parallel.no_sync() if wrapped and not last else contextlib.nullcontext():  # type: ignore[operator]
        with autocast(loop.precision):
            losses = _losses(loop.parallel(**batch.inputs).logits, batch.labels)
        clock.lap("forward")
        # Gradients are averaged over ranks: with this weight that is the mean over all rows of the update.
        torch.autograd.backward(losses.sum() * (weight * loop.world.size / rows))
        clock.lap("backward")
    return float(losses.detach().sum()) * weight


def _line(clock: Clock, number: int, rate: float, rows: int, totals: list[float], waited: float) -> StepLine:
    loss = totals[0] / rows
    if not math.isfinite(loss):
        raise CpuftError(f"step {number}: the loss is {loss}: lower --learning-rate, or check the data's scores")
    return StepLine(
        step=number,
        loss=loss,
        learning_rate=rate,
        samples=rows,
        tokens=int(totals[1]),
        data_seconds=clock.seconds["data"],
        forward_seconds=clock.seconds["forward"],
        backward_seconds=max(0.0, clock.seconds["backward"] + clock.seconds["communication"] - waited),
        communication_seconds=waited,
        update_seconds=clock.seconds["update"],
        step_seconds=time.perf_counter() - clock.start,
        bytes_sent=take_traffic().nbytes,
    )


def _micro_batches(loop: Loop, rows: Order) -> list[tuple[Batch, float]]:
    """This rank's forward passes of an update, each with its weight: 0 for a row that is only there to keep step."""
    share = deal(rows, loop.world.rank, loop.world.size)
    weight = 1.0 if loop.world.rank < len(rows) else 0.0
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
