"""The accuracy of a linear model on embeddings: classify_embeddings MODEL TRAIN.csv VALIDATION.csv.

A part of scripts/bench-alternatives."""

from __future__ import annotations

import csv
import sys

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from cpuft.train.embedder import Embedder


def embed_rows(embedder: Embedder, path: str) -> tuple[NDArray[np.float32], list[str]]:
    """Return features and labels: the embedding of a text, or of two the distances and the products of both."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    labels = [row[-1] for row in rows]
    parts = [embedder.embed(texts) for texts in list(zip(*rows))[:-1]]
    if len(parts) == 1:
        return parts[0], labels
    return np.hstack([np.abs(parts[0] - parts[1]), parts[0] * parts[1]]), labels


def main() -> None:
    """Fit on the training rows, and print the accuracy on the others."""
    model, train, validation = sys.argv[1:]
    embedder = Embedder(model)
    classifier = LogisticRegression(max_iter=1000).fit(*embed_rows(embedder, train))
    print(classifier.score(*embed_rows(embedder, validation)))


if __name__ == "__main__":
    main()
