"""ZeRO stage 1: each rank updates a shard of all parameters (`--shard optimizer`).

In an update, each rank receives the other ranks' gradients of its shards, during the backward pass, and afterwards all
ranks receive the updated weights of all shards. A rank adds up gradients in the order of ranks and in fp32, after an
all-to-all, which costs half of an all-reduce; gloo's own reduce-scatter costs a whole one. Gradients of word embeddings
are still exchanged by rows. Of the embedding's weights, rows that ever had a gradient are sent, since moments change
them in later updates, too; with weight decay, all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from cpuft.comm.compression.table import to_wire_type
from cpuft.train.exchange.data_parallel import GradientExchange
from cpuft.train.exchange.optimizer_shards import OptimizerShards, ShardedBucket
from cpuft.train.fast.adamw import clip_gradients

_MAX_BUCKETS_IN_FLIGHT = 8
"""Buckets that may be under way before the backward pass waits for the first one: they take memory."""


class ShardedExchange(GradientExchange[ShardedBucket]):
    """ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054), in buckets that are sent during the backward pass.
    Making it is collective, moves the parameters into buckets, and gives the optimizer this rank's shards of them.
    """

    def _make_buckets(self) -> list[ShardedBucket]:
        embedding, late = self._rows.weight if self._rows else None, {*self._unused}
        self.shards = self._shards = OptimizerShards(self.bare_model, self.optimizer, embedding, self._unused)
        self._unused = [one.shard for one in self._shards.buckets if one.parameters()[0] in late]
        return [one for one in self._shards.buckets if one is not self._shards.embedding_bucket]

    def _start_mean(self, bucket: ShardedBucket) -> Callable[[], object]:
        while len(self._waits) >= _MAX_BUCKETS_IN_FLIGHT:
            self._waits.pop(0)()
        sent = to_wire_type(bucket.buffer(), self._compression)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, async_op=True)
        assert work is not None
        return partial(self._receive, bucket, work, received, sent)

    def _receive(self, bucket: ShardedBucket, work: dist.Work, received: Tensor, sent: Tensor) -> None:
        """Add up the gradients of this rank's shard; `sent` must live until it was sent."""
        work.wait()
        shard, ranks = bucket.shard, self._group.size()
        # The mean takes the memory of the gradients, which are all sent. The gradients of two bf16 shards or more have
        # at least as many bytes as one shard in fp32.
        total = bucket.buffer().view(torch.float32)[: len(shard)]
        torch.sum(received.view(ranks, -1), 0, dtype=torch.float32, out=total)
        shard.grad = total.div_(ranks)

    def _apply_rows(self, rows: Tensor) -> None:
        super()._apply_rows(rows)
        self._shards.mark_rows(rows)
        if self._rows and self._shards.embedding_bucket:
            bucket, weight = self._shards.embedding_bucket, self._rows.weight
            assert weight.grad is not None
            own = weight.grad.view(-1)[bucket.own]
            missing = len(bucket.shard) - len(own)
            bucket.shard.grad = torch.nn.functional.pad(own, (0, missing)) if missing else own

    def clip_gradients(self) -> None:
        """Scale gradients down to `--max-grad-norm` (0: never) by the norm of all shards. Collective if not 0."""
        if self.config.max_grad_norm:
            shards = [bucket.shard for bucket in self._shards.buckets]
            clip_gradients(self.optimizer, shards, self.config.max_grad_norm, dist.all_reduce)

    def clear_gradients(self) -> None:
        """Set all gradients to None, those of parameters and of shards."""
        self.optimizer.zero_grad()
        super().clear_gradients()

    def synchronize_parameters(self, is_due: bool, wait: bool) -> None:
        """Give all ranks the weights of all shards, after every update and whatever `wait` is. Collective."""
        self._shards.gather_weights()
