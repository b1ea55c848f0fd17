"""Run by scripts/bench-launch: how the parts of a launch grow with the number of simulated hosts.

Each number of hosts gets a cluster of its own, whose hosts have disks of their own. The ranks of a launch report to
this program when they have started, joined and made their first step, and they end when it lets them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpuft.terminal import format_table
from tests.provision.simulated import own_root

PLAIN = """
import json, os, socket, sys, time
times = {"rank": int(os.environ["RANK"]), "started": time.time()}
host, port = sys.argv[1].split(":")
def report(name):
    times[name] = time.time()
with socket.create_connection((host, int(port)), timeout=60) as link:
    link.settimeout(None)
    report("joined")
    report("stepped")
    link.sendall(json.dumps(times).encode() + b"\\n")
    link.recv(1)
"""
"""Worker that imports only the standard library. It has joined when this program has its connection."""
TORCH = PLAIN.replace(
    '    report("joined")\n    report("stepped")\n',
    "    import torch, torch.distributed as dist\n"
    '    report("imported")\n'
    '    dist.init_process_group("gloo")\n'
    '    report("joined")\n'
    "    dist.all_reduce(torch.ones(1000))\n"
    '    report("stepped")\n',
)
"""Worker that forms a process group over gloo and makes one all-reduce."""
WORKERS = {"plain": PLAIN, "torch": TORCH}
PARTS = ("facts", "doctor", "plan", "secrets", "inputs", "ranks start", "import", "join", "first step")
"""Parts of a launch that follow each other, from the command to the first step of all ranks."""
COUNTS = ("CPU s", "ssh", "processes", "MB by launcher", "MB by head host")
"""What is counted from the command to the first step of all ranks, and for the bytes to the end: CPU seconds of this
machine, ssh sessions and processes that the launcher opens, and what it and the head host send."""
COLUMNS = ("hosts", "worker", "input MB", "transfer", *PARTS, "total", "stacks", "end", *COUNTS)
PHASES = {
    "facts": ("cpuft.launch.run", "gather_cluster"),
    "plan": ("cpuft.launch.run", "plan_run"),
    "doctor": ("cpuft.doctor.examine", "check_before_launch"),
}
"""Name of a phase -> (module, function) that the launcher spends it in."""


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="scripts/bench-launch", description=__doc__)
    parser.add_argument("--hosts", default="4,16,64", help="numbers of simulated hosts, at most 99 [4,16,64]")
    parser.add_argument("--workers", default="plain,torch", help="plain: standard library only; torch: gloo [both]")
    parser.add_argument("--input-mb", default="0", help="sizes of an input file in MB, each measured [0]")
    parser.add_argument("--transfers", default="head", help="who sends inputs on: head, copies (nobody), both [head]")
    parser.add_argument("--rate", default="", help="rate of each host's link and of this machine's [no limit]")
    parser.add_argument("--repeats", type=int, default=1, help="launches of each kind [1]")
    parser.add_argument("--json", default="", help="file to which each launch is appended as a line")
    return parser.parse_args(words)


@dataclass
class Gathering:
    """A port on which ranks report, and wait until they may end."""

    address: str
    ranks: int
    reports: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = socket.create_server((self.address, 0), backlog=1024)
        self.port = self._server.getsockname()[1]
        self._links: list[socket.socket] = []
        self.is_complete = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for _ in range(self.ranks):
            link, _ = self._server.accept()
            self._links.append(link)
            threading.Thread(target=self._read, args=(link,), daemon=True).start()

    def _read(self, link: socket.socket) -> None:
        self.reports.append(json.loads(link.makefile().readline()))
        if len(self.reports) == self.ranks:
            self.is_complete.set()

    def release(self) -> None:
        """Let all ranks end."""
        self._server.close()
        for link in self._links:
            link.close()


def read_bytes(cluster: str) -> tuple[int, int]:
    """Return the bytes that this machine and the head host have sent to hosts of a cluster.

    A bridge counts as sent what this machine itself sends; a veth counts as received what the host behind it sends.
    """
    paths = f"cpuft-{cluster}/statistics/tx_bytes", f"cpuft-{cluster}-1/statistics/rx_bytes"
    own, head = (int(Path("/sys/class/net", path).read_text(encoding="ascii")) for path in paths)
    return own, head


def read_busy_seconds() -> float:
    """Return the CPU time of all cores since boot that was not idle."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


