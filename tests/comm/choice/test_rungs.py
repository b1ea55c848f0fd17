"""How few bytes a link needs."""

from __future__ import annotations

import pytest

from cpuft.comm.choice.rungs import Rung, Wire, choose_rung, foretell_seconds
from cpuft.errors import CpuftError

# MiniLM's, of four ranks: bytes of layers and of words' rows, and a tenth of a second for coding.
NONE = Rung("none", 43e6, 2.4e6, 2, 0.0)
BF16 = Rung("bf16", 21.5e6, 1.2e6, 2, 0.0)
INT8 = Rung("int8", 10.9e6, 0.6e6, 4, 0.1)
POWERSGD = Rung("powersgd", 0.4e6, 0.6e6, 4, 0.1)
LOCAL = Rung("local8", 1.4e6, 0.5e6, 0, 0.04, background=True)
ALL = (NONE, BF16, INT8, POWERSGD, LOCAL)


def wire(megabits: float, latency: float = 1e-4) -> Wire:
    """Of four ranks, whose all-reduce sends a message one and a half times."""
    return Wire(1.5 * 8 / (megabits * 1e6), latency)


@pytest.mark.parametrize(
    "rungs, compute, link, chosen",
    [
        (ALL, 4.0, wire(10_000), "none"),
        (ALL, 4.0, wire(1000), "none"),
        (ALL, 0.3, wire(1000), "local8"),
        (ALL[:4], 0.3, wire(1000), "int8"),
        (ALL[:2], 0.3, wire(1000), "bf16"),
        (ALL[:4], 4.0, wire(100), "int8"),
        (ALL, 4.0, wire(100), "local8"),
        (ALL[:4], 0.9, wire(100), "powersgd"),
        (ALL[:2], 0.9, wire(20), "bf16"),
        (ALL, 0.9, wire(20), "local8"),
        # A link of long ways: the fewest waits.
        (ALL[:4], 4.0, wire(10_000, latency=0.2), "none"),
        ((NONE,), 0.01, wire(1), "none"),
    ],
)
def test_the_first_rung_that_costs_no_time(rungs: tuple[Rung, ...], compute: float, link: Wire, chosen: str) -> None:
    rung, reason = choose_rung(rungs, compute, link)
    assert rung.name == chosen
    fastest = min(foretell_seconds(other, compute, link) for other in rungs)
    assert foretell_seconds(rung, compute, link) <= 1.02 * fastest
    assert "\n" not in reason


def test_what_an_update_takes() -> None:
    # 65 MB at 1.25e8 bytes/s, of which backward hides half a second, and rows behind nothing.
    assert foretell_seconds(NONE, 1.0, wire(1000, 0.01)) == pytest.approx(1 + 0.516 - 0.5 + 0.0288 + 0.02)
    # Hidden whole, but for coding; and a step that is shorter than its message.
    assert foretell_seconds(LOCAL, 1.0, wire(1000)) == pytest.approx(1 + 0.04)
    assert foretell_seconds(LOCAL, 1.0, wire(20)) == pytest.approx(1.14 + 0.04)


def test_why_is_told() -> None:
    assert choose_rung((NONE, BF16), 0.5, wire(1000))[1] == (
        "a step computes 0.5 s and an all-reduce takes 667 Mbit/s: none 0.795 s, bf16 0.523 s"
    )


def test_without_rungs() -> None:
    with pytest.raises(CpuftError, match="--grad-compression"):
        choose_rung((), 1.0, wire(1))
