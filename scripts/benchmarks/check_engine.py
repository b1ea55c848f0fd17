"""Run by scripts/check-ipex and its like: MRPC (or the built-in task) with another engine and ours in turn; its metric.

Usage: ENGINE PYTHON [GLUE/MRPC] [options of cpuft launch]. ROUNDS, STEPS, WHERE and METRIC from the environment.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.record import Record, read_record

FORMAT = {"format": "cpuft-check-engine", "version": 1}
LEAST_ACCURACY = 0.76
WHERE = "1:gloo 2:gloo 2:mpi 2:ccl"
"""Numbers of ranks and backends that are compared."""
NEEDED = {"ort": ("--precision", "fp32")}
"""Options that an engine needs; cpuft's own engine gets them, too."""
OURS = {"deepspeed": ("--shard", "optimizer")}
"""Options with which cpuft's own engine does the same as another one."""


@dataclass(frozen=True)
class Job:
    """What both engines train, and the Python of each."""

    pythons: dict[str, str]
    words: tuple[str, ...]
    ours: tuple[str, ...]
    """Options of cpuft's own engine only."""

    def train(self, engine: str, np: int, backend: str, *words: str) -> Record:
        """One run of cpuft launch; its record. What it says on stderr is shown when it fails."""
        with tempfile.TemporaryDirectory() as folder:
            command = [self.pythons[engine], "-m", "cpuft", "launch", "--run-dir", f"{folder}/run", "--no-save-model"]
            command += ["--engine", engine, "--np", str(np), "--backend", backend, *self.words, *words]
            command += self.ours if engine == "torch" else ()
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
            return read_record(f"{folder}/run")


def take_turns(job: Job, np: int, backend: str, rounds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a line per run, cpuft's engine and the other one in turn."""
    for number in range(rounds):
        for engine in job.pythons:
            record = job.train(engine, np, backend, "--max-steps", str(steps))
            assert record.footer is not None
            yield {
                "kind": "turn",
                "np": np,
                "backend": backend,
                "round": number,
                "engine": engine,
                "samples_per_second": record.footer.steady_samples_per_second,
                "phases": record.footer.phases,
                "peak_megabytes": record.footer.peak_memory_bytes >> 20,
                "losses": [line.loss for line in record.steps],
                "precision": record.header.precision,
                "cpu": record.header.cpu_model,
                "cpu_flags": record.header.cpu_flags,
                "versions": record.header.versions,
            }


def summarise(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of both engines, and the median, smallest and largest ratio of the rounds."""
    rates = {
        engine: [turn["samples_per_second"] for turn in turns if turn["engine"] == engine]
        for engine in dict.fromkeys(turn["engine"] for turn in turns)
    }
    ratios = sorted(ours / theirs for ours, theirs in zip(*rates.values(), strict=True))
    return {
        "kind": "summary",
        "np": turns[0]["np"],
        "backend": turns[0]["backend"],
        **{f"{engine}_samples_per_second": statistics.median(values) for engine, values in rates.items()},
        "ratio": statistics.median(ratios),
        "ratio_least": ratios[0],
        "ratio_most": ratios[-1],
    }


def write(engine: str, line: dict[str, Any]) -> None:
    """Append a line to the record."""
    record = Path(f"runs/check-{engine}.jsonl")
    record.parent.mkdir(exist_ok=True)
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Exit with 1 if the metric of the other engine on MRPC is too low."""
    engine, python, *rest = sys.argv[1:]
    data, words = (rest[0], rest[1:]) if rest and not rest[0].startswith("-") else ("", rest)
    task = ("--task", "mrpc", "--data-dir", data) if data else ("--task", "demo")
    given = (*task, "--learning-rate", "1e-4", *NEEDED.get(engine, ()), *words)
    job = Job({"torch": sys.executable, engine: python}, given, OURS.get(engine, ()))
    write(engine, {**FORMAT, "time": time.time(), "words": job.words})
    columns = f"{'torch, samples/s':>18}{f'{engine}, samples/s':>22}{'ratio':>7}{'least':>7}{'most':>7}"
    print(f"{'ranks':>5} {'backend':8}{columns}")
    for place in os.environ.get("WHERE", WHERE).split():
        np, backend = place.split(":")
        turns = []
        for turn in take_turns(job, int(np), backend, int(os.environ.get("ROUNDS", "3")), steps()):
            write(engine, turn)
            turns.append(turn)
        found = summarise(turns)
        write(engine, found)
        rates = f"{found['torch_samples_per_second']:18.1f}{found[f'{engine}_samples_per_second']:22.1f}"
        spread = "".join(f"{found[name]:7.2f}" for name in ("ratio", "ratio_least", "ratio_most"))
        print(f"{np:>5} {backend:8}{rates}{spread}", flush=True)
    if os.environ.get("METRIC", "1") == "1":
        metrics = job.train(engine, 1, "gloo").metrics
        write(engine, {"kind": "metric", "engine": engine, **metrics})
        print(f"{engine}, 3 epochs, 1 rank: {json.dumps(metrics)}")
        sys.exit(bool(data) and metrics["accuracy"] < LEAST_ACCURACY)


def steps() -> int:
    """Updates per turn."""
    return int(os.environ.get("STEPS", "40"))


if __name__ == "__main__":
    main()
