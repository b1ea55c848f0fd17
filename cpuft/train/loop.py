"""The training loop: forward and backward passes, exchange, update, evaluation, checkpoint and stop, in this order.

`train_and_evaluate` is a whole training, `train` its updates. `setup.py` makes what they need. The exchange
(`exchange/base.py`) decides how ranks train as one: most send gradients in every update, and with --sync-every N ranks
update their own parameters and average them every N updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from cpuft.comm import take_traffic
from cpuft.record import EvaluationLine, StepLine
from cpuft.tasks import EMBEDDING_KINDS
from cpuft.train.checkpoint.policy import Checkpoints, Requests, TrainingInterrupted
from cpuft.train.control_messages import ControlMessages
from cpuft.train.data.order import Indices, plan_updates, select_for_rank
from cpuft.train.evaluate import KeptPredictions, evaluate, find_best, should_stop_early
from cpuft.train.optimizer import RATE_FACTOR, count_warm_up_updates, learning_rate_factor, plan_averages
from cpuft.train.passes import Clock
from cpuft.train.ranks import compare_parameters, gather, gather_numbers, prove_equal_parameters
from cpuft.train.reporter import RunReporter, TrainingResult, average_phases, merge_steps
from cpuft.train.setup import TrainingSetup

_EARLY_CHECKS = (2, 20)
"""Updates of this start after which the ranks' parameters are compared. What makes parameters differ mostly does so at
once, and such a run should not go on for hours. With a warm-up, the first update's learning rate is 0."""


def train_and_evaluate(
    setup: TrainingSetup, reporter: RunReporter, checkpoints: Checkpoints, done: int = 0
) -> TrainingResult:
    """Train all ranks as one job after `done` updates, evaluate the model, and record everything. Collective.

    Steps and metrics are shown and recorded as they come. The result has all steps of the run, also of those before it
    was resumed, and the model is that of the best evaluation with --save-best.

    Raises TrainingInterrupted: the run was asked to stop, and a checkpoint was written. Raises CpuftError: the loss is
    not finite, or the ranks' parameters differ after an update of `_EARLY_CHECKS`. If they differ only at the end, the
    result says so, because the model can be saved all the same.
    """
    config, exchange, updates = setup.config, setup.exchange, setup.updates
    steps, evaluations = list[StepLine](), list(reporter.earlier_evaluations)
    stops = partial(should_stop_early, evaluations, setup.best_metric, config.early_stopping)
    try:
        # A resumed run may have stopped early already.
        for line in () if stops() else train(setup, checkpoints, done):
            steps.append(line)
            reporter.add_step(line, updates)
            if _compares_parameters_after(setup, line.step, done):
                with exchange.full_weights():
                    prove_equal_parameters(setup.model, f"after update {line.step}")
                take_traffic()  # the bytes of this check belong to no step
            if _evaluates_after(setup, line.step):
                with exchange.common_weights():
                    evaluations.append(evaluate(setup, line.step))
                    reporter.add(evaluations[-1])
                    reporter.progress.show_evaluation(evaluations[-1], setup.best_metric)
                    if config.save_best and find_best(evaluations, setup.best_metric) is evaluations[-1]:
                        checkpoints.write(line.step, is_best=True)
                take_traffic()
                if stops():
                    exchange.synchronize_parameters(is_due=False, wait=True)
                    break
    except TrainingInterrupted as interruption:
        reporter.add(interruption.line)
        dist.barrier()  # mpirun ends all ranks when the first one ends
        raise
    last = steps[-1].step if steps else done
    checkpoints.write_final(last)
    with exchange.full_weights():
        checksum, difference = compare_parameters(setup.model, "after the last step")
    # The last update may have been evaluated before it ended the training early. With --sync-every, the parameters of
    # that evaluation were the exact mean, and those of now have been rounded to be sent.
    predictions, predicted_step = KeptPredictions(), -1
    if not evaluations or evaluations[-1].step != last or config.sync_every > 1:
        _show_evaluation_start(setup, reporter)
        evaluations.append(evaluate(setup, last, predictions))
        reporter.add(evaluations[-1])
        predicted_step = last
    saved = restore_best(setup, reporter, checkpoints, evaluations) if config.save_best else evaluations[-1]
    if saved is not evaluations[-1]:
        with exchange.full_weights():
            checksum, difference = compare_parameters(
                setup.model, "after the weights of the best evaluation were restored"
            )
    if setup.prepared.rows and saved.step != predicted_step:
        predictions = KeptPredictions()
        _show_evaluation_start(setup, reporter)
        evaluations.append(evaluate(setup, saved.step, predictions))
        if evaluations[-1].metrics != saved.metrics:  # on another number of ranks, products are rounded differently
            saved = evaluations[-1]
            reporter.add(saved)
    reporter.progress.show_metrics(saved)
    return TrainingResult(
        steps=reporter.earlier_steps + steps,
        phases=gather(average_phases(steps)),
        checksum=checksum,
        evaluation=saved,
        evaluation_seconds=sum(line.seconds for line in evaluations),
        saved_step=0 if saved.step == last else saved.step,
        difference=difference,
        predictions=predictions,
    )


def _show_evaluation_start(setup: TrainingSetup, reporter: RunReporter) -> None:
    reporter.progress.show_evaluation_start(sum(len(tokens) for tokens in setup.prepared.validation.values()))


def _evaluates_after(setup: TrainingSetup, update: int) -> bool:
    """Return whether the model is evaluated after this update; after the last, the evaluation at the end follows."""
    interval = setup.evaluation_interval
    return interval > 0 and update % interval == 0 and update < setup.updates


