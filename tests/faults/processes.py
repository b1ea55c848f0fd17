"""Finds the processes of a run, wherever they are on simulated hosts, and does things to them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.kinds import HOSTS, PROCESSES, TWO, Fault, Target
from tests.provision.simulated import Simulated

_SECONDS = 60.0
_MARKS = ("cpuft.train", "cpuft.rank", "cpuft.launch.remote", "mpiexec", "mpirun", "hydra", "pmi_proxy")


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _variables(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(word.partition("=")[::2] for word in text.split("\0"))


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def list_pids() -> list[int]:
    """All processes but this one."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if int(path.name) != os.getpid()]


def list_ours() -> list[int]:
    """All that a run consists of on hosts."""
    return [pid for pid in list_pids() if any(mark in word for word in _words(pid) for mark in _MARKS)]


def find_targets(fault: Fault, launch: int) -> list[int]:
    """Processes of which the fault hits one."""
    pids = {pid: words for pid in list_pids() if (words := _words(pid)) and words[0]}
    found = {
        "ssh": lambda pid, words: _parent(pid) == launch and os.path.basename(words[0]) == "ssh",
        "supervisor": lambda pid, words: "cpuft.launch.remote" in words and "python" in words[0],
        "mpirun": lambda pid, words: os.path.basename(words[0]) in ("mpiexec.hydra", "mpirun", "mpiexec"),
        "proxy": lambda pid, words: "proxy" in os.path.basename(words[0]),
        "rank": lambda pid, words: "cpuft.train" in words and _variables(pid).get("RANK") == str(fault.number),
    }
    is_one: Callable[[int, list[str]], bool] = found[fault.kind.split()[1]]
    return sorted(pid for pid, words in pids.items() if is_one(pid, words))


def make_fault(fault: Fault, cluster: Simulated, launch: int) -> Target:
    """Do it; who was hit. A process that is not there yet is waited for."""
    names = [host.name for host in cluster.hosts]
    others = tuple(name for number, name in enumerate(names) if number not in fault.numbers)
    if fault.kind in (*HOSTS, *TWO):
        verb = ("provision", "local", "--name", cluster.name, fault.kind.split()[0])
        makers = [threading.Thread(target=cluster.cpuft, args=(*verb, str(number + 1))) for number in fault.numbers]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        return Target(names[fault.number], others=others)
    end = time.monotonic() + _SECONDS
    while not (found := find_targets(fault, launch)) and time.monotonic() < end:
        time.sleep(0.05)
    assert found, f"no process for {fault}"
    os.kill(found[fault.number % len(found)], signal.Signals[fault.kind.split()[0]])
    if fault.kind in PROCESSES:
        return Target(others=tuple(names))
    return Target(names[fault.number], fault.number, others=tuple(names))
