"""Run by scripts/check-estimate: compare `cpuft estimate` with measurements on simulated hosts or in slow motion."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cpuft.network_speed import parse_bit_rate
from cpuft.record import read_record
from cpuft.report.estimate import Network, UpdateCosts, estimate_hosts, read_job
from cpuft.serialization import load, parse_json
from cpuft.terminal import format_table
from scripts.benchmarks.bench_slow_motion import list_cases, measure, parse_arguments
from scripts.benchmarks.slow_motion import Result
from scripts.benchmarks.step_times import GradientTime, TimedRecord, read_timed_record
from tests.provision.simulated import Simulated, simulate

MOST_WRONG = 0.10
COLUMNS = ("link", "hosts", "measured", "estimated", "from", "to", "off by")
SLOW_COLUMNS = ("model", "link", "hosts", "measured ms", "as", "estimated ms", "as", "off by")


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


def check_in_slow_motion(run_dir: Path, rate: str, hosts: list[str], results: Path) -> list[list[str]]:
    """Return a row per number of hosts: milliseconds of a step as measured in slow motion and as estimated.

    Parameters
    ----------
    run_dir: folder of a run that scripts/record-layer-times has made.
    results: folder for the measurements; those that are there already are not made again.
    """
    path, sizes = results / f"{run_dir.name}-{rate}.json", ",".join(hosts)
    record = read_timed_record(str(run_dir))
    if not path.exists():
        cases = list_cases(parse_arguments([str(run_dir), "--np", sizes, "--bandwidth", rate]), record)
        found = [dataclasses.asdict(one) for one in measure(record.path, cases)]
        path.write_text(json.dumps(found), encoding="utf-8")
    kept = load(list[Result], parse_json(path.read_text(encoding="utf-8")))
    measured = {one.case.ranks: one for one in kept}
    network = Network(parse_bit_rate(rate, "--rates"), 0.0)
    rows = []
    for one in (estimate_hosts(read_timed_job(record), network, int(number)) for number in hosts):
        result, estimated = measured[one.hosts], one.step_seconds
        case, step = result.case, result.total_seconds
        figures = [
            str(case.ranks),
            f"{step * 1e3:.0f}",
            case.grad_compression,
            f"{estimated * 1e3:.0f}",
            one.sent_as,
        ]
        rows.append([run_dir.name, rate, *figures, f"{estimated / step - 1:+.1%}"])
    return rows


def read_timed_job(record: TimedRecord) -> UpdateCosts:
    """Return the job of a record with the times of its layers, if they were measured."""
    job, times = read_job(record), record.layer_times
    if times is None or times.last_backward_seconds <= 0:
        return job
    return dataclasses.replace(
        job,
        forward_seconds=times.data_seconds + times.forward_seconds,
        backward_seconds=times.backward_seconds,
        update_seconds=times.update_seconds,
        last_backward=min(1.0, times.last_backward_seconds / times.backward_seconds),
        ready=list_ready_shares(times.gradients, times.last_backward_seconds),
    )


def list_ready_shares(gradients: Sequence[GradientTime], backward_seconds: float) -> tuple[tuple[float, float], ...]:
    """Return `UpdateCosts.ready` of gradients, in their order, that are not sent by rows; () if there are none."""
    layers = [(math.prod(one.shape), one.ready_seconds) for one in gradients if not one.by_rows]
    found, count, total = list[tuple[float, float]](), 0, sum(numbers for numbers, _ in layers)
    for numbers, ready in layers if total else ():
        count += numbers
        found.append((count / total, min(1.0, ready / backward_seconds)))
    return tuple(found)


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
    parser.add_argument(
        "--slow-motion",
        default="",
        help="instead of simulated hosts: runs with scripts/record-layer-times, separated by commas, in slow motion",
    )
    parser.add_argument("--results", default="", help="folder that keeps the measurements in slow motion")
    options = parser.parse_args()
    hosts, rates = options.hosts.split(","), options.rates.split(",")
    if options.slow_motion:
        with tempfile.TemporaryDirectory(prefix="check-estimate-") as folder:
            kept = Path(options.results or folder)
            kept.mkdir(parents=True, exist_ok=True)
            runs = [Path(run) for run in options.slow_motion.split(",")]
            rows = [row for run in runs for rate in rates for row in check_in_slow_motion(run, rate, hosts, kept)]
        wrong = sum(abs(float(row[-1].rstrip("%"))) > 100 * MOST_WRONG for row in rows)
        title = f"a step of the slowest rank; {wrong} of {len(rows)} estimates are wrong by more than {MOST_WRONG:.0%}"
        print(format_table(SLOW_COLUMNS, rows, title))
        sys.exit(wrong > 0)
    with tempfile.TemporaryDirectory(prefix="check-estimate-") as folder:
        rows = [row for rate in rates for row in check_rate(Path(folder, rate), rate, hosts, options)]
    print(format_table(COLUMNS, rows, "samples/s, measured and estimated"))
    sys.exit(any(abs(float(row[3]) / float(row[2]) - 1) > MOST_WRONG for row in rows))


if __name__ == "__main__":
    main()
