"""Which configurations of a sweep are pruned, from the evaluations that their runs make while training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cpuft.rank.progress import FINAL_EVALUATION_MARK, parse_evaluation
from cpuft.sweep.study import Configuration, Run, Sweep

_LEAST_FINISHED = 5
"""Nothing is pruned before so many configurations have finished."""
_STEP = "step "
"""Beginning of the line of an update in a log."""


@dataclass
class Curve:
    """What a run has reached while training, and how much of its log has been read."""

    values: dict[int, float] = field(default_factory=dict)
    """Number of updates -> metric."""
    read_bytes: int = 0
    makes_updates: bool = True
    """False while the evaluations in the log are not those while training."""


class MedianPruner:
    """Prunes a configuration whose mean is worse than the median of the finished ones, at the same share of training.

    Optuna's pruner of this name compares evaluations after the same number of steps, and a run with a small batch has
    learned less after as many. Evaluations are read from logs, because the record of a run may be on another host.
    Nothing is pruned before five configurations have finished.
    """

    def __init__(self, sweep: Sweep) -> None:
        self._sweep, self._curves = sweep, dict[str, Curve]()

    def find_reason(self, run: Run) -> str:
        """Read a run's log; return why its configuration is pruned; "" if it is not, or without a new evaluation."""
        before = len(self._curves[run.folder].values) if run.folder in self._curves else 0
        count, one = len(self.read(run).values), run.configuration
        if count == before:
            return ""
        curve, metric = self._average(one)[:count], self._sweep.metric
        self._store(one, curve[: min(len(self.read(other, is_new=False).values) for other in one.runs)])
        update, value = curve[-1]
        finished = [other for other in self._sweep.configurations if other.value is not None]
        known = [_find_reached(other, update * one.share) for other in finished]
        reached = [number for number in known if not math.isnan(number)]
        if len(finished) < _LEAST_FINISHED or not reached:
            return ""
        sign = 1 if self._sweep.is_maximized else -1
        best = max((sign * number for _, number in curve if not math.isnan(number)), default=-math.inf)
        if best >= statistics.median(sign * number for number in reached):
            return ""
        return (
            f"{metric} {value:.4f} after {update} updates, and no evaluation up to this one was as good as the median "
            "of the finished configurations after the same share of their training"
        )

    def finish(self, one: Configuration) -> None:
        """Store the evaluations of a configuration whose runs have ended, also those that not all of them made."""
        for run in one.runs:
            self.read(run)
        self._store(one, self._average(one))

    def _store(self, one: Configuration, curve: Sequence[tuple[int, float]]) -> None:
        for update, value in curve:
            # An attempt that began anew replaces what an earlier one has reached. NaN differs from itself.
            if repr(one.curve.get(update)) != repr(value):
                self._sweep.note_evaluation(one, update, value)

    def _average(self, one: Configuration) -> list[tuple[int, float]]:
        """Return (number of updates, mean of the metric over the runs that have got so far) at each evaluation."""
        curves = [self.read(run, is_new=False).values for run in one.runs]
        updates = sorted({update for curve in curves for update in curve})
        return [(update, statistics.fmean(curve[update] for curve in curves if update in curve)) for update in updates]

    def read(self, run: Run, is_new: bool = True) -> Curve:
        """Return the curve of a run's last attempt, empty before the first; with `is_new`, more of its log is read."""
        if not run.folder:
            return Curve()
        if run.folder in self._curves and not is_new:
            return self._curves[run.folder]
        curve = self._curves.setdefault(run.folder, Curve())
        with suppress(OSError), self._sweep.find_log(run.folder).open("rb") as file:
            file.seek(curve.read_bytes)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            curve.read_bytes += len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._read_line(curve, line)
        return curve

    def _read_line(self, curve: Curve, line: str) -> None:
        if line.startswith((_STEP, FINAL_EVALUATION_MARK)):
            curve.makes_updates = line.startswith(_STEP)
        elif curve.makes_updates and (evaluation := parse_evaluation(line)):
            update, metrics = evaluation
            self._sweep.metric = self._sweep.metric or next(iter(metrics))
            if self._sweep.metric in metrics:
                curve.values[update] = metrics[self._sweep.metric]


def _find_reached(one: Configuration, share: float) -> float:
    """Return what a finished configuration had reached after a share of its training; NaN before an evaluation."""
    reached = [value for update, value in sorted(one.curve.items()) if update * one.share <= share * (1 + 1e-9)]
    return reached[-1] if reached else math.nan
