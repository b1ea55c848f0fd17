"""A launch that is watched from outside, and what a run leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpuft.record import read_record
from tests.faults.processes import list_ours
from tests.provision.simulated import Simulated

END_SECONDS = 180.0
_START_SECONDS = 300.0


class Launch:
    """`cpuft launch` on all hosts; its lines with their moments."""

    def __init__(self, cluster: Simulated, run: str, words: Sequence[str], resume: bool = False) -> None:
        command = [sys.executable, "-m", "cpuft", "launch", "--cluster", cluster.name]
        command += ["--resume" if resume else "--run-dir", run, *words]
        environ = {**os.environ, "CPUFT_STATE": str(cluster.folder / "state")}
        self.begun, self.lines = time.monotonic(), list[tuple[float, str]]()
        self.process = subprocess.Popen(
            command, cwd=cluster.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait(self, seconds: float = _START_SECONDS) -> int:
        """Its exit code; one that does not end is killed, and gives -9."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._thread.join(10)
        return self.process.wait()

    def wait_for(self, words: str, seconds: float) -> bool:
        """Until a line holds these words; False where it has ended, or that takes longer."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            if any(words in line for _, line in self.lines):
                return True
            time.sleep(0.1)
        return False

    def texts(self, since: float = 0.0) -> list[str]:
        """Lines that came after a moment."""
        return [line for at, line in self.lines if at >= since and line]

    def seconds_to(self, words: str, since: float) -> str:
        """From a moment to the first line after it with these words; empty when there is none."""
        return next((f"{at - since:.0f}" for at, line in self.lines if at >= since and words in line), "")


def restart_words(restarts: int) -> tuple[str, ...]:
    """Of cpuft launch, as far as it knows restarts. Exits when they are asked for and it does not."""
    told = subprocess.run(
        [sys.executable, "-m", "cpuft", "launch", "--help"], capture_output=True, text=True, check=True
    )
    if "--restarts" in told.stdout:
        return ("--restarts", str(restarts))
    return sys.exit("check-faults: this cpuft launch has no --restarts") if restarts else ()


def _disks(cluster: Simulated) -> list[Path]:
    return sorted((cluster.folder / "state" / cluster.name / "nodes").glob("*/upper/var/tmp/cpuft-*"))


def wait_for_steps(launch: Launch, cluster: Simulated, run: str, steps: int) -> int:
    """Until the master has recorded so many, or the launch has ended; how many there were."""
    found, end = 0, time.monotonic() + _START_SECONDS
    while launch.process.poll() is None and time.monotonic() < end:
        for disk in _disks(cluster):
            if steps == 0 and list(disk.glob(f"*/{run}/logs")):
                return 0
            for record in disk.glob(f"*/{run}/record.jsonl"):
                found = record.read_text(errors="replace").count('"kind": "step"')
        if steps and found >= steps:
            break
        time.sleep(0.1)
    return found


@dataclass(frozen=True)
class Outcome:
    """What came of a run in the end."""

    updates: str
    metric: str
    repeated: str
    left: list[str]
    """Processes on all hosts, segments of shared memory, and files of the run on hosts' disks."""


def read_outcome(cluster: Simulated, run: str, steps: int) -> Outcome:
    """Of a run that has ended."""
    left = [f"process {pid}" for pid in list_ours()]
    for index in range(1, len(cluster.hosts) + 1):
        left += [f"memory {name}" for name in cluster.on(index, "ls /dev/shm").split()]
    left += [str(path) for disk in _disks(cluster) for path in disk.iterdir() if path.name != "inputs"]
    if not (cluster.folder / run / "record.jsonl").exists():
        return Outcome("0", "", "", left)
    record = read_record(str(cluster.folder / run))
    numbers = [step.step for step in record.steps]
    in_order = numbers == list(range(1, len(numbers) + 1))
    metric = f"{record.metrics['accuracy']:.4f}" if record.footer and "accuracy" in record.metrics else ""
    repeated = str(sum(line.repeated for line in record.resumptions))
    return Outcome(str(len(numbers)) if in_order else f"NOT IN ORDER {numbers}", metric, repeated, left)
