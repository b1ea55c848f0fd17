"""Which backend carries gradients fastest here: from timings to a choice, and the file that remembers it."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError

GRADIENT_BYTES = 25 * 2**20
"""About what the word embeddings of a small encoder take, the biggest message of a step, and DDP's own bucket."""
TIE = 1.02
"""Backends within 2 % of the fastest are as good: repeated medians on one quiet pair of hosts differ by as much."""
PREFERENCE = ("gloo", "mpi", "ccl")
"""Among equals, the one with the fewest parts: gloo comes with torch, ccl has threads of its own."""

Timings = Mapping[str, Mapping[int, Sequence[float]]]
"""Backend -> message bytes -> seconds of each all-reduce, each the slowest rank's."""


@dataclass(frozen=True)
class Choice:
    """A backend and, in one line, why."""

    backend: str
    reason: str


def choose_backend(timings: Timings, nbytes: int = GRADIENT_BYTES) -> Choice:
    """The backend with the least median time at the measured size nearest to `nbytes` (on a log scale).

    Raises
    ------
    CpuftError: nothing was measured.
    """
    sizes = {size for by_size in timings.values() for size in by_size}
    if not sizes:
        raise CpuftError("no backend could be measured: run `cpuft doctor`, or give one with --backend gloo")
    nearest = min(sizes, key=lambda size: max(size, nbytes) / max(1, min(size, nbytes)))
    medians = {name: statistics.median(by_size[nearest]) for name, by_size in timings.items() if by_size.get(nearest)}
    fastest = min(medians.values())
    equal = [name for name, seconds in medians.items() if seconds <= TIE * fastest]
    chosen = min(equal, key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))
    figures = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in sorted(medians.items()))
    return Choice(chosen, f"all-reduce of {nearest / 2**20:.3g} MiB takes {figures} (median)")


def cache_key(hosts: Sequence[str], ranks: int, versions: Mapping[str, str]) -> str:
    """What a remembered choice holds for: these hosts, in any order, so many ranks, these versions and the like."""
    text = json.dumps([sorted(hosts), ranks, sorted(versions.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_choice(folder: Path, key: str) -> Choice | None:
    """The remembered choice; None if there is none that can be read."""
    try:
        found = json.loads((folder / f"backend-{key}.json").read_text())
        return Choice(str(found["backend"]), str(found["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_choice(folder: Path, key: str, choice: Choice) -> None:
    """Remember a choice."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"backend-{key}.json"
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps({"backend": choice.backend, "reason": choice.reason}) + "\n")
    beside.rename(path)
