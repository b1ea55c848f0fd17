"""The choice of a compression level for a link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpuft.comm.compression.levels import CompressionLevel, LinkModel, choose_level, estimate_step_seconds

# MiniLM's between four ranks: bytes of layers and of embedding rows, about a tenth of a second for coding, and ten
# buckets.
NONE = CompressionLevel("none", 43e6, 2.4e6, False, 2, 0.0, 10)
BF16 = CompressionLevel("bf16", 21.5e6, 1.2e6, False, 2, 0.0, 10)
INT8 = CompressionLevel("int8", 10.9e6, 0.6e6, False, 4, 0.1, 10)
POWERSGD = CompressionLevel("powersgd", 0.4e6, 0.6e6, True, 4, 0.13, 4)
ALL = (NONE, BF16, INT8, POWERSGD)


def link(megabits: float, latency: float = 1e-4) -> LinkModel:
    """A link between four ranks, whose all-reduce sends a message one and a half times."""
    return LinkModel(1.5 * 8 / (megabits * 1e6), latency)


@pytest.mark.parametrize(
    "levels, compute, between, chosen",
    [
        (ALL, 4.0, link(10_000), "none"),
        (ALL, 4.0, link(1000), "none"),
        (ALL, 0.3, link(1000), "bf16"),
        (ALL[:3], 0.3, link(300), "int8"),
        (ALL[:2], 0.3, link(1000), "bf16"),
        (ALL, 4.0, link(100), "powersgd"),
        (ALL, 16.0, link(100), "int8"),
        (ALL, 0.9, link(100), "powersgd"),
        (ALL[:2], 0.9, link(20), "bf16"),
        # With a long latency, the fewest messages win.
        (ALL, 4.0, link(10_000, latency=0.2), "none"),
        ((NONE,), 0.01, link(1), "none"),
    ],
)
def test_the_first_level_that_costs_no_time_is_chosen(
    levels: tuple[CompressionLevel, ...], compute: float, between: LinkModel, chosen: str
) -> None:
    level, reason = choose_level(levels, compute, between)
    assert level.name == chosen
    fastest = min(estimate_step_seconds(other, compute, between) for other in levels)
    assert estimate_step_seconds(level, compute, between) <= 1.02 * fastest
    assert "\n" not in reason


def test_the_estimate_of_a_step_counts_what_backward_does_not_hide() -> None:
    # 65 MB at 1.25e8 bytes/s, of which the backward pass hides 0.3 s; nothing hides embedding rows.
    assert estimate_step_seconds(NONE, 0.6, link(1000, 0.01)) == pytest.approx(0.6 + 0.516 - 0.3 + 0.0288 + 0.02)
    # All of the layers hidden but the last two of four buckets; then messages and coding. Late rows are hidden.
    late = 0.5 * 0.4e6 * 1.2e-8
    assert estimate_step_seconds(POWERSGD, 1.0, link(1000, 0.01)) == pytest.approx(1 + late + 0.13 + 0.04)
    # All layers are late in one bucket.
    one_bucket = replace(POWERSGD, buckets=1)
    assert estimate_step_seconds(one_bucket, 1.0, link(1000, 0.01)) == pytest.approx(1 + 2 * late + 0.13 + 0.04)
    on_time = replace(POWERSGD, has_late_rows=False)
    assert estimate_step_seconds(on_time, 1.0, link(1000, 0.01)) == pytest.approx(1 + late + 0.13 + 0.0072 + 0.04)
    # 1 MB at 1/6 MB/s, of which all that computes hides 1 s.
    assert estimate_step_seconds(POWERSGD, 1.0, link(2, 0.01)) == pytest.approx(1 + 6 - 1 + 0.13 + 0.04)


def test_sending_takes_time_from_computing() -> None:
    free, busy = LinkModel(1e-9, 0.0), LinkModel(1e-9, 0.0, 1e-8)
    more = estimate_step_seconds(BF16, 1.0, busy) - estimate_step_seconds(BF16, 1.0, free)
    assert more == pytest.approx(22.7e6 * 1e-8)
    assert choose_level(ALL, 1.0, free)[0].name == "none"
    assert choose_level(ALL, 1.0, busy)[0].name == "powersgd"


def test_the_reason_names_all_estimates() -> None:
    assert choose_level((NONE, BF16), 0.5, link(1000))[1] == (
        "a step computes 0.5 s and an all-reduce takes 667 Mbit/s: none 0.795 s, bf16 0.566 s"
    )
