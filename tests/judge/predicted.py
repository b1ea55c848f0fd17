"""Predictions of runs that never ran."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from sklearn.metrics import f1_score

from cpuft.judge.predictions import About, RunPredictions, write_predictions


def make_predictions(
    kind: str, metrics: tuple[str, ...], classes: tuple[str, ...] = (), rows: str = "rows", **columns: Any
) -> RunPredictions:
    """Predictions of one split, with these columns."""
    count = len(next(iter(columns.values())))
    table = pyarrow.table({"split": [""] * count, "row": np.arange(count), **columns})
    return RunPredictions(About(kind, classes, dict.fromkeys(metrics, 0.5), rows, 12), table)


def make_classes(both: int, only_a: int, only_b: int, neither: int = 0) -> tuple[RunPredictions, RunPredictions]:
    """Two runs with so many rows that both got right, only the first one, only the second one, or none."""
    counts = (both, only_a, only_b, neither)
    label = ["no", "yes"] * (sum(counts) // 2 + 1)

    def predict(*right: bool) -> list[str]:
        is_right = np.repeat(right, counts)
        return [one if good else {"no": "yes", "yes": "no"}[one] for one, good in zip(label, is_right)]

    shared: dict[str, Any] = {"metrics": ("accuracy", "f1"), "classes": ("no", "yes"), "label": label[: sum(counts)]}
    found = (predict(True, True, False, False), predict(True, False, True, False))
    first, second = (make_predictions("class", prediction=one, **shared) for one in found)
    return first, second


def write_classes(folders: tuple[Path, Path], counts: tuple[int, ...], **changes: Any) -> list[dict[str, float]]:
    """Write the predictions of `make_classes` into two folders; return the metrics of both, for their records."""
    metrics = list[dict[str, float]]()
    for folder, made in zip(folders, make_classes(*counts)):
        label, found = (made.column(name) for name in ("label", "prediction"))
        f1 = f1_score(label, found, pos_label="yes", zero_division=0.0)
        metrics.append({"accuracy": float((label == found).mean()), "f1": float(f1)})
        about = replace(made.about, metrics=metrics[-1], **changes)
        write_predictions(folder, about, {name: made.table.column(name) for name in made.table.column_names})
    return metrics
