"""The updates of a training: forward and backward passes, exchange, update, control message and stop, in this order.

`setup.py` makes what they need, and `training.py` evaluates between them. The exchange (`exchange/base.py`) decides how
ranks train as one: most send gradients in every update, and with --sync-every N ranks update their own parameters and
average them every N updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from cpuft.comm import take_traffic
from cpuft.record import StepLine
from cpuft.train.checkpoint.timing import Checkpoints, Request
from cpuft.train.control_messages import ControlMessages
from cpuft.train.data.order import Indices, is_grouped, plan_updates, select_for_rank
from cpuft.train.optimizer import RATE_FACTOR, count_warm_up_updates, learning_rate_factor
from cpuft.train.passes import Clock
from cpuft.train.ranks import gather_numbers
from cpuft.train.setup import TrainingSetup

_EARLY_CHECKS = (2, 20)
"""Updates of this start after which the ranks' parameters are compared, as what makes them differ mostly does so at
once. With a warm-up, the first update's learning rate is 0."""


def train(setup: TrainingSetup, checkpoints: Checkpoints | None = None, done: int = 0) -> Iterator[StepLine]:
    """Run the updates that follow the first `done` ones; yield the record's line of each. Collective.

    A pass before them warms up. With several ranks, lines come some updates later (`ControlMessages`), but those until
    an evaluation, a comparison, a checkpoint or the end come before it. The caller evaluates and compares when it gets
    the line of such an update. Without `checkpoints`, none is written. Raises TrainingInterrupted: a rank was asked to
    stop, and a checkpoint was written; CpuftError: a loss is not finite.
    """
    config, world, exchange, objective = setup.config, setup.world, setup.exchange, setup.objective
    tokens, checkpoints = setup.prepared.train, checkpoints or Checkpoints(exchange)
    exchange.forward_model.train()
    _run_untimed_pass(setup, done)
    take_traffic()  # the bytes sent until now belong to no step
    control = ControlMessages(setup, checkpoints, done)
    for update, (epoch, examples) in islice(enumerate(_plan_all_updates(setup), start=1), done, None):
        is_last = update == setup.updates
        for observer in setup.observers:
            observer.begin_update(setup)

        # This rank's examples. One that has none of its own takes part with others' at weight 0.
        clock = Clock()
        _seed_update(config.seed, update, world.rank)
        share = select_for_rank(examples, world.rank, world.size)
        weight = 1.0 if world.rank < len(examples) else 0.0
        own_terms = weight * objective.count_terms(tokens, share, epoch)
        find_terms = _count_terms_of_ranks(setup, examples, epoch, own_terms)
        passes = objective.plan_passes(setup, examples, epoch)
        clock.lap("data")
        # The losses of an update are divided by the number of their terms (examples, words or masked tokens) on all
        # ranks, or the sum of their class weights.
        terms = find_terms() or 1.0
        clock.lap("communication")

        # Forward and backward passes, several with --gradient-accumulation. In the last one, hooks of the exchange send
        # each bucket of gradients when it is complete. The exchange divides sums by the number of ranks: hence the
        # factor.
        loss = 0.0
        for number, run_pass in enumerate(passes.functions, start=1):
            sends_gradients = number == len(passes.functions)
            loss += weight * run_pass(weight * world.size / terms, sends_gradients, clock)

        # Wait for the mean of the gradients, and exchange what is left: rows of the word embedding by token ids. With
        # powersgd, these are the rows of the update before. With ZeRO-1, a rank gets the mean of its own shards only,
        # and updates only these.
        waited = exchange.average_gradients(partial(list_tokens_of_ranks, setup, examples))
        clock.lap("communication")

        # Update. The norm that is clipped is that of the whole mean gradient; with --sync-every, of this rank's own.
        # Clipping sends, too: with ZeRO-1 the shards' norms are added up. The optimizer's kernel scales the gradients
        # while it reads them.
        exchange.clip_gradients()
        rate = _set_learning_rate(setup, update)
        setup.optimizer.step()
        exchange.clear_gradients()
        clock.lap("update")
        # With --sync-every N, a checkpoint (not a stop) waits for the next average.
        is_averaged = update % config.sync_every == 0
        # What a rank has asked for (a signal, the time of a checkpoint), agreed on for this update in earlier messages.
        # After the last update the run saves anyway.
        due = Request.NOTHING if is_last else control.find_due(may_save=is_averaged)
        # Exchange of parameters: with ZeRO-1 in every update; with --sync-every N, a mean is sent now and applied after
        # N further updates at the latest. Other exchanges do nothing.
        exchange.synchronize_parameters(is_due=is_averaged, wait=bool(due) or is_last)
        is_pause = (
            bool(due) or is_last or evaluates_after(setup, update) or compares_parameters_after(setup, update, done)
        )
        if is_pause:
            exchange.finish_messages()
        clock.lap("communication")

        # Record.
        for observer in setup.observers:
            observer.end_update(clock, waited)
        own = clock.make_line(update, rate, loss, int(weight) * len(share), int(weight) * passes.tokens, waited)
        control.add(own, own_terms, is_pause)
        # Merges the losses of all ranks, and raises CpuftError if one is not finite. The caller compares and evaluates
        # now, before a checkpoint or stop.
        yield from control.take_lines()

        # Checkpoint and stop, on all ranks after the same update: about two seconds and two updates after a Ctrl-C. The
        # state is copied here, and a thread writes it. The best weights were written by the caller, in its evaluation.
        if due == Request.STOP:
            checkpoints.write_and_stop(update, setup.updates)
        elif due:
            checkpoints.write(update)


