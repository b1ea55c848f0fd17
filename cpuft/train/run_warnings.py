"""Warnings of a run that does not fail, before it trains and while it trains.

A warning that is wrong makes people ignore those that are right. So losses are compared with `find_chance_loss`,
metrics by their standard errors, and nothing is said where there are too few updates or rows to know.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.record import EvaluationLine, Line, StepLine
from cpuft.tasks import TEXT_KINDS
from cpuft.train.data.archive import Prepared, Tokens, count_classes
from cpuft.train.data.prepare import MAX_UNKNOWN_SHARE
from cpuft.train.data.recipe import LOWER_IS_BETTER, find_class_weights
from cpuft.train.early_stopping import find_best, is_better
from cpuft.train.optimizer import count_warm_up_updates

_HIGH_RATE = 0.1
"""Learning rate above which a run begins with a warning. That of the largest usual recipes is 0.01."""
_USUAL_RATES = (1e-6, 1e-3)
"""Learning rates of AdamW between which nobody can say whether a rate is too low or too high without trying it."""
_REPEATED_SHARE = 0.01
"""Share of the validation rows that may be training rows, too: they change an accuracy by this much at most."""
_LEAST_DISAGREEMENTS = 6
"""Rows that only one of two models has right, if it is always the same model, which show that it is better: by the
exact form of McNemar's test, chance does this in 2 * 0.5**6 = 3 % of the cases, and with 5 rows in 6 %."""
_SMALL_DIFFERENCE = 0.025
"""Difference of two accuracies that many people look for. All sets of GLUE but the smallest, WNLI, can show it."""
_LEAST_WINDOW, _MOST_WINDOW = 20, 500
"""Updates whose losses are looked at together: a twentieth of the run within these bounds."""
_DIVERGED = 2.0
"""How many times as large as at the beginning, and as that of one constant answer, the loss of a diverged run is."""
_MOVED = 0.99
"""Share of the loss of one constant answer above which nothing is learned."""
_PRECISE = 0.05
"""Two standard errors of a mean loss, as a share of it, above which nothing is said of one near that of an answer."""
_FIRST_LOOK, _UNUSUAL_LOOK = 200, 1000
"""Updates after the warm-up in which models begin to learn. Half of a run is looked at if it has at least so many, and
the second number if the learning rate is not a usual one. Shorter runs are looked at when they end."""
_ERRORS_OF_TURN = 2.0
"""Standard errors by which the last two evaluations are worse than the best one if a validation curve has turned."""


def find_early_warnings(config: TrainConfig, prepared: Prepared) -> Iterator[str]:
    """Yield warnings of unknown tokens, repeated or few validation rows, and a learning rate above 0.1."""
    if prepared.unknown_share > MAX_UNKNOWN_SHARE:
        yield (
            f"warning: {prepared.unknown_share:.0%} of the tokens of the training texts are unknown to the tokenizer: "
            f"give one for these texts by --tokenizer, or a --model that was made for them"
        )
    sizes = [len(tokens) for tokens in prepared.validation.values()]
    if prepared.repeated > _REPEATED_SHARE * sum(sizes):
        yield (
            f"warning: {prepared.repeated:,} of {sum(sizes):,} validation rows have the same tokens as a training row, "
            f"so that metrics are better than on new texts: remove these rows from the training or the validation data"
        )
    # No comparison of the same validation rows can show a smaller difference.
    difference = _LEAST_DISAGREEMENTS / max(1, min(sizes))
    if prepared.kind in ("class", "labels") and difference > _SMALL_DIFFERENCE:
        what = f"accuracies that differ by less than {difference:.3f}" if difference < 1 else "two accuracies"
        yield f"warning: with {min(sizes):,} validation rows, {what} cannot be told apart: to compare them, add rows"
    if config.learning_rate > _HIGH_RATE:
        rate = f"--learning-rate {config.learning_rate:g}"
        yield f"warning: {rate} is far above the usual ones, which are from 1e-6 to 0.01: the model will learn nothing"


