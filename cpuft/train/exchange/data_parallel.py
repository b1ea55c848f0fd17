"""Data parallel training: gradients are averaged in every update, by DistributedDataParallel.

The gradients of layers are sent during the backward pass. Those of a word embedding are sent after it, and only the
rows of tokens that were looked up. With powersgd, the next update computes meanwhile (`LateRows`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.hierarchical import make_host_groups
from cpuft.comm.compression.table import make_reduce, resolve_compression
from cpuft.compressions import BUCKET_NUMBERS, MIN_BUCKETS, count_buckets
from cpuft.config import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.fast.adamw import clip_gradients, set_gradient_rows

UNUSED_ATTRIBUTE = "_cpuft_unused"
"""Attribute of a model: names of trained parameters that the first forward pass did not use (XLNet has some)."""
_MIN_COMPILED_BYTES = 2**20
"""Minimum bucket size with --compile: the size of DistributedDataParallel's own first bucket. torch's compiler splits
a model where buckets end, and fails on smaller ones."""


def _bucket_bytes(
    model: torch.nn.Module, layers: Sequence[torch.nn.Parameter], config: TrainConfig, members: int
) -> int:
    """Return the largest size of a gradient bucket. DistributedDataParallel fills buckets for each type by themselves.

    Parameters
    ----------
    layers: the trained parameters of the model without an embedding that is exchanged by rows.
    members: ranks that send gradients to each other.
    """
    if config.grad_compression == "powersgd":
        buckets = count_buckets("powersgd", sum(parameter.numel() for parameter in layers), members)
        nbytes = -(-sum(parameter.nbytes for parameter in layers) // buckets)
    else:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        numbers = min(BUCKET_NUMBERS, -(-sum(parameter.numel() for parameter in trained) // MIN_BUCKETS))
        nbytes = numbers * trained[0].itemsize
    return max(nbytes, _MIN_COMPILED_BYTES * config.compile)


class DataParallelExchange(Exchange):
    """DistributedDataParallel for the layers, and an exchange of rows for the word embedding.

    It is the exchange of several ranks if no option selects another one. Making it is collective. `forward_model` is
    the wrapped model.

    Raises CpuftError: there is no such gradient compression.
    """

    sends_gradients = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(model, optimizer, config, precision)
        compression, group = resolve_compression(config.grad_compression, precision), dist.group.WORLD
        assert group is not None
        hosts = make_host_groups(compression, group)
        self._rows = make_row_exchange(model, compression, group, hosts)
        self._reduce = make_reduce(compression, group, hosts)
        self._last_ready = 0.0
        """When the last gradient of the backward pass was ready."""
        self._coding_seconds = 0.0
        if self._rows:
            weight: Any = self._rows.weight  # torch has no types for its hooks
            weight.register_post_accumulate_grad_hook(self._note_ready)
        elif frozen := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
            # Without this, DistributedDataParallel would broadcast the frozen weights, which all hosts have already.
            untyped: Any = DistributedDataParallel
            untyped._set_params_and_buffers_to_ignore_for_model(model, frozen)
        words = self._rows.weight if self._rows else None
        layers = [one for one in model.parameters() if one.requires_grad and one is not words]
        megabytes = (
            _bucket_bytes(model, layers, config, group.size() if hosts is None else hosts.ranks // hosts.sums.size())
            / 2**20
        )
        # Looking for unused parameters costs time in every forward pass. Without it, a model that has some would end
        # with an error.
        unused = bool(getattr(model, UNUSED_ATTRIBUTE, ()))
        self._parallel = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=megabytes, find_unused_parameters=unused
        )
        # Otherwise every forward pass would wait for rank 0 to broadcast buffers, which are constants like positions.
        self._parallel.broadcast_buffers = False
        # A lambda, because DistributedDataParallel compares a function's annotations with classes; ours are strings.
        self._parallel.register_comm_hook(None, lambda _, bucket: self._send(bucket))
        self.forward_model = self._parallel

    @staticmethod
    def is_selected(config: TrainConfig, ranks: int) -> bool:
        """Return whether there are several ranks: this exchange is the default, the last of `table.EXCHANGES`."""
        return ranks > 1

    def _note_ready(self, *_: object) -> None:
        """Note that a gradient is ready. The rest of the backward pass after the last one is waiting for messages."""
        self._last_ready = time.perf_counter()

    def _send(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        start = time.perf_counter()
        sent = self._reduce(bucket)
        self._coding_seconds += time.perf_counter() - start
        self._note_ready()
        return sent

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a forward and a backward pass; buckets are sent in the `last` one of an update only."""
        return nullcontext() if last else self._parallel.no_sync()

    def average_gradients(self, find_token_ids: Callable[[], Sequence[torch.Tensor]]) -> float:
        """Average the gradient rows of the word embedding; the backward pass has averaged everything else.

        It blocks until the rows of all ranks are there, or with late rows those of the update before. If the word
        embedding is not exchanged by rows, it only computes the result, and `find_token_ids` is not called.

        Returns
        -------
        Seconds of the last backward pass in which this rank encoded gradients, or waited for messages after the last
        gradient was ready.
        """
        waited, self._coding_seconds = self._coding_seconds + time.perf_counter() - self._last_ready, 0.0
        if self._rows:
            set_gradient_rows(self.bare_model, self._rows.average(find_token_ids()))
        return waited

    def clip_gradients(self) -> None:
        """Scale gradients down to `--max-grad-norm`, on all ranks by the same factor. Collective without kernels."""
        if self.config.max_grad_norm:
            share = partial(dist.broadcast, src=0)
            clip_gradients(self.optimizer, self.bare_model.parameters(), self.config.max_grad_norm, share_plain=share)

    def clear_gradients(self) -> None:
        """Set the gradients to zero in place, because they are views of DistributedDataParallel's buckets.

        Only the word embedding's gradient becomes None if it is exchanged by rows.
        """
        if self._rows:  # first: what is zeroed is written whole, and the next backward pass would clear it whole again
            self._rows.clear()
        self.optimizer.zero_grad(set_to_none=False)

    def finish_messages(self) -> None:
        """Wait until the mean of late embedding rows is there. The next update applies it."""
        if self._rows:
            self._rows.wait()