@contextmanager
def make_cluster(image: Path, hosts: int, rate: str) -> Iterator[tuple[str, Callable[..., list[str]], dict[str, str]]]:
    """Yield (name of a cluster, function that returns the argv of a cpuft command, its environment)."""
    name, folder = f"b{secrets.token_hex(2)}", image.parent
    environ = {**os.environ, "CPUFT_STATE": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache")}

    def cpuft(*words: str) -> list[str]:
        return [sys.executable, "-m", "cpuft", *words]

    # The start-up file of this machine's user is not what is measured; every ssh login would read it.
    (image / "root" / ".bashrc").write_text("", encoding="utf-8")
    words = ["--name", name, "--nodes", str(hosts), "--image", str(image), "--shm", "64m"]
    words += ["--net", rate] if rate else []
    begun = time.monotonic()
    try:
        subprocess.run(cpuft("provision", "local", *words), cwd=folder, env=environ, check=True, capture_output=True)
        if rate:
            limit = ["tc", "qdisc", "replace", "dev", f"cpuft-{name}", "root", "tbf", "rate", rate]
            subprocess.run([*limit, "burst", "256kb", "latency", "50ms"], check=True)
        print(f"{hosts} hosts were made in {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        yield name, cpuft, environ
    finally:
        subprocess.run(cpuft("provision", "down", name), cwd=folder, env=environ, check=True, capture_output=True)


def measure(
    image: Path, cluster: str, environ: dict[str, str], hosts: int, worker: str, megabytes: int, transfer: str
) -> dict[str, Any]:
    """Launch a worker on all hosts of a cluster, and return the seconds of each phase and what was counted."""
    folder = image.parent
    run = f"run-{secrets.token_hex(4)}"
    script, data, times = folder / f"{run}-code" / "worker.py", folder / f"{run}.bin", folder / f"{run}.json"
    script.parent.mkdir()
    script.write_text(WORKERS[worker], encoding="utf-8")
    first = (folder / "hostfiles" / cluster).read_text(encoding="utf-8").splitlines()[1].split()[0]
    gathering = Gathering(f"{first.rpartition('.')[0]}.254", hosts)
    words = ["launch", "--cluster", cluster, "--np", str(hosts), "--run-dir", run, "--max-restarts", "0"]
    words += ["--independent"] if worker == "plain" else []
    words += ["--", str(script), f"{gathering.address}:{gathering.port}"]
    if megabytes:
        data.write_bytes(os.urandom(megabytes << 20))
        words.append(str(data))
    inside = [sys.executable, "-m", "scripts.benchmarks.bench_launch", "--inside", str(times), transfer, *words]
    environ = {**environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    sent, busy, begun = read_bytes(cluster), read_busy_seconds(), time.time()
    with subprocess.Popen(inside, cwd=folder, env=environ, stderr=subprocess.PIPE, text=True) as launch:
        while not gathering.is_complete.wait(0.1) and launch.poll() is None:
            pass
        if launch.poll() is not None:
            assert launch.stderr
            raise RuntimeError(launch.stderr.read()[-3000:])
        stacks_begun, seconds_busy = time.time(), read_busy_seconds() - busy
        stacks = subprocess.run(
            [sys.executable, "-m", "cpuft", "stacks", run], cwd=folder, env=environ, capture_output=True, text=True
        )
        released = time.time()
        gathering.release()
        _, errors = launch.communicate(timeout=300)
        ended = time.time()
    if launch.returncode or stacks.returncode or stacks.stdout.count("worker.py") < hosts:
        raise RuntimeError(f"{errors[-3000:]}\n{stacks.stdout}{stacks.stderr}")
    data.unlink(missing_ok=True)
    found, after = json.loads(times.read_text(encoding="utf-8")), read_bytes(cluster)
    last = {name: max(report[name] for report in gathering.reports) for name in gathering.reports[0]}
    result = {name: found["seconds"].get(name, 0.0) for name in PARTS[:5]}
    result |= {
        "ranks start": last["started"] - found["supervised"],
        "import": last.get("imported", last["started"]) - last["started"],
        "join": last["joined"] - last.get("imported", last["started"]),
        "first step": last["stepped"] - last["joined"],
        "total": last["stepped"] - begun,
        "stacks": released - stacks_begun,
        "end": ended - released,
        "CPU s": seconds_busy,
        "ssh": found["ssh"],
        "processes": found["processes"],
        "MB by launcher": (after[0] - sent[0]) / 1e6,
        "MB by head host": (after[1] - sent[1]) / 1e6,
    }
    return {"hosts": hosts, "worker": worker, "input MB": megabytes, "transfer": transfer, **result}


def run_inside(path: str, transfer: str, words: list[str]) -> None:
    """Run a cpuft command in this process, and write how long its parts took, and what it opened and started.

    With `copies` as the transfer, this machine sends inputs to each host itself, whatever their size is.
    """
    import importlib

    from cpuft import execute
    from cpuft.cli import main
    from cpuft.hosts import transport
    from cpuft.launch import attempt, inputs

    if transfer == "copies":
        vars(inputs)["_LEAST_HOSTS"] = sys.maxsize
    found: dict[str, Any] = {"seconds": {}, "ssh": 0, "processes": 0, "supervised": 0.0}

    def time_calls(module: Any, function: str, name: str) -> None:
        own = getattr(module, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.monotonic()
            try:
                return own(*args, **kwargs)
            finally:
                found["seconds"][name] = found["seconds"].get(name, 0.0) + time.monotonic() - begun

        setattr(module, function, call)

    def count_calls(module: Any, function: str, count: Callable[..., None]) -> None:
        own = getattr(module, function)

        def call(*args: Any, **kwargs: Any) -> Any:
            count(*args, **kwargs)
            return own(*args, **kwargs)

        setattr(module, function, call)

    def note_process(command: Any, *others: Any, **options: Any) -> None:
        found["processes"] += 1
        found["ssh"] += "ssh" in command

    def note_session(*others: Any) -> None:
        found["ssh"] += 1

    def note_supervision(*others: Any) -> None:
        found["supervised"] = time.time()

    for name, (module, function) in PHASES.items():
        time_calls(importlib.import_module(module), function, name)
    own_secrets = vars(attempt)["secrets_on_hosts"]

    @contextmanager
    def secrets_on_hosts(*args: Any) -> Iterator[None]:
        begun = time.monotonic()
        with own_secrets(*args):
            found["seconds"]["secrets"] = time.monotonic() - begun
            yield

    vars(attempt)["secrets_on_hosts"] = secrets_on_hosts
    time_calls(execute, "run_stages", "inputs")
    count_calls(attempt, "plan_supervision", note_supervision)
    count_calls(transport, "_log_in", note_session)
    count_calls(subprocess.Popen, "__init__", lambda self, *args, **options: note_process(*args, **options))
    sys.argv = ["cpuft", *words]
    try:
        main()
    finally:
        Path(path).write_text(json.dumps(found), encoding="utf-8")


def format_row(results: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a row: the medians of several launches of the same kind."""
    cells = []
    for name in COLUMNS:
        values = [result[name] for result in results]
        is_number = isinstance(values[0], float)
        cells.append(f"{statistics.median(values):.1f}" if is_number else str(values[0]))
    return cells


def main() -> None:
    """Measure each number of hosts and print one table. The exit code is 1 if something could not be measured."""
    if sys.argv[1:2] == ["--inside"]:
        run_inside(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    asked, rows, failed = parse(), [], 0
    for hosts in map(int, asked.hosts.split(",")):
        with (
            tempfile.TemporaryDirectory(prefix="cpuft-scale-") as name,
            own_root(Path(name)) as image,
            make_cluster(image, hosts, asked.rate) as (cluster, _, environ),
        ):
            kinds = (asked.workers.split(","), map(int, asked.input_mb.split(",")), asked.transfers.split(","))
            for kind in itertools.product(*kinds):
                try:
                    results = [measure(image, cluster, environ, hosts, *kind) for _ in range(asked.repeats)]
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    print(f"bench-launch: {hosts} hosts, {kind}: {error}", file=sys.stderr, flush=True)
                    failed += 1
                    continue
                rows.append(format_row(results))
                print(dict(zip(COLUMNS, rows[-1])), file=sys.stderr, flush=True)
                if asked.json:
                    with Path(asked.json).open("a", encoding="utf-8") as file:
                        file.writelines(json.dumps(result) + "\n" for result in results)
    print(format_table(COLUMNS, rows, left=2))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
