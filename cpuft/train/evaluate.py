"""Evaluation sharded over ranks: each sees its share of the rows, all get the metrics of the whole."""

from __future__ import annotations

import time

import numpy as np
import torch

from cpuft.options.fields import TrainConfig
from cpuft.rank.world import World
from cpuft.record import EvaluationLine
from cpuft.train.data.batches import make_batch
from cpuft.train.data.prepare import Prepared, Tokens
from cpuft.train.job import gather
from cpuft.train.objective.metrics import compute_metrics
from cpuft.train.precision import autocast


def evaluate(
    model: torch.nn.Module, prepared: Prepared, config: TrainConfig, precision: str, world: World, step: int
) -> EvaluationLine:
    """Metrics of all validation splits, the same on every rank. A collective: all ranks call it."""
    start = time.perf_counter()
    model.eval()
    metrics: dict[str, float] = {}
    for suffix, tokens in prepared.validation.items():
        outputs = _all_outputs(model, tokens, prepared, config, precision, world)
        found = compute_metrics(prepared.metrics, outputs, tokens.labels)
        metrics |= {name + suffix: value for name, value in found.items()}
    model.train()
    rows = sum(len(tokens) for tokens in prepared.validation.values())
    return EvaluationLine(step, metrics, rows, time.perf_counter() - start)


def _all_outputs(
    model: torch.nn.Module, tokens: Tokens, prepared: Prepared, config: TrainConfig, precision: str, world: World
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The model's outputs for every row, in the rows' order; rows are sorted by length and dealt to the ranks."""
    rows = np.argsort(tokens.lengths, kind="stable")[world.rank :: world.size]
    width = config.max_length if config.padding == "max_length" else 0
    parts = []
    with torch.inference_mode(), autocast(precision):
        for start in range(0, len(rows), config.eval_batch_size):
            share = rows[start : start + config.eval_batch_size]
            batch = make_batch(tokens, share, prepared.pad_id, width, is_regression=not prepared.labels)
            parts.append(model(**batch.inputs).logits.float().numpy())
    own = (rows, np.concatenate(parts) if parts else np.zeros((0, len(prepared.labels) or 1), np.float32))
    outputs = np.zeros((len(tokens), len(prepared.labels) or 1), np.float32)
    for places, values in gather(own):
        outputs[places] = values
    return outputs
