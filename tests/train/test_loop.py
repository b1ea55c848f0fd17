"""The loop on an objective that it has never heard of."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import StepLine
from cpuft.train.checkpoint.timing import Checkpoints, Request
from cpuft.train.control_messages import ControlMessages
from cpuft.train.data.archive import Prepared, Tokens
from cpuft.train.data.order import Indices, plan_updates
from cpuft.train.evaluate import KeptPredictions, evaluate
from cpuft.train.loop import train
from cpuft.train.objective.base import Batch, Objective, Predictions
from cpuft.train.passes import Clock
from cpuft.train.ranks import checksum_parameters
from cpuft.train.reporter import Progress, RunReporter
from cpuft.train.setup import TrainingSetup
from cpuft.train.training import train_and_evaluate
from tests.train.tokens import make_tokens

pytestmark = pytest.mark.usefixtures("alone", "one_thread")
CONFIG = TrainConfig(fast_path=False, learning_rate=0.1, max_steps=6, batch_size=4, eval_batch_size=3, weight_decay=0.1)

ALONE = World(0, 1, 0, 1)


class Weights(torch.nn.Module):
    """A number for each of 20 words; a row's is the sum of its words'."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Parameter(torch.zeros(20))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (self.words[input_ids] * attention_mask).sum(1)


class Weighing(Objective):
    """How heavy is a row?"""

    label_type = torch.float32

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        losses: torch.Tensor = (model(**batch.inputs) - batch.labels).abs()
        return losses

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        answers: Predictions = model(**batch.inputs)[:, None].numpy()
        return answers

    def compute_metrics(self, predictions: Predictions, tokens: Tokens) -> dict[str, float]:
        return {"error": float(np.abs(predictions[:, 0] - tokens.labels).mean())}


class ByWord(Weighing):
    """The same, and long rows count for more."""

    def count_terms(self, tokens: Tokens, rows: Indices, epoch: int = -1) -> float:
        return float(tokens.lengths[rows].sum())


class Light(Weighing):
    """The same with the weight 0.02, as a frequent class has: four rows are 0.08 terms."""

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return super().losses(model, batch) * 0.02

    def count_terms(self, tokens: Tokens, rows: Indices, epoch: int = -1) -> float:
        return 0.02 * len(rows)


def make_loop(
    config: TrainConfig,
    heaviest: float = 2.0,
    world: World = ALONE,
    apart: bool = False,
    objective: type[Objective] = Weighing,
) -> TrainingSetup:
    lengths = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 9]
    tokens = replace(make_tokens(lengths, types=False), labels=np.linspace(1, heaviest, 11).astype(np.float32))
    prepared = Prepared((), (), "", 0, tokens, {"": tokens, "_again": tokens})
    return TrainingSetup(Weights(), objective((), (), 0, 0), config, prepared, "fp32", world, apart)


def losses(lines: list[StepLine]) -> list[float]:
    return [line.loss for line in lines]


def test_rows_are_measured_in_their_order() -> None:
    loop = make_loop(CONFIG)
    model, tokens = loop.model, loop.prepared.train
    assert isinstance(model, Weights)
    before = evaluate(loop, 0)
    with torch.no_grad():
        # Row i holds the word i + 1 so many times.
        model.words[1:12] = torch.from_numpy(tokens.labels / tokens.lengths.astype(np.float32))
    after = evaluate(loop, 6)
    assert before.metrics == pytest.approx({"error": 1.5, "error_again": 1.5})
    assert after.metrics == pytest.approx({"error": 0.0, "error_again": 0.0}, abs=1e-6)
    assert (after.step, after.examples) == (6, 22)


def test_the_first_timed_step_does_not_pay_for_what_the_first_pass_takes() -> None:
    class Compiling(Weighing):
        passes = 0

        def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            self.passes += 1
            time.sleep(3.0 if self.passes == 1 else 0.0)
            return super().losses(model, batch)

    loop = make_loop(CONFIG, objective=Compiling)
    assert next(iter(train(loop))).step_seconds < 2.5


def test_ranks_are_compared_after_the_first_updates_and_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def note(model: torch.nn.Module, when: str) -> tuple[str, str]:
        found.append(when)
        return "", ""

    monkeypatch.setattr("cpuft.train.ranks.compare_parameters", note)
    monkeypatch.setattr("cpuft.train.training.compare_parameters", note)
    averaged, short = replace(CONFIG, sync_every=2), replace(CONFIG, max_steps=2)
    for config, done in ((CONFIG, 0), (CONFIG, 1), (averaged, 0), (short, 0)):
        loop = make_loop(config)
        train_and_evaluate(loop, RunReporter(Progress("lines", 1)), Checkpoints(loop.exchange), done)
    last = "after the last step"
    assert found == ["after update 2", last, "after update 3", last, last, last]


