"""Run by mpirun: torch's data-parallel wrappers over a backend. Usage: wrappers.py BACKEND FOLDER.

Writes FOLDER/RANK.json: the final loss of each wrapper, and the payload bytes of a step.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cpuft import comm
from cpuft.comm.compression import powersgd
from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.table import make_reduce
from cpuft.config.train import TrainConfig
from cpuft.train.exchange.data_parallel import DataParallelExchange, GradientExchange
from cpuft.train.exchange.zero1 import ShardedExchange
from tests.comm.ranks import become_rank

STEPS = 14
Result = dict[str, float]
"""Loss on all examples after training, and bytes that a rank passed to collectives in its last step."""


def make_model(hidden: int = 64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 32, generator=generator)
    return inputs, inputs[:, :4].sum(1, keepdim=True).tanh()


def fit(model: torch.nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], object] = lambda: None) -> Result:
    inputs, targets = rows()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for _ in range(STEPS):
        comm.take_traffic()
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine]))
        optimizer.step()
        after()
    nbytes = comm.take_traffic()
    with torch.no_grad():
        return {"loss": torch.nn.functional.mse_loss(model(inputs), targets).item(), "bytes": nbytes}


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)  # type: ignore[arg-type]


def ddp() -> Result:
    model = DistributedDataParallel(make_model())
    return fit(model, adam(model.parameters()))


def zero() -> Result:
    model = DistributedDataParallel(make_model())
    return fit(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01))


def exchange(kind: type[GradientExchange[Any]], compression: str, hidden: int = 64) -> Result:
    """Train with an exchange of cpuft."""
    model = make_model(hidden)
    optimizer = adam(model.parameters())
    exchange = kind(model, optimizer, TrainConfig(grad_compression=compression), "fp32")

    def average(*_: object) -> None:
        exchange.average_gradients(lambda: [torch.zeros(0)])

    def meet() -> None:
        exchange.synchronize_parameters(True, wait=False)
        exchange.clear_gradients()
        exchange.begin_pass(is_last=True)

    exchange.begin_pass(is_last=True)
    optimizer.register_step_pre_hook(average)
    return fit(model, optimizer, meet)


def fsdp() -> Result:
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    result = fit(model, adam(model.parameters()))
    assert isinstance(model, FSDPModule)
    model.reshard()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    first = next(model.parameters())
    assert isinstance(total, DTensor)
    assert isinstance(first, DTensor)
    return result | {"norm": float(total.full_tensor()), "rows": float(first.full_tensor().shape[0])}


class Lookup(torch.nn.Module):
    """An embedding of 1000 tokens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(1000, 32)
        self.layer = torch.nn.Linear(32, 1)

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.words

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(tokens))  # type: ignore[no-any-return]


def embedding_gradient(compression: str, by_rows: bool) -> tuple[torch.Tensor, int]:
    """Return the mean gradient of the embedding after two accumulated passes of each rank, and the bytes sent."""
    model = Lookup()
    assert dist.group.WORLD is not None
    exchange = make_row_exchange(model, compression, dist.group.WORLD) if by_rows else None
    if exchange:
        untyped: Any = DistributedDataParallel
        untyped._set_params_and_buffers_to_ignore_for_model(model, ["words.weight"])
    parallel, reduce = DistributedDataParallel(model), make_reduce(compression, dist.group.WORLD)
    # A lambda, because DDP compares a function's annotations with classes, and ours are texts.
    parallel.register_comm_hook(None, lambda _, bucket: reduce(bucket))
    # Some tokens are used by one rank and some by both; token 7 is repeated.
    named = torch.tensor([[[1, 7], [7, 3]], [[3, 7], [900, 3]]])
    comm.take_traffic()
    first, last = named[dist.get_rank() % 2]
    with parallel.no_sync():
        torch.autograd.backward(parallel(first).square().sum())
    torch.autograd.backward(parallel(last).sin().sum())
    if exchange:
        exchange.average([named[rank % 2] for rank in range(dist.get_world_size())])
    gradient = model.words.weight.grad
    assert gradient is not None
    return gradient.clone(), comm.take_traffic()


def embedding(compression: str, whole_as: str) -> Result:
    whole, most = embedding_gradient(whole_as, by_rows=False)
    rows, nbytes = embedding_gradient(compression, by_rows=True)
    off = float((whole - rows).abs().max() / whole.abs().max())
    counts = {"named": int(rows.any(1).sum()), "bytes": nbytes, "whole bytes": most}
    return {"equal": torch.equal(whole, rows), "off": off, **counts}


def local_sgd() -> Result:
    model = make_model()
    updates = itertools.count(1)

    def meet() -> None:
        if (done := next(updates)) % 7 == 0 or done == STEPS:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter, op=dist.ReduceOp.AVG)

    return fit(model, adam(model.parameters()), meet)


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    powersgd.RANK = 16  # so that the factors of these small matrices are smaller than the matrices
    comm.start(sys.argv[1], timeout_seconds=20)
    names = ("bf16", "fp16", "int8", "powersgd")
    found = {"ddp": ddp(), **{name: exchange(DataParallelExchange, name) for name in ("none", *names)}}
    found |= {f"rows {name}": embedding(name, name) for name in ("none", "bf16", "fp16")}
    found |= {f"rows {name}": embedding(name, "none") for name in ("int8", "powersgd")}
    found |= {"small powersgd": exchange(DataParallelExchange, "powersgd", hidden=4)}
    found |= {"shards": exchange(ShardedExchange, "none"), "zero": zero(), "fsdp": fsdp(), "local_sgd": local_sgd()}
    Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
