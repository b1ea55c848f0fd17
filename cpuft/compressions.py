"""The values of --grad-compression and facts about them, without torch (code: `cpuft.comm.compression.table`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CompressionFacts:
    """What is known about a gradient compression."""

    bytes_per_number: float
    """Bytes sent per number of a gradient; for powersgd, per number of the factors, unless all gradients are whole."""
    row_bytes_per_number: float = 0.0
    """Bytes sent per number of embedding rows; 0 for as many as per number of other gradients."""
    coding_seconds: float = 0.0
    """Core seconds to encode and decode a number of a gradient, on an AMD EPYC of family 23, model 1 (Zen 1)."""
    factor_coding_seconds: float = 0.0
    """Core seconds that each number of the factors adds."""
    is_automatic: bool = False
    """Whether `auto` may choose it, because it costs less than 0.005 of the metric in scripts/check-seeds."""
    works_with_shard: bool = False
    """Whether it works with --shard, where each rank receives the sum of its own shard only."""
    has_feedback: bool = False
    """Whether it has error feedback: what a rank could not send in an update is added to the next one."""
    has_late_rows: bool = False
    """Whether an update applies the previous update's mean of the embedding rows. Hierarchical means do not."""


COMPRESSION_FACTS = {
    "none": CompressionFacts(4.0, is_automatic=True, works_with_shard=True),
    "bf16": CompressionFacts(2.0, is_automatic=True, works_with_shard=True),
    "fp16": CompressionFacts(2.0, works_with_shard=True),
    # With four ranks and five seeds, int8 differed from exact gradients by +0.0003 (standard error 0.0005) on MRPC and
    # by -0.0018 (0.0011) on SST-2. `cpuft.comm.compression.int8.measure_coding_seconds` measured its coding.
    "int8": CompressionFacts(260 / 256, coding_seconds=3.5e-9, is_automatic=True, has_feedback=True),
    # Coding for the layers of MiniLM, BERT-base and a BERT of four layers, in bf16, on a core of a Xeon with AMX took
    # 1.56, 1.13 and 1.47 times the time in which it codes as many numbers as int8 blocks, measured alternately. Per
    # number, the factors of 16 rows, which were measured, had 0.066, 0.033 and 0.050 numbers. 0.7 + 13 * factors is
    # within 0.13 of all three. Factors of 12 rows, of which P has codes of 4 bits, were not measured.
    # With four ranks and five seeds, the metric differed from that of exact gradients by -0.0010 (standard error
    # 0.0007) on MRPC, and -0.0018 (0.0011) on SST-2. Gradients that are sent whole had 4 bits then instead of 8.
    "powersgd": CompressionFacts(
        # Nearly as many numbers belong to P, with 4 bits, as to Q, with 8 bits.
        (132 + 260) / 2 / 256,
        row_bytes_per_number=132 / 256,
        coding_seconds=2.5e-9,
        factor_coding_seconds=46e-9,
        is_automatic=True,
        has_feedback=True,
        has_late_rows=True,
    ),
}

AVX512_CODING_SHARE = 0.8
"""Core seconds to encode and decode a number on a CPU with AVX-512, as a share of those above. int8 takes 2.5 to 3.5 ns
on a Xeon of family 6, model 167; other CPUs with AVX-512, and powersgd, were not measured."""

BUCKET_NUMBERS = 2**20
"""Numbers of a gradient in a message of the backward pass: 4 MiB of fp32, or 2 MiB of 16-bit numbers.

Each bucket costs CPU time of its own: 40 MiB over gloo between four hosts take 55 ms of each rank as 40 buckets, 45 ms
as 20 buckets and 39 ms as 10 buckets. Larger buckets leave more to send after the backward pass; DDP's default of 25
MiB hides nothing, because a small encoder's layers never fill it. MiniLM in bf16 over gloo between two hosts with one
core each (scripts/bench-comm) takes as long with 0.5 to 4 MiB at 1 Gbit/s; at 500 Mbit/s, 0.5, 1, 2 and 4 MiB take 402,
411, 417 and 454 ms."""
MIN_BUCKETS = 8
"""Minimum number of gradient buckets, so that little is left to send when the backward pass ends."""
FACTOR_BUCKETS = 3
"""Number of gradient buckets with powersgd, whose messages are small; another type of gradients makes one more. In slow
motion (four hosts of half a core with AMX, MiniLM in bf16), an update at 1 Gbit/s took 73 to 77 ms of CPU time in seven
buckets, 59 to 63 ms in three, and 60 ms in two."""
TIE_RATIO = 1.02
"""Compression levels, and backends, whose times differ by less count as equally fast, because repeated medians on two
idle hosts differ by as much."""
MANY_RANKS = 32
"""Ranks from which on powersgd sends gradients in one bucket instead: the CPU time of an update grows with the number
of buckets times the number of ranks."""


def count_buckets(compression: str, numbers: int, ranks: int) -> int:
    """Return the number of gradient buckets: one for each 2**20 numbers, at least 8; powersgd 3, from 32 ranks on 1."""
    if compression == "powersgd":
        return FACTOR_BUCKETS if ranks < MANY_RANKS else 1
    return max(MIN_BUCKETS, -(-numbers // BUCKET_NUMBERS))


def count_coding_seconds(compression: str, numbers: float, factors: float, row_numbers: float) -> float:
    """Return the core seconds, on the CPU of COMPRESSION_FACTS, in which a rank codes the messages of an update.
    `compression` is one of its keys, `numbers` are those in the gradients of layers, `factors` those in their PowerSGD
    factors (as many if all gradients are sent whole), `row_numbers` the mean of those sent and received in embedding
    rows.
    """
    facts, blocks = COMPRESSION_FACTS[compression], COMPRESSION_FACTS["int8"].coding_seconds
    of_rows = blocks * row_numbers if facts.has_feedback else 0.0
    if facts.factor_coding_seconds and factors < numbers:
        return facts.coding_seconds * numbers + facts.factor_coding_seconds * factors + of_rows
    return (blocks if facts.factor_coding_seconds else facts.coding_seconds) * numbers + of_rows


COMPRESSIONS = ("auto", *COMPRESSION_FACTS)
"""The values of --grad-compression."""
AUTO_COMPRESSIONS = tuple(name for name, facts in COMPRESSION_FACTS.items() if facts.is_automatic)
SHARDED_COMPRESSIONS = tuple(name for name, facts in COMPRESSION_FACTS.items() if facts.works_with_shard)
COMPRESSIONS_WITH_FEEDBACK = tuple(name for name, facts in COMPRESSION_FACTS.items() if facts.has_feedback)


def count_ring_passes(members: int) -> float:
    """Return how often a ring all-reduce sends its payload over each link: 2 (n - 1) / n (Patarasuk and Yuan, 2009)."""
    return 2 * (members - 1) / members
