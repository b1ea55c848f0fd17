"""Queries and documents that a tiny reranker learns in seconds: documents are relevant if they say `here`."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

from cpuft.config.train import TrainConfig
from tests.train.tiny import save_tiny

THINGS = ("cat", "dog", "house", "boat", "tree", "car")


def list_rows(count: int, seed: int, documents: int = 4) -> list[tuple[str, str, str]]:
    """Query, document and label; of each query, one document is relevant. Every fifth of these does not say so."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        query, place = f"{generator.choice(THINGS)} number {number}{' please' * (number % 3)}", number % documents
        for one in range(documents):
            where = "here" if one == place and number % 5 else "away"
            text = f"the {generator.choice(THINGS)} is {where} number {one}{' or so' * generator.randrange(4)}"
            rows.append((query, text, str(int(one == place))))
    return rows


def write_csv(path: Path, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def make_config(folder: Path, **options: Any) -> TrainConfig:
    """Learns 96 rows of 24 queries; 40 rows of 10 others are for validation."""
    usual: dict[str, Any] = {"max_steps": 60, "batch_size": 16, "learning_rate": 5e-3, "dropout": 0.0, "max_length": 32}
    header = ("query", "document", "label")
    return TrainConfig(
        task="rerank",
        model=save_tiny(folder / "tiny"),
        train_file=write_csv(folder / "train.csv", header, list(list_rows(24, 0))),
        validation_file=write_csv(folder / "validation.csv", header, list(list_rows(10, 1))),
        **usual | options,
    )
