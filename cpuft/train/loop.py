"""The training loop: forward, backward with gradients summed over ranks, update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cpuft.comm import take_traffic
from cpuft.comm.compression.embedding_rows import check_lookups
from cpuft.config import COMPRESSIONS_WITH_FEEDBACK, TrainConfig
from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import StepLine
from cpuft.train.data.archive import Prepared
from cpuft.train.data.order import Indices, count_updates, plan_updates, select_for_rank
from cpuft.train.exchange.compression import choose_compression
from cpuft.train.exchange.data_parallel import UNUSED_ATTRIBUTE
from cpuft.train.exchange.table import choose_exchange
from cpuft.train.model import name_model
from cpuft.train.objective.base import Batch, Objective
from cpuft.train.optimizer import learning_rate_factor, make_optimizer
from cpuft.train.precision import autocast

KEEP, LEAVE = 1.0, 2.0
"""What a rank may ask of all; KEEP only the first one does, so that a sum tells which it was."""


class Clock:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("data", "forward", "backward", "update", "communication"), 0.0)
        self.start = self.last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] += now - self.last
        self.last = now

    @property
    def compute_seconds(self) -> float:
        """Of all phases but communication."""
        return sum(self.seconds.values()) - self.seconds["communication"]


class Loop:
    """Everything a step needs, made once."""

    def __init__(
        self,
        model: torch.nn.Module,
        objective: Objective,
        config: TrainConfig,
        prepared: Prepared,
        precision: str,
        world: World,
        apart: bool = False,
        global_batch: int = 0,
        known: str = "",
    ) -> None:
        """`known`: what gradients were found to be sent as, when the run began."""
        self.model, self.objective, self.config, self.prepared = model, objective, config, prepared
        self.precision, self.world, self.apart = precision, world, apart
        self.global_batch = global_batch or config.batch_size * config.gradient_accumulation * world.size
        self.updates = count_updates(len(prepared.train), self.global_batch, config.epochs, config.max_steps)
        try_model(model, objective, config, prepared, precision)
        self.optimizer = make_optimizer(model, config, precision)
        self.gradients, self.rung_reason = "", ""
        if not apart:
            self.gradients, self.rung_reason = choose_compression(
                config, precision, model, objective, prepared, world, known
            )
        config = replace(config, grad_compression=self.gradients or config.grad_compression)
        self.exchange = choose_exchange(config, 1 if apart else world.size)(model, self.optimizer, config, precision)
        self.optimizer = self.exchange.optimizer
        self.done = 0
        """Updates that were made before this start, and are not made again."""
        self.asks: Callable[[], float] = lambda: 0.0
        """Whether this rank wants all to stop after this update: for a moment (KEEP), or for good (LEAVE)."""
        self.asked = 0.0
        """The sum of that over ranks; all know the same."""
        self.rest: Callable[[int, bool], None] = lambda update, leaves: None
        """What is done then, on all ranks after the same update, with the same parameters. To leave, it raises."""


def try_model(
    model: torch.nn.Module, objective: Objective, config: TrainConfig, prepared: Prepared, precision: str
) -> None:
    """Run a first forward pass on two examples of different length, and note what the exchange must know of the model.

    Noted are whether the word embedding is looked up by more than input ids, and which parameters are unused.

    Raises CpuftError: the model cannot compute a padded batch, or not in this precision.
    """
    lengths = prepared.train.lengths[:1000]
    batch = objective.make_batch(prepared.train, np.unique([lengths.argmax(), lengths.argmin()]))
    losses: list[torch.Tensor] = []

    def forward(name: str) -> None:
        with autocast(name):
            losses.append(objective.losses(model, batch))

    was_training = model.training
    model.eval()  # dropout would draw random numbers
    try:
        check_lookups(model, batch.inputs["input_ids"], partial(forward, precision))
        setattr(model, UNUSED_ATTRIBUTE, find_unused(model, losses[-1]))
    except Exception as error:  # models raise whatever their layers raise
        said = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, (CpuftError, MemoryError)) or "allocate memory" in said:
            raise
        what = f"{type(model).__name__} of {name_model(config)} cannot compute a batch of two examples"
        works = False
        with suppress(Exception):
            forward("fp32")
            works = True
        next_step = "add --precision fp32, in which it can" if works else "name another --model"
        raise CpuftError(f"{what}{f' in {precision}' * works} ({said}): {next_step}") from None
    finally:
        model.train(was_training)


def find_unused(model: torch.nn.Module, losses: torch.Tensor) -> tuple[str, ...]:
    """Names of the trained parameters of a model that a forward pass did not use, by the graph of its losses."""
    used, seen, waiting = set[int](), set[Any](), [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        used.add(id(getattr(node, "variable", None)))
        waiting += [one for one, _ in node.next_functions]
    return tuple(name for name, one in model.named_parameters() if one.requires_grad and id(one) not in used)


def warm_up(loop: Loop, rows: Indices) -> None:
    """Run one forward and one backward pass on the rows of the first update, and forget their gradients.

    This compiles the C++ kernels (and the model with --compile) and fills caches before the first timed step.
    Without it, the first step of a run may take seconds longer than that of the run it is compared with. The
    gradients are multiplied by 0 and never sent, so parameters and later results do not change. A collective.
    """
    # DeepSpeed counts every backward pass as a part of an update.
    if loop.config.engine != "deepspeed":
        batch, *_ = _micro_batches(loop, select_for_rank(rows, loop.world.rank, loop.world.size), 0)
        with loop.exchange.micro_batch(last=False):
            _forward_backward(loop, Clock(), batch, 0.0)
        loop.exchange.clear_gradients()
    if loop.world.size > 1:
        dist.barrier()  # else the first step of the ranks that are ready would include waiting for the slowest


def train(loop: Loop) -> Iterator[StepLine]:
    """Run all updates; a line for each. Raises CpuftError: the loss is no finite number."""
    config = loop.config
    loop.exchange.forward_model.train()
    for _, rows in islice(_plan(loop), loop.done, loop.done + 1):
        warm_up(loop, rows)
    take_traffic()  # what was sent while the ranks met is no step's
    # Ranks that train apart learn of all ranks' losses an update later: behind what is sent meanwhile they would wait.
    late = int(config.sync_every > 1)
    unread: list[Callable[[], StepLine]] = []
    for number, (epoch, rows) in islice(enumerate(_plan(loop), start=1), loop.done, None):
        rests = loop.asked if loop.asked >= LEAVE or number % config.sync_every == 0 else 0.0
        unread.append(_update(loop, number, epoch, rows, bool(rests)))
        rests = (rests if late else loop.asked) * (number < loop.updates)
        read_now = len(unread) - late * (not rests)
        yield from (read() for read in unread[:read_now])
        del unread[:read_now]
        if rests:
            loop.rest(number, rests >= LEAVE)
            loop.asked = 0.0
    yield from (read() for read in unread)


def _plan(loop: Loop) -> Iterator[tuple[int, Indices]]:
    """The epoch and the rows of every update, from the first one on."""
    config, rows = loop.config, loop.prepared.train
    return plan_updates(rows, loop.global_batch, config.seed, loop.updates, config.padding == "dynamic")


def _update(loop: Loop, number: int, epoch: int, rows: Indices, rests: bool) -> Callable[[], StepLine]:
    """One update; gives what waits for all ranks' sums and makes the line of them. Where it `rests`, ranks are one."""
    clock, exchange = Clock(), loop.exchange
    count = partial(loop.objective.count_terms, loop.prepared.train, epoch=epoch)
    seed_update(loop.config.seed, number, loop.world.rank)
    share = select_for_rank(rows, loop.world.rank, loop.world.size)
    weight = 1.0 if loop.world.rank < len(rows) else 0.0  # 0 where this rank is only there to keep step
    batches, terms = _micro_batches(loop, share, epoch), max(1.0, count(rows))
    seen = (count(share), len(share), sum(batch.tokens for batch in batches))
    clock.lap("data")
    loss_sum = 0.0
    for batch in batches:
        with exchange.micro_batch(last=batch is batches[-1]):
            loss_sum += weight * _forward_backward(loop, clock, batch, weight * loop.world.size / terms)
    waited = exchange.average_gradients(lambda: loop.objective.list_token_ids(loop.prepared.train, rows))
    clock.lap("communication")
    exchange.clip_gradients()
    rate = set_rate(loop, number)
    loop.optimizer.step()
    exchange.clear_gradients()
    clock.lap("update")
    exchange.synchronize_parameters(number, wait=rests or number == loop.updates)
    own = [loop.asks(), loss_sum, *(weight * counted for counted in seen)]
    totals: Callable[[], list[float]] = (
        (lambda: own) if loop.apart else _add_up(loop.world, [*own, clock.compute_seconds - waited])
    )

    def read() -> list[float]:
        loop.asked, *others = totals()
        return others

    if loop.config.sync_every == 1:
        read()
    clock.lap("communication")
    sent, seconds = take_traffic().nbytes, time.perf_counter() - clock.start
    return lambda: _line(clock, number, rate, read(), waited, sent, seconds)


