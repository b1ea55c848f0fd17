"""The training of an embedding model by cpuft and by the Trainer of sentence-transformers, in turn.

Started by scripts/bench-embeddings."""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from cpuft.record import read_record
from cpuft.train.data.demo import make_pairs
from cpuft.train.embedder import Embedder
from cpuft.train.fast.acceleration import has_bf16_products
from cpuft.train.precision import read_cpu
from scripts.benchmarks.train_sentence_transformer import WARM_UP_STEPS


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; all have defaults."""
    parser = argparse.ArgumentParser(prog="bench-embeddings", description=__doc__)
    parser.add_argument("--task", choices=("pairs", "scored-pairs"), default="pairs")
    parser.add_argument("--train-file", default="", help="CSV file of pairs (default: sentences of the demo, joined)")
    parser.add_argument("--validation-file", default="", help="CSV file of pairs, for the metrics")
    parser.add_argument("--model", default="minilm", help="folder or name of the model")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="updates of a turn, without --epochs")
    parser.add_argument("--epochs", type=float, default=0.0, help="train for so long, and compare metrics, too")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; each turn has another seed")
    return parser.parse_args(arguments)


def write_pairs(path: Path, count: int) -> str:
    """Write pairs of paragraphs of one to six sentences; return the path."""
    generator = random.Random(0)
    sentences = make_pairs(6 * count, 0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["anchor", "positive"])
        for start in range(0, len(sentences), 6):
            some = sentences[start : start + generator.randint(1, 6)]
            writer.writerow([" ".join(first for first, _, _ in some), " ".join(second for _, second, _ in some)])
    return str(path)


def run_cpuft(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    """Train with cpuft; return `samples_per_second` and `metrics`."""
    run = folder / f"cpuft-{seed}"
    command = [
        *(sys.executable, "-m", "cpuft", "launch", "--np", "1", "--task", options.task),
        *("--train-file", options.train_file),
        *(["--validation-file", options.validation_file] if options.validation_file else []),
        *("--model", options.model, "--batch-size", str(options.batch_size), "--max-length", str(options.max_length)),
        *(["--epochs", str(options.epochs)] if options.epochs else ["--max-steps", str(options.steps)]),
        *("--learning-rate", str(options.learning_rate), "--seed", str(seed), "--run-dir", str(run)),
        *("--no-save-model", "--checkpoint-every", "0", "--no-check"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    record = read_record(str(run))
    steps = record.steps[WARM_UP_STEPS:]
    rate = sum(line.samples for line in steps) / sum(line.step_seconds for line in steps)
    return {"samples_per_second": rate, "metrics": dict(record.metrics)}


def run_peer(options: argparse.Namespace, seed: int, folder: Path, source: str) -> dict[str, Any]:
    """Train with sentence-transformers; return `samples_per_second` and, for scored pairs, `metrics`."""
    command = [
        *(sys.executable, "-m", "scripts.benchmarks.train_sentence_transformer", "--task", options.task),
        *("--model", source, "--train-file", options.train_file, "--validation-file", options.validation_file),
        *("--batch-size", str(options.batch_size), "--max-length", str(options.max_length), "--seed", str(seed)),
        *(["--epochs", str(options.epochs)] if options.epochs else ["--max-steps", str(options.steps)]),
        *("--learning-rate", str(options.learning_rate), "--folder", str(folder / f"peer-{seed}")),
        *(["--bf16"] if has_bf16_products() else []),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the turns, and print each turn, the median ratio with its spread, and the CPU."""
    options = parse_arguments()
    cpu = read_cpu()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not options.train_file:
            options.train_file = write_pairs(folder / "train.csv", 4000)
            options.validation_file = write_pairs(folder / "validation.csv", 50)
        source = Embedder(options.model).source
        ratios = []
        for seed in range(options.rounds):
            own = run_cpuft(options, seed, folder)
            peer = run_peer(options, seed, folder, source)
            ratios.append(own["samples_per_second"] / peer["samples_per_second"])
            print(json.dumps({"seed": seed, "cpuft": own, "sentence-transformers": peer}), flush=True)
    print(
        f"cpuft trains {median(ratios):.2f} times as many examples per second as sentence-transformers "
        f"({min(ratios):.2f} to {max(ratios):.2f}, {options.rounds} rounds in turn) on {cpu.model}"
    )


if __name__ == "__main__":
    main()
