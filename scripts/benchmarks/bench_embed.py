"""How fast cpuft computes embeddings, compared with SentenceTransformer.encode, in turn and on the same cores.

Each of the two has a process of its own with as many threads as the other. sentence-transformers computes with each of
the given batch sizes once, and then with the fastest one. `--against unpacked` compares with cpuft itself, when each
product prepares its weights. Started by scripts/bench-embed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cpuft.errors import CpuftError

OWN, PEER, UNPACKED = "cpuft", "sentence-transformers", "unpacked"
_LEAST_CHARACTERS = 20


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; all but the texts have defaults."""
    parser = argparse.ArgumentParser(prog="bench-embed", description=__doc__)
    parser.add_argument(
        "--texts", type=Path, nargs="+", required=True, help="files of texts; each gives the same number of texts"
    )
    parser.add_argument("--model", default="minilm", help="folder or hub name of the model, or minilm")
    parser.add_argument("--count", type=int, default=2000, help="number of texts of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each after a warm-up turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of each")
    parser.add_argument("--batch-sizes", default="16,32,64,128", help="those that sentence-transformers tries")
    parser.add_argument(
        "--peer-precision", default="fp32", choices=("fp32", "bf16"), help="number format of sentence-transformers"
    )
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"), help="number format of cpuft")
    parser.add_argument("--against", default=PEER, choices=(PEER, UNPACKED), help="what cpuft is compared with")
    parser.add_argument("--child", default="", choices=("", OWN, PEER, UNPACKED), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def read_texts(paths: Sequence[Path], count: int) -> list[str]:
    """Return texts in random order: lines of a .tsv file up to the first tab, else paragraphs.

    Raises CpuftError: a file has fewer texts than its share of `count`.
    """
    generator, found = random.Random(0), list[str]()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".tsv":
            texts = [line.split("\t")[0] for line in text.splitlines()[1:]]
        else:
            texts = [" ".join(part.split()) for part in text.split("\n\n")]
        texts = [one for one in dict.fromkeys(texts) if len(one) >= _LEAST_CHARACTERS]
        if len(texts) < count // len(paths):
            raise CpuftError(f"{path} has {len(texts)} texts: give more files, or a smaller --count")
        found += generator.sample(texts, count // len(paths))
    generator.shuffle(found)
    return found


def make_encoder(name: str, options: argparse.Namespace) -> Callable[[list[str], int], Any]:
    """Load the model; return the function that embeds texts, given a batch size (0: its own choice)."""
    if name != PEER:
        from cpuft.train.embedder import Embedder
        from cpuft.train.fast import packed_weights

        if name == UNPACKED:
            packed_weights._MOST_ROWS = 0
        embedder = Embedder(options.model, options.precision)
        return lambda texts, batch_size: embedder.embed(texts, batch_size=batch_size)
    from sentence_transformers import SentenceTransformer

    from cpuft.train.embedding_form import find_embedding_model

    settings = {"dtype": "bfloat16" if options.peer_precision == "bf16" else "float32"}
    peer = SentenceTransformer(find_embedding_model(options.model), device="cpu", model_kwargs=settings)
    return lambda texts, batch_size: peer.encode(texts, batch_size=batch_size, show_progress_bar=False)


def run_child(options: argparse.Namespace) -> None:
    """Embed the texts once for each line of standard input, a batch size; answer with the seconds of wall and CPU."""
    import torch

    torch.set_num_threads(options.threads)
    texts = read_texts(options.texts, options.count)
    encode = make_encoder(options.child, options)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        encode(texts, int(line))
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)


class Contestant:
    """One of the two, in a process of its own."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "scripts.benchmarks.bench_embed", *sys.argv[1:], "--child", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self, batch_size: int) -> tuple[float, float]:
        """Let it embed the texts; return the seconds, and those of the CPU. Raises CpuftError: it has failed."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{batch_size}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise CpuftError("a process of the benchmark has failed: see its error above")
        wall, cpu = json.loads(line)
        return wall, cpu

    def close(self) -> None:
        """End the process."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(60)


def format_ratios(name: str, ratios: Sequence[float]) -> str:
    """Return a line with the median of ratios, and their range."""
    return f"{name}: {median(ratios):.2f} times (from {min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rounds)"


def run(options: argparse.Namespace) -> None:
    """Measure, and print the ratios."""
    from cpuft.train.precision import read_cpu

    texts = read_texts(options.texts, options.count)
    print(f"{read_cpu().model}, {platform.machine()}, {options.threads} threads each, {len(texts)} texts", flush=True)
    name, sizes = options.against, options.batch_sizes if options.against == PEER else "0"
    if name == PEER:
        print(f"{PEER} computes in {options.peer_precision}", flush=True)
    own, peer = Contestant(OWN), Contestant(name)
    try:
        own.turn(0)
        trials = {int(size): peer.turn(int(size))[0] for size in sizes.split(",")}
        best = min(trials, key=lambda size: trials[size])
        print(", ".join(f"{name} with batches of {size}: {seconds:.1f} s" for size, seconds in trials.items()))
        rounds = [(own.turn(0), peer.turn(best)) for _ in range(options.rounds)]
    finally:
        own.close()
        peer.close()
    speeds = [median(len(texts) / turns[place][0] for turns in rounds) for place in (0, 1)]
    print(f"{OWN}: {speeds[0]:.1f} texts/s, {name} with batches of {best}: {speeds[1]:.1f} texts/s")
    print(format_ratios("texts per second", [peers[0] / owns[0] for owns, peers in rounds]))
    print(format_ratios("texts per CPU second", [peers[1] / owns[1] for owns, peers in rounds]))


def main() -> int:
    """Run. Returns 2 for an error that the user can correct."""
    options = parse_arguments()
    try:
        run_child(options) if options.child else run(options)
    except (CpuftError, OSError) as error:
        print(f"bench-embed: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
