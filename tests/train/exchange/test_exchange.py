"""How gradients and parameters travel, and what is clipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cpuft.config.train import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.compression_choice import make_levels
from cpuft.train.exchange.table import choose_exchange
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE
from tests.comm.ranks import fork_ranks
from tests.train.fast.encoders import make_batch, make_model, make_optimizer


def _alone(model: torch.nn.Module, max_grad_norm: float) -> Exchange:
    """Asked for everything, with nobody to meet; there is no process group here."""
    config = TrainConfig(max_grad_norm=max_grad_norm, sync_every=2, grad_compression="powersgd")
    return choose_exchange(config, 1)(model, torch.optim.SGD(model.parameters(), lr=1.0), config, "bf16")


@pytest.mark.parametrize("max_grad_norm, norm", [(0.0, 5.0), (1.0, 1.0), (9.0, 5.0)])
def test_a_rank_alone_clips_and_clears(max_grad_norm: float, norm: float) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    exchange = _alone(model, max_grad_norm)
    assert exchange.forward_model is model
    exchange.begin_pass(is_last=False)
    torch.autograd.backward(exchange.forward_model(torch.tensor([3.0, 4.0])).sum())
    assert exchange.average_gradients(lambda: [torch.arange(1)]) == 0.0
    exchange.clip_gradients()
    assert model.weight.grad is not None
    assert float(model.weight.grad.norm()) == pytest.approx(norm, rel=1e-5)
    exchange.clear_gradients()
    exchange.synchronize_parameters(True, wait=True)
    assert model.weight.grad is None


@pytest.mark.usefixtures("alone")
def test_a_few_small_gradients_are_those_of_a_compiled_model() -> None:
    model, config = torch.nn.Linear(2, 1, bias=False), TrainConfig()
    model.compile(backend="eager")
    exchange = choose_exchange(config, 2)(model, torch.optim.SGD(model.parameters()), config, "fp32")
    torch.autograd.backward(exchange.forward_model(torch.tensor([[3.0, 4.0]])).sum())
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[3.0, 4.0]]


@pytest.mark.usefixtures("alone")
def test_the_gradient_of_the_word_embedding_is_not_written_whole_between_updates() -> None:
    model = make_model("bert")
    _, optimizer = accelerate(model, make_optimizer(model), precision="fp32")
    exchange = choose_exchange(TrainConfig(), 2)(model, optimizer, TrainConfig(), "fp32")
    batch, masters = make_batch(), getattr(model, MASTERS_ATTRIBUTE)
    for _ in range(2):
        exchange.begin_pass(is_last=True)
        exchange.forward_model(**batch).loss.backward()
        exchange.average_gradients(lambda: [batch["input_ids"].flatten()])
        gradient = masters.embedding.weight.grad
        written = gradient._version
        exchange.clear_gradients()
        assert gradient._version == written


def test_two_ranks(tmp_path: Path) -> None:
    run = fork_ranks(2, "tests.train.exchange.ranks", str(tmp_path), seconds=60)
    assert run.returncode == 0, run.stdout[-3000:]
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for found in (one["gradients"] for one in both):
        # A layer of nine numbers while the last pass goes back, then the rows of words 1, 3, 5, 7 and 900.
        assert found["sent"] == [0, 4 * 9, 4 * 5 * 8]
        assert 0 < found["waited"] < 20
        assert found["numbers"] == [0, 1]  # nobody waits for rank 0's before a forward pass
        assert found["error"] < 2e-6
        assert found["norm"] > 0.01
        assert found["clipping error"] < 1e-7
        assert found["cleared"] == []
    first, second = (one["parameters"] for one in both)
    # What is sent after two is there at the end, when ranks wait for each other.
    assert (first["biases"], second["biases"]) == ([10.0, 20.0, 30.5], [11.0, 21.0, 30.5])
    named = 4 * (5 * 8 + 8 + 1)
    assert (first["sent"], first["gradients"]) == ([0, named, named], [])
    assert max(one["late rows"]["off"] for one in both) < 1e-4
    for found in (one for rank in both for one in rank["unused"]):
        assert (found["off"], found["decayed"]) == (pytest.approx(0.0, abs=1e-6), 0.0)
    for rungs in (one["rungs"] for one in both):
        assert list(rungs) == ["none", "bf16", "fp16", "int8", "powersgd"]
        assert all(promised == sent for promised, sent in rungs.values())
    for frozen in (one["frozen"] for one in both):
        # Never the 1000 words: an update sends the layer's nine numbers, some of them as blocks, and nothing for rows.
        assert {name: sent[0] < 1000 for name, sent in frozen.items()} == dict.fromkeys(frozen, True)
        # torch's sums depend on the CPU, so that rank 0 sends its factor of clipping.
        assert (frozen["gradients"][1], frozen["parameters"][1]) == (4 * 9 + 8, 4 * 9)


def test_a_model_of_a_few_megabytes_sends_a_quarter_as_blocks_and_less_as_factors() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(768, 768) for _ in range(4)))
    none, bf16, _, blocks, factors = (rung.layer_bytes for rung in make_levels(model, 0, 0, 4, 0.0))
    assert bf16 == none / 2
    assert blocks / none == pytest.approx(0.25, rel=0.02)
    assert factors / none < 0.043


def test_two_hosts_of_two_ranks_train_alike_and_repeatably(tmp_path: Path) -> None:
    run = fork_ranks(4, "tests.train.exchange.hosts", str(tmp_path))
    assert run.returncode == 0, run.stdout[-3000:]
    for rank, found in enumerate(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)):
        assert list(found) == ["int8", "powersgd"]
        for one in found.values():
            assert one["same"]
            assert one["repeats"]
            assert one["distance"] < 0.03
            # The leaders of the hosts send the same as a rank of two hosts with one rank each, and the others nothing.
            assert one["sent"] == (one["promised"] if rank in (0, 2) else 0)
