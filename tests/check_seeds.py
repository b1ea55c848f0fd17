"""Run by scripts/check-seeds: the metric over seeds, the fast path against --plain, paired by seed."""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from cpuft.record import read_record
from cpuft.train.data import tasks

# What each task trains on, and the metric that is compared.
TASKS = {
    "mrpc": (("--learning-rate", "1e-4"), "accuracy"),
    "sst2": (("--learning-rate", "1e-4", "--max-train-samples", "6000"), "accuracy"),
}
PATHS: dict[str, tuple[str, ...]] = {"fast": (), "plain": ("--plain",)}
MOST_WORSE = 0.005


def hold_out(glue: Path, records: Path, task: str, count: int) -> Path:
    """A GLUE folder whose task has its last `count` training rows in the development set: a metric of less noise."""
    made = records / f"glue-held-out-{count}"
    own, folder = glue / tasks.TASKS[task].folder, made / tasks.TASKS[task].folder
    if not folder.exists():
        head, *rows = (own / "train.tsv").read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        dev = (own / "dev.tsv").read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        folder.mkdir(parents=True)
        (folder / "train.tsv").write_text("\n".join([head, *rows[:-count]]) + "\n", encoding="utf-8")
        (folder / "dev.tsv").write_text("\n".join(dev + rows[-count:]) + "\n", encoding="utf-8")
    return made


def metric_of(glue: Path, records: Path, task: str, path: str, seed: int) -> float:
    """The metric of one run; trains only if its record is not there or has no end."""
    options, metric = TASKS[task]
    run_dir = records / f"{task}-{path}-{seed}"
    if run_dir.exists() and read_record(str(run_dir)).footer is None:
        shutil.rmtree(run_dir)
    if not run_dir.exists():
        words = ("--task", task, "--data-dir", str(glue), "--seed", str(seed), "--no-save-model", *options)
        command = [sys.executable, "-m", "cpuft", "launch", "--run-dir", str(run_dir), *words, *PATHS[path]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_record(str(run_dir)).metrics[metric]


def summarise(task: str, fast: list[float], plain: list[float]) -> dict[str, object]:
    """Means, their difference (fast minus plain) and its standard error from the pairs."""
    differences = [a - b for a, b in zip(fast, plain, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    means = {"fast": statistics.mean(fast), "plain": statistics.mean(plain)}
    spread = {"difference": statistics.mean(differences), "standard_error": error}
    return {"task": task, "seeds": len(fast), **means, **spread, "each_fast": fast, "each_plain": plain}


def main() -> None:
    """Exit 1 when the fast path's mean is lower by more than `MOST_WORSE`."""
    parser = argparse.ArgumentParser(prog="check-seeds", description=__doc__)
    parser.add_argument("glue", type=Path, help="folder of a GLUE download, with MRPC and SST-2")
    parser.add_argument("records", type=Path, help="folder for the runs' records; those there are not made again")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="comma between")
    parser.add_argument(
        "--held-out",
        type=int,
        default=0,
        help="training rows to evaluate on, too; their records need a folder of their own",
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma between")
    options = parser.parse_args()
    names: list[str] = options.tasks.split(",")
    found: dict[tuple[str, str], list[float]] = {(task, path): [] for task in names for path in PATHS}
    # Seed by seed, so that a run that is stopped early has whole pairs.
    for seed in options.seeds.split(","):
        for task, path in found:
            glue = hold_out(options.glue, options.records, task, options.held_out) if options.held_out else options.glue
            found[task, path].append(metric_of(glue, options.records, task, path, int(seed)))
    lines = [summarise(task, found[task, "fast"], found[task, "plain"]) for task in names]
    for line in lines:
        print(json.dumps(line))
    sys.exit(any(statistics.mean(found[t, "plain"]) - statistics.mean(found[t, "fast"]) > MOST_WORSE for t in names))


if __name__ == "__main__":
    main()
