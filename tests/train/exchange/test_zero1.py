"""An optimizer that is shared out trains like a whole one, in an Nth of its memory, and goes on on other ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cpuft.rank.world import World
from cpuft.train.exchange.base import Exchange
from tests.comm.ranks import fork_ranks
from tests.train.exchange.sharded import KEPT_AFTER, go, go_on, make_loop

ALONE = World(0, 1, 0, 1)
STEPS = 10
Found = list[dict[str, Any]]


def run(ranks: int, folder: Path, steps: int, *goes_on: str) -> Found:
    """What each rank has found."""
    words = (str(folder), str(folder / "kept"), str(steps), *goes_on)
    done = fork_ranks(ranks, "tests.train.exchange.sharded", *words, seconds=540)
    assert done.returncode == 0, done.stdout[-3000:]
    return [json.loads((folder / f"{rank}-of-{ranks}.json").read_text()) for rank in range(ranks)]


def check_training(found: Found, precision: str, off: float) -> None:
    """Losses of both ways within `off`, weights of all ranks the same, and memory an Nth."""
    for one in found:
        both = one[precision]
        assert both["shared"]["losses"] == pytest.approx(both["whole"]["losses"], abs=off)
        assert both["shared"]["checksum"] == found[0][precision]["shared"]["checksum"]
        assert both["shared"]["bytes"] == pytest.approx(both["whole"]["bytes"] / len(found), rel=0.05)
        assert both["saved"]
        assert both["packed"]
        assert one["gives back"]
        assert one["in place"]


def check_going_on(found: Found, precision: str, off: float) -> None:
    """From a checkpoint that ranks have made together, both ways have the losses that would have been."""
    for one in found:
        both = one[precision]
        for way in ("from none", "from optimizer"):
            assert both[way]["losses"] == pytest.approx(both["shared"]["losses"][KEPT_AFTER:], abs=off)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def three(folder: Path) -> Found:
    """Their checkpoint is what all others go on from."""
    return run(3, folder, STEPS, "goes on")


@pytest.fixture(scope="module")
def two(folder: Path, three: Found) -> Found:
    return run(2, folder, STEPS, "goes on")


@pytest.mark.real
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_with_a_whole_optimizer(ranks: int, tmp_path: Path) -> None:
    found = run(ranks, tmp_path, STEPS)
    check_training(found, "fp32", 1e-5)
    check_training(found, "bf16", 2e-3)
    check_training(found, "rows", 1e-5)
    assert found[0]["rows"]["shared"]["sent"][-1] < found[0]["fp32"]["shared"]["sent"][-1]


@pytest.mark.proof
def test_the_same_ranks_go_on_to_the_bit(three: Found) -> None:
    for precision in ("fp32", "bf16", "rows"):
        for one in three:
            shared, resumed = one[precision]["shared"], one[precision]["from optimizer"]
            assert resumed["losses"] == shared["losses"][KEPT_AFTER:]
            assert resumed["checksum"] == shared["checksum"]


@pytest.mark.proof
def test_other_ranks_and_a_whole_optimizer_go_on_alike(two: Found, three: Found) -> None:
    for found in (two, three):
        check_going_on(found, "fp32", 1e-5)
        check_going_on(found, "bf16", 2e-3)
        check_going_on(found, "rows", 1e-5)


@pytest.mark.proof
@pytest.mark.usefixtures("alone")
def test_a_rank_alone_is_the_plain_path_and_goes_on_from_parts(folder: Path, three: Found) -> None:
    loop = make_loop(ALONE, "fp32", "optimizer", STEPS)
    alone, resumed = go(loop), go_on(ALONE, "fp32", "optimizer", STEPS, folder / "kept" / "fp32")
    assert type(loop.exchange) is Exchange
    losses = three[0]["fp32"]["shared"]["losses"]
    assert alone["losses"] == pytest.approx(losses, abs=1e-5)
    assert resumed["losses"] == pytest.approx(losses[KEPT_AFTER:], abs=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hundred_steps_are_those_of_a_whole_optimizer(ranks: int, tmp_path: Path) -> None:
    check_training(run(ranks, tmp_path, 100), "fp32", 1e-5)