def find_chance_loss(config: TrainConfig, prepared: Prepared) -> float:
    """Return the smallest mean training loss of one and the same answer for every example or tag; for texts, that of
    equally likely tokens; nan if the loss depends on the other examples of a batch, or no label is known.
    """
    labels = prepared.train.labels
    if prepared.kind in TEXT_KINDS:
        return math.log(max(2, prepared.vocab_size))
    if prepared.kind == "score":
        return float(np.var(labels, dtype=np.float64))
    if prepared.kind in ("labels", "relevance"):
        shares = labels.reshape(len(labels), -1).mean(0, dtype=np.float64)
        return float(_entropies(np.stack([shares, 1 - shares])).mean())
    if prepared.kind not in ("class", "tags"):
        return math.nan
    counts = count_classes(labels, len(prepared.labels))
    if not counts.any():
        return math.nan
    shares = counts / counts.sum()
    weights = np.asarray(find_class_weights(config.class_weights, prepared) or [1.0] * len(shares))
    # With smoothing s, the target of each example is 1 - s for its class, and s / classes for every class.
    smoothed = (1 - config.label_smoothing) * shares + config.label_smoothing / len(shares)
    targets, total = weights * smoothed, float(weights @ smoothed)
    return total * float(_entropies(targets / total)) / float(weights @ shares)


def _entropies(shares: NDArray[np.float64]) -> torch.Tensor:
    """Return the entropies of distributions along axis 0, in nats."""
    logarithms: torch.Tensor = torch.special.entr(torch.from_numpy(shares))
    return logarithms.sum(0)


