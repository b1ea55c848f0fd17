"""Run by scripts/bench-comm: what the backends reach on this machine, in turn, against the bars of the project."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cpuft.compressions import BUCKET_NUMBERS
from cpuft.record import parse_measurements, read_record

ROUNDS = 5
BUCKET = 26214400
SIZES = (1 << 20, BUCKET, 110 << 20)
BACKENDS = ("gloo", "mpi", "ccl")
LINKS = ("1gbit", "500mbit")
CLUSTER = "bench"
Rounds = list[Mapping[tuple[str, int], list[float]]]
"""For each round the seconds of each repetition, by backend and bytes."""


def cpuft(folder: Path, *words: str) -> str:
    """Run cpuft in a folder, and return its output. Its errors go to the terminal."""
    environ = dict(os.environ) | {"CPUFT_STATE": str(folder / "state")}
    command = [sys.executable, "-m", "cpuft", *words]
    return subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout


def measure(folder: Path, name: str, sizes: Sequence[int], *where: str) -> Rounds:
    """Measure all-reduces of fp32 with each backend and with the choice of auto, round by round."""
    words = ["--backends", "auto,gloo,mpi,ccl", "--dtypes", "float32", "--rounds", str(ROUNDS)]
    words += ["--sizes", ",".join(map(str, sizes)), "--run-dir", str(folder / name)]
    print(cpuft(folder, "bench", "comm", "--np", "2", *where, *words))
    rows = parse_measurements((folder / name / "comm.jsonl").read_text(), name)
    each = len(rows) // ROUNDS
    return [
        {(row.backend.partition(":")[0], row.nbytes): list(row.seconds) for row in part}
        for part in (rows[at : at + each] for at in range(0, len(rows), each))
    ]


def spread(ratios: Sequence[float]) -> str:
    """Return the median, the smallest and the largest value as text."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def check_one_host(folder: Path) -> bool:
    """Check that the faster of ccl and mpi is at least 4 times as fast as gloo."""
    rounds = measure(folder, "one-host", [BUCKET])
    medians = [{name: statistics.median(one[name, BUCKET]) for name in BACKENDS} for one in rounds]
    better = {name: [one["gloo"] / one[name] for one in medians] for name in ("ccl", "mpi")}
    for name, ratios in better.items():
        print(f"one host, 25 MiB: {name} is {spread(ratios)} times as fast as gloo")
    return max(map(statistics.median, better.values())) >= 4


@contextmanager
def two_hosts(folder: Path, *words: str) -> Iterator[None]:
    """Make two simulated hosts for the time of the context."""
    cpuft(folder, "provision", "local", "--name", CLUSTER, "--nodes", "2", *words)
    try:
        yield
    finally:
        cpuft(folder, "provision", "down", CLUSTER)


def check_two_hosts(folder: Path) -> bool:
    """Check that auto is within 5 % of the best backend, and of gloo, at three sizes."""
    with two_hosts(folder):
        rounds = measure(folder, "two-hosts", SIZES, "--cluster", CLUSTER)
    well = True
    for size in SIZES:
        medians = {
            name: statistics.median(itertools.chain.from_iterable(one[name, size] for one in rounds))
            for name in ("auto", *BACKENDS)
        }
        behind, gloo = medians["auto"] / min(medians.values()), medians["auto"] / medians["gloo"]
        print(f"two hosts, {size >> 20} MiB: auto takes {behind:.3f} of the best's time, {gloo:.3f} of gloo's")
        well &= max(behind, gloo) <= 1.05
    return well


def check_overlap(folder: Path) -> bool:
    """Backward with communication at most 60 % of backward and communication one after the other, over some link.

    What can be hidden is the shorter of the two, so the least share there can be is that of the longer: half, where
    a link makes both alike.
    """
    for backend in BACKENDS:
        _overlap(folder, "one host", backend)
    shares = []
    for link in LINKS:
        with two_hosts(folder, "--net", link):
            shares += [_overlap(folder, link, backend, "--cluster", CLUSTER) for backend in BACKENDS]
    return min(shares) <= 0.6


def _overlap(folder: Path, place: str, backend: str, *where: str) -> float:
    script = str(Path(__file__).parent / "overlap.py")
    run_dir = folder / f"overlap-{place.replace(' ', '-')}-{backend}"
    cpuft(
        folder,
        "launch",
        "--np",
        "2",
        "--max-restarts",
        "0",
        "--run-dir",
        str(run_dir),
        *where,
        "--",
        script,
        backend,
        str(BUCKET_NUMBERS * 2 / 2**20),
    )
    found = json.loads((run_dir / "logs/rank-0.out").read_text().splitlines()[-1])
    print(place, json.dumps(found), flush=True)
    return float(found["share"])


def check_compression(folder: Path, data: str) -> bool:
    """Check that gradients in bf16 reach the metric of fp32 within 0.01 on MRPC, with half the bytes."""
    runs = {}
    for compression in ("none", "bf16"):
        job = ["launch", "--np", "2", "--task", "mrpc", "--data-dir", data, "--learning-rate", "1e-4", "--no-fast-path"]
        cpuft(folder, *job, "--grad-compression", compression, "--no-save-model", "--run-dir", f"mrpc-{compression}")
        record = read_record(str(folder / f"mrpc-{compression}"))
        assert record.footer is not None
        runs[compression] = record.metrics | {"bytes_per_step": record.footer.bytes_per_step}
    print(json.dumps(runs))
    near = all(abs(runs["bf16"][name] - runs["none"][name]) <= 0.01 for name in ("accuracy", "f1"))
    return near and runs["bf16"]["bytes_per_step"] <= 0.51 * runs["none"]["bytes_per_step"]


def main() -> None:
    """Run all measurements. Returns 1 if a bar is missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {"one host": check_one_host(folder)}
        if os.geteuid() == 0:
            results |= {"two hosts": check_two_hosts(folder), "overlap": check_overlap(folder)}
        if sys.argv[1:]:
            results["compression"] = check_compression(folder, str(Path(sys.argv[1]).absolute()))
        print(json.dumps(results))
    sys.exit(not all(results.values()))


if __name__ == "__main__":
    main()