@pytest.mark.parametrize("max_grad_norm", [1.0, 1e-8])
def test_updates_are_those_of_the_recipe_by_hand(max_grad_norm: float) -> None:
    loop, model = make_loop(replace(CONFIG, max_grad_norm=max_grad_norm)), Weights()
    tokens = loop.prepared.train
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.0)
    wanted = []
    for number, (_, rows) in enumerate(plan_updates(tokens, 4, CONFIG.seed, 6, grouped=True)):
        loss = loop.objective.losses(model, loop.objective.make_batch(tokens, rows)).mean()
        optimizer.param_groups[0]["lr"] = 0.1 * (6 - number) / 6
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        wanted.append(float(loss.detach()))
    lines = list(train(loop))
    assert losses(lines) == pytest.approx(wanted, abs=1e-6)
    # Eleven rows are two updates of four and one of three; the rate would be 0 after the last.
    assert sorted(line.samples for line in lines) == [3, 3, 4, 4, 4, 4]
    assert sum(line.tokens for line in lines) == 2 * 44
    assert [line.learning_rate for line in lines] == pytest.approx([0.1 * left / 6 for left in (6, 5, 4, 3, 2, 1)])


def test_an_update_is_the_same_in_one_pass_and_in_two() -> None:
    whole = losses(list(train(make_loop(CONFIG))))
    parts = losses(list(train(make_loop(replace(CONFIG, batch_size=2, gradient_accumulation=2)))))
    assert parts == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("parts", [{}, {"batch_size": 2, "gradient_accumulation": 2}])
def test_an_update_s_loss_is_the_mean_over_all_its_terms(parts: dict[str, Any]) -> None:
    found = []
    for objective in (Weighing, ByWord):
        loop = make_loop(replace(CONFIG, max_steps=1, max_grad_norm=0.0, **parts), objective=objective)
        (line,) = train(loop)
        (state,) = loop.optimizer.state.values()
        found.append((line, state["exp_avg"]))
    (by_row, row_gradients), (by_word, word_gradients) = found
    factor = by_row.samples / by_row.tokens
    assert factor < 0.5
    assert by_word.loss == pytest.approx(by_row.loss * factor)
    assert torch.allclose(word_gradients, row_gradients * factor)
    assert torch.count_nonzero(row_gradients) > 1


def test_terms_that_weigh_less_than_one_together_have_a_whole_mean() -> None:
    found = []
    for objective in (Weighing, Light):
        loop = make_loop(replace(CONFIG, max_steps=1, max_grad_norm=0.0), objective=objective)
        (line,) = train(loop)
        (state,) = loop.optimizer.state.values()
        found.append((line.loss, state["exp_avg"]))
    (loss, gradients), (light_loss, light_gradients) = found
    assert light_loss == pytest.approx(loss)
    assert torch.allclose(light_gradients, gradients)


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    with pytest.raises(CpuftError, match=r"the loss is inf at update 1, .* diverged at learning rate .*: lower"):
        list(train(make_loop(CONFIG, heaviest=3e38)))


def test_a_rank_apart_trains_on_its_share_alone() -> None:
    lines = list(train(make_loop(CONFIG, world=World(1, 2, 1, 2), apart=True)))
    # Eleven rows are an update of eight and one of three; this rank's are every second of them.
    assert sorted(line.samples for line in lines) == [1, 1, 1, 4, 4, 4]
    assert [line.compute_seconds for line in lines] == [[]] * 6
    assert losses(lines)[-1] < losses(lines)[0]


def test_steps_tell_what_each_rank_computed() -> None:
    for line in train(make_loop(CONFIG)):
        (seconds,) = line.compute_seconds
        phases = line.data_seconds + line.forward_seconds + line.backward_seconds + line.update_seconds
        assert seconds == pytest.approx(phases)
        assert 0 < seconds <= line.step_seconds


class ScriptedCheckpoints(Checkpoints):
    """Makes the requests of a test after each update, and records what the loop does about them."""

    def __init__(self, loop: TrainingSetup, requests: dict[int, Request]) -> None:
        super().__init__(loop.exchange)
        self.requests, self.update, self.done = requests, 0, list[str]()

    def find_request(self) -> Request:
        self.update += 1
        return self.requests.get(self.update, Request.NOTHING)

    def write(self, update: int, is_best: bool = False) -> None:
        self.done.append(f"write {update}")

    def write_and_stop(self, update: int, updates: int) -> None:
        self.done.append(f"stop {update} of {updates}")


