"""The file of a run's predictions, made of what the evaluation of the saved weights has kept."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cpuft.config.train import TrainConfig
from cpuft.errors import describe_error
from cpuft.judge.predictions import FILE_NAME, About, write_predictions
from cpuft.record import EvaluationLine
from cpuft.train.data.archive import Prepared
from cpuft.train.evaluate import KeptPredictions


def save_predictions(
    folder: Path, config: TrainConfig, prepared: Prepared, evaluation: EvaluationLine, kept: KeptPredictions
) -> str:
    """Write an evaluation's file of predictions, if its kind has any; return "", or a warning if anything fails."""
    try:
        if kept.problem:
            raise RuntimeError(kept.problem)
        parts = [make_columns(config, prepared, suffix, columns) for suffix, columns in kept.splits.items() if columns]
        if parts and prepared.rows:
            about = About(
                prepared.kind, prepared.labels, evaluation.metrics, prepared.rows, evaluation.step, config.slice_by
            )
            write_predictions(folder, about, join_columns(parts))
    except Exception as error:
        return f"warning: {FILE_NAME} could not be written ({describe_error(error)}): the run is complete"
    return ""


def make_columns(config: TrainConfig, prepared: Prepared, suffix: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Return a split's columns "split", "row", "tokens" and, if kept, "text" and "slice", then those of `columns`."""
    tokens, rows = prepared.validation[suffix], prepared.validation_rows.get(suffix)
    numbers = columns.get("row", np.arange(len(tokens)))
    # An example of a retrieval set is a text, not a query.
    lengths = np.zeros(len(numbers)) if prepared.kind == "pairs" else tokens.lengths
    shared = {"split": [suffix] * len(numbers), "row": numbers, "tokens": lengths.astype(np.int32)}
    if rows and config.examples:
        shared["text"] = rows.list_texts(numbers)
    if rows and len(rows.slice_numbers):
        shared["slice"] = np.asarray(rows.slice_values, object)[rows.slice_numbers]
    return shared | columns


def join_columns(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return each column of all splits, one split after another, in a form that PyArrow takes: an array, a list of rows
    for arrays of two dimensions, or a list.
    """
    joined = dict[str, Any]()
    for name in parts[0]:
        found = [part[name] for part in parts]
        is_array = all(isinstance(one, np.ndarray) for one in found)
        joined[name] = np.concatenate(found) if is_array else list(chain.from_iterable(found))
        if is_array and joined[name].ndim > 1:
            joined[name] = list(joined[name])
    return joined
