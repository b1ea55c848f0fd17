"""The training of a decoder on conversations with LoRA, by cpuft and by TRL's SFTTrainer, in turn.

Started by scripts/bench-chat. The decoder has random weights, because no speed depends on them."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from cpuft.record import read_record
from cpuft.train.data.sources import make_pairs
from cpuft.train.fast.acceleration import has_bf16_products
from cpuft.train.model import find_model
from cpuft.train.precision import read_cpu
from scripts.benchmarks.train_sft import WARM_UP_STEPS

_SPECIAL = {"vocab_size": 30522, "pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
"""Of MiniLM's tokenizer."""
DECODERS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "gemma-3-270m": {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
    },
}
"""Decoders by name: the arguments of transformers' AutoConfig.for_model."""
_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}assistant : "
    "{% generation %}{{ message['content'] }} [SEP] {% endgeneration %}"
    "{% else %}{{ message['role'] }} : {{ message['content'] }} [SEP] {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
_PAIR_TOKENS = 30
"""About the number of tokens of a question and its answer."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; all have defaults."""
    parser = argparse.ArgumentParser(prog="bench-chat", description=__doc__)
    parser.add_argument("--model", choices=tuple(DECODERS), default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, default=0, help="number of layers (default: those of the model)")
    parser.add_argument("--vocabulary", type=int, default=30522, help="size of the vocabulary, at least 30522")
    parser.add_argument("--lora-rank", type=int, default=16, help="0 trains all weights")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12, help="updates of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; each turn has another seed")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the Python in whose environment TRL is installed"
    )
    return parser.parse_args(arguments)


def write_conversations(path: Path, count: int, length: int) -> str:
    """Write conversations whose lengths are mixed, up to about `length` tokens; return the path."""
    generator = random.Random(0)
    pairs = iter(make_pairs(count * length // _PAIR_TOKENS, 0))
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for _ in range(generator.randint(1, length // _PAIR_TOKENS)):
                first, second, _ = next(pairs)
                messages += [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


def save_model(folder: Path, options: argparse.Namespace) -> str:
    """Save the decoder with random weights, MiniLM's tokenizer and a chat template; return the folder."""
    import torch
    import transformers

    settings = {**DECODERS[options.model], **_SPECIAL, "vocab_size": options.vocabulary}
    if options.layers:
        settings["num_hidden_layers"] = options.layers
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**settings, max_position_embeddings=2 * options.max_length)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in ("tokenizer.json", "vocab.txt"):
        shutil.copy(Path(find_model("minilm"), file), folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_model("minilm"))
    tokenizer.chat_template = _TEMPLATE
    tokenizer.eos_token = "[SEP]"
    tokenizer.model_max_length = 2 * options.max_length
    tokenizer.save_pretrained(folder)
    return str(folder)


def run_cpuft(options: argparse.Namespace, seed: int, folder: Path, model: str, data: str) -> dict[str, Any]:
    """Train with cpuft; return `samples_per_second` and `peak_megabytes`."""
    run = folder / f"cpuft-{seed}"
    command = [
        *(sys.executable, "-m", "cpuft", "launch", "--task", "chat", "--train-file", data, "--validation-file", data),
        *("--model", model, "--batch-size", str(options.batch_size)),
        *("--max-length", str(options.max_length), "--max-steps", str(options.steps), "--seed", str(seed)),
        *("--lora-rank", str(options.lora_rank), "--run-dir", str(run), "--no-save-model"),
        *("--checkpoint-every", "0", "--no-check"),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    record = read_record(str(run))
    steps = record.steps[WARM_UP_STEPS:]
    rate = sum(line.samples for line in steps) / sum(line.step_seconds for line in steps)
    assert record.footer is not None
    return {"samples_per_second": rate, "peak_megabytes": record.footer.peak_memory_bytes >> 20}


def run_peer(options: argparse.Namespace, seed: int, folder: Path, model: str, data: str) -> dict[str, Any]:
    """Train with TRL; return `samples_per_second` and `peak_megabytes`."""
    command = [
        *(options.peer_python, "-m", "scripts.benchmarks.train_sft", "--model", model, "--train-file", data),
        *("--batch-size", str(options.batch_size), "--max-length", str(options.max_length), "--seed", str(seed)),
        *("--max-steps", str(options.steps), "--lora-rank", str(options.lora_rank)),
        *("--folder", str(folder / f"peer-{seed}"), *(["--bf16"] if has_bf16_products() else [])),
    ]
    threads = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | threads)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the turns, and print each turn, the median ratio with its spread, and the CPU."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder / "model", options)
        data = write_conversations(folder / "chat.jsonl", options.batch_size * options.steps * 2, options.max_length)
        ratios = []
        for seed in range(options.rounds):
            own, peer = (run(options, seed, folder, model, data) for run in (run_cpuft, run_peer))
            ratios.append(own["samples_per_second"] / peer["samples_per_second"])
            print(json.dumps({"seed": seed, "cpuft": own, "TRL": peer}), flush=True)
    print(
        f"cpuft trains {median(ratios):.2f} times as many conversations per second as TRL "
        f"({min(ratios):.2f} to {max(ratios):.2f}, {options.rounds} rounds in turn) on {read_cpu().model}"
    )


if __name__ == "__main__":
    main()
