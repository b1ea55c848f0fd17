"""Run by mpirun on four ranks, which count as two hosts of two ranks. Usage: hosts.py FOLDER.

Writes FOLDER/RANK.json: for each hierarchical compression, what some updates of a model end with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from cpuft import comm
from cpuft.config.train import TrainConfig
from cpuft.train.exchange.compression_choice import make_levels
from cpuft.train.exchange.table import choose_exchange
from tests.comm.ranks import become_rank, simulate_hosts
from tests.train.exchange.ranks import WORDS, Reader

UPDATES = 9
"""More than those that powersgd sends as int8."""


def flatten(model: torch.nn.Module) -> torch.Tensor:
    """Return all parameters, one after another."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train(compression: str) -> tuple[torch.Tensor, int]:
    """Return the parameters after the updates, and the bytes that this rank has sent in the last one."""
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainConfig(max_grad_norm=0.0, grad_compression=compression)
    exchange = choose_exchange(config, 4)(model, optimizer, config, "fp32")
    for _ in range(UPDATES):
        comm.take_traffic()
        exchange.begin_pass(is_last=True)
        torch.autograd.backward(exchange.forward_model(WORDS[dist.get_rank()]).sum())
        exchange.average_gradients(lambda: list(WORDS))
        optimizer.step()
        exchange.clear_gradients()
    return flatten(model), comm.take_traffic()


def compare(compression: str) -> dict[str, object]:
    """Train twice with the compression and once with exact gradients.

    The distance is that from the exact parameters, divided by the change of the exact parameters.
    """
    exact, _ = train("none")
    first, sent = train(compression)
    second, _ = train(compression)
    everywhere = [torch.empty_like(first) for _ in range(4)]
    dist.all_gather(everywhere, first)
    level = next(level for level in make_levels(Reader(), 5, 3, 4, 0.0, hosts=2) if level.name == compression)
    return {
        "same": all(torch.equal(one, first) for one in everywhere),
        "repeats": torch.equal(first, second),
        "distance": float((first - exact).norm() / (flatten(Reader()) - exact).norm()),
        "sent": sent,
        # Between two ranks, an all-reduce sends two thirds of what one of the same payload sends between four.
        "promised": (level.layer_bytes + level.row_bytes) * 3 / 2,
    }


if __name__ == "__main__":
    become_rank()
    simulate_hosts(2)
    torch.set_num_threads(1)
    comm.start("gloo", timeout_seconds=20)
    result = {name: compare(name) for name in ("int8", "powersgd")}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
