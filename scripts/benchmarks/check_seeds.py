"""Run by scripts/check-seeds: the metric over seeds, of one path against others, paired by seed.

By default the fast path against --no-fast-path; `--np 4 --paths exact,bf16,int8,powersgd,local8` compares what is sent
between ranks: each path is compared with the first.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from cpuft import tasks
from cpuft.errors import CpuftError
from cpuft.record import read_record

# What each task trains on, and the metric that is compared.
TASKS = {
    "mrpc": (("--learning-rate", "1e-4"), "accuracy"),
    "sst2": (("--learning-rate", "1e-4", "--max-train-samples", "6000"), "accuracy"),
}
PATHS: dict[str, tuple[str, ...]] = {
    "plain": ("--no-fast-path",),
    "fp32": ("--precision", "fp32"),
    "int8p": ("--precision", "int8"),
    "fast": (),
    "exact": ("--grad-compression", "none"),
    "bf16": ("--grad-compression", "bf16"),
    "int8": ("--grad-compression", "int8"),
    "powersgd": ("--grad-compression", "powersgd"),
    "local2": ("--sync-every", "2"),
    "local4": ("--sync-every", "4"),
    "local8": ("--sync-every", "8"),
    "local16": ("--sync-every", "16"),
    "lora8": ("--lora-rank", "8", "--learning-rate", "1e-3"),
    "lora16": ("--lora-rank", "16", "--learning-rate", "1e-3"),
    "diloco4": ("--sync-every", "4", "--outer-momentum", "0.9"),
    "diloco8": ("--sync-every", "8", "--outer-momentum", "0.9"),
}
MOST_WORSE = 0.005


def hold_out(glue: Path, records: Path, task: str, count: int) -> Path:
    """Make a GLUE folder whose last `count` training examples are in the development set, for a metric with less
    noise."""
    made = records / f"glue-held-out-{count}"
    own, folder = glue / tasks.TASKS[task].folder, made / tasks.TASKS[task].folder
    if not folder.exists():
        head, *rows = (own / "train.tsv").read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        dev = (own / "dev.tsv").read_text(encoding="utf-8-sig").rstrip("\n").split("\n")
        folder.mkdir(parents=True)
        (folder / "train.tsv").write_text("\n".join([head, *rows[:-count]]) + "\n", encoding="utf-8")
        (folder / "dev.tsv").write_text("\n".join(dev + rows[-count:]) + "\n", encoding="utf-8")
    return made


def has_ended(run_dir: Path) -> bool:
    """Return whether a run is complete; one that was killed early has no record."""
    try:
        return read_record(str(run_dir)).footer is not None
    except CpuftError:
        return False


def metric_of(glue: Path, records: Path, task: str, path: str, seed: int, where: tuple[str, ...]) -> float:
    """Return the metric of one run, and train it first if its record is missing or not complete."""
    options, metric = TASKS[task]
    run_dir = records / f"{task}-{path}-{seed}"
    if run_dir.exists() and not has_ended(run_dir):
        shutil.rmtree(run_dir)
    if not run_dir.exists():
        words = ("--task", task, "--data-dir", str(glue), "--seed", str(seed), "--no-save-model", *options, *where)
        command = [sys.executable, "-m", "cpuft", "launch", "--run-dir", str(run_dir), *words, *PATHS[path]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return read_record(str(run_dir)).metrics[metric]


def ranks_here(records: Path, ranks: int) -> tuple[str, ...]:
    """Return the options of a number of ranks on this machine, even if it has fewer cores."""
    if ranks == 1:
        return ("--np", "1")
    hostfile = records / f"hosts-{ranks}"
    hostfile.write_text(f"localhost slots={ranks}\n", encoding="utf-8")
    return ("--np", str(ranks), "--hostfile", str(hostfile), "--backend", "gloo")


def summarise(task: str, path: str, found: list[float], base: str, of_base: list[float]) -> dict[str, object]:
    """Return both means, their difference (path minus base) and its standard error over the pairs."""
    differences = [a - b for a, b in zip(found, of_base, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    spread = {"difference": statistics.mean(differences), "standard_error": error}
    names = {"task": task, "path": path, "base": base, "seeds": len(found)}
    means = {"mean": statistics.mean(found), "mean_of_base": statistics.mean(of_base)}
    return {**names, **means, **spread, "each": found, "each_of_base": of_base}


def main() -> None:
    """Exit with 1 if the mean of a path is lower than that of the first path by more than `--most-worse`."""
    parser = argparse.ArgumentParser(prog="check-seeds", description=__doc__)
    parser.add_argument("glue", type=Path, help="folder of a GLUE download, with MRPC and SST-2")
    parser.add_argument("records", type=Path, help="folder for the runs' records; those there are not made again")
    parser.add_argument("--seeds", default="1,2,3,4,5", help="separated by commas")
    parser.add_argument(
        "--held-out",
        type=int,
        default=0,
        help="training rows to evaluate on, too; their records need a folder of their own",
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="separated by commas")
    parser.add_argument("--paths", default="plain,fast", help=f"the base first: {', '.join(PATHS)}")
    parser.add_argument("--np", type=int, default=1, help="ranks on this machine")
    parser.add_argument(
        "--batch-size", default="32", help="rows of a rank's update: 32 / NP for the updates of one rank [32]"
    )
    parser.add_argument("--rows", default="", help="training rows of every task [mrpc: all, sst2: 6000]")
    parser.add_argument("--most-worse", type=float, default=MOST_WORSE, help=f"[{MOST_WORSE}]")
    options = parser.parse_args()
    names, paths = options.tasks.split(","), options.paths.split(",")
    options.records.mkdir(parents=True, exist_ok=True)
    where = (*ranks_here(options.records, options.np), "--batch-size", options.batch_size)
    where += ("--max-train-samples", options.rows) if options.rows else ()
    found: dict[tuple[str, str], list[float]] = {(task, path): [] for task in names for path in paths}
    # Seed by seed, so that a run that is stopped early has whole pairs.
    for seed in options.seeds.split(","):
        for task, path in found:
            glue = hold_out(options.glue, options.records, task, options.held_out) if options.held_out else options.glue
            found[task, path].append(metric_of(glue, options.records, task, path, int(seed), where))
    lines = [
        summarise(task, path, found[task, path], paths[0], found[task, paths[0]])
        for task in names
        for path in paths[1:]
    ]
    for line in lines:
        print(json.dumps(line))
    lost = [statistics.mean(found[task, paths[0]]) - statistics.mean(found[task, path]) for task, path in found]
    sys.exit(max(lost) > options.most_worse)


if __name__ == "__main__":
    main()
