"""Run by scripts/bench-data: prepare a large CSV file with cpuft and with datasets.map, each in a new cache folder."""

from __future__ import annotations

import argparse
import csv
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpuft.hardware import parse_cpuinfo
from cpuft.terminal import format_table
from cpuft.train.data.demo import make_pairs
from cpuft.train.model import find_model

_MAP = """
import os, sys, datasets
from datasets import load_dataset
from transformers import AutoTokenizer

path, model, length, cache = sys.argv[1:]
datasets.disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(model)
rows = load_dataset("csv", data_files=path, split="train", cache_dir=cache)
labels = {name: number for number, name in enumerate(sorted(set(map(str, rows.unique("label")))))}

def tokenize(batch):
    found = tokenizer(batch["sentence"], truncation=True, max_length=int(length))
    return dict(found) | {"labels": [labels[str(label)] for label in batch["label"]]}

rows.map(tokenize, batched=True, remove_columns=rows.column_names)
"""
"""What an example script of transformers does: all columns of the tokenizer, in batches of 1000 rows."""
_PREPARE = """
import sys
from cpuft.config.train import TrainConfig
from cpuft.train.data.prepare import prepare

prepare(TrainConfig(task="files", train_file=sys.argv[1], validation_file=sys.argv[2], max_length=int(sys.argv[3])))
"""
COLUMNS = ("program", "seconds", "CPU seconds", "rows per CPU second", "most memory, GB", "disk, GB")


def write_csv(path: Path, rows: int) -> None:
    """Write different sentences, of about 12 words each."""
    generator = random.Random(0)
    pairs = make_pairs(20_000, 1)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("sentence", "label"))
        for number in range(rows):
            sentence, _, label = generator.choice(pairs)
            writer.writerow((f"{number}: {sentence}", label))


def run(program: str, *words: str) -> tuple[float, float, float, float]:
    """Run a Python program in a new cache folder.

    Returns
    -------
    Seconds; CPU seconds of user and system; the largest resident memory in GB; GB in the cache folder.

    Raises subprocess.CalledProcessError: it fails.
    """
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as cache:
        environ = os.environ | {"XDG_CACHE_HOME": cache, "HF_HOME": f"{cache}/hf", "HF_HUB_OFFLINE": "1"}
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-c", program, *words, cache], env=environ, stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), program)
        seconds = time.monotonic() - start
        size = sum(path.stat().st_size for path in Path(cache).rglob("*") if path.is_file())
        return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, size / 2**30


def main() -> None:
    """Print a table with a line for each run."""
    parser = argparse.ArgumentParser(prog="scripts/bench-data", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--repeats", type=int, default=1, help="number of runs of each program, in turn [1]")
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--programs", default="cpuft,datasets.map", help="which of them to run, in this order")
    options = parser.parse_args()
    length = str(options.max_length)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"), platform.machine()).model)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/var/tmp")) as folder:
        path, few = Path(folder, "rows.csv"), Path(folder, "few.csv")
        write_csv(path, options.rows)
        write_csv(few, 100)
        commands = {
            "cpuft": (_PREPARE, str(path), str(few), length),
            "datasets.map": (_MAP, str(path), find_model("minilm"), length),
        }
        results = []
        for _ in range(options.repeats):
            for name in options.programs.split(","):
                results.append((name, run(*commands[name])))
                seconds, used, memory, disk = results[-1][1]
                print(f"{name}: {seconds:.0f} s, {used:.0f} CPU s, {memory:.2f} GB, {disk:.2f} GB on disk", flush=True)
    table = [
        (name, f"{seconds:.0f}", f"{used:.0f}", f"{options.rows / used:,.0f}", f"{memory:.2f}", f"{disk:.2f}")
        for name, (seconds, used, memory, disk) in results
    ]
    print(format_table(COLUMNS, table, left=1))


if __name__ == "__main__":
    main()
