"""Run by scripts/check-mrpc: the metric that the recipe reaches, and samples/s in turn with a peer's script."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cpuft.record import Record, read_record
from cpuft.train.model import find_model

LEAST = {"accuracy": 0.76, "f1": 0.83}
ROUNDS = 3
STEPS = 60


def train(folder: Path, name: str, *words: str) -> Record:
    """One run of cpuft launch; its record."""
    run_dir = folder / name
    command = [sys.executable, "-m", "cpuft", "launch", "--run-dir", str(run_dir), "--no-save-model", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return read_record(str(run_dir))


def peer_speed(script: str, data: str) -> float:
    """Samples per second of the Trainer's script, bf16 and dynamic padding, on the cores and settings of one rank."""
    command = [sys.executable, script, "--data", data, "--model", find_model("minilm"), "--bf16", "--dynamic"]
    done = subprocess.run(
        [*command, "--max-steps", str(STEPS)],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ) | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
    )
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith('{"'))
    return float(json.loads(line)["samples_per_second"])


def check_metric(folder: Path, data: str) -> bool:
    """Three epochs at 1e-4 with one rank and with two."""
    job = ("--task", "mrpc", "--data-dir", data, "--learning-rate", "1e-4")
    found = {np: train(folder, f"np-{np}", "--np", str(np), *job).metrics for np in (1, 2)}
    print(json.dumps({"metrics": found, "least": LEAST}))
    reached = all(found[1][name] >= value for name, value in LEAST.items())
    return reached and all(abs(found[2][name] - found[1][name]) <= 0.02 for name in LEAST)


def check_speed(folder: Path, data: str, script: str) -> bool:
    """Ours and the peer's in turn; the median of the ratios must be 1 at least."""
    job = ("--task", "mrpc", "--data-dir", data, "--max-steps", str(STEPS))
    rounds = []
    for number in range(ROUNDS):
        footer = train(folder, f"speed-{number}", *job).footer
        assert footer is not None
        rounds.append((footer.samples_per_second, peer_speed(script, data)))
    ratios = sorted(ours / theirs for ours, theirs in rounds)
    print(json.dumps({"ours_and_peers": rounds, "ratio": statistics.median(ratios), "spread": [ratios[0], ratios[-1]]}))
    return statistics.median(ratios) >= 1


def main() -> None:
    """Exit 1 when a bar is missed."""
    data, *script = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        passed = check_speed(Path(folder), data, script[0]) if script else True
        passed = check_metric(Path(folder), data) and passed
    sys.exit(not passed)


if __name__ == "__main__":
    main()