def evaluates_after(setup: TrainingSetup, update: int) -> bool:
    """Return whether an evaluation while training follows this update; False after the last one."""
    interval = setup.evaluation_interval
    return interval > 0 and update % interval == 0 and update < setup.updates


def compares_parameters_after(setup: TrainingSetup, update: int, done: int) -> bool:
    """Return whether ranks compare parameters after an update: the 2nd and 20th after the `done` ones before this
    start, but not the run's last, and only with --sync-every 1.
    """
    # With --sync-every above 1 they differ on purpose; after the last update, the comparison at the end follows.
    return update - done in _EARLY_CHECKS and setup.config.sync_every == 1 and update < setup.updates


def _count_terms_of_ranks(setup: TrainingSetup, examples: Indices, epoch: int, own: float) -> Callable[[], float]:
    """Return a function that returns the number of terms of all examples of an update, or waits for it. Collective."""
    if setup.objective.counts_by_drawing and setup.world.size > 1 and not setup.independent:
        find_numbers = gather_numbers([own])
        return lambda: float(find_numbers().sum())
    terms = setup.objective.count_terms(setup.prepared.train, examples, epoch)
    return lambda: terms


def list_tokens_of_ranks(setup: TrainingSetup, examples: Indices) -> list[torch.Tensor]:
    """Return all token ids that each rank may look up in an update, in the order of ranks: int64, with repetitions."""
    objective, tokens = setup.objective, setup.prepared.train
    return [objective.list_token_ids(tokens, share) for share in objective.deal_to_ranks(setup, examples)]


def _seed_update(seed: int, update: int, rank: int) -> None:
    """Seed torch's generator, so that dropout masks differ between ranks, and are the same in a resumed run."""
    torch.manual_seed(int(np.random.SeedSequence((seed, update, rank)).generate_state(1, np.uint64)[0]))


def _set_learning_rate(setup: TrainingSetup, update: int) -> float:
    """Set the optimizer's learning rate for an update, counted from 1, and return that of the head."""
    config = setup.config
    warmup = count_warm_up_updates(setup.updates, config.warmup_ratio, config.warmup_steps)
    rate = config.learning_rate * learning_rate_factor(update - 1, setup.updates, warmup, config.lr_schedule)
    for group in setup.optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)
    return rate


def _plan_all_updates(setup: TrainingSetup) -> Iterator[tuple[int, Indices]]:
    prepared = setup.prepared
    return plan_updates(prepared.train, setup.global_batch, setup.config.seed, setup.updates, is_grouped(prepared.kind))


def _run_untimed_pass(setup: TrainingSetup, done: int) -> None:
    """Run a forward and a backward pass without effect, to compile kernels and fill caches. Collective."""
    world = setup.world
    for _, examples in islice(_plan_all_updates(setup), done, done + 1):
        if setup.exchange.allows_warm_up:
            setup.objective.plan_passes(setup, examples, 0).functions[0](0.0, False, Clock())
            setup.exchange.clear_gradients()
        if world.size > 1:
            dist.barrier()  # without it, the first step of fast ranks would include waiting for the slowest one
