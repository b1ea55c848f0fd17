"""Run by scripts/check-sweep: the time of a sweep against an ideal queue, and a sweep whose hosts are lost."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from cpuft.sweep.study import DONE, Attempt, Sweep, read_sweep
from tests.provision.simulated import Simulated, simulate

HOSTS, CORES = 4, "0.5"
LEAST_SHARE = 0.97
MOST_IDLE_SECONDS = 2.0
_MOST_SECONDS = 1800.0
FAULTS = (("kill", 2), ("cut", 3), ("kill", 4))
"""What happens to which host. The first host stays, so that the sweep can end."""


def start_sweep(cluster: Simulated, folder: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a sweep of the demo task over the cluster."""
    words = ["--cluster", cluster.name, "--task", "demo", "--max-steps", str(options.steps), "--batch-size", "8"]
    words += ["--precision", "fp32", "--checkpoint-every", "10", "--no-save-model", "--seed", f"1..{options.runs}"]
    environ = dict(os.environ) | {"CPUFT_STATE": str(cluster.folder / "state")}
    command = [sys.executable, "-m", "cpuft", "sweep", *words, "--run-dir", folder]
    return subprocess.Popen(command, cwd=cluster.folder, env=environ, text=True, stderr=subprocess.PIPE)


def list_idle_seconds(sweep: Sweep) -> list[float]:
    """Return the seconds between the end of an attempt and the start of the next one on the same host."""
    gaps, attempts = list[float](), _list_attempts(sweep)
    for place in {one.place for one in attempts}:
        here = sorted((one for one in attempts if one.place == place), key=lambda one: one.time)
        gaps += [after.time - before.time - before.seconds for before, after in pairwise(here)]
    return gaps


def _list_attempts(sweep: Sweep) -> list[Attempt]:
    return [one for run in sweep.runs for one in run.attempts]


def list_metrics(sweep: Sweep) -> dict[int, dict[str, float]]:
    """Return the metrics of each run that is done."""
    return {run.number: run.attempts[-1].metrics for run in sweep.list_runs(DONE)}


def check_queue(cluster: Simulated, options: argparse.Namespace) -> tuple[Sweep, bool]:
    """Sweep without faults; return the sweep, and whether it took hardly longer than an ideal queue."""
    begin = time.monotonic()
    process = start_sweep(cluster, "queue", options)
    _, errors = process.communicate(timeout=_MOST_SECONDS)
    seconds = time.monotonic() - begin
    if process.returncode:
        sys.exit(f"check-sweep: the sweep failed:\n{errors}")
    sweep = read_sweep(str(cluster.folder / "queue"))
    ideal = sum(one.seconds for one in _list_attempts(sweep)) / HOSTS
    idle = max(list_idle_seconds(sweep), default=0.0)
    print(f"{options.runs} runs on {HOSTS} hosts: {seconds:.1f} s; an ideal queue of the same runs {ideal:.1f} s, so")
    print(
        f"{ideal / seconds:.1%} of its speed (bar {LEAST_SHARE:.0%}); longest idle time of a host {idle:.2f} s",
        flush=True,
    )
    return sweep, ideal / seconds >= LEAST_SHARE and idle < MOST_IDLE_SECONDS


def wait_for_ends(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many runs of a sweep have ended, and its other runs have trained for some seconds."""
    end = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if (folder / "sweep.jsonl").exists() and len(read_sweep(str(folder)).list_runs(DONE)) >= count:
            time.sleep(5.0)
            return
        time.sleep(0.5)
    sys.exit("check-sweep: the sweep ended before its hosts were lost: give more --runs or --steps")


def check_losses(cluster: Simulated, undisturbed: Sweep, options: argparse.Namespace) -> bool:
    """Sweep while hosts are lost; return whether all runs ended with the metrics of the undisturbed sweep."""
    process = start_sweep(cluster, "losses", options)
    for number, (fault, host) in enumerate(FAULTS):
        wait_for_ends(cluster.folder / "losses", 2 * number, process)
        done = cluster.cpuft("provision", "local", fault, str(host), "--name", cluster.name)
        print(f"{fault} {host}: exit code {done.returncode}", flush=True)
    _, errors = process.communicate(timeout=_MOST_SECONDS)
    sweep = read_sweep(str(cluster.folder / "losses"))
    found, wanted = list_metrics(sweep), list_metrics(undisturbed)
    same = [run for run, metrics in found.items() if metrics == wanted[run]]
    print(f"with two hosts killed and one cut off: {len(found)} of {options.runs} runs done,")
    print(f"{len(same)} with the metrics of the undisturbed sweep, {len(_list_attempts(sweep))} attempts", flush=True)
    if len(same) < options.runs:
        print(errors)
    return bool(len(same) == options.runs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="check-sweep", description=__doc__)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=150, help="updates of a run")
    parser.add_argument("--only", choices=("queue",), help="leave out the sweep whose hosts are lost")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="check-sweep-") as folder,
        simulate(Path(folder), "--nodes", str(HOSTS), "--cores-per-node", CORES) as cluster,
    ):
        for number in range(1, HOSTS + 1):  # so that no host sees the checkpoints of another one
            cluster.on(number, "mount -t tmpfs -o mode=1777 tmpfs /var/tmp")
        sweep, is_good = check_queue(cluster, options)
        if not options.only:
            is_good &= check_losses(cluster, sweep, options)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
