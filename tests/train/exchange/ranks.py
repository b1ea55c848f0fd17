"""Run by mpirun: both exchanges between two ranks. Usage: ranks.py FOLDER.

Writes FOLDER/RANK.json: what this rank's gradients and parameters are after each part of an update.
"""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft import comm
from cpuft.comm.compression.powersgd import EXACT_UPDATES
from cpuft.config.train import TrainConfig
from cpuft.train.arena import UNUSED_ATTRIBUTE
from cpuft.train.exchange import data_parallel
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.compression_choice import make_levels
from cpuft.train.exchange.table import choose_exchange
from cpuft.train.fast.acceleration import accelerate
from tests.comm.ranks import become_rank

WORDS = torch.tensor([[1, 7], [7, 3], [3, 900], [5, 7]])
"""Rows of an update: the first rank has the first and the third, in a forward pass each."""


class Reader(torch.nn.Module):
    """A look-up of 1000 words and a layer over it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(1000, 8)
        self.layer = torch.nn.Linear(8, 1)
        self.numbers: torch.Tensor
        self.register_buffer("numbers", torch.arange(2))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.words

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(self.words(words)).sin()
        return outputs


def make(model: Reader, **options: Any) -> tuple[Exchange, torch.optim.Optimizer]:
    """The exchange that these options ask for."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    config = TrainConfig(max_grad_norm=0.01, **options)
    return choose_exchange(config, 2)(model, optimizer, config, "fp32"), optimizer


def flat(model: torch.nn.Module) -> list[float]:
    """All gradients, one after another; nothing for a parameter without one."""
    return [number for p in model.parameters() if p.grad is not None for number in p.grad.reshape(-1).tolist()]


def differences(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, wanted, strict=True))


def of_gradients(rank: int) -> dict[str, object]:
    """An update of two forward passes a rank, against one pass over all rows of a rank alone."""
    model = Reader()
    alone = copy.deepcopy(model)
    torch.autograd.backward(alone(WORDS).sum() / 4)
    exchange, optimizer = make(model)
    model.numbers += rank
    comm.take_traffic()
    sent = []
    for row, last in ((rank, False), (rank + 2, True)):
        exchange.begin_pass(last)
        torch.autograd.backward(exchange.forward_model(WORDS[row]).sum() * 2 / 4)
        sent.append(comm.take_traffic())
    waited = exchange.average_gradients(lambda: [WORDS[::2], WORDS[1::2]])
    found: dict[str, object] = {"sent": [*sent, comm.take_traffic()], "waited": waited}
    found["error"] = differences(flat(model), flat(alone))
    exchange.clip_gradients()
    norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01))
    found |= {"norm": norm, "clipping error": differences(flat(model), flat(alone))}
    optimizer.step()
    exchange.clear_gradients()
    found["numbers"] = (model.numbers - rank).tolist()
    return found | {"cleared": flat(model)}


def of_parameters(rank: int) -> dict[str, object]:
    """Three updates of one's own: what a bias is after each."""
    model = Reader()
    exchange, _ = make(model, sync_every=2, grad_compression="none")
    comm.take_traffic()
    values, sent = [], []
    for update in (1, 2, 3):
        exchange.begin_pass(is_last=True)
        torch.autograd.backward(exchange.forward_model(WORDS[rank]).sum())
        exchange.average_gradients(lambda: [WORDS[::2], WORDS[1::2]])
        exchange.clip_gradients()
        exchange.clear_gradients()
        with torch.no_grad():
            model.layer.bias.copy_(torch.tensor([10.0 * update + rank]))
        exchange.synchronize_parameters(update % 2 == 0, wait=update == 3)
        sent.append(comm.take_traffic())
        values.append(model.layer.bias.item())
    return {"biases": values, "sent": sent, "gradients": flat(model)}


def of_frozen(rank: int) -> dict[str, list[int]]:
    """By what is exchanged: bytes that are sent for frozen words and a trained layer before an update, and in one."""
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "gradients": {"grad_compression": "none"},
        "parameters": {"grad_compression": "none", "sync_every": 2},
    }
    for name, options in ways.items():
        model = Reader()
        model.words.requires_grad_(False)
        comm.take_traffic()
        exchange, optimizer = make(model, **options)
        sent = [comm.take_traffic()]
        exchange.begin_pass(is_last=True)
        torch.autograd.backward(exchange.forward_model(WORDS[rank]).sum())
        exchange.average_gradients(lambda: [WORDS[::2], WORDS[1::2]])
        exchange.clip_gradients()
        optimizer.step()
        exchange.synchronize_parameters(True, wait=True)
        found[name] = [*sent, comm.take_traffic()]
    return found


