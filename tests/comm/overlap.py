"""Run by scripts/bench-comm under cpuft launch: how much of communication hides behind backward.

    overlap.py BACKEND [BUCKET_MB [MODEL]]

Takes turns between backward alone, the all-reduces of its gradients alone, and both together as training does it:
layers by DistributedDataParallel, word embeddings by rows. Prints medians in milliseconds, how many cores a rank kept
busy meanwhile, and the bytes it sent, as one JSON object.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from cpuft.comm import start, take_traffic
from cpuft.comm.gradients.compression import make_reduce
from cpuft.comm.gradients.embedding_rows import exchange_rows
from cpuft.comm.group.session import leave
from cpuft.train.model import find_model

ROUNDS = 12
ROWS, TOKENS = 16, 56


class Turns:
    """Seconds and busy cores of each kind of turn, the slowest rank's."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[float, float]]] = {}

    def take(self, name: str, call: Callable[[], object]) -> None:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        seconds = time.perf_counter() - wall
        found = torch.tensor([seconds, (time.process_time() - cpu) / seconds], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self._found.setdefault(name, []).append((float(found[0]), float(found[1])))

    def medians(self, name: str) -> tuple[float, float]:
        # The first two rounds warm up allocators, pages and DDP's buckets.
        seconds, cores = zip(*self._found[name][2:], strict=True)
        return statistics.median(seconds), statistics.median(cores)


def make_model(name: str) -> torch.nn.Module:
    """The pretrained encoder, or one of BERT-base's size, whose embeddings are a fifth of its parameters."""
    made: torch.nn.Module = BertForSequenceClassification(BertConfig(num_labels=2))
    if name == "minilm":
        made = BertForSequenceClassification.from_pretrained(find_model(name), num_labels=2)
    return made


def main() -> None:
    backend, bucket_mb, name = [*sys.argv[1:], *("gloo", "25", "minilm")[len(sys.argv) - 1 :]]
    start(backend, 120)
    torch.manual_seed(0)
    model = make_model(name).bfloat16()
    size = dist.get_world_size()
    assert dist.group.WORLD is not None
    reduce, buckets = make_reduce("bf16", dist.group.WORLD), {}

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        buckets[bucket.index()] = bucket.buffer()
        return reduce(bucket)

    exchange = exchange_rows(model, "bf16", dist.group.WORLD)
    assert exchange is not None
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=float(bucket_mb))
    parallel.register_comm_hook(None, hook)
    tokens = torch.randint(1000, 30000, (size, ROWS, TOKENS))
    inputs = tokens[dist.get_rank()]

    def loss() -> torch.Tensor:
        return parallel(input_ids=inputs).logits.float().sum() / size  # type: ignore[no-any-return]

    def together(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        exchange.average(tokens)

    def reduce_all() -> None:
        works = [dist.all_reduce(buffer, async_op=True) for _, buffer in sorted(buckets.items())]
        for work in works:
            assert work is not None
            work.wait()
        exchange.average(tokens)

    turns = Turns()
    for _ in range(ROUNDS):
        turns.take("together", functools.partial(together, loss()))
        with parallel.no_sync():
            exchange.clear()
            alone = loss()
            turns.take("backward", alone.backward)
        take_traffic()
        turns.take("communication", reduce_all)
        sent = take_traffic()
        model.zero_grad(set_to_none=False)
        exchange.clear()
    if dist.get_rank() == 0:
        found = {name: turns.medians(name) for name in ("backward", "communication", "together")}
        share = found["together"][0] / (found["backward"][0] + found["communication"][0])
        times = {f"{name}_ms": round(seconds * 1e3, 2) for name, (seconds, _) in found.items()}
        cores = {f"{name}_cores": round(busy, 2) for name, (_, busy) in found.items()}
        print(
            json.dumps(
                {
                    "backend": backend,
                    "bucket_mb": bucket_mb,
                    "model": name,
                    **times,
                    **cores,
                    "bytes": sent.nbytes,
                    "share": round(share, 3),
                }
            )
        )
    leave(0)


if __name__ == "__main__":
    main()
