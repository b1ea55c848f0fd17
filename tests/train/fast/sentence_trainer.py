"""A user's script for the SentenceTransformerTrainer that knows nothing of cpuft. Usage: sentence_trainer.py MODEL OUT.

It trains on pairs with in-batch negatives, encodes texts in the middle of training, and saves the model in OUT/model.
Every rank writes OUT/RANK.json: losses, the embeddings from the middle and from the end, and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

COLOURS, ANIMALS = ("red", "green", "blue", "old"), ("cat", "dog", "horse", "bird", "fish")
TEXTS = ["the cat is old", "a red bird that is not a fish but a bird for all that", "dog"]
UPDATES = 20


def make_pairs(count: int) -> Dataset:
    """Pairs of short and long texts, no two of them alike."""
    things = [f"{colour} {animal} {number}" for number in range(count) for colour in COLOURS for animal in ANIMALS]
    rows = [
        {"anchor": f"the {thing}", "positive": f"a {thing} is here " + "and there " * (number % 7)}
        for number, thing in enumerate(things[:count])
    ]
    return Dataset.from_list(rows)


def load(folder: str) -> SentenceTransformer:
    """The model of a folder, with mean pooling and without dropout."""
    model = SentenceTransformer(folder, device="cpu")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def train(model: SentenceTransformer, out: str, optimizer: Any = None, **options: Any) -> dict[str, Any]:
    """Train a model on pairs; return what a rank writes."""
    usual: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": UPDATES,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": UPDATES // 2,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 1,
    }
    seen: list[Any] = []

    def evaluate(model: Any, *others: Any) -> float:
        seen.append(model.encode(TEXTS).tolist())
        return float(torch.tensor(seen[-1]).norm())

    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(out, **usual | options),
        train_dataset=make_pairs(64),
        loss=MultipleNegativesRankingLoss(model),
        evaluator=[evaluate],
        optimizers=(optimizer, None),
    )
    trainer.train()
    values = [value.detach().float().numpy().tobytes() for value in model.state_dict().values()]
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "middle": seen[:1],
        "end": model.encode(TEXTS).tolist(),
        "weights": hashlib.sha256(b"".join(values)).hexdigest(),
    }


def main(folder: str, out: str) -> None:
    """Train as one rank of several."""
    model = load(folder)
    found = train(model, out)
    rank = os.environ.get("RANK", "0")
    Path(out, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if rank == "0":
        model.save_pretrained(f"{out}/model")


if __name__ == "__main__":
    main(*sys.argv[1:])
