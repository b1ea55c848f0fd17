"""Run by scripts/bench-scaling: simulated hosts at several rates, against as many independent jobs, in turn."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cpuft.record import Record, read_record
from cpuft.terminal import format_table

COLUMNS = [
    "Mbit/s",
    "samples/s",
    "ideal",
    "of the ideal",
    "waiting",
    "slowed",
    "uneven",
    "rest",
    "MB a step",
    "backend",
]


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options, and the remaining arguments, which are for `cpuft compare`."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-scaling", description=__doc__, epilog="Others: cpuft compare's."
    )
    parser.add_argument("--rates", default="1000,100,20", help="Mbit/s of each host's link [1000,100,20]")
    parser.add_argument("--hosts", type=int, default=4, help="simulated hosts [4]")
    parser.add_argument("--cores", type=float, default=0.5, help="CPU time of each host, in cores [0.5]")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind, in turn [3]")
    parser.add_argument("--steps", type=int, default=24, help="updates of each run [24]")
    parser.add_argument("--data", default="", help="GLUE folder, for MRPC [demo rows]")
    known, others = parser.parse_known_args(words)
    known.options = others
    return known


def plan_compare(asked: argparse.Namespace, cluster: str, run_dir: Path) -> list[str]:
    """Return the arguments of `cpuft compare` for one rate."""
    data = ["--task", "mrpc", "--data-dir", str(Path(asked.data).absolute())] if asked.data else []
    steps = ["--np", str(asked.hosts), "--max-steps", str(asked.steps), "--repeats", str(asked.repeats)]
    own = ["--ideal", "--no-save-model", "--no-check", "--cluster", cluster, "--run-dir", str(run_dir)]
    return ["compare", *steps, *own, *data, *asked.options]


def cpuft(folder: Path, *words: str) -> str:
    """Run cpuft, and return its output. Its errors go to the terminal."""
    environ = dict(os.environ) | {"CPUFT_STATE": str(folder / "state")}
    command = [sys.executable, "-m", "cpuft", *words]
    return subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout


def measure(folder: Path, asked: argparse.Namespace, rate: str) -> list[str]:
    """Measure one rate, and return its row. The name of the cluster holds the rate, because `auto` remembers its choice
    by the names of the hosts.
    """
    cluster, run_dir = f"s{rate}"[:7], folder / f"at-{rate}"
    words = ["--nodes", str(asked.hosts), "--cores-per-node", str(asked.cores), "--net", f"{rate}mbit"]
    cpuft(folder, "provision", "local", "--name", cluster, *words)
    try:
        cpuft(folder, *plan_compare(asked, cluster, run_dir))
    finally:
        cpuft(folder, "provision", "down", cluster)
    record = read_record(str(min(run_dir.glob(f"np-{asked.hosts}*"))))
    return format_row(rate, json.loads(cpuft(folder, "report", "--json", str(run_dir)))["runs"][0], record)


def format_row(rate: str, run: dict[str, Any], record: Record) -> list[str]:
    """Return the cells of a row: means of all rounds, with the shares of the missing time in percent of a step."""
    ideal, off = run["ideal"], run["intervals"].get("ideal", 0.0)
    parts = [f"{ideal['parts'].get(name, 0.0) / ideal['step_seconds']:.1%}" for name in COLUMNS[4:8]]
    share = f"{ideal['efficiency']:.1%}" + (f" ±{off:.1%}" if off else "")
    rates = [f"{run['samples_per_second']:.1f}", f"{ideal['samples_per_second']:.1f}"]
    megabytes = statistics.fmean(line.bytes_sent for line in record.steps) / 1e6
    how = f"{record.header.backend} {record.header.gradients or record.header.options.get('grad_compression', '')}"
    return [rate, *rates, share, *parts, f"{megabytes:.1f}", how]


def main() -> None:
    """Measure all rates and print one table. Returns 1 if a rate could not be measured."""
    asked, rows, begun = parse(), [], time.monotonic()
    rates = asked.rates.split(",")
    with tempfile.TemporaryDirectory() as name:
        for rate in rates:
            try:
                rows.append(measure(Path(name), asked, rate))
            except (subprocess.CalledProcessError, KeyError, TypeError, IndexError) as error:
                print(f"bench-scaling: {rate} Mbit/s was not measured: {error!r}", file=sys.stderr)
            print(f"{rate} Mbit/s: {(time.monotonic() - begun) / 60:.1f} minutes so far", file=sys.stderr, flush=True)
    print(f"{asked.hosts} hosts of {asked.cores:g} cores, {asked.repeats} runs of {asked.steps} updates, in turn:")
    print(format_table(COLUMNS, rows, left=0))
    sys.exit(len(rows) < len(rates))


if __name__ == "__main__":
    main()
