"""A tiny encoder with random weights, rows of every kind that it learns in seconds, and a run of it that was kept."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.hardware import Cpu
from cpuft.rank.world import World
from cpuft.record import EvaluationLine, RecordedRank, StepLine, Writer
from cpuft.train.checkpoint.final_model import save_model
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.prepare import prepare
from cpuft.train.evaluate import evaluate
from cpuft.train.loop import train
from cpuft.train.model import find_model
from cpuft.train.objective.table import make_objective
from cpuft.train.reporter import make_header
from cpuft.train.setup import TrainingSetup

COLOURS, ANIMALS, OTHERS = ("red", "green"), ("cat", "dog"), ("the", "is", "old")
WORDS = (*COLOURS, *ANIMALS, *OTHERS)


def _tag(word: str) -> str:
    return "B-COL" if word in COLOURS else "B-ANI" if word in ANIMALS else "O"


MAKERS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "class": lambda words: {"text": " ".join(words), "label": "red" if "red" in words else "not red"},
    "score": lambda words: {"text": " ".join(words), "label": words.count("red") / 4 + 0.01},
    "labels": lambda words: {"text": " ".join(words), "label": sorted(set(COLOURS) & set(words))},
    "tags": lambda words: {"tokens": words, "tags": [_tag(word) for word in words]},
}
"""A row of each kind, of some words."""


def write_rows(path: Path, kind: str, count: int, seed: int) -> str:
    """JSON lines of one to eight words; the path."""
    generator = random.Random(seed)
    rows = [MAKERS[kind](generator.choices(WORDS, k=generator.randint(1, 8))) for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def save_tiny(folder: Path) -> str:
    """The encoder, with MiniLM's tokenizer; the folder."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(max_position_embeddings=64, **sizes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(Path(find_model("minilm"), name), folder)
    return str(folder)


def save_tokenizer(folder: Path, **special: str) -> None:
    """MiniLM's tokenizer with these special tokens only, in the place of the one in the folder."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (folder / name).unlink(missing_ok=True)
    own = Tokenizer.from_file(str(Path(find_model("minilm"), "tokenizer.json")))
    own.no_padding()
    PreTrainedTokenizerFast(tokenizer_object=own, **special).save_pretrained(folder)


def make_config(folder: Path, kind: str, **options: Any) -> TrainConfig:
    """Learns rows of a kind, in some dozens of steps."""
    usual: dict[str, Any] = {"max_steps": 60, "batch_size": 16, "learning_rate": 5e-3, "dropout": 0.0, "max_length": 32}
    return TrainConfig(
        task="files",
        model=save_tiny(folder / "tiny"),
        train_file=write_rows(folder / "train.jsonl", kind, 96, 0),
        validation_file=write_rows(folder / "validation.jsonl", kind, 37, 1),
        **usual | options,
    )


def learn(config: TrainConfig, precision: str, run: Path) -> tuple[list[StepLine], EvaluationLine]:
    """Train, evaluate and keep that in `run`, in this process; torch.distributed has begun."""
    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    torch.manual_seed(0)
    loop = TrainingSetup(objective.load_model(config), objective, config, prepared, precision, World(0, 1, 0, 1))
    steps = list(train(loop))
    evaluation = evaluate(loop, loop.updates)
    header = make_header(loop, WorkerConfig(), [RecordedRank(0, "here", [0])], "gloo", Cpu("x", ()), "")
    with Writer(str(run)) as writer:
        writer.write(header)
        writer.write(evaluation)
    save_model(loop.model, config.model, str(run), finish=objective.finish_folder)
    return steps, evaluation