def settle_messages(loop: Loop) -> None:
    """Let DistributedDataParallel lay out its messages anew, as it does after its first backward pass. Changes nothing.

    By their layout the ranks' gradients are added in one order or another: of three or more the sum's last bits differ.
    """
    sent_as = loop.gradients or loop.config.grad_compression
    # What keeps something back would send this pass's zeros, or have them applied an update late.
    if loop.world.size < 3 or loop.config.sync_every > 1 or sent_as in COMPRESSIONS_WITH_FEEDBACK:
        return
    rows = np.arange(min(loop.world.size, len(loop.prepared.train)))
    batch, *_ = _micro_batches(loop, select_for_rank(rows, loop.world.rank, loop.world.size), 0)
    loop.exchange.forward_model.train()
    with loop.exchange.micro_batch(last=True):
        _forward_backward(loop, Clock(), batch, 0.0)
    loop.exchange.average_gradients(lambda: loop.objective.list_token_ids(loop.prepared.train, rows))
    loop.exchange.clear_gradients()


def seed_update(seed: int, update: int, rank: int) -> None:
    """Ranks share weights, not dropout masks; and a run that was resumed has those that it would have had."""
    torch.manual_seed(int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0]))


def set_rate(loop: Loop, update: int) -> float:
    """Give the optimizer the learning rate of an update, counted from 1."""
    rate = loop.config.learning_rate * learning_rate_factor(update - 1, loop.updates, loop.config.warmup_ratio)
    for group in loop.optimizer.param_groups:
        group["lr"] = rate
    return rate


