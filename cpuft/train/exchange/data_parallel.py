"""Data parallel training: gradients are averaged in every update.

The gradients of layers are sent during the backward pass, in buckets. Those of a word embedding are sent after it, and
only the rows of tokens that were looked up. With powersgd, the next update computes meanwhile.

Why not torch's DistributedDataParallel: it makes its buckets anew after the first update, so that sums of three ranks
have another order in a resumed run, adds each first gradient to zeros, and sends weights that all ranks have.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.hierarchical import make_host_groups
from cpuft.comm.compression.table import make_reduce, resolve_compression
from cpuft.compressions import count_buckets
from cpuft.config.train import TrainConfig
from cpuft.train.arena import B, Bucket, GradientBuckets, list_unused, plan_buckets
from cpuft.train.exchange.base import Exchange
from cpuft.train.fast.adamw import clip_gradients
from cpuft.train.fast.master_weights import set_gradient_rows


class GradientExchange(Exchange, ABC, Generic[B]):
    """An exchange that sends gradients in every update, in buckets of its subclass. Making it is collective."""

    sends_gradients = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(model, optimizer, config, precision)
        self._compression, group = resolve_compression(config.grad_compression, precision), dist.group.WORLD
        assert group is not None
        self._group, self._hosts = group, make_host_groups(self._compression)
        self._rows = make_row_exchange(model, self._compression, group, self._hosts)
        self._unused = list_unused(model)
        """What the optimizer leaves as it is if no rank has used it."""
        self._gradients = GradientBuckets(self._make_buckets(), self._send)
        self._waits: list[Callable[[], object]] = []
        """Functions that wait for the means that are under way, the oldest first."""
        self._seconds = 0.0

    @abstractmethod
    def _make_buckets(self) -> list[B]:
        """Return the buckets of all gradients but those that are exchanged by rows, in the order in which to send."""

    @abstractmethod
    def _start_mean(self, bucket: B) -> Callable[[], object]:
        """Start to average a bucket over the ranks; return a function that waits for the mean."""

    def _apply_rows(self, rows: torch.Tensor) -> None:
        """Take note that the mean of the word embedding's gradient is there, which has these rows."""
        set_gradient_rows(self.bare_model, rows)

    def begin_pass(self, is_last: bool) -> None:
        """Begin a forward and backward pass; in the last one of an update, each bucket is sent once it is complete."""
        self._gradients.begin_pass(is_last)

    def _send(self, bucket: B) -> None:
        start = time.perf_counter()
        self._waits.append(self._start_mean(bucket))
        self._seconds += time.perf_counter() - start

    def average_gradients(self, find_token_ids: Callable[[], Sequence[torch.Tensor]]) -> float:
        """Wait for the mean of the buckets, average the gradient rows of the word embedding (with powersgd, wait for
        those of the update before), and return the seconds that sending took in the backward pass. Unused parameters'
        zeros become None.
        """
        seconds = self._seconds
        self._gradients.send_rest()
        self._seconds = 0.0
        while self._waits:
            self._waits.pop(0)()
        for one in self._unused:
            if one.grad is not None and not one.grad.any():
                one.grad = None  # as on one rank, so that weight decay leaves it as it is
        if self._rows:
            self._apply_rows(self._rows.average(find_token_ids()))
        return seconds

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        if self._rows:
            self._rows.clear()
        self._gradients.clear()

    def finish_messages(self) -> None:
        """Wait until the mean of late embedding rows is there. The next update applies it."""
        if self._rows:
            self._rows.wait()


class DataParallelExchange(GradientExchange[Bucket]):
    """The mean of the gradients of all ranks, which all have the whole optimizer."""

    def _make_buckets(self) -> list[Bucket]:
        hosts = self._hosts
        self._reduce = make_reduce(self._compression, self._group, hosts)
        members = self._group.size() if hosts is None else hosts.ranks // hosts.sums.size()
        words = self._rows.weight if self._rows else None
        layers = [one for one in self.trained if one is not words]
        return make_buckets(layers, self._unused, self.config.grad_compression, members)

    def _start_mean(self, bucket: Bucket) -> Callable[[], object]:
        return self._reduce(bucket).wait

    def clip_gradients(self) -> None:
        """Scale gradients down to `--max-grad-norm` (0: never), alike on all ranks. Collective without kernels."""
        if self.config.max_grad_norm:
            share = partial(dist.broadcast, src=0)
            clip_gradients(self.optimizer, self.trained, self.config.max_grad_norm, share_plain=share)


def make_buckets(
    layers: Sequence[torch.nn.Parameter], unused: Sequence[torch.nn.Parameter], compression: str, members: int
) -> list[Bucket]:
    """Return buckets, one `count_buckets`-th of all elements or more each, in the order of sending: last layers first,
    `unused` ones last. `members` ranks send to each other.
    """
    total, late = sum(one.numel() for one in layers), {*unused}
    least = -(-total // count_buckets(compression, total, members))
    return [Bucket(some) for some in plan_buckets(layers, lambda one: (one.dtype, one in late), least, unused)]
