"""Data parallel training: gradients are averaged in every update.

The gradients of layers are sent during the backward pass, in buckets. Those of a word embedding are sent after it, and
only the rows of tokens that were looked up. With powersgd, the next update computes meanwhile (`LateRows`).

Why not torch's DistributedDataParallel: it makes its buckets anew after the first update, so that sums of three ranks
have another order in a resumed run, adds each first gradient to zeros, and sends weights that all ranks have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.hierarchical import make_host_groups
from cpuft.comm.compression.table import make_reduce, resolve_compression
from cpuft.compressions import count_buckets
from cpuft.config.train import TrainConfig
from cpuft.train.arena import Bucket, GradientBuckets, list_unused, plan_buckets
from cpuft.train.exchange.base import Exchange
from cpuft.train.fast.adamw import clip_gradients, set_gradient_rows


class DataParallelExchange(Exchange):
    """The mean of the gradients of all ranks in every update. Making it is collective; parameters must be equal."""

    sends_gradients = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(model, optimizer, config, precision)
        compression, group = resolve_compression(config.grad_compression, precision), dist.group.WORLD
        assert group is not None
        hosts = make_host_groups(compression, group)
        self._rows = make_row_exchange(model, compression, group, hosts)
        self._reduce = make_reduce(compression, group, hosts)
        members = group.size() if hosts is None else hosts.ranks // hosts.sums.size()
        words = self._rows.weight if self._rows else None
        layers = [one for one in self.trained if one is not words]
        self._unused = list_unused(model)
        buckets = make_buckets(layers, self._unused, config.grad_compression, members)
        self._buckets = GradientBuckets(buckets, self._send)
        self._sent: list[torch.futures.Future[torch.Tensor]] = []
        self._coding_seconds = 0.0

    @staticmethod
    def is_selected(config: TrainConfig, ranks: int) -> bool:
        """Return whether there are several ranks; this exchange is the default, the last of `table.EXCHANGES`."""
        return ranks > 1

    def begin_pass(self, is_last: bool) -> None:
        """Begin a pass; complete buckets are sent in the last one of an update."""
        self._buckets.begin_pass(is_last)

    def _send(self, bucket: Bucket) -> None:
        start = time.perf_counter()
        self._sent.append(self._reduce(bucket))
        self._coding_seconds += time.perf_counter() - start

    def average_gradients(self, find_token_ids: Callable[[], Sequence[torch.Tensor]]) -> float:
        """Wait for the mean of the buckets, and average the gradient rows of the word embedding.

        It blocks until the rows of all ranks are there, or with late rows those of the update before. Returns the
        seconds of the last backward pass in which this rank encoded gradients.
        """
        coding = self._coding_seconds
        self._buckets.send_rest()
        self._coding_seconds = 0.0
        for mean in self._sent:
            mean.wait()
        self._sent.clear()
        for parameter in self._unused:
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None  # as on one rank, so that weight decay leaves it as it is
        if self._rows:
            set_gradient_rows(self.bare_model, self._rows.average(find_token_ids()))
        return coding

    def clip_gradients(self) -> None:
        """Scale gradients down to `--max-grad-norm`, on all ranks by the same factor. Collective without kernels."""
        if self.config.max_grad_norm:
            share = partial(dist.broadcast, src=0)
            clip_gradients(self.optimizer, self.trained, self.config.max_grad_norm, share_plain=share)

    def clear_gradients(self) -> None:
        """Set all gradients to None."""
        if self._rows:
            self._rows.clear()
        self._buckets.clear()

    def finish_messages(self) -> None:
        """Wait until the mean of late embedding rows is there. The next update applies it."""
        if self._rows:
            self._rows.wait()


def make_buckets(
    layers: Sequence[torch.nn.Parameter], unused: Sequence[torch.nn.Parameter], compression: str, members: int
) -> list[Bucket]:
    """Return the buckets of gradients in the order in which they are sent; `members` ranks send to each other.

    `unused` (see `list_unused`) have the last buckets for themselves: others would wait for them until backward ends.
    """
    total, late = sum(one.numel() for one in layers), {*unused}
    least = -(-total // count_buckets(compression, total, members))
    planned = plan_buckets(layers, lambda one: (one.dtype, one in late), least)
    return [Bucket(some) for some in sorted(planned, key=lambda some: some[0] in late)]
