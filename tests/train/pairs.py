"""Pairs of texts that a tiny encoder learns in seconds: questions about a thing of a colour, and their answers."""

from __future__ import annotations

import csv
import itertools
import random
from pathlib import Path
from typing import Any

from cpuft.config.train import TrainConfig
from tests.train.tiny import save_tiny

COLOURS = ("red", "green", "blue", "white", "black", "brown")
THINGS = ("cat", "dog", "house", "boat", "tree", "car", "hat", "door")


def write_pairs(path: Path, count: int, seed: int = 0, negatives: int = 0, score: bool = False) -> str:
    """A CSV of different pairs; with scores, half of them are of different things. The path."""
    generator = random.Random(seed)
    things = generator.sample(list(itertools.product(COLOURS, THINGS)), min(count, len(COLOURS) * len(THINGS)))
    header = ["sentence1", "sentence2", "score"] if score else ["anchor", "positive"]
    rows = []
    for number in range(count):
        colour, thing = things[number % len(things)]
        question = f"where is the {colour} {thing} number {number}"
        other, others = (colour, thing), [one for one in things if one != (colour, thing)]
        if score and number % 2:
            other = generator.choice(others)
        answer = f"the {thing if not score else other[1]} that is {other[0]} stands here" + " again" * (number % 5)
        row = [question, f"{answer} {number}"]
        if score:
            row.append(str(round((0.2 if other != (colour, thing) else 0.8) + generator.random() / 10, 3)))
        rows.append(row + [f"a {c} {t}" for c, t in generator.sample(others, negatives)])
    header += [f"negative_{number + 1}" for number in range(negatives)]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def make_config(folder: Path, task: str = "pairs", negatives: int = 0, **options: Any) -> TrainConfig:
    """Learns pairs, or scored pairs."""
    usual: dict[str, Any] = {"max_steps": 6, "batch_size": 8, "learning_rate": 1e-3, "dropout": 0.0, "max_length": 32}
    score = task == "scored-pairs"
    return TrainConfig(
        task=task,
        model=save_tiny(folder / "tiny"),
        train_file=write_pairs(folder / "train.csv", 40, 0, negatives, score),
        validation_file=write_pairs(folder / "validation.csv", 20, 1, negatives, score),
        **usual | options,
    )
