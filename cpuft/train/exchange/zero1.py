"""Each rank steps its part of all parameters: gradients are added up where their part is, weights gathered from there.

An update sends each rank the others' numbers of its part (in the course of backward), and then all ranks its part's
weights. Ranks add up in their order and in fp32, whatever carries the numbers: an all-to-all is half an all-reduce on
every backend, where gloo's own reduce-scatter is a whole one. Word embeddings' gradients still travel by rows: that is
a tenth of what all of them would be. Of their weights those of all rows go that were ever named, since moments move
them, or with weight decay all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.table import resolve_compression, to_wire_type
from cpuft.config import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.optimizer_shards import Bucket, Parts
from cpuft.train.fast.adamw import clip_gradients, set_gradient_rows

_AHEAD = 8
"""Buckets that may be on their way before backward waits for the first: they are beside the gradients in memory."""


@dataclass(frozen=True)
class _Message:
    """A bucket's gradients on their way."""

    bucket: Bucket
    gradients: Tensor
    """The bucket's own."""
    sent: Tensor
    """Kept until all have it."""
    received: Tensor
    """Of this rank's part, from each rank."""
    work: dist.Work


class ShardExchange(Exchange):
    """ZeRO's first stage (Rajbhandari et al. 2020, arXiv:1910.02054), in buckets like DistributedDataParallel's."""

    def __init__(self, own: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(own, optimizer, config, precision)
        group = dist.group.WORLD
        assert group is not None
        self._ranks, self._compression = group.size(), resolve_compression(config.grad_compression, precision)
        self._rows = make_row_exchange(own, self._compression, group)
        words = self._rows.weight if self._rows else None
        self.parts = self._parts = Parts(own, optimizer, words)
        self._words = next((one for one in self._parts.buckets if one.parameters[0] is words), None)
        self._dense = [one for one in self._parts.buckets if one is not self._words]
        self._gradients = [torch.zeros_like(one.weights) for one in self._dense]
        self._missing: list[set[Tensor]] = []
        """Of each bucket, parameters whose gradients are not all there."""
        self._next = len(self._dense)
        """Which bucket is to be sent; that many: none is."""
        self._messages: list[_Message] = []
        self._within = 0.0
        for number, (bucket, gradients) in enumerate(zip(self._dense, self._gradients, strict=True)):
            parameters: list[Any] = [*bucket.parameters]  # torch has no types for its hooks
            for parameter, gradient in zip(parameters, bucket.split(gradients), strict=True):
                parameter.grad = gradient
                parameter.register_post_accumulate_grad_hook(partial(self._note, number))

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Gradients add up in the buckets; in the last one, those that are complete are sent, in their order."""
        self._missing = [set(bucket.parameters) for bucket in self._dense]
        self._next = 0 if last else len(self._dense)
        return nullcontext()

    def _note(self, number: int, ready: Tensor) -> None:
        self._missing[number].discard(ready)
        while self._next < len(self._dense) and not self._missing[self._next]:
            self._send()
            start = time.perf_counter()
            while len(self._messages) > _AHEAD:
                self._receive()
            self._within += time.perf_counter() - start

    def _send(self) -> None:
        bucket, gradients = self._dense[self._next], self._gradients[self._next]
        sent = to_wire_type(gradients, self._compression)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, async_op=True)
        assert work is not None
        self._messages.append(_Message(bucket, gradients, sent, received, work))
        self._next += 1

    def _receive(self) -> None:
        message = self._messages.pop(0)
        message.work.wait()
        part = message.bucket.part
        # Where gradients were, which are all sent: a part of two ranks' bf16 ones has as many bytes in fp32.
        total = message.gradients.view(torch.float32)[: len(part)]
        torch.sum(message.received.view(self._ranks, -1), 0, dtype=torch.float32, out=total)
        part.grad = total.div_(self._ranks)

    @torch.no_grad()
    def average(self, name_tokens: Callable[[], Tensor]) -> float:
        """Only of its part a rank gets the mean."""
        waited, self._within = self._within, 0.0
        while self._next < len(self._dense):  # what has parameters that no row has used
            self._send()
        if self._rows and self._words:
            rows = self._rows.average(name_tokens())
            set_gradient_rows(self.own, rows)
            self._parts.note(rows)
            self._words.part.grad = _cut(self._rows.weight, self._words)
        while self._messages:
            self._receive()
        return waited

    def clip(self) -> None:
        """The norm is that of all parts together."""
        if self.config.max_grad_norm:
            parts = [bucket.part for bucket in self._parts.buckets]
            clip_gradients(self.optimizer, parts, self.config.max_grad_norm, dist.all_reduce)

    def clear(self) -> None:
        """Gradients are views of the buckets, and must stay where they are."""
        self.optimizer.zero_grad()
        for gradients in self._gradients:
            gradients.zero_()
        if self._rows:
            self._rows.clear()

    def meet(self, update: int, last: bool) -> None:
        """All ranks get the weights of all parts."""
        self._parts.spread()


def _cut(weight: Tensor, bucket: Bucket) -> Tensor:
    """This rank's part of a weight's gradient, which is alone in its bucket: no copy, unless it ends in padding."""
    assert weight.grad is not None
    own = weight.grad.view(-1)[bucket.own]
    missing = len(bucket.part) - len(own)
    return torch.nn.functional.pad(own, (0, missing)) if missing else own
