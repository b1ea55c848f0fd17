"""Which backend carries gradients fastest here: from timings to a choice, and the file that remembers it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import hash_text, write_text
from cpuft.serialization import load, parse_json

BUCKET_NUMBERS = 2**20
"""How much of a gradient is sent at a time, while backward goes on: 4 MiB of fp32, 2 MiB of 16-bit numbers. Each bucket
costs CPU time of its own: 40 MiB over gloo between four hosts take 55 ms of each rank as 40 buckets, 45 as 20, 39 as 10
(bf16: 40, 34, 26). Ever larger ones leave more to be sent when backward is over, and with DDP's own 25 MiB, which a
small encoder's layers never fill, nothing is hidden: by scripts/bench-comm, MiniLM in bf16 over gloo between two hosts
with a core each, backward and communication take 384 ms together at 1 Gbit/s with 0.5, 1, 2 or 4 MiB alike; at 500
Mbit/s 402, 411, 417 and 454."""
MESSAGE_BYTES = 2**20
"""What backends are chosen by: about a bucket, compressed, and over a slow link not too long."""
TIE = 1.02
"""Backends within 2 % of the best are as good: repeated medians on one quiet pair of hosts differ by as much."""
PREFERENCE = ("gloo", "mpi", "ccl")
"""Among equals, the one with the fewest parts: gloo comes with torch, ccl has threads of its own."""

Timings = Mapping[str, Sequence[tuple[float, float]]]
"""Of each backend and all-reduce: seconds of the slowest rank, and the share of its cores the busiest kept busy."""


@dataclass(frozen=True)
class Choice:
    """A backend and, in one line, why."""

    backend: str
    reason: str


def choose_backend(timings: Timings, nbytes: int) -> Choice:
    """The backend that costs the least: time, and the time that it takes from compute on the same cores.

    An all-reduce that a network limits takes equally long over all. One that spins meanwhile is paid for twice, as
    backward goes on beside it: over 1 Gbit/s and a core a rank, mpi's 198 ms cost 126, and gloo's 200 ms 84.

    Parameters
    ----------
    nbytes: of the message that was timed.

    Raises CpuftError: nothing was measured.
    """
    if not timings:
        error = CpuftError("no backend could be measured: run `cpuft doctor`, or give one with --backend gloo")
        error.exit_code = 1  # gloo always can be, unless another program wrote to the store: the next start may succeed
        raise error
    seconds = {name: statistics.median(second for second, _ in found) for name, found in timings.items()}
    busy = {name: statistics.median(share for _, share in found) for name, found in timings.items()}
    costs = {name: seconds[name] * (1 + busy[name]) for name in timings}
    equal = [name for name, cost in costs.items() if cost <= TIE * min(costs.values())]
    chosen = min(equal, key=lambda name: PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE))
    figures = ", ".join(f"{name} {seconds[name] * 1e3:.2f} ms ({busy[name]:.0%} busy)" for name in sorted(timings))
    return Choice(chosen, f"all-reduce of {nbytes / 2**20:.3g} MiB takes {figures}")


def cache_key(hosts: Sequence[str], ranks: int, versions: Mapping[str, str]) -> str:
    """What a remembered choice holds for: these hosts, in any order, so many ranks, these versions and the like."""
    return hash_text(json.dumps([sorted(hosts), ranks, sorted(versions.items())]), 16)


def read_choice(folder: Path, key: str) -> Choice | None:
    """The remembered choice; None if there is none that can be read."""
    with suppress(OSError, ValueError):
        return load(Choice, parse_json((folder / f"backend-{key}.json").read_text()))
    return None


def write_choice(folder: Path, key: str, choice: Choice) -> None:
    """Remember a choice."""
    text = json.dumps({"backend": choice.backend, "reason": choice.reason}) + "\n"
    write_text(folder / f"backend-{key}.json", text)
