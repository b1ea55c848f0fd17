"""Train an embedding model with sentence-transformers; print examples per second and metrics as one line of JSON.

Started by bench_embeddings.py, one process for each turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CoSENTLoss, MultipleNegativesRankingLoss

WARM_UP_STEPS = 5


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=("pairs", "scored-pairs"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train-file", required=True)
    parser.add_argument("--validation-file", default="")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--folder", required=True, help="folder for the Trainer's files")
    return parser.parse_args(arguments)


def main() -> None:
    """Train, evaluate, and print the line."""
    options = parse_arguments(sys.argv[1:])
    model = SentenceTransformer(options.model, device="cpu")
    model.max_seq_length = options.max_length
    rows = datasets.load_dataset("csv", data_files=options.train_file, split="train", cache_dir=options.folder)
    loss = {"pairs": MultipleNegativesRankingLoss, "scored-pairs": CoSENTLoss}[options.task](model)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=options.folder,
        per_device_train_batch_size=options.batch_size,
        max_steps=options.max_steps,
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        seed=options.seed,
        data_seed=options.seed,
        bf16=options.bf16,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer: Any = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=loss)
    starts, run_step = list[float](), trainer.training_step

    def note_start(*args: Any, **others: Any) -> Any:
        starts.append(time.perf_counter())
        return run_step(*args, **others)

    trainer.training_step = note_start
    trainer.train()
    timed = starts[WARM_UP_STEPS:]
    found: dict[str, Any] = {
        "samples_per_second": options.batch_size * (len(timed) - 1) / (timed[-1] - timed[0]) if len(timed) > 1 else 0.0
    }
    if options.validation_file and options.task == "scored-pairs":
        other: Any = datasets.load_dataset(
            "csv", data_files=options.validation_file, split="train", cache_dir=options.folder
        )
        evaluator = EmbeddingSimilarityEvaluator(
            list(map(str, other["sentence1"])),
            list(map(str, other["sentence2"])),
            other["score"],
            main_similarity="cosine",
        )
        metrics: Any = evaluator(model)
        found["metrics"] = {name: metrics[f"{name}_cosine"] for name in ("spearman", "pearson")}
    print(json.dumps(found), flush=True)
    Path(options.folder, "done").touch()


if __name__ == "__main__":
    main()
