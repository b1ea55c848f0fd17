"""Evaluation sharded over ranks: each sees its share of the rows, all get the metrics of the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch

from cpuft.record import EvaluationLine
from cpuft.train.data.archive import Tokens
from cpuft.train.data.order import Indices
from cpuft.train.loop import Loop
from cpuft.train.objective.base import Batch, Objective, Predictions
from cpuft.train.precision import autocast
from cpuft.train.process_group import gather


def evaluate(loop: Loop, step: int) -> EvaluationLine:
    """Metrics of all validation splits, the same on every rank. A collective: all ranks call it."""
    start = time.perf_counter()
    loop.model.eval()
    metrics: dict[str, float] = {}
    for suffix, tokens in loop.prepared.validation.items():
        found = loop.objective.compute_metrics(_all_answers(loop, tokens), tokens)
        metrics |= {name + suffix: value for name, value in found.items()}
    loop.model.train()
    rows = sum(len(tokens) for tokens in loop.prepared.validation.values())
    return EvaluationLine(step, metrics, rows, time.perf_counter() - start)


Part = tuple[Indices, Predictions]
"""Rows of a batch, and what is known of them."""


def _all_answers(loop: Loop, tokens: Tokens) -> Predictions:
    """The answers to every row, in the rows' order."""
    batches = plan_batches(tokens, loop.config.eval_batch_size, loop.world.size)[loop.world.rank]
    with autocast(loop.precision):
        own = answer(partial(loop.objective.predict, loop.model), loop.objective, tokens, batches)
    return join([part for parts in gather(own) for part in parts])


def ask_all(
    model: torch.nn.Module, objective: Objective, tokens: Tokens, size: int, ranks: int, precision: str
) -> Predictions:
    """The head's outputs for every row, in the rows' order, from the same batches as in the evaluation on `ranks`."""
    batches = chain(*plan_batches(tokens, size, ranks))
    with autocast(precision):
        return join(answer(partial(objective.outputs, model), objective, tokens, batches))


def plan_batches(tokens: Tokens, size: int, ranks: int) -> list[list[Indices]]:
    """Each rank's batches: rows are sorted by length and dealt to the ranks."""
    order = np.argsort(tokens.lengths, kind="stable")
    shares = [order[rank::ranks] for rank in range(ranks)]
    return [[share[start : start + size] for start in range(0, len(share), size)] for share in shares]


def answer(
    ask: Callable[[Batch], Predictions], objective: Objective, tokens: Tokens, batches: Iterable[Indices]
) -> list[Part]:
    """What `ask` gives for the rows of each batch, without gradients."""
    with torch.inference_mode():
        return [(rows, ask(objective.make_batch(tokens, rows))) for rows in batches]


def join(parts: Sequence[Part]) -> Predictions:
    """What is known of all rows, in their order; of batches of shorter rows, -1 stands where others have more."""
    width = max(answers.shape[1] for _, answers in parts)
    whole = np.full((sum(len(rows) for rows, _ in parts), width, *parts[0][1].shape[2:]), -1, np.float32)
    for rows, answers in parts:
        whole[rows, : answers.shape[1]] = answers
    return whole
