"""What updates send, counted beforehand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cpuft.comm.compression.levels import LinkModel
from cpuft.comm.compression.powersgd import RANK
from cpuft.config.train import TrainConfig
from cpuft.rank.world import World
from cpuft.train.data.archive import Prepared
from cpuft.train.data.order import plan_updates
from cpuft.train.exchange import compression_choice
from cpuft.train.exchange.compression_choice import RANK_COUNTS, choose_compression, count_sent_numbers
from cpuft.train.objective.base import Objective
from cpuft.train.objective.labels import Classification
from tests.train.tokens import make_tokens

TOKENS = make_tokens([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 9], types=False)
PREPARED = Prepared((), (), "", 0, TOKENS, {"": TOKENS})
OBJECTIVE = Objective((), (), 0)


class Encoder(torch.nn.Module):
    """Words and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = torch.nn.Embedding(1000, 8), torch.nn.Linear(8, 3)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.tokens


def test_words_travel_by_rows_and_all_else_whole() -> None:
    found = count_sent_numbers(Encoder(), OBJECTIVE, TrainConfig(batch_size=2), PREPARED)
    assert (found.parameters, found.embedding_row) == (8 * 3 + 3, 8)
    # A matrix of 8 x 3 has no factors of fewer numbers.
    assert found.factors == 8 * 3 + 3
    assert list(found.tokens) == list(map(str, RANK_COUNTS))
    # A batch of all eleven rows names every word there is, and the one that pads.
    assert found.tokens["64"] == len({*TOKENS.ids.tolist(), 0})


def test_adapters_are_under_three_hundredths_of_what_a_small_encoder_sends() -> None:
    objective = Classification(("no", "yes"), (), 0)
    whole, adapted = (
        count_sent_numbers(objective.load_model(config), objective, config, PREPARED)
        for config in (TrainConfig(), TrainConfig(lora_rank=16))
    )
    assert (whole.embedding_row, adapted.embedding_row) == (384, 0)
    # Without the words' rows, which only whole models send.
    assert adapted.parameters < 0.03 * whole.parameters


def test_words_are_those_of_the_updates_that_come() -> None:
    config = TrainConfig(batch_size=2, seed=3)
    for kind, grouped in (("class", True), ("pairs", False)):
        updates = plan_updates(TOKENS, 4, 3, 4, grouped)
        named = [len({*np.concatenate([TOKENS.ids[TOKENS.positions(rows)], [0]]).tolist()}) for _, rows in updates]
        found = count_sent_numbers(Encoder(), OBJECTIVE, config, replace(PREPARED, kind=kind))
        assert found.tokens["2"] == pytest.approx(np.mean(named))


def test_a_model_without_words_of_its_own_sends_all() -> None:
    found = count_sent_numbers(torch.nn.Linear(8, 3), OBJECTIVE, TrainConfig(), PREPARED)
    assert (found.parameters, found.embedding_row, found.tokens) == (27, 0, {})


def test_factors_are_counted_where_they_are_fewer() -> None:
    found = count_sent_numbers(torch.nn.Linear(64, 100), OBJECTIVE, TrainConfig(), PREPARED)
    assert (found.parameters, found.factors) == (64 * 100 + 100, (64 + 100) * RANK + 100)


@pytest.mark.parametrize(
    "ranks_per_host, backend, chosen",
    [(0, "cpuft_gloo", "bf16"), (8, "cpuft_gloo", "int8"), (8, "ccl", "int8"), (8, "mpi4py", "bf16")],
)
def test_auto_counts_that_hosts_with_several_ranks_send_blocks_once(
    ranks_per_host: int, backend: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurements are given. Between all ranks, the time of coding outweighs what int8 saves.

    MPI's all-reduce, whose time was measured, sends as little between hosts.
    """
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(compression_choice, "measure_link", lambda: LinkModel(1e-6, 0.0))
    monkeypatch.setattr(compression_choice, "find_ranks_per_host", lambda world: ranks_per_host)
    monkeypatch.setattr(compression_choice, "_measure_compute", lambda *_: 0.01)
    monkeypatch.setattr(compression_choice, "measure_coding_seconds", lambda: 1.4e-6)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **options: None)
    found, reason = choose_compression(
        TrainConfig(), "bf16", torch.nn.Linear(21_845, RANK), OBJECTIVE, PREPARED, World(0, 16, 0, 8)
    )
    assert (found, "bf16 0." in reason) == (chosen, True)
