"""Evaluation sharded over ranks: each sees its share of the rows, all get the metrics of the whole."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from cpuft.record import EvaluationLine
from cpuft.train.data.prepare import Tokens
from cpuft.train.job import gather
from cpuft.train.loop import Loop
from cpuft.train.precision import autocast


def evaluate(loop: Loop, step: int) -> EvaluationLine:
    """Metrics of all validation splits, the same on every rank. A collective: all ranks call it."""
    start = time.perf_counter()
    loop.model.eval()
    metrics: dict[str, float] = {}
    for suffix, tokens in loop.prepared.validation.items():
        found = loop.objective.measure(_all_answers(loop, tokens), tokens)
        metrics |= {name + suffix: value for name, value in found.items()}
    loop.model.train()
    rows = sum(len(tokens) for tokens in loop.prepared.validation.values())
    return EvaluationLine(step, metrics, rows, time.perf_counter() - start)


def _all_answers(loop: Loop, tokens: Tokens) -> NDArray[np.float32]:
    """The answers to every row, in the rows' order; rows are sorted by length and dealt to the ranks."""
    own = np.argsort(tokens.lengths, kind="stable")[loop.world.rank :: loop.world.size]
    size, found = loop.config.eval_batch_size, []
    with torch.inference_mode(), autocast(loop.precision):
        for rows in (own[start : start + size] for start in range(0, len(own), size)):
            found.append((rows, loop.objective.answers(loop.model, loop.objective.make_batch(tokens, rows))))
    everyone = [part for parts in gather(found) for part in parts]
    rows, answers = (np.concatenate(column) for column in zip(*everyone))
    whole: NDArray[np.float32] = answers[np.argsort(rows)]
    return whole
