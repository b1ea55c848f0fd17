"""Run by scripts/check-hangs: let one rank hang in every way; cpuft must name the rank that others wait for."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cpuft.terminal import format_table
from tests.launch import hanging

COLUMNS = ("groups", "hang", "rank", "named while it hangs", "s", "named at its end", "s after")
MOST_SECONDS = 5.0
"""Most seconds that the stacks of all ranks may take."""
DEADLINE_SECONDS = 30.0
KINDS = ("torch", "gloo", "mpi", "ccl")
HOWS = ("loop", "asleep", "elsewhere", "stopped", "gil")


@dataclass(frozen=True)
class Hang:
    """One way in which a rank hangs."""

    kind: str
    how: str
    rank: int


def plan_hangs(number: int, ranks: int) -> list[Hang]:
    """Return hangs of all kinds in turn, each of another rank."""
    return [Hang(KINDS[index % len(KINDS)], HOWS[index % len(HOWS)], index % ranks) for index in range(number)]


def find_named(text: str) -> int:
    """Return the rank that a text names as the one that others wait for; -1 if there is none."""
    found = re.search(r"^cpuft: rank (\d+) on \S+ blocks the others .*: it (.*)$", text, re.MULTILINE)
    return int(found[1]) if found and (".py:" in found[2] or "stopped (T)" in found[2]) else -1


def plant(hang: Hang, ranks: int, deadline: float, folder: Path) -> tuple[list[str], bool]:
    """Return a row of the table, and whether the rank was named."""
    hostfile, run = folder / "hosts", folder / f"{hang.kind}-{hang.how}-{hang.rank}"
    hostfile.write_text(f"localhost slots={ranks}\n", encoding="utf-8")
    words = ["launch", "--np", str(ranks), "--hostfile", str(hostfile), "--no-check", "--run-dir", str(run), "--"]
    words += [hanging.__file__, hang.kind, hang.how, str(hang.rank), str(deadline)]
    command, pipe = [sys.executable, "-m", "cpuft"], subprocess.PIPE
    with subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL, stderr=pipe, text=True) as launch:
        mark, limit = run / "logs" / f"rank-{hang.rank}.out", time.monotonic() + 300
        while launch.poll() is None and time.monotonic() < limit and not _read_begin(mark):
            time.sleep(0.1)
        time.sleep(deadline / 3)
        begun = time.monotonic()
        asked = subprocess.run([*command, "stacks", run], capture_output=True, text=True)
        seconds, left = time.monotonic() - begun, deadline - (time.time() - _read_begin(mark))
        assert launch.stderr
        errors = launch.stderr.read()
    after = time.monotonic() - begun - seconds - left
    named = find_named(asked.stdout), find_named(errors.splitlines()[-1])
    files = len(list(run.glob("logs/rank-*.stack")))
    if named != (hang.rank, hang.rank) or files != ranks:
        print(f"{asked.stdout}{asked.stderr}{errors}", file=sys.stderr)
    row = [hang.kind, hang.how, str(hang.rank), str(named[0]), f"{seconds:.1f}", str(named[1]), f"{after:.1f}"]
    return row, named == (hang.rank, hang.rank) and files == ranks and seconds < MOST_SECONDS


def _read_begin(said: Path) -> float:
    """Return when a rank said that it hangs, in seconds since 1970; 0 before that."""
    found = re.search(r"^hangs (\S+)\n", said.read_text(encoding="utf-8") if said.exists() else "", re.MULTILINE)
    return float(found[1]) if found else 0.0


def main() -> None:
    """Exit with 1 if a rank was not named, or if stacks took too long."""
    parser = argparse.ArgumentParser(prog="check-hangs", description=__doc__)
    parser.add_argument("--hangs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=DEADLINE_SECONDS, help="seconds of a collective")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cpuft-hangs-") as folder:
        done = []
        for hang in plan_hangs(options.hangs, options.ranks):
            done.append(plant(hang, options.ranks, options.deadline, Path(folder)))
            print(" ".join(done[-1][0]), file=sys.stderr)
    print(format_table(COLUMNS, [row for row, _ in done], left=2), end="")
    print(
        f"{sum(good for _, good in done)} of {len(done)} named in time, {options.ranks} ranks, {os.cpu_count()} cores"
    )
    sys.exit(not all(good for _, good in done))


if __name__ == "__main__":
    main()
