"""A rank's shards of an optimizer (ZeRO stage 1): fp32 weights and moments of an Nth of all parameters.

Parameters lie side by side in buckets, as views of their weights. A rank's shard of a bucket is a slice of equal
length, which may begin and end within parameters; the optimizer gets it in their place. An fp32 parameter is used in
computation as it is, so only its moments are sharded. A bf16 parameter has an fp32 master weight, which is sharded,
too: no rank has all master weights.

Why not torch's own: ZeroRedundancyOptimizer assigns whole parameters to ranks (one of MiniLM's has half of all
elements) and sends them one by one. FSDP2 gathers weights in hooks around each module, but the fast layers read weights
of modules that they do not call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cpuft.comm.compression.int8 import all_gather
from cpuft.compressions import BUCKET_NUMBERS
from cpuft.train.arena import Bucket, plan_buckets
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE, MasterWeights

WEIGHTS, MOMENTS = "model", ("exp_avg", "exp_avg_sq")
"""Names of the fp32 weights and of AdamW's moments in `OptimizerShards.gather_state` and in checkpoints."""
ALIGNMENT = 16
"""The length of a shard is a multiple of this number of elements: a cache line of fp32."""


def shard_length(elements: int, ranks: int, unit: int = ALIGNMENT) -> int:
    """Return the length of each rank's shard of a bucket: elements / ranks, rounded up to a multiple of `unit`."""
    return -(-elements // (ranks * unit)) * unit


def fill_shard(shard: Tensor, start: int, values: Iterable[Tensor]) -> None:
    """Copy elements of these values, side by side, from number `start` on into a shard; what they do not fill stays."""
    place = -start
    for value in values:
        first, last = max(place, 0), min(place + value.numel(), len(shard))
        if first < last:
            shard[first:last].copy_(value.reshape(-1)[first - place : last - place])
        place += value.numel()


class ShardedBucket(Bucket):
    """A bucket whose parameters lie side by side in memory, too, and this rank's shard of them."""

    @torch.no_grad()
    def __init__(
        self, parameters: Sequence[nn.Parameter], masters: dict[Tensor, Tensor], unit: int = ALIGNMENT
    ) -> None:
        """Move the parameters into the bucket, and their fp32 masters out of `masters`."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        length = shard_length(sum(parameter.numel() for parameter in parameters), ranks, unit)
        super().__init__(parameters, ranks * length)
        self.own = slice(rank * length, (rank + 1) * length)
        """This rank's shard in `weights`."""
        self.weights = torch.zeros(ranks * length, dtype=parameters[0].dtype)
        """One-dimensional, in the parameters' type: all weights and the padding, `ranks` times a shard's length."""
        for parameter, view in zip(parameters, self.split(self.weights), strict=True):
            view.copy_(parameter)
            parameter.data = view
        self.has_masters = parameters[0] in masters
        """Whether the parameters are bf16 with fp32 masters, so that `shard` is not a slice of `weights`."""
        shard = self.weights[self.own]
        if self.has_masters:
            shard = self.fill(torch.zeros(length), masters.pop)
        self.shard = nn.Parameter(shard)
        """What the optimizer updates: a slice of `weights`, or of their fp32 masters."""

    def fill(self, shard: Tensor, find_value: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Copy this rank's elements of each parameter's value into `shard`, one-dimensional, and return it."""
        fill_shard(shard, self.own.start, map(find_value, self.parameters()))
        return shard


class OptimizerShards:
    """This rank's shards of everything that an optimizer updates, which replace the parameters in the optimizer.

    They are made when the model has its layers, with the same weights on all ranks, and the optimizer has no state yet.
    They take the fp32 masters from the model, which outside of `full_weights` cannot be saved. A word embedding that is
    exchanged by rows has a bucket of its own with shards of whole rows; so has each parameter of `unused`.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, embedding: Tensor | None, unused: Sequence[nn.Parameter] = ()
    ) -> None:
        self._optimizer = optimizer
        self._masters: MasterWeights | None = getattr(model, MASTERS_ATTRIBUTE, None)
        groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.parameters = [parameter for parameter in model.parameters() if parameter in groups]
        """The parameters that the optimizer had, in the order of the model."""
        late, masters = {*unused}, self._take_masters()
        planned = plan_buckets(
            self.parameters,
            lambda p: (p if p in late else None, p.dtype, groups[p], p is embedding),
            BUCKET_NUMBERS,
            unused,
        )
        unit = ALIGNMENT if embedding is None else math.lcm(ALIGNMENT, embedding.shape[-1])
        self.buckets = [ShardedBucket(some, masters, unit if some[0] is embedding else ALIGNMENT) for some in planned]
        """All buckets, in the order in which their gradients are complete in a backward pass."""
        self.embedding_bucket = next((one for one in self.buckets if one.parameters()[0] is embedding), None)
        self._changed_rows: Tensor | None = None
        """Which rows of the embedding and its padding may have changed since the start; None if all may have."""
        if (
            embedding is not None
            and self.embedding_bucket
            and not optimizer.param_groups[groups[embedding]]["weight_decay"]
        ):
            rows = self.embedding_bucket.weights.numel() // embedding.shape[-1]
            self._changed_rows = torch.zeros(rows, dtype=torch.bool)
        for number, group in enumerate(optimizer.param_groups):
            group["params"][:] = [one.shard for one in self.buckets if groups[one.parameters()[0]] == number]

    def _take_masters(self) -> dict[Tensor, Tensor]:
        return self._masters.hand_over(self.parameters) if self._masters else {}

    def mark_rows(self, rows: Tensor) -> None:
        """Note that these rows of the embedding, int64, the same on all ranks, have had gradients and must be sent."""
        if self._changed_rows is not None:
            self._changed_rows[rows.reshape(-1)] = True

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Give all ranks the weights of all shards, in place in the model's parameters. Collective."""
        finish: list[Callable[[], object]] = []
        for bucket in self.buckets:
            own = bucket.weights[bucket.own]
            if bucket.has_masters:
                own.copy_(bucket.shard)
            if bucket is self.embedding_bucket and self._changed_rows is not None:
                finish.append(_gather_rows(bucket, self._changed_rows))
            else:
                finish.append(all_gather(bucket.weights, own, async_op=True).wait)
        for one in finish:
            one()

    @contextmanager
    def full_weights(self) -> Iterator[None]:
        """Inside, the model has all of its fp32 weights, to read or save. Collective to enter if there are masters."""
        if self._masters is None:
            yield
            return
        gathered = [(bucket, _gather_shards(bucket.shard)) for bucket in self.buckets if bucket.has_masters]
        self._masters.take_back({p: m for one, all_ in gathered for p, m in zip(one.parameters(), one.split(all_))})
        try:
            yield
        finally:
            self._take_masters()

    @property
    def step(self) -> float:
        """Number of updates that the optimizer has made; 0.0 before the first."""
        return max(float(state.get("step", 0)) for state in [*self._optimizer.state.values(), {}])

    def gather_state(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield all that is sharded, as (kind, parameter, value), one bucket in memory at a time. Collective, to the
        end. The kind is "exp_avg", "exp_avg_sq" (zeros before the first update) or, for bf16 parameters, "model"; the
        value is fp32, in the parameter's shape.
        """
        for bucket in self.buckets:
            state = self._optimizer.state.get(bucket.shard, {})
            shards = {moment: state.get(moment, torch.zeros_like(bucket.shard)) for moment in MOMENTS}
            for kind, shard in (shards | ({WEIGHTS: bucket.shard} if bucket.has_masters else {})).items():
                for parameter, value in zip(bucket.parameters(), bucket.split(_gather_shards(shard)), strict=True):
                    yield kind, parameter, value

    @torch.no_grad()
    def restore(self, find_value: Callable[[str, nn.Parameter], Tensor], step: Tensor) -> None:
        """Take this rank's shards of what `gather_state` yielded after `step` updates: `find_value(kind, parameter)`
        returns a value, and is asked for no moments if `step` is 0. The model has its weights already. Not collective.
        """
        for bucket in self.buckets:
            if bucket.has_masters:
                bucket.fill(bucket.shard, partial(find_value, WEIGHTS))
            for name in MOMENTS if step and bucket is self.embedding_bucket else ():
                self.mark_rows(find_value(name, bucket.parameters()[0]).any(1).nonzero())
            if step:
                moments = {
                    name: bucket.fill(torch.zeros_like(bucket.shard), partial(find_value, name)) for name in MOMENTS
                }
                self._optimizer.state[bucket.shard] = {"step": step.clone(), **moments}


def _gather_rows(bucket: ShardedBucket, changed: Tensor) -> Callable[[], None]:
    """Start to give all ranks the changed rows of all shards of a matrix; return a function that finishes this."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = bucket.weights.view(ranks, -1, bucket.parameters()[0].shape[-1])
    places = [some.nonzero()[:, 0] for some in changed.view(ranks, -1)]
    received = rows.new_zeros(ranks, max(map(len, places)), rows.shape[-1])
    received[rank, : len(places[rank])] = rows[rank, places[rank]]
    work = all_gather(received.view(-1), received[rank].view(-1), async_op=True)

    @torch.no_grad()
    def finish() -> None:
        work.wait()
        for whole, some, found in zip(rows, places, received, strict=True):
            whole[some] = found[: len(some)]

    return finish


def _gather_shards(shard: Tensor) -> Tensor:
    whole = torch.empty(dist.get_world_size() * len(shard))
    all_gather(whole, shard.detach())
    return whole
