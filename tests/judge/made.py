"""Made-up predictions."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cpuft.judge.predictions import About, RunPredictions, read_predictions, write_predictions

FIVE = ("complaint", "order", "praise", "question", "returns")
_FIVE_CLASSES = (
    ("complaint", "praise", 159),
    ("complaint", "complaint", 15),
    ("order", "order", 38),
    ("order", "question", 2),
    ("praise", "praise", 118),
    ("praise", "order", 2),
    ("question", "question", 50),
    ("question", "order", 6),
    ("question", "praise", 4),
    ("returns", "returns", 14),
    ("returns", "order", 6),
)
"""Label, prediction and number of rows of a run with balanced weights that calls complaints praise."""


def make_predictions(
    kind: str,
    label: Any,
    prediction: Any,
    metrics: dict[str, float],
    classes: tuple[str, ...] = (),
    slice_by: str = "",
    **columns: Any,
) -> RunPredictions:
    """The predictions of a run whose rows have 3 to 42 tokens."""
    rows = len(label)
    shared = {"split": [""] * rows, "row": np.arange(rows), "tokens": (np.arange(rows) % 40 + 3).astype(np.int32)}
    own = {"label": label, "prediction": prediction}
    with tempfile.TemporaryDirectory() as folder:
        about = About(kind, classes, metrics, "abc", 12, slice_by)
        write_predictions(Path(folder), about, shared | own | columns)
        return read_predictions(folder)


def make_classes(label: Any, prediction: Any, metrics: dict[str, float], classes: tuple[str, ...], **more: Any) -> Any:
    """Predictions of one class for each row, which are quite sure."""
    rows = len(label)
    sure = np.linspace(0.5, 1, rows, dtype=np.float32)
    return make_predictions(
        "class", label, prediction, metrics, classes, **{"confidence": sure, "label_probability": sure, **more}
    )


def make_five_classes() -> RunPredictions:
    """A run with a bad result: 159 of 174 complaints are called praise."""
    label = [label for label, _, rows in _FIVE_CLASSES for _ in range(rows)]
    prediction = [prediction for _, prediction, rows in _FIVE_CLASSES for _ in range(rows)]
    accuracy = float(np.mean([a == b for a, b in zip(label, prediction)]))
    languages = [("en", "de", "fr")[number % 3] for number in range(len(label))]
    found: RunPredictions = make_classes(
        label, prediction, {"accuracy": accuracy}, FIVE, slice_by="language", slice=languages
    )
    return found
