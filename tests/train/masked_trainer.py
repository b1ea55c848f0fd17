"""What a user would run instead: the Hugging Face Trainer on the same rows with the same masks.

    python -m tests.train.masked_trainer RUN/data.npz --model minilm --steps 40 --bf16 --attention sdpa

prints one JSON line: rows per second without the first tenth of the steps. Batches are made before it starts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import islice
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from cpuft.config.train import TrainConfig
from cpuft.train.data.archive import Prepared, read_prepared
from cpuft.train.data.order import plan_updates
from cpuft.train.model import find_model
from cpuft.train.objective.table import make_objective

Batches = list[dict[str, torch.Tensor]]


class Noting(Trainer):  # type: ignore[misc]
    """Keeps every loss as it is, where a log would round it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def compute_loss(self, *given: Any, **options: Any) -> Any:
        loss = super().compute_loss(*given, **options)
        self.losses.append(float(loss.detach()))
        return loss


class Clock(TrainerCallback):  # type: ignore[misc]
    """When the first step began, and each ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_begin(self, *given: Any, **options: Any) -> None:
        self.times = self.times or [time.perf_counter()]

    def on_step_end(self, *given: Any, **options: Any) -> None:
        self.times.append(time.perf_counter())


def make_batches(prepared: Prepared, config: TrainConfig) -> Batches:
    """What one rank of ours trains on in `config.max_steps` updates, in the order of that."""
    objective = make_objective(config, prepared)
    updates = plan_updates(prepared.train, config.batch_size, config.seed, config.max_steps, grouped=True)
    made = [objective.make_batch(prepared.train, rows, epoch) for epoch, rows in islice(updates, config.max_steps)]
    return [
        {name: value for name, value in batch.inputs.items() if name != "places"} | {"labels": batch.labels}
        for batch in made
    ]


def train(model: Any, batches: Batches, rate: float, **options: Any) -> tuple[list[float], list[float]]:
    """The loss of each step, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        usual = {
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "logging_strategy": "no",
            "save_strategy": "no",
        }
        order = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 1}
        arguments = TrainingArguments(
            output_dir=folder,
            **{**usual, **order, "remove_unused_columns": False, "max_steps": len(batches), "learning_rate": rate},
            **options,
        )
        trainer = Noting(
            model=model,
            args=arguments,
            train_dataset=list(range(len(batches))),
            data_collator=lambda numbers: dict(batches[numbers[0]]),
        )
        trainer.remove_callback(PrinterCallback)
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
    return trainer.losses, [end - start for start, end in zip(clock.times, clock.times[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prepared")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--attention", default="sdpa")
    options = parser.parse_args()
    set_seed(42)
    config = TrainConfig(task="text", max_steps=options.steps, batch_size=options.batch_size)
    batches = make_batches(read_prepared(options.prepared), config)
    load_model = AutoModelForMaskedLM.from_pretrained
    model = load_model(find_model(options.model), attn_implementation=options.attention, dtype=torch.float32)
    _, seconds = train(model, batches, config.learning_rate, bf16=options.bf16)
    steady = seconds[len(seconds) // 10 :]
    rows = sum(len(batch["labels"]) for batch in batches[-len(steady) :])
    print(json.dumps({"samples_per_second": rows / sum(steady)}))


if __name__ == "__main__":
    main()
