"""A whole training: the updates, with evaluations, comparisons and checkpoints between them, and the best weights."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist

from cpuft.comm import take_traffic
from cpuft.record import EvaluationLine, StepLine
from cpuft.train.checkpoint.timing import Checkpoints, TrainingInterrupted
from cpuft.train.early_stopping import find_best, should_stop_early
from cpuft.train.evaluate import KeptPredictions, evaluate
from cpuft.train.loop import compares_parameters_after, evaluates_after, train
from cpuft.train.ranks import compare_parameters, gather, prove_equal_parameters
from cpuft.train.reporter import RunReporter, TrainingResult, average_phases, merge_steps
from cpuft.train.setup import TrainingSetup


def train_and_evaluate(
    setup: TrainingSetup, reporter: RunReporter, checkpoints: Checkpoints, done: int = 0
) -> TrainingResult:
    """Train all ranks as one job after `done` updates, evaluate the model, and record everything. Collective.

    The result has all steps of the run, also of those before it was resumed, and the model is that of the best
    evaluation with --save-best. Raises TrainingInterrupted: the run was asked to stop, and a checkpoint was written.
    Raises CpuftError: the loss is not finite, or the ranks' parameters differ after update 2 or 20 of this start. If
    they differ only at the end, the result says so, because the model can be saved all the same.
    """
    config, exchange, updates = setup.config, setup.exchange, setup.updates
    steps, evaluations = list[StepLine](), list(reporter.earlier_evaluations)
    stops = partial(should_stop_early, evaluations, setup.best_metric, config.early_stopping)
    try:
        # A resumed run may have stopped early already.
        for line in () if stops() else train(setup, checkpoints, done):
            steps.append(line)
            reporter.progress.show_step(line, updates)
            reporter.add(line)
            if compares_parameters_after(setup, line.step, done):
                with exchange.full_weights():
                    prove_equal_parameters(setup.model, f"after update {line.step}")
                take_traffic()  # the bytes of this check belong to no step
            if evaluates_after(setup, line.step):
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
    predictions = KeptPredictions()
    is_predicted = not evaluations or evaluations[-1].step != last or config.sync_every > 1
    if is_predicted:
        evaluations.append(_evaluate_at_end(setup, reporter, last, predictions))
        reporter.add(evaluations[-1])
    saved = _restore_best(setup, reporter, checkpoints, evaluations) if config.save_best else evaluations[-1]
    if saved is not evaluations[-1]:
        with exchange.full_weights():
            checksum, difference = compare_parameters(setup.model, "after the best weights were restored")
    if setup.prepared.rows and not (is_predicted and saved.step == last):
        predictions = KeptPredictions()
        evaluations.append(_evaluate_at_end(setup, reporter, saved.step, predictions))
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


def _evaluate_at_end(
    setup: TrainingSetup, reporter: RunReporter, step: int, predictions: KeptPredictions
) -> EvaluationLine:
    reporter.progress.show_evaluation_start(sum(map(len, setup.prepared.validation.values())))
    return evaluate(setup, step, predictions)


def _restore_best(
    setup: TrainingSetup, reporter: RunReporter, checkpoints: Checkpoints, evaluations: list[EvaluationLine]
) -> EvaluationLine:
    """Give the model the weights of the best evaluation and return that evaluation; if it is the last one, or its
    weights are on no disk, which is warned of, change nothing and return the last one. Collective.
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
