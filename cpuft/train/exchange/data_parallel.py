"""Gradients are averaged at every update: layers' in the course of backward, word embeddings' after it, by rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.table import make_reduce, resolve_compression
from cpuft.comm.selection import BUCKET_ELEMENTS
from cpuft.config import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.fast.adamw import set_gradient_rows

UNUSED_ATTRIBUTE = "_cpuft_unused"
"""Attribute of a model: names of trained parameters that a first forward pass did not use (XLNet has some)."""
LEAST_BUCKETS = 8
"""Into so many a model's gradients are cut at least, so that what is left when backward is over is little."""

_LEAST_COMPILED = 2**20
"""Bytes of DistributedDataParallel's own first message: torch's compiler, which cuts a model where messages end, wants
no smaller ones."""


def _bucket_bytes(model: torch.nn.Module, compiled: bool) -> int:
    """How much of a gradient is sent at a time."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    numbers = min(BUCKET_ELEMENTS, -(-sum(parameter.numel() for parameter in trained) // LEAST_BUCKETS))
    return max(numbers * trained[0].itemsize, _LEAST_COMPILED * compiled)


class GradientExchange(Exchange):
    """DistributedDataParallel, with the words that rows name beside it."""

    def __init__(self, own: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(own, optimizer, config, precision)
        compression, group = resolve_compression(config.grad_compression, precision), dist.group.WORLD
        assert group is not None
        self._rows, self._reduce = make_row_exchange(own, compression, group), make_reduce(compression, group)
        self._ready = self._within = 0.0
        if self._rows:
            weight: Any = self._rows.weight  # torch has no types for its hooks
            weight.register_post_accumulate_grad_hook(self._note)
        elif frozen := [name for name, parameter in own.named_parameters() if not parameter.requires_grad]:
            # Else a base that all hosts have would be sent to them, before the first of its adapters' small gradients.
            untyped: Any = DistributedDataParallel
            untyped._set_params_and_buffers_to_ignore_for_model(own, frozen)
        megabytes = _bucket_bytes(own, config.compile) / 2**20
        # Looking for unused parameters takes time in every forward pass; not looking for them ends the run.
        unused = bool(getattr(own, UNUSED_ATTRIBUTE, ()))
        self._parallel = DistributedDataParallel(
            own, gradient_as_bucket_view=True, bucket_cap_mb=megabytes, find_unused_parameters=unused
        )
        # Else every forward pass begins with waiting for rank 0, which sends an encoder's constants: numbers of places.
        self._parallel.broadcast_buffers = False
        # A lambda, because DDP compares a function's annotations with classes, and ours are texts.
        self._parallel.register_comm_hook(None, lambda _, bucket: self._send(bucket))
        self.model = self._parallel

    def _note(self, *_: object) -> None:
        """A gradient is ready: what backward takes after the last one is waiting for others."""
        self._ready = time.perf_counter()

    def _send(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        start = time.perf_counter()
        sent = self._reduce(bucket)
        # Thrifty ways wait here for messages before.
        self._within += time.perf_counter() - start
        self._note()
        return sent

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Only in the last one buckets are sent."""
        return nullcontext() if last else self._parallel.no_sync()

    def average(self, name_tokens: Callable[[], torch.Tensor]) -> float:
        """What backward has left to do are the words' gradients."""
        waited, self._within = self._within + time.perf_counter() - self._ready, 0.0
        if self._rows:
            set_gradient_rows(self.own, self._rows.average(name_tokens()))
        return waited

    def clear(self) -> None:
        """DDP's gradients are views of its buckets, and must stay where they are."""
        self.optimizer.zero_grad(set_to_none=False)
        if self._rows:
            self._rows.clear()
