"""What `cpuft bench comm` and the doctor measure, as lines of a record."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

FORMAT = 1
"""Of every record; its header says it."""


@dataclass(frozen=True)
class Travels:
    """What gradients are made of, wherever they travel: `cpuft estimate` reads it."""

    parameters: int = 0
    """Numbers of all gradients but those of words; 0 in the record of an older version."""
    row: int = 0
    """Numbers of one word's gradient; 0 where words' are no rows of their own, and part of the parameters."""
    factors: int = 0
    """Numbers of powersgd's factors of all gradients but those of words; 0 in the record of an older version."""
    words: dict[str, float] = field(default_factory=dict)
    """Different words of an update, on average, by the number of ranks."""


@dataclass(frozen=True)
class MeasuredHeader:
    """What a file of measurements begins with, where a run's has a header."""

    what: str
    """The verb that measured."""
    versions: dict[str, str]
    format: int = FORMAT


@dataclass(frozen=True)
class Measurement:
    """One operation of a backend on one message, measured by `cpuft bench comm`.

    Bandwidths are nccl-tests' (doc/PERFORMANCE.md): algorithm bandwidth is bytes a rank holds over time; bus bandwidth
    multiplies it by 2(n-1)/n for all_reduce, (n-1)/n for all_gather and reduce_scatter of n ranks, 1 for broadcast, so
    that it compares with the link's own speed whatever n. Of all_gather and reduce_scatter the bytes are the whole's.
    """

    backend: str
    operation: str
    dtype: str
    nbytes: int
    """Of the whole message, as nccl-tests count it."""
    ranks: int
    seconds: tuple[float, ...]
    """Each repetition; of the slowest rank; warm-up left out."""
    busy: tuple[float, ...]
    """Each repetition; the share of its cores that the busiest rank kept busy, its library's threads included."""

    @property
    def median_seconds(self) -> float:
        """The middle repetition."""
        return statistics.median(self.seconds)

    @property
    def algorithm_bytes_per_second(self) -> float:
        """Message bytes over time."""
        return self.nbytes / self.median_seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """What the busiest link carries."""
        return self.algorithm_bytes_per_second * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """nccl-tests' factor from algorithm to bus bandwidth."""
    shares = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
    return shares[operation] * (ranks - 1) / ranks if operation in shares else 1.0


@dataclass(frozen=True)
class Link:
    """What one TCP connection carries from a host to another."""

    source: str
    """As the hostfile names it."""
    target: str
    latency_us: float
    """Half a round trip of one byte, microseconds."""
    bits_per_second: float
    error: str = ""
