"""Run by mpirun over gloo: what compressions with error feedback send and keep. Usage: feedback.py FOLDER.

Writes FOLDER/RANK.json: for each compression, the differences between sums over steps and the exact sums.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft import comm
from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.int8 import BlockMean, BlockReducer, encoded_bytes
from cpuft.comm.compression.local_sgd import LocalSGD
from cpuft.comm.compression.powersgd import EXACT_UPDATES, PowerSGD, saves_bytes
from cpuft.kernels import plain_torch
from tests.comm.ranks import become_rank

STEPS = 7
ROW_STEPS = EXACT_UPDATES + 3
SHAPES = ((300, 40), (7,), (96, 96), (1,))


class Bucket:
    """The part of a bucket that a reducer reads: parameters, and their gradients one after another."""

    def __init__(self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], last: bool) -> None:
        self._parameters, self._last = parameters, last
        self._buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        parts = torch.split(self._buffer, [parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def is_last(self) -> bool:
        return self._last


def mean(tensor: torch.Tensor) -> torch.Tensor:
    """Return the exact mean over the ranks, in fp64."""
    whole = tensor.double()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


def sums(reducer: Any, kept: Any) -> dict[str, float]:
    """Return how far what was received, with and without what is unsent, is from the mean of all gradients.

    The last step has gradients a thousand times as large.
    """
    parameters = [torch.zeros(shape) for shape in SHAPES]
    exact = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    received = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    same = 0.0
    for step in range(STEPS):
        gradients = [torch.randn(shape) * 1000.0 ** (step == STEPS - 1) for shape in SHAPES]
        for total, gradient in zip(exact, gradients, strict=True):
            total += mean(gradient)
        buckets = [Bucket(parameters[a:b], gradients[a:b], last=b == 4) for a, b in ((0, 1), (1, 2), (2, 4))]
        futures = [reducer.reduce(bucket) for bucket in buckets]
        assert all(future.wait() is bucket.buffer() for future, bucket in zip(futures, buckets, strict=True))
        averaged = [part for bucket in buckets for part in bucket.gradients()]
        for total, part in zip(received, averaged, strict=True):
            total += part.double()
            same = max(same, float((mean(part) - part.double()).abs().max()))
    kept_parts = [part for bucket in buckets for part in kept(reducer, bucket)]
    unsent = [mean(part).view(parameter.shape) for part, parameter in zip(kept_parts, parameters, strict=True)]
    largest = max(float(total.abs().max()) for total in exact)
    gaps = [abs(a + b - c).max() for a, b, c in zip(received, unsent, exact, strict=True)]
    lacks = [abs(a - c).max() for a, c in zip(received, exact, strict=True)]
    return {"gap": float(max(gaps)) / largest, "lack": float(max(lacks)) / largest, "differ": same}


def blocks(reducer: BlockReducer, bucket: Bucket) -> list[torch.Tensor]:
    sizes = [parameter.numel() for parameter in bucket.parameters()]
    return list(torch.split(reducer._unsent[bucket.parameters()[0]], sizes))


def factors(reducer: PowerSGD, bucket: Bucket) -> list[torch.Tensor]:
    """Return what is unsent of each gradient, which is sent as factors, or whole if it is small."""
    one = reducer._buckets[bucket.parameters()[0]]
    whole = iter(torch.split(one._unsent, [size for _, size in one._whole]))
    matrices = iter(one.matrices.unsent)
    return [next(matrices if saves_bytes(parameter.shape) else whole) for parameter in bucket.parameters()]


def row_sums(compression: str, dtype: torch.dtype = torch.float32, waits: bool = True) -> dict[str, float]:
    """Return the same as `sums` for the rows of an embedding, of which each rank has some, and other ones in each step.

    In some steps a rank has no rows. "named" is the number of steps whose rows are those of all ranks' tokens, and
    "bytes" the bytes that are sent, as a share of what would be sent if each rank sent the rows of all ranks. "off" is
    how far what a step receives is from the mean of that step, or of the step before if rows are late, as a share of
    the largest number of the mean.

    Parameters
    ----------
    waits: whether each step waits for its messages. Otherwise "bytes" has no meaning.
    """
    words = torch.nn.Embedding(97, 300, dtype=dtype)
    model: Any = torch.nn.Sequential(words)
    model.get_input_embeddings = lambda: words
    assert dist.group.WORLD is not None
    exchange = make_row_exchange(model, compression, dist.group.WORLD)
    assert exchange is not None
    ranks, draw = dist.get_world_size(), torch.Generator().manual_seed(0)
    exact, received = torch.zeros(97, 300, dtype=torch.float64), torch.zeros(97, 300, dtype=torch.float64)
    differ, named, sent, most, off, before = 0.0, 0, 0, 0, 0.0, torch.zeros(97, 300, dtype=torch.float64)
    is_late, late_rows = exchange._thread is not None, torch.empty(0, dtype=torch.int64)
    comm.take_traffic()
    for step in range(ROW_STEPS):
        counts = [(0, 97, 10, 20)[(step + rank) % 4] for rank in range(ranks)]
        tokens = [torch.randint(97, (count,), generator=draw) for count in counts]
        own, together = torch.unique(tokens[dist.get_rank()]), torch.unique(torch.cat(tokens))
        gradient = torch.zeros(97, 300, dtype=dtype)
        gradient[own] = (torch.randn(len(own), 300) * 1000.0 ** (step == ROW_STEPS - 1)).to(dtype)
        words.weight.grad = gradient.clone()
        rows = exchange.average(tokens)
        if waits:
            exchange.wait()
        named += rows.tolist() == sorted({*together.tolist(), *late_rows.tolist()})
        most += encoded_bytes(len(together) * 300, ranks, exchange._bits)
        sent += comm.take_traffic()
        wanted = mean(gradient)
        exact += wanted
        if is_late and step >= EXACT_UPDATES:
            late_rows = together
            wanted, before = before, wanted
        received += words.weight.grad.double()
        off = max(off, float((words.weight.grad - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)))
        differ = max(differ, float((mean(words.weight.grad) - words.weight.grad.double()).abs().max()))
        comm.take_traffic()
    exchange.wait()
    if is_late:
        assert exchange._late is not None
        rows, last = exchange._late
        received[rows] += last.result()
    assert exchange._unsent is not None
    largest, unsent = float(exact.abs().max()), mean(exchange._unsent)
    return {
        "gap": float((received + unsent - exact).abs().max()) / largest,
        "lack": float((received - exact).abs().max()) / largest,
        "differ": differ,
        "named": named,
        "bytes": sent / most,
        "off": off,
    }


def untouched() -> bool:
    """Return whether averaging leaves its input unchanged, also when no padding copies it."""
    numbers = torch.arange(512.0)
    moving = BlockMean(numbers, dist.group.WORLD)  # type: ignore[arg-type]
    moving.send()
    moving.average_share()
    moving.finish()
    return torch.equal(numbers, torch.arange(512.0))


def walk(compression: str, momentum: float, receives: bool = False) -> dict[str, float]:
    """Return how far ranks with random changes end from their mean, and from each other, after three synchronizations.

    Five of the nine embedding rows change, and each is noted when it first does.

    Parameters
    ----------
    receives: whether each mean is applied before the next synchronization, after some of the changes between them.
    """
    weight, words = torch.nn.Parameter(torch.randn(70, 5)), torch.nn.Parameter(torch.randn(9, 3))
    dist.broadcast(weight.data, 0)
    dist.broadcast(words.data, 0)
    start = torch.cat([weight.detach().reshape(-1), words.detach().reshape(-1)])
    local = LocalSGD([weight, words], compression, momentum, words)
    gained = torch.zeros_like(start)
    named: list[int] = []
    for meeting, more in enumerate(([1, 4], [4], [0, 8, 3])):
        local.note_tokens(torch.tensor([more]))
        named = sorted({*named, *more})
        layer, rows = torch.randn(70, 5), torch.zeros(9, 3)
        rows[named] = torch.randn(len(named), 3)
        weight.data += layer
        words.data += rows
        gained += torch.cat([layer.view(-1), rows.view(-1)])
        if receives:
            local.receive()
            local.receive()  # nothing is under way: it does nothing
            weight.data += 1.0
            gained[:350] += 1.0
        (local.finish if meeting == 2 else local.synchronize)()
    end = torch.cat([weight.detach().reshape(-1), words.detach().reshape(-1)])
    exact = start.double() + mean(gained)
    return {
        "off": float((end - exact).abs().max()),
        "differ": float((mean(end) - end.double()).abs().max()),
        "unnamed": float((end - start)[350:].view(9, 3)[[2, 5, 6, 7]].abs().max()),
    }


def outer(momentum: float) -> list[float]:
    """Return a number after each synchronization, when every rank adds 1 before each of them and before the end."""
    number = torch.nn.Parameter(torch.zeros(1))
    local = LocalSGD([number], "none", momentum)
    places = []
    for meet in (local.synchronize, local.synchronize, local.synchronize, local.finish):
        number.data += 1.0
        meet()
        places.append(round(number.item(), 5))
    return places


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start("gloo", timeout_seconds=20)
    torch.manual_seed(dist.get_rank())
    world: Any = dist.group.WORLD
    found: dict[str, object] = {
        "int8": sums(BlockReducer(world), blocks),
        "powersgd": sums(PowerSGD(world, 2), factors),
        "int8 rows": row_sums("int8"),
        "powersgd rows": row_sums("powersgd"),
        "under way rows": row_sums("powersgd", waits=False),
        "bf16 rows": row_sums("int8", torch.bfloat16),
    }
    found |= {f"local {name}": walk(name, 0.0) for name in ("none", "bf16", "int8")}
    found |= {f"local {name}, received": walk(name, 0.0, receives=True) for name in ("none", "bf16", "int8")}
    with plain_torch():
        found["rows without kernels"] = row_sums("int8")
    found |= {"untouched": untouched(), "outer": outer(0.9), "plain": outer(0.0)}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
