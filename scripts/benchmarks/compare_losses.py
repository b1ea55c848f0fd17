"""Run by scripts/compare-losses: the losses of two commits of this repository, update by update.

Both train the built-in task with the same options, one after the other, on this machine. The exit code is 1 if a loss
differs by more than the limit: to the bit on one rank, and by 1e-6 on several, whose sums may have another order.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cpuft.record import FILE_NAME, format_metrics
from cpuft.terminal import format_table

_ROOT = Path(__file__).parents[2]
_SAME = ("--task", "demo", "--batch-size", "8", "--seed", "5", "--backend", "gloo", "--no-check", "--no-save-model")
"""Options of both trainings, before those that the user gives: the last one of a name counts."""
EXACT = ("--precision", "fp32", "--grad-compression", "none")
"""Options of both trainings unless the user gives others."""
COLUMNS = ("ranks", "updates", "first difference", "largest", "limit", "metric before", "after")


def find_difference(before: Sequence[float], after: Sequence[float]) -> tuple[int, float]:
    """Return (first update whose losses differ, counted from 1, 0 for none; the largest difference).

    Raises ValueError: the trainings have not the same number of updates.
    """
    differences = [abs(one - other) for one, other in zip(before, after, strict=True)]
    first = next((number for number, value in enumerate(differences, start=1) if value > 0), 0)
    return first, max(differences, default=0.0)


def train(checkout: Path, run_dir: Path, ranks: int, words: Sequence[str]) -> tuple[list[float], str]:
    """Train with the code of a checkout; return the loss of each update, and the metrics as text."""
    command = (sys.executable, "-m", "cpuft", "launch", "--np", str(ranks), "--run-dir", str(run_dir), *_SAME, *words)
    environ = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        command, cwd=checkout, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(f"the training with {checkout} failed:\n{done.stderr[-2000:]}")
    # Lines by themselves, because the other commit may write another version of the record.
    lines = [json.loads(line) for line in (run_dir / FILE_NAME).read_text(encoding="utf-8").splitlines()]
    metrics = [line["metrics"] for line in lines if line["kind"] == "evaluation"]
    return [line["loss"] for line in lines if line["kind"] == "step"], format_metrics(metrics[-1])


def main() -> None:
    """Exit with 1 if a loss differs by more than the limit."""
    parser = argparse.ArgumentParser(
        usage=f"compare-losses BEFORE [OPTIONS] [-- OPTIONS OF cpuft launch, in place of {' '.join(EXACT)}]",
        description=__doc__,
    )
    parser.add_argument("before", help="a commit; it is compared with this checkout as it is")
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, each compared [1,2]")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--limit", type=float, help="largest difference [0 on one rank, else 1e-6]")
    # argparse takes no options between the commit and what is behind --.
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, words_of_launch = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    words = (*(words_of_launch or EXACT), "--max-steps", str(options.updates))
    rows, is_bad = [], False
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "before")
        git = ("git", "-C", str(_ROOT), "worktree")
        subprocess.run((*git, "add", "--quiet", "--detach", str(checkout), options.before), check=True)
        try:
            for ranks in map(int, options.ranks.split(",")):
                old, old_metric = train(checkout, Path(folder, f"before-{ranks}"), ranks, words)
                new, new_metric = train(_ROOT, Path(folder, f"after-{ranks}"), ranks, words)
                first, largest = find_difference(old, new)
                limit = options.limit if options.limit is not None else 1e-6 * (ranks > 1)
                is_bad |= largest > limit
                cells = (ranks, len(new), first or "none", f"{largest:.3g}", f"{limit:g}", old_metric, new_metric)
                rows.append([str(cell) for cell in cells])
        finally:
            subprocess.run((*git, "remove", "--force", str(checkout)), check=True)
    print(format_table(COLUMNS, rows, width=160))
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
