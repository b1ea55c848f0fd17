"""Train a decoder on conversations with TRL's SFTTrainer; print conversations per second as one line of JSON.

Started by bench_chat.py, one process for each turn, in an environment that has TRL.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train-file", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--lora-rank", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=int, required=True, help="first updates, whose time does not count")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--folder", required=True, help="folder for the Trainer's files")
    return parser.parse_args(arguments)


def main() -> None:
    """Train, and print the line. Batches have conversations of similar length, as cpuft's have."""
    import datasets
    from peft import LoraConfig

    trl: Any = importlib.import_module("trl")
    options = parse_arguments(sys.argv[1:])
    rows = datasets.load_dataset("json", data_files=options.train_file, split="train", cache_dir=options.folder)
    arguments = trl.SFTConfig(
        output_dir=options.folder,
        per_device_train_batch_size=options.batch_size,
        max_steps=options.max_steps,
        max_length=options.max_length,
        seed=options.seed,
        bf16=options.bf16,
        assistant_only_loss=True,
        train_sampling_strategy="group_by_length",
        gradient_checkpointing=options.gradient_checkpointing,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )
    rank = options.lora_rank
    adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear") if rank else None
    trainer: Any = trl.SFTTrainer(model=options.model, args=arguments, train_dataset=rows, peft_config=adapters)
    starts, run_step = list[float](), trainer.training_step

    def note_start(*args: Any, **others: Any) -> Any:
        starts.append(time.perf_counter())
        return run_step(*args, **others)

    trainer.training_step = note_start
    trainer.train()
    timed = starts[options.warm_up :]
    rate = options.batch_size * (len(timed) - 1) / (timed[-1] - timed[0])
    print(json.dumps({"samples_per_second": rate, "peak_megabytes": _read_peak_megabytes()}), flush=True)


def _read_peak_megabytes() -> int:
    """Return the peak memory of this process. ru_maxrss would begin with the peak of the process that started it."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
