"""Run by scripts/check-texts: perplexity before and after adapting to texts, and speed compared with the Trainer."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cpuft.record import read_record
from scripts.benchmarks.check_mrpc import train

ROUNDS = 3
STEPS = 40
LEAST = 1.5
"""How many times as fast as the faster variant of the Trainer cpuft must be."""
ATTENTIONS = ("sdpa", "eager")


def run_peer(data: Path, attention: str) -> float:
    """Return the samples/s of the Trainer on the examples of a run of cpuft, with the cores and settings of one
    rank."""
    words = [str(data), "--steps", str(STEPS), "--bf16", "--attention", attention]
    settings = {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    command = [sys.executable, "-m", "tests.train.masked_trainer", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ) | settings)
    return float(json.loads(done.stdout.splitlines()[-1])["samples_per_second"])


def check_speed(folder: Path, texts: str) -> bool:
    """Train with cpuft and with both variants of the Trainer in turn; return the median ratio to the faster one."""
    rounds = []
    for number in range(ROUNDS):
        footer = train(
            folder, f"speed-{number}", "--task", "text", "--train-file", texts, "--max-steps", str(STEPS)
        ).footer
        assert footer is not None
        theirs = {name: run_peer(folder / f"speed-{number}" / "data.npz", name) for name in ATTENTIONS}
        rounds.append({"cpuft": footer.steady_samples_per_second, **theirs})
        print(json.dumps(rounds[-1]), flush=True)
    ratios = sorted(found["cpuft"] / max(found[name] for name in ATTENTIONS) for found in rounds)
    print(json.dumps({"ratio": statistics.median(ratios), "spread": [ratios[0], ratios[-1]]}), flush=True)
    return statistics.median(ratios) >= LEAST


def check_perplexity(folder: Path, texts: str) -> bool:
    """Measure perplexity before training, and after three epochs with one rank and with two."""
    job = ("--task", "text", "--train-file", texts, "--learning-rate", "2e-4")
    found = {"before": train(folder, "before", *job, "--epochs", "0").metrics}
    for ranks in ("1", "2"):
        found[f"np {ranks}"] = train(folder, f"np-{ranks}", *job, "--np", ranks).metrics
        print(json.dumps(found), flush=True)
    seconds = {name: (read_record(str(folder / f"np-{name}")).footer) for name in ("1", "2")}
    print(json.dumps({name: footer.train_seconds for name, footer in seconds.items() if footer}), flush=True)
    return all(metrics["perplexity"] < found["before"]["perplexity"] / 20 for metrics in list(found.values())[1:])


def main() -> None:
    """Exit with 1 if a bar is missed."""
    (texts,) = sys.argv[1:]
    checks = {"speed": check_speed, "perplexity": check_perplexity}
    with tempfile.TemporaryDirectory() as folder:
        passed = [checks[part](Path(folder), texts) for part in os.environ.get("PARTS", "speed perplexity").split()]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