class RunWatch:
    """Looks at the lines of a run while it trains, and warns of each problem once.

    `updates` are those of the whole run, `global_batch` is the number of examples in an update, and `metric` the one
    that compares evaluations.
    """

    def __init__(self, config: TrainConfig, prepared: Prepared, updates: int, global_batch: int, metric: str) -> None:
        self.config, self.prepared, self._metric = config, prepared, metric
        self._updates_per_epoch = len(prepared.train) / global_batch
        self._chance = find_chance_loss(config, prepared)
        self._window = min(max(_LEAST_WINDOW, updates // 20), _MOST_WINDOW)
        warm_up = count_warm_up_updates(updates, config.warmup_ratio, config.warmup_steps)
        look = (updates - warm_up) // 2
        if _find_rate_fault(config.learning_rate):
            look = min(look, _UNUSUAL_LOOK)
        self._look_at = warm_up + look if look >= _FIRST_LOOK else 0
        """Update after which the loss has to have fallen; 0: only the end tells."""
        self._losses, self._evaluations = list[float](), list[EvaluationLine]()
        self._warned_of_loss = self._warned_of_turn = False

    def add(self, line: Line) -> str:
        """Take note of a line of the record, a step or evaluation; return a warning, of each kind once, else ""."""
        warning = ""
        if isinstance(line, StepLine):
            self._losses.append(line.loss)
            if not self._warned_of_loss:
                warning = self._look_at_losses()
                self._warned_of_loss = bool(warning)
        elif isinstance(line, EvaluationLine):
            self._evaluations.append(line)
            if not self._warned_of_turn:
                warning = self._look_at_evaluations()
                self._warned_of_turn = bool(warning)
        return warning

    def finish(self) -> str:
        """Return a warning that nothing was trained, or of all losses unless `add` has warned of losses; else ""."""
        count = len(self._losses)
        if not count or not self.config.learning_rate:
            given = f"--epochs {self.config.epochs:g}" if not count else "--learning-rate 0"
            return f"warning: nothing was trained, because of {given}: the model has the weights from before the run"
        if self._warned_of_loss:
            return ""
        last = self._losses[-min(max(10, count // 10), self._window) :]
        return self._warn_of_divergence(last) or self._warn_of_chance(self._losses[-max(_LEAST_WINDOW, count // 4) :])

    def _look_at_losses(self) -> str:
        count = len(self._losses)
        if count % self._window == 0 and (warning := self._warn_of_divergence(self._losses[-self._window :])):
            return warning
        return self._warn_of_chance(self._losses[-(self._look_at // 2) :]) if count == self._look_at else ""

    def _warn_of_divergence(self, last: Sequence[float]) -> str:
        """Return a warning if the last losses are far above the first ones; a median, as single losses may be huge."""
        # The first loss may be small because the model was trained before, or by chance.
        share = 1 / 4 if self.prepared.kind in TEXT_KINDS else 1
        usual = share * self._chance if self._chance > 0 else math.log(2)
        first = self._losses[0] if self._chance > 0 else statistics.median(self._losses[:10])
        now = statistics.median(last)
        if not now > _DIVERGED * max(first, usual):
            return ""
        return (
            f"warning: the training has diverged: the loss rose from {first:.4g} to {now:.4g} until update "
            f"{len(self._losses):,}: try a tenth of --learning-rate {self.config.learning_rate:g} or --warmup-ratio 0.1"
        )

    def _warn_of_chance(self, window: Sequence[float]) -> str:
        """Return a warning if the model has learned nothing: its losses are those of one answer for every example."""
        if len(window) < _LEAST_WINDOW or not self._chance > 0:
            return ""
        now, error = statistics.fmean(window), statistics.stdev(window) / math.sqrt(len(window))
        least, noise = _MOVED * self._chance, 2 * error
        if now < least or (noise > _PRECISE * now and now - noise < least):
            return ""
        # Scores far from 0 take many updates until their mean is learned, which one answer knows.
        if self.prepared.kind == "score" and now < (1 - _PRECISE) * statistics.fmean(self._losses[:_LEAST_WINDOW]):
            return ""
        what = "that of one answer for every example"
        if self.prepared.kind in TEXT_KINDS:
            what = "without any knowledge of the texts it"
        return (
            f"warning: the model has learned nothing in {len(self._losses):,} updates: the loss is {now:.4g}, and "
            f"{what} is {self._chance:.4g}: {advise_rate(self.config)}"
        )

    def _look_at_evaluations(self) -> str:
        """Return a warning if the metric has become worse since the best evaluation, and the last weights are kept."""
        best = find_best(self._evaluations, self._metric)
        if best is None or self.config.save_best or len(self._evaluations) - self._evaluations.index(best) <= 2:
            return ""
        value = best.metrics[self._metric]
        error = find_standard_error(self.prepared, self._metric, value)
        limit = value + _ERRORS_OF_TURN * (error if self._metric.startswith(LOWER_IS_BETTER) else -error)
        last = [line.metrics[self._metric] for line in self._evaluations[-2:]]
        if not all(is_better(limit, one, self._metric) for one in last):
            return ""
        epochs = best.step / self._updates_per_epoch
        less = f"--max-steps {best.step}" if self.config.max_steps else f"--epochs {epochs:.2g}"
        return (
            f"warning: since update {best.step:,} the model has become worse on validation rows: {self._metric} was "
            f"{value:.4f}, and after update {self._evaluations[-1].step:,} is {last[-1]:.4f} (standard error "
            f"{error:.4f}): add --save-best, or train less ({less})"
        )


def _find_rate_fault(rate: float) -> str:
    low, high = _USUAL_RATES
    return "low" if rate < low else "high" if rate > high else ""


def advise_rate(config: TrainConfig) -> str:
    """Return, as a clause, what to do about the learning rate of a run that has learned nothing."""
    rate = f"--learning-rate {config.learning_rate:g}"
    if fault := _find_rate_fault(config.learning_rate):
        return f"{rate} is too {fault}, try {2e-4 if config.lora_rank > 0 else 2e-5:g}"
    return f"train longer, or with a higher or lower {rate}, unless the texts do not tell what is to be learned"


def find_standard_error(prepared: Prepared, metric: str, value: float) -> float:
    """Return the standard error of a metric's value on its validation split, rather too large than too small.

    Of a correlation it is (1 - value**2) / sqrt(rows - 1), and of perplexity, where nobody knows it, a hundredth. That
    of a mean of numbers from 0 to 1 is at most that of a share, here with 2 rows added to both sides as in Agresti and
    Coull's interval.
    """
    suffix = max((suffix for suffix in prepared.validation if metric.endswith(suffix)), key=len)
    tokens, name = prepared.validation[suffix], metric.removesuffix(suffix)
    if name in LOWER_IS_BETTER:
        return value / 100
    if name in ("pearson", "spearman", "matthews_correlation"):
        return (1 - value**2) / math.sqrt(max(1, len(tokens) - 1))
    count = _count_deciding_rows(prepared, tokens, name)
    share = (value * count + 2) / (count + 4)
    return math.sqrt(max(0.0, share * (1 - share)) / (count + 4))


def _count_deciding_rows(prepared: Prepared, tokens: Tokens, name: str) -> float:
    """Return on how many rows a metric from 0 to 1 depends: for F1 those with the label, for searches the queries."""
    labels = tokens.labels
    if prepared.kind == "pairs":
        return float(len(np.unique(labels[:, 0])))
    if prepared.kind == "relevance":
        return float(len(np.unique(labels[:, 1])))
    if prepared.kind not in ("class", "labels") or "f1" not in name:
        return float(len(tokens))
    is_class = prepared.kind == "class"
    counts = count_classes(labels, len(prepared.labels)) if is_class else labels.sum(0)
    if "micro" in name:
        return float(counts.sum())
    if len(counts) == 2 and is_class and name == "f1":
        return float(counts[1])
    known = counts[counts > 0]
    return float(len(known) ** 2 / (1 / known).sum()) if len(known) else 0.0
