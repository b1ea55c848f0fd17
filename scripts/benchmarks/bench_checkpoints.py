"""Run by scripts/bench-checkpoints: train with checkpoints and without, in turn, and print what checkpoints cost."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpuft.record import Footer, read_record
from cpuft.terminal import format_table


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options, and the remaining arguments, which are for `cpuft launch`."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-checkpoints", description=__doc__, epilog="Others: cpuft launch's."
    )
    parser.add_argument("--np", type=int, default=2, help="ranks [2]")
    parser.add_argument("--steps", type=int, default=1500, help="updates of each run: several intervals [1500]")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind, in turn [3]")
    known, others = parser.parse_known_args(words)
    known.options = others
    return known


def run(asked: argparse.Namespace, run_dir: Path, *words: str) -> tuple[Footer, int]:
    """Train, and return the footer of the record and the number of checkpoints."""
    job = ["--np", str(asked.np), "--task", "demo", "--max-steps", str(asked.steps)]
    own = ["--no-save-model", "--no-check", "--run-dir", str(run_dir), *words, *asked.options]
    with subprocess.Popen([sys.executable, "-m", "cpuft", "launch", *job, *own]) as process:
        seen = set[str]()
        while process.poll() is None:
            seen |= {path.name for path in run_dir.glob("checkpoints/*.0")}
            time.sleep(0.2)
    footer = read_record(str(run_dir)).footer
    assert footer, "the run broke off"
    return footer, len(seen)


def cost(kept: Footer, plain: Footer) -> float:
    """Return the share of the training time that checkpoints took, by pauses and by slower steps."""
    return (kept.total_seconds - plain.total_seconds) / plain.train_seconds


def main() -> None:
    """Run the trainings in turn, and print the table."""
    asked = parse()
    rows, shares = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1, asked.rounds + 1):
            plain, _ = run(asked, Path(folder, f"{turn}-without"), "--checkpoint-every", "0")
            kept, count = run(asked, Path(folder, f"{turn}-with"))
            shares.append(cost(kept, plain))
            seconds = [f"{one.total_seconds:.1f}" for one in (plain, kept)]
            rows.append([str(turn), *seconds, str(count), f"{shares[-1]:.1%}"])
    print(format_table(["turn", "s without", "s with", "checkpoints", "cost"], rows))
    print(f"cost: {statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%}); asked for: 2 % at most")


if __name__ == "__main__":
    main()
