"""Collectives of a ccl world's subgroups: over gloo, because oneCCL cannot be trusted to make a second communicator.

oneCCL 2021.16 hangs now and then inside its own key-value store when a process makes a further communicator (4 of 24
starts of 4 ranks; the stack ends in kvs's read). Gradients go over the world's communicator, which is the first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from cpuft.comm.backends.gloo import connect_gloo

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_TYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
_SECONDS = 86400.0
"""Deadlines are the watchdog's; gloo's own only has to be later."""


def _at(address: int, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """The memory at an address as a tensor, shape (count,)."""
    if not count:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


class SubgroupCollectives:
    """Collectives over torch's gloo, on addresses."""

    name = "ccl"

    def __init__(self, store: Store, rank: int, size: int, label: str) -> None:
        self._rank, self._size = rank, size
        # torch's stub of ProcessGroupGloo leaves out the operations.
        self._gloo: Any = connect_gloo(store, rank, size, _SECONDS)

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        """Sum, product, min and max of the types that gloo knows."""
        return dtype in _TYPES and reduction in _REDUCTIONS

    def all_reduce(self, address: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """gloo's all-reduce, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_REDUCTIONS[reduction])
        self._gloo.allreduce([_at(address, count, dtype)], options).wait()

    def reduce_scatter(self, source: int, target: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """An all-reduce of a copy, of which this rank keeps its part."""
        whole = _at(source, count * self._size, dtype).clone()
        self.all_reduce(whole.data_ptr(), whole.numel(), dtype, reduction)
        _at(target, count, dtype).copy_(whole[self._rank * count : (self._rank + 1) * count])

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        """gloo's broadcast of bytes."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._gloo.broadcast([_at(address, nbytes)], options).wait()

    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        """gloo's all-gather of bytes."""
        parts = [_at(target + rank * nbytes, nbytes) for rank in range(self._size)]
        self._gloo.allgather([parts], [_at(source, nbytes).clone()]).wait()

    def all_to_all(self, source: int, source_sizes: Sequence[int], target: int, target_sizes: Sequence[int]) -> None:
        """gloo's all-to-all of bytes."""
        sent, received = _at(source, sum(source_sizes)), _at(target, sum(target_sizes))
        self._gloo.alltoall_base(received, sent, list(target_sizes), list(source_sizes)).wait()

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> None:
        """gloo's send of bytes."""
        self._gloo.send([_at(address, nbytes)], peer, tag).wait()

    def recv(self, address: int, nbytes: int, peer: int | None, tag: int) -> int:
        """gloo's receive of bytes, from any rank when `peer` is None."""
        into = [_at(address, nbytes)]
        work = self._gloo.recv_anysource(into, tag) if peer is None else self._gloo.recv(into, peer, tag)
        work.wait()
        return int(work._source_rank()) if peer is None else peer

    def close(self) -> None:
        """Give gloo's threads back."""
        self._gloo = None