def _add_up(world: World, own: list[float]) -> Callable[[], list[float]]:
    """Sums over all ranks, but for the last of them: that comes from each rank, in their order. To be waited for."""
    *added, last = own
    totals = torch.tensor([*added, *(last * (rank == world.rank) for rank in range(world.size))], dtype=torch.float64)
    work = dist.all_reduce(totals, async_op=True)

    def read() -> list[float]:
        if work is not None:
            work.wait()
        return [float(total) for total in totals]

    return read


def _micro_batches(loop: Loop, share: Indices, epoch: int) -> list[Batch]:
    """This rank's share of an update, forward pass by forward pass."""
    parts = [share[start : start + loop.config.batch_size] for start in range(0, len(share), loop.config.batch_size)]
    return [loop.objective.make_batch(loop.prepared.train, part, epoch) for part in parts]


def _forward_backward(loop: Loop, clock: Clock, batch: Batch, factor: float) -> float:
    """One forward and one backward pass; the sum of the rows' losses, whose gradient is multiplied by `factor`.

    The exchange averages over ranks: with ranks / terms it is the gradient of the mean over all of the update's terms.
    """
    with autocast(loop.precision):
        losses = loop.objective.losses(loop.exchange.forward_model, batch)
    clock.lap("forward")
    torch.autograd.backward(losses.sum() * factor)
    clock.lap("backward")
    return float(losses.detach().sum())


def _line(
    clock: Clock, number: int, rate: float, totals: list[float], waited: float, sent: int, seconds: float
) -> StepLine:
    loss_sum, terms, rows, tokens, *compute_seconds = totals
    loss = loss_sum / max(terms, 1)
    if not math.isfinite(loss):
        told = f"the loss is {loss} at update {number}, because the training diverged at learning rate {rate:g}"
        raise CpuftError(f"{told}: lower --learning-rate, or look for huge numbers among the data's scores")
    return StepLine(
        step=number,
        loss=loss,
        learning_rate=rate,
        samples=int(rows),
        tokens=int(tokens),
        data_seconds=clock.seconds["data"],
        forward_seconds=clock.seconds["forward"],
        backward_seconds=max(0.0, clock.seconds["backward"] - waited),
        communication_seconds=clock.seconds["communication"] + waited,
        update_seconds=clock.seconds["update"],
        step_seconds=seconds,
        bytes_sent=sent,
        compute_seconds=compute_seconds,
    )