class BestCheckpoints(ScriptedCheckpoints):
    """Keeps the weights of the best evaluation in memory."""

    def __init__(self, loop: TrainingSetup) -> None:
        super().__init__(loop, {})
        self.model, self.best = loop.model, dict[str, torch.Tensor]()

    def write(self, update: int, is_best: bool = False) -> None:
        self.best = copy.deepcopy(self.model.state_dict())

    def restore_best(self, update: int, world: World) -> bool:
        self.model.load_state_dict(self.best)
        return True


def test_the_checksum_is_that_of_the_weights_of_the_best_evaluation() -> None:
    loop = make_loop(replace(CONFIG, save_best=True, eval_every="1"))
    loop.best_metric = "error"  # more is better by this name, so the first evaluation stays the best
    result = train_and_evaluate(loop, RunReporter(Progress("lines", 1)), BestCheckpoints(loop))
    assert result.saved_step == 1
    assert result.checksum == checksum_parameters(loop.model)


class Listing(Weighing):
    """The same, and lists its predictions."""

    def list_predictions(self, predictions: Predictions, tokens: Tokens) -> dict[str, Any]:
        return {"prediction": predictions[:, 0].tolist()}


def predict_now(loop: TrainingSetup) -> list[float]:
    """What the model predicts with the weights that it has."""
    kept = KeptPredictions()
    evaluate(loop, 0, kept)
    found: list[float] = kept.splits[""]["prediction"]
    return found


