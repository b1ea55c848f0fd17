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
        self.begun, self.lines, self.ended_at = time.monotonic(), list[tuple[float, str]](), 0.0
        self.process = subprocess.Popen(
            command, cwd=cluster.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
        self.ended_at = time.monotonic()

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

    def wait_for_line_since(self, words: str, after: str, since: float, seconds: float) -> bool:
        """Until a line begins with `words` after one that begins with `after`; False where that does not come."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            lines = [line for at, line in self.lines if at >= since]
            begun = next((number for number, line in enumerate(lines) if line.startswith(after)), len(lines))
            if any(line.startswith(words) for line in lines[begun:]):
                return True
            time.sleep(0.1)
        return False

    def texts(self, since: float = 0.0) -> list[str]:
        """Lines that came after a moment."""
        return [line for at, line in self.lines if at >= since and line]

    def seconds_to_go_on(self, since: float) -> float:
        """From a fault to the first update after a restart, or to the end of the launch if there was no restart."""
        restarts = [at for at, line in self.lines if at >= since and line.startswith("cpuft: restart ")]
        goes_on = [at for at, line in self.lines if restarts and at > restarts[-1] and line.startswith("step ")]
        return min(goes_on, default=self.ended_at) - since

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


def _count_steps(records: Sequence[str]) -> int:
    return max((text.count('"kind": "step"') for text in records), default=0)


def has_come_to(stage: str, step: int, steps: int, cluster: Simulated, run: str) -> bool:
    """Whether a run is in a stage, as the hosts' disks tell."""
    folders = [folder for disk in _disks(cluster) for folder in disk.glob(f"*/{run}")]
    if stage == "prepare":
        return any((folder / "logs").is_dir() for folder in folders)
    if stage == "start":
        return any((folder / "logs/mpirun.log").exists() for folder in folders)
    records = [path.read_text(errors="replace") for folder in folders if (path := folder / "record.jsonl").exists()]
    if stage == "train":
        return _count_steps(records) >= step
    if stage == "checkpoint":
        return any(list(folder.glob("checkpoints/*.new")) for folder in folders) and _count_steps(records) > 0
    if stage == "evaluate":
        return _count_steps(records) >= steps
    if stage == "save":
        return any('"kind": "evaluation"' in text for text in records)
    return any((folder / "logs/exit-code").exists() for folder in folders)  # the results are fetched now


def wait_for_stage(launch: Launch, cluster: Simulated, run: str, stage: str, step: int, steps: int) -> bool:
    """Until a run is in a stage; False if the launch has ended before."""
    end = time.monotonic() + _START_SECONDS
    while launch.process.poll() is None and time.monotonic() < end:
        if has_come_to(stage, step, steps, cluster, run):
            return True
        time.sleep(0.02)
    return False


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
