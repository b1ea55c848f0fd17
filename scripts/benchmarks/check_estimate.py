"""Run by scripts/check-estimate: compare `cpuft estimate` with measurements on simulated hosts."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from cpuft.record import read_record
from cpuft.terminal import format_table
from tests.provision.simulated import Simulated, simulate

MOST_WRONG = 0.10
COLUMNS = ("link", "hosts", "measured", "estimated", "from", "to", "off by")


def run(cluster: Simulated, *words: str) -> str:
    """Return the output of a command. Exits with 2 if the command failed."""
    done = cluster.cpuft(*words)
    if done.returncode:
        sys.exit(f"check-estimate: cpuft {' '.join(words)}:\n{done.stderr}")
    return done.stdout


def check_rate(folder: Path, rate: str, hosts: list[str], options: argparse.Namespace) -> list[list[str]]:
    """Return a row per number of hosts: samples per second as measured and as estimated."""
    folder.mkdir()
    nodes = ("--nodes", hosts[-1], "--cores-per-node", options.cores, "--net", rate)
    with simulate(folder, *nodes) as cluster:
        job = ["--max-steps", str(options.steps), "--batch-size", str(options.batch_size)]
        job += ["--task", "mrpc", "--data-dir", str(Path(options.glue).absolute())] if options.glue else []
        chosen = ("--grad-compression", options.compression, "--backend", options.backend)
        for number in hosts:
            where = ("--cluster", cluster.name, "--np", number, "--run-dir", f"np-{number}", "--no-check")
            run(cluster, "launch", *where, *job, *chosen, "--no-save-model", "--max-restarts", "0")
        link = ("--bandwidth", rate, "--latency", str(options.latency), "--hosts", ",".join(hosts))
        told = json.loads(run(cluster, "estimate", "np-1", *link, "--json"))
        rows = []
        for one in told["predictions"]:
            footer = read_record(str(folder / f"np-{one['hosts']}")).footer
            assert footer is not None
            measured, estimated = footer.steady_samples_per_second, one["samples_per_second"]
            figures = [measured, estimated, one["least"], one["most"]]
            off = f"{estimated / measured - 1:+.0%}"
            rows.append([rate, str(one["hosts"]), *(f"{figure:.1f}" for figure in figures), off])
        return rows


def main() -> None:
    """Exit with 1 if an estimate is wrong by more than `MOST_WRONG`."""
    parser = argparse.ArgumentParser(prog="check-estimate", description=__doc__)
    parser.add_argument("--rates", default="1gbit,100mbit,20mbit", help="rates of the links, separated by commas")
    parser.add_argument("--hosts", default="1,2,4,8", help="numbers of hosts")
    parser.add_argument("--cores", default="0.25", help="cores of each host")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--glue", default="", help="folder of a GLUE download: MRPC instead of the demo")
    parser.add_argument("--compression", default="bf16", help="compression level of the gradients")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--latency", type=float, default=50.0, help="microseconds one way between simulated hosts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="check-estimate-") as folder:
        hosts = options.hosts.split(",")
        rows = [
            row for rate in options.rates.split(",") for row in check_rate(Path(folder, rate), rate, hosts, options)
        ]
    print(format_table(COLUMNS, rows, "samples/s, measured and estimated"))
    sys.exit(any(abs(float(row[3]) / float(row[2]) - 1) > MOST_WRONG for row in rows))


if __name__ == "__main__":
    main()
