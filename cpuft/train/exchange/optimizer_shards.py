"""Which numbers a rank keeps the optimizer's state of: an equal run of every bucket, whatever parameters it cuts.

A bucket is parameters side by side, about as many numbers as are worth a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cpuft.comm.compression.int8 import all_gather
from cpuft.comm.selection import BUCKET_ELEMENTS
from cpuft.train.fast.adamw import MASTERS_ATTRIBUTE, MasterWeights

ALIGNED = 16
"""A part has a whole multiple of so many numbers: a cache line of fp32."""


@dataclass(frozen=True)
class Member:
    """What matters of a parameter."""

    size: int
    kind: Hashable
    """Parameters of one kind may share a bucket."""
    block: Hashable
    """Those that lie in one block of memory stay side by side: layers that are packed are multiplied as one."""


@dataclass(frozen=True)
class Piece:
    """Numbers of one parameter that are in a rank's part."""

    member: int
    """Which of the bucket's parameters."""
    start: int
    """The first of them in the parameter, flattened."""
    place: int
    """Where that one is in the part."""
    length: int


def plan_buckets(members: Sequence[Member], least: int) -> list[list[int]]:
    """Numbers of the parameters in each bucket, ascending: `least` numbers in each, but for the last of a kind.

    Buckets come in the order in which backward has all of their gradients, if it goes through parameters backwards.
    """
    filling: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    for number in reversed(range(len(members))):
        member = members[number]
        bucket = filling.setdefault(member.kind, [])
        if sum(members[other].size for other in bucket) >= least and members[bucket[0]].block != member.block:
            full.append(bucket)
            bucket = filling[member.kind] = []
        bucket.insert(0, number)
    return sorted([*full, *filling.values()], key=lambda bucket: -bucket[0])


