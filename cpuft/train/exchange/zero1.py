"""ZeRO stage 1: each rank updates a shard of all parameters (`--shard optimizer`).

In an update, each rank receives the other ranks' gradients of its shards, during the backward pass, and afterwards all
ranks receive the updated weights of all shards. A rank adds up gradients in the order of ranks and in fp32, on any
backend, after an all-to-all, which costs half of an all-reduce everywhere; gloo's own reduce-scatter costs a whole one.
Gradients of word embeddings are still exchanged by rows: that is a tenth of their whole gradient. Of the embedding's
weights, only rows that ever had a gradient are sent, since moments change them in later updates, too; with weight decay
all rows change, and all are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from cpuft.comm.compression.embedding_rows import make_row_exchange
from cpuft.comm.compression.table import resolve_compression, to_wire_type
from cpuft.config.train import TrainConfig
from cpuft.train.arena import GradientBuckets, list_unused
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.optimizer_shards import OptimizerShards, ShardedBucket
from cpuft.train.fast.adamw import clip_gradients, set_gradient_rows

_MAX_BUCKETS_IN_FLIGHT = 8
"""Buckets that may be under way before the backward pass waits for the first one: they take memory."""


@dataclass(frozen=True)
class _Message:
    """A bucket's gradients under way."""

    bucket: ShardedBucket
    sent: Tensor
    """Kept because it must live until it was sent."""
    received: Tensor
    """From each rank, its gradients of this rank's shard."""
    work: dist.Work


class ShardedExchange(Exchange):
    """ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054), in buckets that are sent during the backward pass.

    Making it is collective, moves the parameters into buckets, and replaces them in the optimizer by this rank's
    shards. With gradient compression bf16 or fp16, gradients are sent in that type, and added up in fp32.
    """

    sends_gradients = True

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(model, optimizer, config, precision)
        group = dist.group.WORLD
        assert group is not None
        self._ranks, self._compression = group.size(), resolve_compression(config.grad_compression, precision)
        self._rows = make_row_exchange(model, self._compression, group)
        embedding = self._rows.weight if self._rows else None
        unused = list_unused(model)
        self.shards = self._shards = OptimizerShards(model, optimizer, embedding, unused)
        buckets = self._shards.buckets
        self._embedding_bucket = next((one for one in buckets if one.parameters()[0] is embedding), None)
        self._dense_buckets = [one for one in buckets if one is not self._embedding_bucket]
        late = {*unused}
        self._unused_buckets = [one for one in self._dense_buckets if one.parameters()[0] in late]
        self._gradients = GradientBuckets(self._dense_buckets, self._send)
        self._messages: list[_Message] = []
        self._waited = 0.0

    @staticmethod
    def is_selected(config: TrainConfig, ranks: int) -> bool:
        """Return whether there are several ranks and `--shard optimizer` is given."""
        return ranks > 1 and config.shard == "optimizer"

    def begin_pass(self, is_last: bool) -> None:
        """Begin a pass; complete buckets are sent in the last one of an update."""
        self._gradients.begin_pass(is_last)

    def _send(self, bucket: ShardedBucket) -> None:
        sent = to_wire_type(bucket.buffer(), self._compression)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, async_op=True)
        assert work is not None
        self._messages.append(_Message(bucket, sent, received, work))
        start = time.perf_counter()
        while len(self._messages) > _MAX_BUCKETS_IN_FLIGHT:
            self._receive()
        self._waited += time.perf_counter() - start

    def _receive(self) -> None:
        message = self._messages.pop(0)
        message.work.wait()
        shard = message.bucket.shard
        # The mean takes the memory of the gradients, which are all sent. The gradients of two bf16 shards or more have
        # at least as many bytes as one shard in fp32.
        total = message.bucket.buffer().view(torch.float32)[: len(shard)]
        torch.sum(message.received.view(self._ranks, -1), 0, dtype=torch.float32, out=total)
        shard.grad = total.div_(self._ranks)

    @torch.no_grad()
    def average_gradients(self, find_token_ids: Callable[[], Sequence[Tensor]]) -> float:
        """Finish the mean of the gradients of this rank's shards; return the seconds for which backward has waited."""
        waited = self._waited
        self._gradients.send_rest()
        self._waited = 0.0
        if self._rows and self._embedding_bucket:
            rows = self._rows.average(find_token_ids())
            set_gradient_rows(self.bare_model, rows)
            self._shards.mark_rows(rows)
            self._embedding_bucket.shard.grad = _slice_gradient(self._rows.weight, self._embedding_bucket)
        while self._messages:
            self._receive()
        for bucket in self._unused_buckets:
            if bucket.shard.grad is not None and not bucket.shard.grad.any():
                bucket.shard.grad = None  # as on one rank, so that weight decay leaves it as it is
        return waited

    def clip_gradients(self) -> None:
        """Scale gradients down to `--max-grad-norm` if it is set, by the norm of all ranks' shards. Collective then."""
        if self.config.max_grad_norm:
            shards = [bucket.shard for bucket in self._shards.buckets]
            clip_gradients(self.optimizer, shards, self.config.max_grad_norm, dist.all_reduce)

    def clear_gradients(self) -> None:
        """Set all gradients to None, those of parameters and of shards."""
        self.optimizer.zero_grad()
        self._gradients.clear()
        if self._rows:
            self._rows.clear()

    def synchronize_parameters(self, is_due: bool, wait: bool) -> None:
        """Give all ranks the weights of all shards, after every update and whatever `wait` is. Collective."""
        self._shards.gather_weights()


def _slice_gradient(weight: Tensor, bucket: ShardedBucket) -> Tensor:
    """Return this rank's shard of the gradient of a weight that is alone in its bucket; a copy only if it is padded."""
    assert weight.grad is not None
    own = weight.grad.view(-1)[bucket.own]
    missing = len(bucket.shard) - len(own)
    return torch.nn.functional.pad(own, (0, missing)) if missing else own