@pytest.mark.parametrize("best", ["first", "of an earlier start", "last"])
def test_predictions_are_those_of_the_saved_weights(best: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(CONFIG, save_best=True, eval_every="2")
    loop = make_loop(config, objective=Listing)
    loop.prepared = replace(loop.prepared, rows="abc")
    loop.best_metric = "error"  # more is better by this name, so the first evaluation stays the best
    reporter, checkpoints, done = RunReporter(Progress("lines", 0)), BestCheckpoints(loop), 0
    if best == "last":
        loop.config = replace(config, save_best=False)
    if best == "of an earlier start":
        with torch.no_grad():
            next(loop.model.parameters()).fill_(5.0)
        reporter.earlier_evaluations = [evaluate(loop, 2)]
        checkpoints.write(2, is_best=True)
        with torch.no_grad():
            next(loop.model.parameters()).fill_(0.0)
        done = 2
    result = train_and_evaluate(loop, reporter, checkpoints, done)
    assert result.predictions
    assert result.evaluation
    assert result.predictions.splits[""]["prediction"] == predict_now(loop)
    assert result.evaluation.metrics == evaluate(loop, 0).metrics
    assert (result.evaluation.step, result.saved_step) == ((6, 0) if best == "last" else (2, 2))
    # Only weights from before the run was resumed are evaluated again.
    assert capsys.readouterr().err.count("evaluating") == (1 if best == "last" else 2)


def test_a_resumed_run_that_had_stopped_early_predicts_again() -> None:
    loop = make_loop(replace(CONFIG, early_stopping=1, eval_every="2"), objective=Listing)
    loop.prepared = replace(loop.prepared, rows="abc")
    loop.best_metric = "error"
    reporter = RunReporter(Progress("lines", 1))
    reporter.earlier_evaluations = [replace(evaluate(loop, step), step=step) for step in (2, 4)]
    result = train_and_evaluate(loop, reporter, Checkpoints(loop.exchange), 4)
    assert result.steps == []
    assert result.predictions
    assert result.predictions.splits["_again"]["prediction"] == predict_now(loop)


@pytest.mark.parametrize(
    "requests, done",
    [
        ({2: Request.CHECKPOINT, 4: Request.STOP}, ["write 2", "stop 4 of 6"]),
        ({6: Request.STOP}, []),
    ],
)
def test_the_loop_carries_out_requests_between_updates_and_not_after_the_last(
    requests: dict[int, Request], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(CONFIG)
    checkpoints, waited = ScriptedCheckpoints(loop, requests), list[int]()
    monkeypatch.setattr(loop.exchange, "finish_messages", lambda: waited.append(checkpoints.update))
    assert [line.step for line in train(loop, checkpoints)] == [1, 2, 3, 4, 5, 6]
    assert checkpoints.done == done
    # No message is under way then, nor when the ranks' parameters are compared after update 2, nor at the end.
    assert waited == sorted({*(int(one.split()[1]) for one in done), 2, 5})


def test_no_message_is_under_way_before_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, waited = make_loop(replace(CONFIG, eval_every="2")), list[int]()
    checkpoints = ScriptedCheckpoints(loop, {})
    monkeypatch.setattr(loop.exchange, "finish_messages", lambda: waited.append(checkpoints.update))
    assert len(list(train(loop, checkpoints))) == 6
    assert waited == [2, 4, 5]  # at the last update, the sixth, nobody is asked for requests


def make_update(update: int, loss: float = 1.0, seconds: float = 0.0) -> StepLine:
    return replace(Clock().make_line(update, 0.1, loss, 1, 3, 0.0), step_seconds=seconds)


class OtherRank:
    """A second rank, whose numbers are those of this one: it reads messages when this rank waits for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints, done: int = 0) -> None:
        monkeypatch.setattr("cpuft.train.control_messages.gather_numbers", self.gather)
        loop = make_loop(CONFIG)
        loop.world = World(0, 2, 0, 2)
        self.control, self.requests = ControlMessages(loop, checkpoints, done), Request.NOTHING
        self.sent = list[int]()
        """Number of updates of each message."""

    def gather(self, numbers: Sequence[float]) -> Callable[[], torch.Tensor]:
        self.sent.append(len(numbers) // 6)
        other = [self.requests, *numbers[1:]]
        return lambda: torch.tensor([numbers, other], dtype=torch.float64)

    def update(self, own: StepLine, is_pause: bool = False, may_save: bool = True) -> tuple[Request, list[int]]:
        due = self.control.find_due(may_save)
        self.control.add(own, 1.0, is_pause or bool(due))
        return due, [line.step for line in self.control.take_lines()]


def test_messages_are_sent_about_once_per_second_and_read_in_the_next_update(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = OtherRank(monkeypatch, Checkpoints(make_loop(CONFIG).exchange), done=4)
    lines = [pair.update(make_update(update, seconds=0.4))[1] for update in range(5, 12)]
    # After update 5, two updates later, and so on.
    assert (lines, pair.sent) == ([[], [5], [], [6, 7], [], [8, 9], []], [1, 2, 2, 2])
    assert pair.update(make_update(12, seconds=5.0), is_pause=True)[1] == [10, 11, 12]
    assert [pair.update(make_update(update, seconds=5.0))[1] for update in (13, 14)] == [[], [13]]


def test_all_ranks_carry_out_a_request_after_the_update_in_which_they_have_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing, checkpoint, stop = Request.NOTHING, Request.CHECKPOINT, Request.STOP
    loop = make_loop(CONFIG)
    pair = OtherRank(monkeypatch, ScriptedCheckpoints(loop, {1: checkpoint}))
    found = [pair.update(make_update(update, seconds=1.0)) for update in (1, 2, 3)]
    # A request that is carried out is not sent again, and all lines are complete before that.
    assert found == [(nothing, []), (checkpoint, [1, 2]), (nothing, [])]
    # A checkpoint waits for an average of parameters, and a stop does not.
    pair = OtherRank(monkeypatch, ScriptedCheckpoints(loop, {1: checkpoint, 2: checkpoint}))
    found = [pair.update(make_update(update, seconds=1.0), may_save=update == 3) for update in (1, 2, 3)]
    assert [due for due, _ in found] == [nothing, nothing, checkpoint]
    pair = OtherRank(monkeypatch, ScriptedCheckpoints(loop, {}))
    pair.requests = stop
    assert [pair.update(make_update(update, seconds=1.0), may_save=False)[0] for update in (1, 2)] == [nothing, stop]


def test_the_lines_before_a_loss_that_is_no_number_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = OtherRank(monkeypatch, Checkpoints(make_loop(CONFIG).exchange))
    pair.update(make_update(1, seconds=0.1))
    pair.update(make_update(2, seconds=0.1))
    for update in (3, 4):
        pair.control.add(make_update(update, math.inf if update == 4 else 1.0, 0.1), 1.0, is_pause=update == 4)
    lines = pair.control.take_lines()
    assert [next(lines).step, next(lines).step] == [2, 3]
    with pytest.raises(CpuftError, match="the loss is inf at update 4"):
        next(lines)


def test_requests_of_several_ranks_are_told_apart_in_their_sum() -> None:
    nothing, checkpoint, stop = Request.NOTHING, Request.CHECKPOINT, Request.STOP
    for ranks, wanted in (
        ([nothing, nothing], nothing),
        ([checkpoint, nothing], checkpoint),
        ([nothing, stop], stop),
        ([checkpoint, stop], stop),
        ([stop, stop], stop),
    ):
        assert Request.merge(sum(ranks)) == wanted
