"""Run by scripts/bench-pretraining: sequences/s of BERT-large on simulated hosts; and of a BERT of 1.5 billion
parameters as far as memory goes: layers of full width at two depths, and what follows for all of them."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cpuft.record import Record, drop_warm_up, read_record
from cpuft.terminal import format_table

WIDE = {"hidden_size": 1600, "num_attention_heads": 25, "intermediate_size": 6400}
"""Configuration of the large model; the rest is that of BERT-base."""
HOSTS = ("hosts", "sequences/s", "a host's", "efficiency", "s a step", "GB a rank")
DEPTHS = ("layers", "parameters", "sequences/s", "s a step", "GB a rank")
_SECONDS = 3600
"""Most seconds of one training."""


@dataclass(frozen=True)
class Point:
    """Result of one training."""

    size: float
    """Number of hosts, or of layers."""
    parameters: float
    sequences: float
    """Sequences of one update of all ranks."""
    seconds: float
    """Median seconds of an update after the first one."""
    peak_bytes: float
    """Peak memory of the rank that used most."""

    @property
    def rate(self) -> float:
        """Sequences a second."""
        return self.sequences / self.seconds


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options, and the remaining arguments, which are for `cpuft launch`."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-pretraining", description=__doc__, epilog="Others: cpuft launch's."
    )
    parser.add_argument("--text", default="", help="file or folder of texts [the same line again and again]")
    parser.add_argument("--model", default="bert-large", help="model that is trained on the hosts [bert-large]")
    parser.add_argument("--hosts", default="1,2,4", help="numbers of simulated hosts, separated by commas [1,2,4]")
    parser.add_argument("--cores", type=float, default=0.5, help="CPU time of each host, in cores [0.5]")
    parser.add_argument("--net", default="1gbit", help="network rate of each host [1gbit]")
    parser.add_argument("--depths", default="2,4", help="numbers of the large model's layers, two; or none: '' [2,4]")
    parser.add_argument("--layers", type=int, default=48, help="layers of the large model [48]")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence [128]")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a micro-batch of a rank [4]")
    parser.add_argument("--gradient-accumulation", type=int, default=4, help="micro-batches of an update [4]")
    parser.add_argument("--steps", type=int, default=5, help="updates of each training [5]")
    known, others = parser.parse_known_args(words)
    known.options = others
    return known


def plan_launch(asked: argparse.Namespace, model: str, texts: tuple[str, str], run_dir: Path) -> list[str]:
    """Return the arguments of `cpuft launch`. `texts` are the training texts and the small validation text."""
    what = ["--task", "text", "--train-file", texts[0], "--validation-file", texts[1]]
    what += ["--from-config", model, "--tokenizer", "minilm"]
    size = ["--max-length", str(asked.length), "--batch-size", str(asked.batch_size)]
    size += ["--gradient-accumulation", str(asked.gradient_accumulation), "--max-steps", str(asked.steps)]
    own = ["--shard", "optimizer", "--no-save-model", "--checkpoint-every", "0", "--no-check", "--max-restarts", "0"]
    return ["launch", *what, *size, *own, "--time-limit", str(_SECONDS), "--run-dir", str(run_dir), *asked.options]


def read_point(size: float, record: Record) -> Point:
    """Return the result of a training without its first update, in which caches warm up."""
    assert record.footer, "the run broke off"
    steps = drop_warm_up(record.steps)[1:]
    seconds = statistics.median(line.step_seconds for line in steps)
    return Point(size, record.header.parameters, steps[0].samples, seconds, record.footer.peak_memory_bytes)


def derive(first: Point, second: Point, layers: float) -> Point:
    """Extrapolate to more layers: each layer adds what it added between the two depths that were measured."""

    def at(low: float, high: float) -> float:
        return low + (high - low) / (second.size - first.size) * (layers - first.size)

    return Point(
        layers,
        at(first.parameters, second.parameters),
        first.sequences,
        at(first.seconds, second.seconds),
        at(first.peak_bytes, second.peak_bytes),
    )


def format_hosts(points: list[Point]) -> str:
    """Return the table of the hosts. Efficiency is relative to the rate per host of the smallest number of hosts."""
    alone = points[0].rate / points[0].size
    rows = []
    for point in points:
        own = point.rate / point.size
        figures = [f"{point.rate:.2f}", f"{own:.2f}", f"{own / alone:.1%}", f"{point.seconds:.2f}"]
        rows.append([f"{point.size:g}", *figures, f"{point.peak_bytes / 1e9:.1f}"])
    return format_table(HOSTS, rows)


def format_depths(points: list[Point], layers: int) -> str:
    """Return the table of the depths, with the extrapolation from the first two."""
    told = [(f"{point.size:g}", point) for point in points]
    told.append((f"{layers} (derived)", derive(points[0], points[1], layers)))
    rows = [
        [name, f"{one.parameters / 1e6:.0f} M", f"{one.rate:.3f}", f"{one.seconds:.2f}", f"{one.peak_bytes / 1e9:.1f}"]
        for name, one in told
    ]
    note = "derived: a line through the two depths, for seconds and memory; nothing of that size was run"
    return format_table(DEPTHS, rows, notes=[note])


def cpuft(folder: Path, *words: str) -> None:
    """Run cpuft. Its errors go to the terminal."""
    environ = dict(os.environ) | {"CPUFT_STATE": str(folder / "state")}
    command = [sys.executable, "-m", "cpuft", *words]
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True, timeout=_SECONDS + 600)


def measure_hosts(folder: Path, asked: argparse.Namespace, texts: tuple[str, str], hosts: int) -> Point:
    """Train on a number of simulated hosts with one rank each."""
    cluster, run_dir = f"p{hosts}", folder / f"hosts-{hosts}"
    nodes = ["--nodes", str(hosts), "--cores-per-node", str(asked.cores), "--net", asked.net]
    cpuft(folder, "provision", "local", "--name", cluster, *nodes)
    try:
        words = plan_launch(asked, asked.model, texts, run_dir)
        cpuft(folder, *words, "--cluster", cluster, "--np", str(hosts))
    finally:
        cpuft(folder, "provision", "down", cluster)
    return read_point(hosts, read_record(str(run_dir)))


def measure_depth(folder: Path, asked: argparse.Namespace, texts: tuple[str, str], layers: int) -> Point:
    """Train a number of wide layers with one rank on all cores of this machine."""
    settings, run_dir = folder / f"wide-{layers}.json", folder / f"depth-{layers}"
    settings.write_text(json.dumps({"model_type": "bert", **WIDE, "num_hidden_layers": layers}), encoding="utf-8")
    cpuft(folder, *plan_launch(asked, str(settings), texts, run_dir))
    return read_point(layers, read_record(str(run_dir)))


def write_text(path: Path, lines: int) -> str:
    """Write a meaningless text, which serves because its content does not change the time of a step."""
    path.write_text("the river runs by a house of stone and under old trees\n" * lines, encoding="utf-8")
    return str(path)


def main() -> None:
    """Measure and print both tables."""
    asked = parse()
    print(
        f"{asked.batch_size} x {asked.gradient_accumulation} sequences of {asked.length} tokens a rank and update",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own = str(Path(asked.text).absolute()) if asked.text else write_text(folder / "text.txt", 40_000)
        texts = (own, write_text(folder / "few.txt", 20))
        hosts = [measure_hosts(folder, asked, texts, int(number)) for number in asked.hosts.split(",") if number]
        if hosts:
            print(f"{asked.model}, {asked.cores:g} cores a host:\n{format_hosts(hosts)}", flush=True)
        depths = [measure_depth(folder, asked, texts, int(number)) for number in asked.depths.split(",") if number]
        if depths:
            print(f"{WIDE['hidden_size']} wide, one rank:\n{format_depths(depths, asked.layers)}", flush=True)


if __name__ == "__main__":
    main()