def part_width(count: int, ranks: int, unit: int = ALIGNED) -> int:
    """Numbers of each rank's part of a bucket of `count`, whole units; the last parts end in padding."""
    return -(-count // (ranks * unit)) * unit


def find_pieces(sizes: Sequence[int], ranks: int, rank: int, unit: int = ALIGNED) -> list[Piece]:
    """What a rank's part of a bucket has of its parameters, of these sizes."""
    width, start, found = part_width(sum(sizes), ranks, unit), 0, []
    begin, end = rank * width, (rank + 1) * width
    for member, size in enumerate(sizes):
        first, last = max(start, begin), min(start + size, end)
        if first < last:
            found.append(Piece(member, first - start, first - begin, last - first))
        start += size
    return found


WEIGHTS, MOMENTS = "model", ("exp_avg", "exp_avg_sq")


class Bucket:
    """Parameters of one type, side by side in memory, and this rank's part of them."""

    @torch.no_grad()
    def __init__(self, parameters: Sequence[nn.Parameter], masters: dict[Tensor, Tensor], unit: int = ALIGNED) -> None:
        """`masters`: of the parameters that have one; they are taken out. Parts have so many whole units."""
        self.parameters, self._sizes = parameters, [p.numel() for p in parameters]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        width = part_width(sum(self._sizes), ranks, unit)
        self._pieces = find_pieces(self._sizes, ranks, rank, unit)
        self.own = slice(rank * width, (rank + 1) * width)
        self.weights = torch.zeros(ranks * width, dtype=parameters[0].dtype)
        for parameter, view in zip(parameters, self.split(self.weights), strict=True):
            view.copy_(parameter)
            parameter.data = view
        self.has_masters = parameters[0] in masters
        part = self.weights[self.own]
        if self.has_masters:
            part = self.fill(torch.zeros(width), masters.pop)
        self.part = nn.Parameter(part)

    def split(self, whole: Tensor) -> list[Tensor]:
        """What of a tensor as long as the bucket belongs to each parameter, in its shape."""
        *found, _ = torch.split(whole, [*self._sizes, len(whole) - sum(self._sizes)])
        return [value.view(parameter.shape) for value, parameter in zip(found, self.parameters, strict=True)]

    def fill(self, part: Tensor, whole: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Put what each parameter has into a tensor as long as a part, as far as it is in this rank's."""
        values = [whole(parameter).reshape(-1) for parameter in self.parameters]
        for piece in self._pieces:
            value = values[piece.member][piece.start : piece.start + piece.length]
            part[piece.place : piece.place + piece.length].copy_(value)
        return part


class Parts:
    """This rank's parts of all that an optimizer steps, in the place of the parameters themselves.

    To be made when the model has its layers, the same weights on all ranks, and the optimizer no state.

    Parameters
    ----------
    alone: a matrix that shares its bucket with no other parameter. Parts have whole rows of it, and ranks send those
        that have ever been noted, unless weight decay moves all.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, alone: Tensor | None) -> None:
        self._optimizer = optimizer
        self._masters: MasterWeights | None = getattr(model, MASTERS_ATTRIBUTE, None)
        groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.parameters = [parameter for parameter in model.parameters() if parameter in groups]
        members = [
            Member(p.numel(), (p.dtype, groups[p], p is alone), p.untyped_storage().data_ptr()) for p in self.parameters
        ]
        found, masters = plan_buckets(members, BUCKET_ELEMENTS), self._take_masters()
        unit = ALIGNED if alone is None else math.lcm(ALIGNED, alone.shape[-1])
        self.buckets = [
            Bucket(some, masters, unit if some[0] is alone else ALIGNED)
            for some in ([self.parameters[number] for number in bucket] for bucket in found)
        ]
        self._in_rows = next((one for one in self.buckets if one.parameters[0] is alone), None)
        self._moved: Tensor | None = None
        """Which rows of `alone`, padding with them, are not as they were on all ranks."""
        if alone is not None and self._in_rows and not optimizer.param_groups[groups[alone]]["weight_decay"]:
            self._moved = torch.zeros(self._in_rows.weights.numel() // alone.shape[-1], dtype=torch.bool)
        for number, group in enumerate(optimizer.param_groups):
            group["params"][:] = [one.part for one in self.buckets if groups[one.parameters[0]] == number]

    def _take_masters(self) -> dict[Tensor, Tensor]:
        return self._masters.hand_over(self.parameters) if self._masters else {}

    def note(self, rows: Tensor) -> None:
        """These rows of `alone` have had gradients; the same on all ranks."""
        if self._moved is not None:
            self._moved[rows.reshape(-1)] = True

    @torch.no_grad()
    def spread(self) -> None:
        """Give all ranks the compute weights of all parts. A collective."""
        finish: list[Callable[[], object]] = []
        for bucket in self.buckets:
            own = bucket.weights[bucket.own]
            if bucket.has_masters:
                own.copy_(bucket.part)
            if bucket is self._in_rows and self._moved is not None:
                finish.append(_spread_rows(bucket, self._moved))
            else:
                finish.append(all_gather(bucket.weights, own, async_op=True).wait)
        for one in finish:
            one()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, this rank's model has all fp32 weights, as one that is not shared out. A collective to begin with."""
        if self._masters is None:
            yield
            return
        gathered = [(bucket, _gather(bucket.part)) for bucket in self.buckets if bucket.has_masters]
        self._masters.take_back({p: m for one, all_ in gathered for p, m in zip(one.parameters, one.split(all_))})
        try:
            yield
        finally:
            self._take_masters()

    @property
    def step(self) -> float:
        """Updates that the optimizer has made."""
        return max(float(state.get("step", 0)) for state in [*self._optimizer.state.values(), {}])

    def gather(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """All that ranks have parts of, as of a parameter's: WEIGHTS or which of MOMENTS, fp32, in its shape.

        A collective: every rank goes through all of it, one bucket's in memory at a time.
        """
        for bucket in self.buckets:
            state = self._optimizer.state.get(bucket.part, {})
            parts = {moment: state.get(moment, torch.zeros_like(bucket.part)) for moment in MOMENTS}
            for kind, part in (parts | ({WEIGHTS: bucket.part} if bucket.has_masters else {})).items():
                for parameter, value in zip(bucket.parameters, bucket.split(_gather(part)), strict=True):
                    yield kind, parameter, value

    @torch.no_grad()
    def restore(self, value: Callable[[str, nn.Parameter], Tensor], step: Tensor) -> None:
        """Take this rank's parts of what `gather` had given, after so many updates. The model has its weights again."""
        for bucket in self.buckets:
            if bucket.has_masters:
                bucket.fill(bucket.part, partial(value, WEIGHTS))
            for name in MOMENTS if step and bucket is self._in_rows else ():
                self.note(value(name, bucket.parameters[0]).any(1).nonzero())
            if step:
                moments = {name: bucket.fill(torch.zeros_like(bucket.part), partial(value, name)) for name in MOMENTS}
                self._optimizer.state[bucket.part] = {"step": step.clone(), **moments}


def _spread_rows(bucket: Bucket, moved: Tensor) -> Callable[[], None]:
    """Give all ranks those rows of a matrix that have moved, of all parts; what is returned ends that."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = bucket.weights.view(ranks, -1, bucket.parameters[0].shape[-1])
    places = [some.nonzero()[:, 0] for some in moved.view(ranks, -1)]
    received = rows.new_zeros(ranks, max(map(len, places)), rows.shape[-1])
    received[rank, : len(places[rank])] = rows[rank, places[rank]]
    work = all_gather(received.view(-1), received[rank].view(-1), async_op=True)

    @torch.no_grad()
    def put() -> None:
        work.wait()
        for whole, some, found in zip(rows, places, received, strict=True):
            whole[some] = found[: len(some)]

    return put


def _gather(part: Tensor) -> Tensor:
    """The parts of all ranks, one after another."""
    whole = torch.empty(dist.get_world_size() * len(part))
    all_gather(whole, part.detach())
    return whole