def of_rungs(rank: int) -> dict[str, list[float]]:
    """Of each rung: bytes that it promises for an update of five words, and those that it sends.

    The promise of powersgd holds after its first updates, which send as int8.
    """
    found = {}
    for rung in make_levels(Reader(), 5, 3, 2, 0.0):
        exchange, _ = make(Reader(), grad_compression=rung.name)
        for _ in range(1 + EXACT_UPDATES):
            comm.take_traffic()
            exchange.begin_pass(is_last=True)
            torch.autograd.backward(exchange.forward_model(WORDS[rank::2]).sum())
            exchange.average_gradients(lambda: [WORDS[::2], WORDS[1::2]])
            exchange.clear_gradients()
            exchange.finish_messages()
        found[rung.name] = [rung.layer_bytes + rung.row_bytes, comm.take_traffic()]
    return found


def of_late_rows(rank: int) -> dict[str, float]:
    """How much of the last four updates, whose rows are late, the fast path misses if it is told which rows to handle.

    It is the distance of the word embeddings from those of a fast path that handles all rows, as a share of what the
    updates have changed. All gradients are clipped, so that their norm must have all rows.
    """
    from transformers import BertConfig, BertForSequenceClassification  # hosts.py does not need it

    untyped: Any = data_parallel
    ends, told = [], untyped.set_gradient_rows
    for tell in (lambda *given: None, told):
        untyped.set_gradient_rows = tell
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = BertForSequenceClassification(BertConfig(vocab_size=5000, **sizes, **quiet))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        # In bf16, a last bit of the norm may decide how a weight is rounded.
        accelerate(model, optimizer, precision="fp32")
        config = TrainConfig(grad_compression="powersgd", max_grad_norm=0.001)
        exchange = choose_exchange(config, 2)(model, optimizer, config, "fp32")
        weight = model.get_input_embeddings().weight
        start = weight.detach().clone()
        for update in range(EXACT_UPDATES + 4):
            draw = torch.Generator().manual_seed(update)
            words = [torch.randint(5000, (4, 6), generator=draw) for _ in range(2)]
            exchange.begin_pass(is_last=True)
            torch.autograd.backward(exchange.forward_model(input_ids=words[rank]).logits[:, 0].square().sum())
            exchange.average_gradients(partial(list, words))
            exchange.clip_gradients()
            optimizer.step()
            exchange.clear_gradients()
        exchange.finish_messages()
        ends.append(weight.detach().clone())
    return {"off": float((ends[1] - ends[0]).norm() / (ends[0] - start).norm())}


class Choice(torch.nn.Module):
    """Layers of which one is used by all ranks, one by the second rank, and one by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all, self.second, self.nobody = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, rank: int) -> torch.Tensor:
        inputs = torch.full((1, 4), 1.0 + rank)
        outputs: torch.Tensor = self.all(inputs) + (self.second(inputs) if rank else 0)
        return outputs.square().sum()


def of_unused(rank: int, shard: str) -> dict[str, float]:
    """How far two ranks are from one that runs both passes, if each rank believes that others are unused."""
    model, alone = Choice(), Choice()
    start = alone.nobody.weight.detach().clone()
    setattr(model, UNUSED_ATTRIBUTE, ("second.weight", "nobody.weight", "nobody.bias") if rank == 0 else ())
    config = TrainConfig(shard=shard, max_grad_norm=0.0)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.5) for one in (model, alone)]
    exchange = choose_exchange(config, 2)(model, optimizers[0], config, "fp32")
    for _ in range(3):
        exchange.begin_pass(is_last=True)
        torch.autograd.backward(exchange.forward_model(rank))
        exchange.average_gradients(list)
        exchange.clip_gradients()
        exchange.optimizer.step()
        exchange.clear_gradients()
        exchange.synchronize_parameters(True, wait=True)
        optimizers[1].zero_grad()
        torch.autograd.backward((alone(0) + alone(1)) / 2)
        optimizers[1].step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    off = max(float((one - other).detach().abs().max()) for one, other in pairs)
    return {"off": off, "decayed": float((model.nobody.weight - start).detach().abs().max())}


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start("gloo", timeout_seconds=20)
    own = dist.get_rank()
    everything = {"gradients": of_gradients(own), "parameters": of_parameters(own), "rungs": of_rungs(own)}
    everything |= {"late rows": of_late_rows(own), "unused": [of_unused(own, one) for one in ("none", "optimizer")]}
    Path(sys.argv[1], f"{own}.json").write_text(json.dumps(everything | {"frozen": of_frozen(own)}))
    dist.barrier()
    dist.destroy_process_group()
