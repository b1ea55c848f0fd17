"""The backend mpi: collectives of Intel MPI, MPICH or Open MPI, through mpi4py."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from cpuft.comm.backends.base import Backend
from cpuft.comm.watchdog import stop_watchdog
from cpuft.errors import CpuftError, install_command
from cpuft.rank.world import parse_world

FINALIZE_SECONDS = 5.0
_SPIN_SECONDS = 5e-5
_SLEEP_SECONDS = 1e-3
"""Longest sleep between two polls. A socket's buffers hold more than a fast network delivers in this time. With four
hosts and 40 all-reduces of 1 MiB at 1 Gbit/s, a rank needs 53 ms of CPU time for them instead of 328 without sleeping,
and on shared cores they take 0.55 s instead of 4.7 s."""
_SUM_OF_HALVES = {torch.bfloat16: (0x3FC0, 0x4010, 0x4070), torch.float16: (0x3E00, 0x4080, 0x4380)}
"""The bits of 1.5, 2.25 and their sum 3.75 in each 16-bit type (sign, exponent, fraction)."""


def half_precision_handles(library: str) -> dict[torch.dtype, int]:
    """Return the MPI datatype handles of bfloat16 and float16 in a library with this MPI_Get_library_version.

    mpi4py has no names for these types. Intel MPI 2021 has both, MPIX_C_BF16 and MPIX_C_FLOAT16 in its mpi.h; MPICH 4
    has only MPIX_BFLOAT16. For other libraries, such as Open MPI, the result is empty.
    """
    if library.startswith("Intel(R) MPI"):
        return {torch.bfloat16: 0x4C000247, torch.float16: 0x4C000246}
    if library.startswith("MPICH"):
        return {torch.bfloat16: 0x4C00024C}
    return {}


@functools.lru_cache(maxsize=1)
def load() -> Any:
    """Initialize MPI with MPI_THREAD_MULTIPLE once; return mpi4py.MPI. CpuftError: mpi4py or that level is missing."""
    try:
        import mpi4py

        # MPI_Finalize would wait for a lost rank for ever, so `_finalize` calls it with a time limit.
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CpuftError(
            f"backend mpi needs mpi4py and MPI ({error}): {install_command('train', 'mpi')}, or use --backend gloo"
        ) from None
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CpuftError("backend mpi needs MPI_THREAD_MULTIPLE, which this MPI library lacks: use --backend gloo")
    MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
    atexit.register(_finalize, MPI)
    return MPI


def _finalize(mpi: Any) -> None:
    """Finalize MPI, as mpirun expects, with a time limit; a failed rank exits at once, so that the others notice."""
    if getattr(sys, "last_value", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    stop_watchdog()  # so that ranks which still wait for this one notice that it has left
    # mpi4py's own Finalize keeps the GIL, which the time limit and the hub of the first rank need.
    thread = threading.Thread(target=ctypes.CDLL(mpi.__file__).MPI_Finalize, daemon=True)
    thread.start()
    thread.join(FINALIZE_SECONDS)


def _sums_correctly(mpi: Any, handle: Any, dtype: torch.dtype) -> bool:
    first, second, total = (torch.tensor([bits], dtype=torch.int16) for bits in _SUM_OF_HALVES[dtype])
    try:
        if handle.Get_size() != 2:
            return False
        left, right = (mpi.buffer.fromaddress(value.data_ptr(), 2) for value in (first, second))
        mpi.SUM.Reduce_local([left, 1, handle], [right, 1, handle])
    except mpi.Exception:
        return False
    return bool(second == total)


@functools.lru_cache(maxsize=1)
def _datatypes() -> dict[torch.dtype, Any]:
    mpi = load()
    types = {
        torch.float32: mpi.FLOAT,
        torch.float64: mpi.DOUBLE,
        torch.int8: mpi.INT8_T,
        torch.uint8: mpi.UINT8_T,
        torch.int16: mpi.INT16_T,
        torch.int32: mpi.INT32_T,
        torch.int64: mpi.INT64_T,
    }
    for dtype, number in half_precision_handles(mpi.Get_library_version()).items():
        handle = mpi.Datatype.fromhandle(number)
        if _sums_correctly(mpi, handle, dtype):
            types[dtype] = handle
    return types


def _wait_sleeping(is_done: Callable[[], bool]) -> None:
    """Poll with sleeps of an eighth of the time waited so far, after a first moment without sleeping."""
    started = time.perf_counter()
    while not is_done():
        waited = time.perf_counter() - started
        if waited > _SPIN_SECONDS:
            time.sleep(min(waited / 8, _SLEEP_SECONDS))


class MpiBackend(Backend):
    """Collectives over an MPI communicator of the group's ranks.

    Between hosts a rank sleeps while it waits for a collective; on one host it spins. Making one raises CpuftError if
    MPI has fewer ranks than the group.
    """

    name = "mpi"

    def __init__(self, store: Store, rank: int, size: int, label: str) -> None:
        self._mpi = mpi = load()
        world = mpi.COMM_WORLD
        if world.size < size:
            raise CpuftError(
                f"MPI has {world.size} rank(s), but the process group has {size}: start with `cpuft launch`, mpirun or "
                "srun --mpi=pmi2, or use --backend gloo"
            )
        # torch and MPI may number the ranks differently, for example because they list the hosts in another order.
        store.set(f"mpi/{rank}", str(world.rank))
        members = [int(store.get(f"mpi/{member}")) for member in range(size)]
        group = world.group.Incl(members)
        self._comm = world.Create_group(group, tag=zlib.crc32(label.encode()) % 32767)
        self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        place = parse_world(os.environ)
        # Over a network a message takes longer than a sleep; in the shared memory of one host it does not.
        self._sleeps_while_waiting = place.local_size < place.size
        self._types = _datatypes()
        names = ("sum", "min", "max", "band", "bor", "bxor")
        self._operations = {name: getattr(mpi, name.upper()) for name in names} | {"product": mpi.PROD}

    def can_reduce(self, dtype: torch.dtype, reduction: str) -> bool:
        """Return true for integers (not bool) and, unless bitwise, floats (16-bit ones if MPI sums them correctly)."""
        return dtype in self._types and not (reduction.startswith("b") and dtype.is_floating_point)

    def all_reduce(self, address: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """Reduce `count` elements in place, for what `can_reduce` allows. RuntimeError: MPI_Allreduce fails."""
        data = self._typed(address, count, dtype)
        self._run("allreduce", self._mpi.IN_PLACE, data, op=self._operations[reduction])

    def reduce_scatter(self, source: int, target: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """Reduce elements; rank r gets the r-th `count` in `target`. RuntimeError: MPI_Reduce_scatter_block fails."""
        # MPI wants the count of one rank, for the sent buffer, too.
        whole = [self._memory(source, count * self._comm.size * dtype.itemsize), count, self._types[dtype]]
        self._run("reduce_scatter_block", whole, self._typed(target, count, dtype), op=self._operations[reduction])

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        """Copy the bytes of rank `root` to every rank, by MPI_Bcast. RuntimeError: MPI fails."""
        self._run("bcast", self._bytes(address, nbytes), root=root)

    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        """Write the `nbytes` of rank r to the r-th place of `target`, on all. RuntimeError: MPI_Allgather fails."""
        # MPI wants the received count of one rank.
        whole = [self._memory(target, nbytes * self._comm.size), nbytes, self._mpi.BYTE]
        is_in_place = source == target + self._comm.rank * nbytes  # FSDP2 does this, and MPI must know
        self._run("allgather", self._mpi.IN_PLACE if is_in_place else self._bytes(source, nbytes), whole)

    def all_to_all(self, source: int, source_sizes: Sequence[int], target: int, target_sizes: Sequence[int]) -> None:
        """Send rank r the r-th piece of `source`, and receive that of `target`. RuntimeError: MPI_Alltoallv fails."""
        self._run("alltoallv", self._pieces(source, source_sizes), self._pieces(target, target_sizes))

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> None:
        """Send bytes to rank `peer` by MPI_Send, which may spin until `peer` receives them. RuntimeError: MPI fails."""
        self._comm.Send(self._bytes(address, nbytes), dest=peer, tag=tag)

    def recv(self, address: int, nbytes: int, peer: int | None, tag: int) -> int:
        """Receive bytes by MPI_Recv; return the sender's rank. RuntimeError: MPI fails, or a message is too long."""
        status = self._mpi.Status()
        source = self._mpi.ANY_SOURCE if peer is None else peer
        self._comm.Recv(self._bytes(address, nbytes), source=source, tag=tag, status=status)
        return int(status.Get_source())

    # close() releases nothing, because MPI_Comm_free is collective.

    def _run(self, name: str, *arguments: Any, **options: Any) -> None:
        if not self._sleeps_while_waiting:
            getattr(self._comm, name.capitalize())(*arguments, **options)
            return
        # MPI's blocking calls spin, on a core that may also have to compute.
        request = getattr(self._comm, f"I{name}")(*arguments, **options)
        _wait_sleeping(request.Test)

    def _memory(self, address: int, nbytes: int) -> Any:
        return self._mpi.buffer.fromaddress(address, nbytes) if nbytes else bytearray()

    def _typed(self, address: int, count: int, dtype: torch.dtype) -> list[Any]:
        return [self._memory(address, count * dtype.itemsize), count, self._types[dtype]]

    def _bytes(self, address: int, nbytes: int) -> list[Any]:
        return [self._memory(address, nbytes), nbytes, self._mpi.BYTE]

    def _pieces(self, address: int, sizes: Sequence[int]) -> list[Any]:
        starts = [0, *itertools.accumulate(sizes)][:-1]
        return [self._memory(address, sum(sizes)), (list(sizes), starts), self._mpi.BYTE]
