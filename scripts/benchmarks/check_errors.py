"""Run by scripts/check-errors: how many of 5 % planted wrong labels `cpuft errors` has in its first 10 % of rows."""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow

from cpuft.judge.model_errors import list_errors
from cpuft.judge.predictions import FILE_NAME, RunPredictions, read_predictions
from cpuft.tasks import TASKS

Row = tuple[str, ...]
"""Texts and, last, the label."""

ROWS = {"mrpc": 4076, "sst2": 6000}
"""How many of the training examples are used."""
PLANTED, LOOKED_AT, LEAST_FOUND = 0.05, 0.1, 0.5
PLANTINGS = 20
PARTS = 4
"""Of the training rows; each is predicted by a model of the others."""
OPTIONS = ("--learning-rate", "1e-4", "--np", "1", "--no-save-model")


def read_rows(path: Path, task: str, count: int = 0) -> list[Row]:
    """Return the first rows of a GLUE file, or all of them."""
    head, *lines = path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
    places = [head.split("\t").index(name) for name in (*TASKS[task].texts, TASKS[task].label)]
    cells = [line.split("\t") for line in lines[: count or None]]
    return [tuple(row[place] for place in places) for row in cells]


def choose_rows(count: int, seed: int) -> set[int]:
    """Return the numbers of the rows whose labels are planted."""
    return {*random.Random(seed).sample(range(count), round(count * PLANTED))}


def turn_label(row: Row) -> Row:
    """Return a row with the other label; both tasks have the labels 0 and 1."""
    return (*row[:-1], "1" if row[-1] == "0" else "0")


def train(folder: Path, training: list[Row], validation: list[Row]) -> RunPredictions:
    """Return what a model of these training rows predicts for the validation rows, and train it if it is not there."""
    if not (folder / "run" / FILE_NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        names = ["first", "second"][: len(training[0]) - 1]
        for name, rows in (("train.csv", training), ("validation.csv", validation)):
            with (folder / name).open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([(*names, "label"), *rows])
        files = ("--train-file", str(folder / "train.csv"), "--validation-file", str(folder / "validation.csv"))
        words = ("--task", "files", *files, "--text-columns", ",".join(names), "--run-dir", str(folder / "run"))
        subprocess.run([sys.executable, "-m", "cpuft", "launch", *words, *OPTIONS], check=True, stdout=sys.stderr)
    return read_predictions(str(folder / "run"))


def plant(predictions: RunPredictions, planted: set[int]) -> RunPredictions:
    """Return the predictions of a run whose validation file has wrong labels: they change nothing else."""
    table, probabilities = predictions.table, predictions.probabilities()
    labels = [int(label) for label in table.column("label").to_pylist()]
    labels = [1 - label if row in planted else label for row, label in enumerate(labels)]
    own = probabilities[np.arange(len(labels)), labels].astype(np.float32)
    for name, values in (("label", list(map(str, labels))), ("label_probability", own)):
        table = table.set_column(table.column_names.index(name), name, pyarrow.array(values))
    return replace(predictions, table=table)


def measure_share(predictions: RunPredictions, planted: set[int]) -> float:
    """Return the share of the planted labels that are among the first rows of `cpuft errors`."""
    suspects = list_errors("", predictions, round(len(predictions.table) * LOOKED_AT)).suspects
    return len(planted & {one.row for one in suspects}) / len(planted)


def check_validation_rows(glue: Path, folder: Path, task: str) -> list[float]:
    """Return the share that is found in each of several plantings in the validation rows of one run."""
    data = glue / TASKS[task].folder
    training, validation = read_rows(data / "train.tsv", task, ROWS[task]), read_rows(data / "dev.tsv", task)
    found = train(folder / f"{task}-validation", training, validation)
    plantings = [choose_rows(len(validation), seed) for seed in range(PLANTINGS)]
    return [measure_share(plant(found, rows), rows) for rows in plantings]


def check_training_rows(glue: Path, folder: Path, task: str) -> list[float]:
    """Return the share that is found in each part of the training rows by a model of the other parts."""
    rows = read_rows(glue / TASKS[task].folder / "train.tsv", task, ROWS[task])
    planted = choose_rows(len(rows), 0)
    rows = [turn_label(row) if number in planted else row for number, row in enumerate(rows)]
    shares = []
    for part in range(PARTS):
        others = [row for number, row in enumerate(rows) if number % PARTS != part]
        found = train(folder / f"{task}-part-{part}", others, rows[part::PARTS])
        shares.append(measure_share(found, {number // PARTS for number in planted if number % PARTS == part}))
    return shares


def main() -> None:
    """Print the shares, and exit with 1 if a mean is below one half."""
    parser = argparse.ArgumentParser(prog="check-errors", description=__doc__)
    parser.add_argument("glue", type=Path, help="folder of a GLUE download, with MRPC and SST-2")
    parser.add_argument("records", type=Path, help="folder for the runs; those there are not made again")
    options = parser.parse_args()
    means = []
    for task in ROWS:
        for name, check in (("validation", check_validation_rows), ("training", check_training_rows)):
            shares = check(options.glue, options.records, task)
            means.append(statistics.mean(shares))
            print(json.dumps({"task": task, "rows": name, "found": means[-1], "least": min(shares), "each": shares}))
    sys.exit(min(means) < LEAST_FOUND)


if __name__ == "__main__":
    main()
