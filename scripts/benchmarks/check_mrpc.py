"""Run by scripts/check-mrpc: the metric that the recipe reaches; samples/s, and the wall time of the whole job, in turn
with a peer's script."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpuft.record import Record, read_record
from cpuft.train.model import find_model

LEAST = {"accuracy": 0.76, "f1": 0.83}
ROUNDS = 3
STEPS = 60


def train(folder: Path, name: str, *words: str, save: bool = False) -> Record:
    """Run `cpuft launch` once, and return its record."""
    run_dir = folder / name
    command = [sys.executable, "-m", "cpuft", "launch", "--run-dir", str(run_dir), *words]
    command += [] if save else ["--no-save-model"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return read_record(str(run_dir))


def run_peer(script: str, data: str, *words: str) -> dict[str, float]:
    """Run the script of the Trainer (bf16, dynamic padding) on the cores and with the settings of one rank."""
    command = [sys.executable, script, "--data", data, "--model", find_model("minilm"), "--bf16", "--dynamic"]
    done = subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ) | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
    )
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"'))
    said: dict[str, float] = json.loads(line)
    return said


def check_metric(folder: Path, data: str) -> bool:
    """Train three epochs at 1e-4 with one rank and with two."""
    job = ("--task", "mrpc", "--data-dir", data, "--learning-rate", "1e-4")
    found = {np: train(folder, f"np-{np}", "--np", str(np), *job).metrics for np in (1, 2)}
    print(json.dumps({"metrics": found, "least": LEAST}))
    reached = all(found[1][name] >= value for name, value in LEAST.items())
    return reached and all(abs(found[2][name] - found[1][name]) <= 0.02 for name in LEAST)


def check_speed(folder: Path, data: str, script: str) -> bool:
    """Train with cpuft and with the peer in turn. The median of the ratios must be at least 1."""
    job = ("--task", "mrpc", "--data-dir", data, "--max-steps", str(STEPS))
    rounds = []
    for number in range(ROUNDS):
        footer = train(folder, f"speed-{number}", *job).footer
        assert footer is not None
        peer = run_peer(script, data, "--max-steps", str(STEPS))
        rounds.append((footer.samples_per_second, peer["samples_per_second"]))
    ratios = sorted(ours / theirs for ours, theirs in rounds)
    print(json.dumps({"ours_and_peers": rounds, "ratio": statistics.median(ratios), "spread": [ratios[0], ratios[-1]]}))
    return statistics.median(ratios) >= 1


def check_wall(folder: Path, data: str, script: str) -> bool:
    """Time three epochs at 1e-4 from the command to the saved model, with cpuft and with the peer."""
    start = time.perf_counter()
    words = ("--task", "mrpc", "--data-dir", data, "--learning-rate", "1e-4")
    record = train(folder, "wall", *words, save=True)
    ours = time.perf_counter() - start
    peer = run_peer(script, data, "--learning-rate", "1e-4")
    theirs = time.perf_counter() - start - ours
    assert record.footer is not None
    steps, evaluation = record.footer.train_seconds, sum(line.seconds for line in record.evaluations)
    shares = {"steps": steps, "evaluation": evaluation}
    shares |= {"start and saving": record.footer.total_seconds - steps - evaluation}
    shares |= {"launching and tokenising": ours - record.footer.total_seconds}
    found = {"ours": ours, "where": shares, "accuracy": record.metrics["accuracy"]}
    found |= {"peer": theirs, "peer_training": peer["seconds"], "peer_accuracy": peer["accuracy"]}
    print(json.dumps({"wall_seconds": found, "ratio": theirs / ours}))
    return theirs / ours >= 1


def main() -> None:
    """Exit with 1 if a bar is missed."""
    data, *script = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        parts = os.environ.get("PARTS", "speed wall metric" if script else "metric").split()
        checks = {
            "speed": lambda: check_speed(Path(folder), data, script[0]),
            "wall": lambda: check_wall(Path(folder), data, script[0]),
            "metric": lambda: check_metric(Path(folder), data),
        }
        passed = [checks[part]() for part in parts]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
