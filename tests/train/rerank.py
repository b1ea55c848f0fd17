"""Queries and documents that a tiny reranker learns in seconds: whether both are about a thing of the same colour."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path
from typing import Any

from cpuft.config import TrainConfig
from tests.train.tiny import save_tiny

COLOURS = ("red", "green", "blue", "white")
THINGS = ("cat", "dog", "house", "boat", "tree", "car")


def list_rows(count: int, seed: int, documents: int = 4) -> list[tuple[str, str, str]]:
    """Query, document and label: of each query, one document is relevant, in a random place among the others."""
    generator = random.Random(seed)
    things = list(itertools.product(COLOURS, THINGS))
    rows = []
    for number in range(count):
        colour, thing = things[(number * 5 + seed) % len(things)]
        others = generator.sample([one for one in things if one[0] != colour], documents - 1)
        places = generator.sample([(colour, thing), *others], documents)
        query = f"{colour} {thing} {'old ' * (number % 3)}number {number}"
        rows += [
            (query, f"the {t} is {c}{' and old' * generator.randrange(4)}", str(int((c, t) == (colour, thing))))
            for c, t in places
        ]
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
