"""The training of a decoder on conversations with LoRA, by cpuft and by TRL's SFTTrainer, in turn.

Started by scripts/bench-chat. The decoder has random weights, because no speed depends on them."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from cpuft.errors import CpuftError, suggest_names
from cpuft.record import read_record
from cpuft.train.data.demo import make_pairs
from cpuft.train.fast.acceleration import has_bf16_products
from cpuft.train.model import find_model
from cpuft.train.precision import read_cpu

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
    "{% generation %}{{ message['content'] }} [SEP]{% endgeneration %} "
    "{% else %}{{ message['role'] }} : {{ message['content'] }} [SEP] {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
"""A generation block must not end with a space: the tokenizer makes no token of it, and transformers then marks all
tokens up to the end of the conversation as the assistant's."""
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
    parser.add_argument("--warm-up", type=int, default=3, help="first updates of a turn, whose time does not count")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; each turn has another seed")
    parser.add_argument(
        "--full-length",
        action="store_true",
        help="make all conversations as long as --max-length, for peak memory (default: mixed lengths)",
    )
    parser.add_argument("--gradient-checkpointing", action="store_true", help="both recompute activations in backward")
    parser.add_argument(
        "--cpuft-options", default="", help="more options of cpuft launch, such as '--base-precision bf16'"
    )
    parser.add_argument(
        "--contestants", default="cpuft,TRL", help="tools to measure, separated by commas; the ratio needs both"
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the Python in whose environment TRL is installed"
    )
    return parser.parse_args(arguments)


def write_conversations(path: Path, count: int, length: int, is_full: bool = False) -> str:
    """Write conversations whose lengths are mixed, up to about `length` tokens; return the path.

    `is_full`: write longer ones, of which training takes the first `length` tokens.
    """
    generator = random.Random(0)
    most = length // _PAIR_TOKENS
    pairs = iter(make_pairs(2 * count * most, 0))
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for _ in range(2 * most if is_full else generator.randint(1, most)):
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
    """Train with cpuft; return `samples_per_second` and `peak_megabytes`.

    The evaluation at the end sees one short conversation, because the peer has none.
    """
    run = folder / f"cpuft-{seed}"
    validation = write_conversations(folder / "validation.jsonl", 1, 2 * _PAIR_TOKENS)
    command = [
        *(sys.executable, "-m", "cpuft", "launch", "--np", "1", "--task", "chat", "--train-file", data),
        *("--validation-file", validation),
        *("--model", model, "--batch-size", str(options.batch_size)),
        *("--max-length", str(options.max_length), "--max-steps", str(options.steps), "--seed", str(seed)),
        *("--lora-rank", str(options.lora_rank), "--run-dir", str(run), "--no-save-model"),
        *("--checkpoint-every", "0", "--no-check", *_checkpointing(options), *shlex.split(options.cpuft_options)),
    ]
    _run(command)
    record = read_record(str(run))
    steps = record.steps[options.warm_up :]
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
        *("--warm-up", str(options.warm_up), *_checkpointing(options)),
    ]
    output = _run(command, OMP_NUM_THREADS=str(len(os.sched_getaffinity(0))))
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def _checkpointing(options: argparse.Namespace) -> list[str]:
    return ["--gradient-checkpointing"] if options.gradient_checkpointing else []


def _run(command: list[str], **variables: str) -> str:
    """Run a program; return its output. If it fails, its error output is shown."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        raise SystemExit(f"bench-chat: {shlex.join(command)} ended with exit code {done.returncode}")
    return done.stdout


CONTESTANTS = {"cpuft": run_cpuft, "TRL": run_peer}


def _check(options: argparse.Namespace, names: list[str]) -> None:
    for name in names:
        if name not in CONTESTANTS:
            raise CpuftError(f"--contestants: {name!r} is unknown: {suggest_names(name, list(CONTESTANTS))}")
    if options.warm_up >= options.steps:
        raise CpuftError(
            f"--warm-up {options.warm_up} leaves no update to measure of --steps {options.steps}: raise --steps"
        )
    if options.vocabulary < _SPECIAL["vocab_size"]:
        raise CpuftError(f"--vocabulary must be at least {_SPECIAL['vocab_size']}, the size of MiniLM's vocabulary")
    if options.max_length < 2 * _PAIR_TOKENS:
        raise CpuftError(f"--max-length must be at least {2 * _PAIR_TOKENS}, about two questions with their answers")


def main() -> None:
    """Run the turns, and print each turn, the median ratio with its spread, and the CPU.

    It ends with exit code 2 and a message if an option has no sense.
    """
    options = parse_arguments()
    names = options.contestants.split(",")
    try:
        _check(options, names)
    except CpuftError as error:
        print(f"bench-chat: {error}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model(folder / "model", options)
        count = options.batch_size * options.steps * 2
        data = write_conversations(folder / "chat.jsonl", count, options.max_length, options.full_length)
        ratios = []
        for seed in range(options.rounds):
            found = {one: CONTESTANTS[one](options, seed, folder, model, data) for one in names}
            print(json.dumps({"seed": seed, **found}), flush=True)
            if set(CONTESTANTS) <= set(found):
                ratios.append(found["cpuft"]["samples_per_second"] / found["TRL"]["samples_per_second"])
    print(f"measured on {read_cpu().model}")
    if ratios:
        print(
            f"cpuft trains {median(ratios):.2f} times as many conversations per second as TRL "
            f"({min(ratios):.2f} to {max(ratios):.2f}, {options.rounds} rounds in turn)"
        )


if __name__ == "__main__":
    main()
