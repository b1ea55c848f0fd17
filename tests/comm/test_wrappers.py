"""Every compression, ZeRO, FSDP2 and local SGD over each backend, compared with plain DDP."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.comm.ranks import fork_ranks, mpirun

PARAMETERS = 32 * 64 + 64 + 64 + 1


@pytest.mark.parametrize("backend", ("gloo", *(pytest.param(name, marks=pytest.mark.proof) for name in ("ccl", "mpi"))))
def test_wrappers_reach_the_same_loss_and_send_the_expected_bytes(backend: str, tmp_path: Path) -> None:
    start_ranks = fork_ranks if backend == "gloo" else mpirun
    run = start_ranks(2, "tests.comm.wrappers", backend, str(tmp_path), seconds=90)
    assert run.returncode == 0, run.stdout[-3000:]
    found = json.loads((tmp_path / "0.json").read_text())
    plain = found["ddp"]
    assert plain["loss"] < 0.1
    # The same sums in another order differ by a few units in the last place of float32.
    for same in ("none", "shards", "zero", "fsdp"):
        assert found[same]["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    # bf16 keeps 8 bits, fp16 11.
    assert found["bf16"]["loss"] == pytest.approx(plain["loss"], rel=5e-2)
    assert found["fp16"]["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert plain["bytes"] == 4 * PARAMETERS
    assert found["bf16"]["bytes"] == found["fp16"]["bytes"] == 2 * PARAMETERS
    # Five blocks for each of two ranks, with a scale of four bytes.
    assert found["int8"]["bytes"] == 2 * 5 * (256 + 4)
    assert found["int8"]["loss"] == pytest.approx(plain["loss"], rel=5e-2)
    # The factors of the first matrix, of 16 * 64 numbers with 4 bits and of 16 * 32 with 8 bits; the rest is whole, in
    # the message with the latter. Both messages have two blocks for each of two ranks.
    assert found["powersgd"]["bytes"] == 2 * 2 * (128 + 4) + 2 * 2 * (256 + 4)
    assert found["powersgd"]["loss"] < 0.2
    # All gradients to their shards, and all weights from there: half an all-reduce each, padded to 16 numbers.
    assert found["shards"]["bytes"] == 4 * 32 * math.ceil(PARAMETERS / 32)
    assert found["local_sgd"]["bytes"] == 4 * PARAMETERS
    assert found["local_sgd"]["loss"] < 0.2
    assert found["fsdp"]["rows"] == 64
    # Matrices whose factors would not be smaller.
    assert found["small powersgd"]["bytes"] == 2 * (256 + 4)
    check_rows(found)


def check_rows(found: dict[str, dict[str, float]]) -> None:
    """Compare word embeddings exchanged by rows with those exchanged whole."""
    layer = 32 + 1
    for name, width in {"none": 4, "bf16": 2, "fp16": 2}.items():
        # Words 1, 3, 7 and 900.
        assert found[f"rows {name}"] == {
            "equal": True,
            "off": 0.0,
            "named": 4,
            "bytes": width * (4 * 32 + layer),
            "whole bytes": width * (1000 * 32 + layer),
        }
    # The words' 128 numbers and the layer's 33, a block for each rank. The first updates of powersgd are those of int8.
    for name in ("int8", "powersgd"):
        assert (found[f"rows {name}"]["named"], found[f"rows {name}"]["bytes"]) == (4, 2 * 2 * (256 + 4))
        # Half a 127th of the largest, for each rank and for their mean.
        assert found[f"rows {name}"]["off"] < 1 / 127