def _compares_parameters_after(setup: TrainingSetup, update: int, done: int) -> bool:
    """Return whether the ranks' parameters are compared after an update; `done` updates were before this start."""
    # With --sync-every above 1 they differ on purpose; after the last update, the comparison at the end follows.
    return update - done in _EARLY_CHECKS and setup.config.sync_every == 1 and update < setup.updates


def restore_best(
    setup: TrainingSetup, reporter: RunReporter, checkpoints: Checkpoints, evaluations: list[EvaluationLine]
) -> EvaluationLine:
    """Give the model the weights of the best of the evaluations, at least one, if that is not the last. Collective.

    Returns the evaluation of the weights that the model has then: the last one, with a warning, if the best are on no
    disk.
    """
    last, best = evaluations[-1], find_best(evaluations, setup.best_metric)
    if best is None or best.step == last.step:
        return last
    reporter.progress.show_evaluation(last, setup.best_metric)
    if not checkpoints.restore_best(best.step, setup.world):
        reporter.progress.show(
            f"warning: the weights of the best evaluation, after update {best.step}, are on no disk, so the model has "
            f"those of the last update: free some space, or see whether the disks of the hosts can be written"
        )
        return last
    reporter.progress.show(f"the weights of the best evaluation, after update {best.step}, are saved")
    return best


def train_independently(
    setup: TrainingSetup, reporter: RunReporter, checkpoints: Checkpoints, done: int = 0
) -> TrainingResult:
    """Train each rank for itself, all at the same time, and record the merged steps at the end. Collective. Raises
    TrainingInterrupted: a rank was asked to stop; CpuftError: a loss is not finite.
    """
    own: list[StepLine] = []
    for line in train(setup, checkpoints, done):
        own.append(line)
        reporter.progress.show_step(line, setup.updates)
    steps = merge_steps(gather(own))
    for line in steps:
        reporter.add(line)
    return TrainingResult(steps, gather(average_phases(own)), "")


def train(setup: TrainingSetup, checkpoints: Checkpoints | None = None, done: int = 0) -> Iterator[StepLine]:
    """Run the updates that follow the first `done` ones; yield the record's line of each. Collective.

    Before the first update, one forward and one backward pass warm up. With several ranks, lines come some updates
    later, about once per second (`ControlMessages`), but those until an evaluation, a comparison, a checkpoint or the
    end come before it. The caller evaluates and compares when it gets the line of such an update.

    Without `checkpoints`, none is written. Raises TrainingInterrupted: a rank was asked to stop, and a checkpoint was
    written; CpuftError: a loss is not finite.
    """
    config, world, exchange, objective = setup.config, setup.world, setup.exchange, setup.objective
    tokens, checkpoints = setup.prepared.train, checkpoints or Checkpoints(exchange)
    exchange.forward_model.train()
    _run_untimed_pass(setup, done)
    take_traffic()  # the bytes sent until now belong to no step
    averaging_updates, control = plan_averages(config, setup.updates), ControlMessages(setup, checkpoints, done)
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

        # Wait for the mean of the gradients, and exchange what is left: rows of the word embedding by token ids.
        waited = exchange.average_gradients(partial(list_tokens_of_ranks, setup, examples))
        clock.lap("communication")

        # Update, and exchange of parameters where the exchange sends those. The norm that is clipped is that of the
        # whole mean gradient; with --sync-every, of this rank's own.
        exchange.clip_gradients()
        rate = _set_learning_rate(setup, update)
        setup.optimizer.step()
        exchange.clear_gradients()
        clock.lap("update")
        # With --sync-every N, a checkpoint (not a stop) waits for the next average, but for at most N updates.
        may_save = update in averaging_updates or update % config.sync_every == 0
        # What a rank has asked for (a signal, the time of a checkpoint), agreed on for this update in earlier messages.
        due = Requests() if is_last else control.find_due(may_save)  # after the last update the run saves anyway
        exchange.synchronize_parameters(is_due=update in averaging_updates, wait=due.any or is_last)
        is_pause = (
            due.any or is_last or _evaluates_after(setup, update) or _compares_parameters_after(setup, update, done)
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

        # Checkpoint and stop, on all ranks after the same update.
        if due.stop:
            checkpoints.write_and_stop(update, setup.updates)
        elif due.checkpoint:
            checkpoints.write(update)


def _count_terms_of_ranks(setup: TrainingSetup, examples: Indices, epoch: int, own: float) -> Callable[[], float]:
    """Return a function that returns the number of terms of all examples of an update. Collective.

    Where counting takes long (`Objective.counts_by_drawing`), ranks add up their `own` numbers, in the background.
    """
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
    """Yield the epoch and the examples of every update, from the first one on."""
    config, tokens = setup.config, setup.prepared.train
    # Texts of similar length as negatives would change what an embedding model learns.
    is_grouped = config.padding == "dynamic" and setup.prepared.kind not in EMBEDDING_KINDS
    return plan_updates(tokens, setup.global_batch, config.seed, setup.updates, is_grouped)


def _run_untimed_pass(setup: TrainingSetup, done: int) -> None:
    """Run one forward and one backward pass on the examples of the first update, and drop their gradients. Collective.

    This compiles the C++ kernels (and the model with --compile) and fills caches, which may take seconds, before the
    first timed step. The gradients are multiplied by 0 and never sent, so parameters and later results do not change.
    """
    world = setup.world
    for _, examples in islice(_plan_all_updates(setup), done, done + 1):
        if setup.exchange.allows_warm_up:
            setup.objective.plan_passes(setup, examples, 0).functions[0](0.0, False, Clock())
            setup.exchange.clear_gradients()
        if world.size > 1:
            dist.barrier()  # without it, the first step of fast ranks would include waiting for the slowest one
