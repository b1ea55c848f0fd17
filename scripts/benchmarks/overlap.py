"""Run by scripts/bench-comm under cpuft launch: how much of communication hides behind backward.

    overlap.py BACKEND [BUCKET_MB [MODEL]]

Takes turns between backward alone, the all-reduces of its gradients alone, and both together: layers by
DistributedDataParallel, as in users' scripts, and word embeddings by rows. Prints medians in milliseconds, how many
cores a rank kept busy meanwhile, and the bytes it sent, as one JSON object.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

from cpuft.comm import start, take_traffic
from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.table import make_reduce
from cpuft.comm.registration import exit_process
from cpuft.train.model import find_model

ROUNDS = 12
ROWS, TOKENS = 16, 56


class Turns:
    """Return the seconds and busy cores of the slowest rank for each kind of turn."""

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
    """Return the pretrained encoder, or a model of BERT-base's size, whose embeddings are a fifth of it."""
    made: torch.nn.Module = BertForSequenceClassification(BertConfig(num_labels=2))
    if name == "minilm":
        made = BertForSequenceClassification.from_pretrained(find_model(name), num_labels=2)
    return made


class Step:
    """Times the backward pass of one rank and its communication, together and one after the other."""

    def __init__(self, model: torch.nn.Module, bucket_mb: float) -> None:
        assert dist.group.WORLD is not None
        self._reduce = make_reduce("bf16", dist.group.WORLD)
        self._buckets: dict[int, torch.Tensor] = {}
        exchange = make_row_exchange(model, "bf16", dist.group.WORLD)
        assert exchange is not None
        self.rows, self.model = exchange, model
        words = [name for name, one in model.named_parameters() if one is exchange.weight]
        untyped: Any = DistributedDataParallel
        untyped._set_params_and_buffers_to_ignore_for_model(model, words)
        self.parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
        # A lambda, because DDP compares a function's annotations with classes, and ours are texts.
        self.parallel.register_comm_hook(None, lambda _, bucket: self._send(bucket))
        self._tokens = torch.randint(1000, 30000, (dist.get_world_size(), ROWS, TOKENS))

    def _send(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._buckets[bucket.index()] = bucket.buffer()
        return self._reduce(bucket)

    def loss(self) -> torch.Tensor:
        logits: torch.Tensor = self.parallel(input_ids=self._tokens[dist.get_rank()]).logits
        return logits.float().sum() / dist.get_world_size()

    def together(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)
        self.rows.average(list(self._tokens))

    def reduce_all(self) -> None:
        works = [dist.all_reduce(buffer, async_op=True) for _, buffer in sorted(self._buckets.items())]
        for work in works:
            assert work is not None
            work.wait()
        self.rows.average(list(self._tokens))


def take_turns(step: Step) -> tuple[Turns, int]:
    """Run the turns, and return their times and the bytes that one exchange sends."""
    turns, sent = Turns(), 0
    for _ in range(ROUNDS):
        turns.take("together", functools.partial(step.together, step.loss()))
        with step.parallel.no_sync():
            step.rows.clear()
            turns.take("backward", functools.partial(torch.autograd.backward, step.loss()))
        take_traffic()
        turns.take("communication", step.reduce_all)
        sent = take_traffic()
        step.model.zero_grad(set_to_none=False)
        step.rows.clear()
    return turns, sent


def main() -> None:
    backend, bucket_mb, name = [*sys.argv[1:], *("gloo", "25", "minilm")[len(sys.argv) - 1 :]]
    start(backend, 120)
    torch.manual_seed(0)
    turns, nbytes = take_turns(Step(make_model(name).bfloat16(), float(bucket_mb)))
    if dist.get_rank() == 0:
        found = {name: turns.medians(name) for name in ("backward", "communication", "together")}
        share = found["together"][0] / (found["backward"][0] + found["communication"][0])
        times = {f"{name}_ms": round(seconds * 1e3, 2) for name, (seconds, _) in found.items()}
        cores = {f"{name}_cores": round(busy, 2) for name, (_, busy) in found.items()}
        asked = {"backend": backend, "bucket_mb": bucket_mb, "model": name}
        print(json.dumps(asked | times | cores | {"bytes": nbytes, "share": round(share, 3)}))
    exit_process(0)


if __name__ == "__main__":
    main()
