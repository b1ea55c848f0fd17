"""The backend ccl: collectives of oneCCL, through the C functions of ccl_shim.cpp."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
from collections.abc import Sequence, Set
from importlib import metadata
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from cpuft.comm.backends.base import Backend
from cpuft.errors import CpuftError, install_command
from cpuft.rank.process import find_shared_memory
from cpuft.rank.world import is_started_by_srun, parse_world
from cpuft.serialization import is_count

# Values of the enums `datatype` and `reduction` of oneCCL 2021's oneapi/ccl/types.hpp.
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int16: 2,
    torch.int32: 4,
    torch.int64: 6,
    torch.float16: 8,
    torch.float32: 9,
    torch.float64: 10,
    torch.bfloat16: 11,
}
_REDUCTIONS = {"sum": 0, "product": 1, "min": 2, "max": 3}
_HEADER_BYTES = 16
_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_MOST_WORKERS = 64
_SLACK_MICROSECONDS = 500
"""How late a sleeping oneCCL worker that shares its core may wake up; Linux' default is 50."""


def _find_library(name: str, distribution: str) -> str:
    """Return the path of a shared library of an installed wheel, or `name` if the dynamic loader must search it."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())) for file in files if file.name == name]
    paths += [Path(root, "lib", name) for root in (os.environ.get("CCL_ROOT"), sys.prefix) if root]
    return next((str(path.resolve()) for path in paths if path.exists()), name)


def _preload(name: str, distribution: str) -> None:
    try:
        ctypes.CDLL(_find_library(name, distribution))
    except OSError as error:
        raise CpuftError(
            f"backend ccl needs {distribution} ({error}): {install_command('train', 'ccl')}, or use --backend mpi"
        ) from None


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Load oneCCL once, and return the shim, the library of C functions `cpuft_ccl_*`. Raises CpuftError: a
    library is missing, or CCL_WORKER_COUNT is wrong.

    It sets those variables of `worker_settings` in os.environ that are not set yet.
    """
    shims = sorted(Path(__file__).parent.glob("_ccl_shim*.so"))
    if not shims:
        raise CpuftError(
            "backend ccl was not built when cpuft was installed: install g++, then run this twice, as the first run "
            f"installs headers for the second one: {install_command('train', 'ccl')}; or use --backend mpi or gloo"
        )
    for name, value in worker_settings(dict(os.environ), os.sched_getaffinity(0)).items():
        os.environ.setdefault(name, value)
    # oneCCL opens libfabric by its name without a path, which is found only if it is loaded already.
    _preload("libfabric.so.1", "impi-rt")
    _preload("libccl.so.1", "oneccl-cpu")
    library = ctypes.CDLL(str(shims[0]))
    library.cpuft_ccl_error.restype = ctypes.c_char_p
    library.cpuft_ccl_address_size.restype = ctypes.c_size_t
    return library


def worker_settings(environment: dict[str, str], cores: set[int]) -> dict[str, str]:
    """Return the variables CCL_WORKER_OFFLOAD, CCL_WORKER_AFFINITY, CCL_ATL_TRANSPORT and CCL_ATL_SHM that oneCCL needs
    in a process that `cpuft launch` has not started; also those in `environment`, which the caller keeps as they are.

    `cores` are the hardware threads that this rank may use, at least one; the workers of all local ranks get the last
    ones, and sleep (CCL_YIELD) unless the CCL_WORKER_AFFINITY in `environment` has none of them. Without PMI_RANK or
    with srun, also CCL_PROCESS_LAUNCHER, CCL_LOCAL_RANK and CCL_LOCAL_SIZE. Raises CpuftError: CCL_WORKER_COUNT is no
    number from 1 to 64.
    """
    local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("MPI_LOCALNRANKS") or "1"
    count = environment.get("CCL_WORKER_COUNT", "1")
    if not is_count(count, most=_MOST_WORKERS):
        raise CpuftError(f"CCL_WORKER_COUNT is {count[:40]!r}: set it to 1 to {_MOST_WORKERS}, or unset it")
    workers = int(count) * int(local_size)
    last_first = sorted(cores, reverse=True)
    settings = {
        # Without workers oneCCL must not be called from two threads, and by default it has none if cores are few.
        "CCL_WORKER_OFFLOAD": "1",
        # "auto" would give the host's last cores to every rank. One entry for each worker of each rank on the host.
        "CCL_WORKER_AFFINITY": ",".join(str(last_first[worker % len(cores)]) for worker in range(workers)),
        "CCL_ATL_TRANSPORT": "ofi",
        # Ranks of one host communicate through shared memory and not over the loopback interface.
        "CCL_ATL_SHM": "1",
    }
    affinity = environment.get("CCL_WORKER_AFFINITY", settings["CCL_WORKER_AFFINITY"])
    ranges = re.findall("([0-9]{1,9})-?([0-9]{0,9})", affinity)
    if any(int(first) <= core <= int(last or first) for first, last in ranges for core in cores):
        # A worker that shares a core with computing must sleep while it waits, where oneCCL's default is to spin. The
        # shim explains why sched_yield does not suffice.
        settings["CCL_YIELD"] = "sleep"
    # srun's pmi2 does not give oneCCL the local rank.
    if "PMI_RANK" not in environment or is_started_by_srun(environment):
        settings |= {
            "CCL_PROCESS_LAUNCHER": "none",
            "CCL_LOCAL_RANK": environment.get("LOCAL_RANK", "0"),
            "CCL_LOCAL_SIZE": local_size,
        }
    return settings


class CclBackend(Backend):
    """Collectives over a oneCCL communicator, whose sends have no tags: a header with tag and size comes first.

    Making one raises CpuftError if a library is missing, and RuntimeError if oneCCL fails.
    """

    name = "ccl"

    def __init__(self, store: Store, rank: int, size: int, label: str) -> None:
        self._library = load()
        self._size = size
        self._group = ctypes.c_void_p()
        world = parse_world(os.environ)
        # In one host's shared memory a message takes less time than the slack.
        slack = ctypes.c_ulong(_SLACK_MICROSECONDS if world.local_size < world.size else 0)
        others = find_shared_memory(os.getpid())
        address = ctypes.create_string_buffer(self._library.cpuft_ccl_address_size())
        if rank != 0:
            address.raw = bytes.fromhex(store.get("ccl/address").decode())
        self._check(self._library.cpuft_ccl_make_group(ctypes.byref(self._group), address, int(rank == 0), slack))
        if rank == 0:
            store.set("ccl/address", address.raw.hex())
        self._check(self._library.cpuft_ccl_connect(self._group, size, rank, slack))
        self._sending = [threading.Lock() for _ in range(size)]
        self._receiving = [threading.Lock() for _ in range(size)]
        self._unclaimed: list[dict[int, list[bytes]]] = [{} for _ in range(size)]
        """For each peer, messages that arrived under a tag that nobody has received yet."""
        self._remove_names(find_shared_memory(os.getpid()) - others)

    def can_reduce(self, dtype: torch.dtype, reduction: str) -> bool:
        """Return true for sum, product, min and max of integers and floats; not for bool or bitwise reductions."""
        return dtype in _TYPES and reduction in _REDUCTIONS

    def all_reduce(self, address: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """Reduce `count` elements in place, for what `can_reduce` allows. RuntimeError: ccl::allreduce fails."""
        self._call("all_reduce", _pointer(address), _size(count), _TYPES[dtype], _REDUCTIONS[reduction])

    def reduce_scatter(self, source: int, target: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """Reduce elements; rank r gets the r-th `count` in `target`. RuntimeError: ccl::reduce_scatter fails."""
        reduce = _size(count), _TYPES[dtype], _REDUCTIONS[reduction]
        self._call("reduce_scatter", _pointer(source), _pointer(target), *reduce)

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        """Copy the bytes of rank `root` to every rank, by ccl::broadcast. RuntimeError: oneCCL fails."""
        self._call("broadcast", _pointer(address), _size(nbytes), root)

    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        """Write the `nbytes` of rank r to the r-th place of `target`, on all. RuntimeError: ccl::allgather fails."""
        self._call("all_gather", _pointer(source), _pointer(target), _size(nbytes))

    def all_to_all(self, source: int, source_sizes: Sequence[int], target: int, target_sizes: Sequence[int]) -> None:
        """Send rank r the r-th piece of `source`, and receive that of `target`. RuntimeError: ccl::alltoallv fails."""
        sizes = ctypes.c_size_t * self._size
        sent, received = sizes(*source_sizes), sizes(*target_sizes)
        self._call("all_to_all", _pointer(source), sent, _pointer(target), received, self._size)

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> None:
        """Send a header (tag, size), then the bytes; sends to one peer take turns. RuntimeError: ccl::send fails."""
        header = (ctypes.c_int64 * 2)(tag, nbytes)
        with self._sending[peer]:
            self._call("send", header, _size(_HEADER_BYTES), peer)
            if nbytes:
                self._call("send", _pointer(address), _size(nbytes), peer)

    def recv(self, address: int, nbytes: int, peer: int | None, tag: int) -> int:
        """Call ccl::recv until a message with the tag arrives, and return `peer`. Other tags are kept for their own
        recv.

        Raises CpuftError if `peer` is None, ValueError if the message has not `nbytes`, RuntimeError if oneCCL fails.
        """
        if peer is None:
            raise CpuftError("backend ccl cannot receive from any rank: give the source rank, or use --backend mpi")
        with self._receiving[peer]:
            waiting = self._unclaimed[peer].get(tag)
            data = waiting.pop(0) if waiting else None
            while data is None:
                header = (ctypes.c_int64 * 2)()
                self._call("recv", header, _size(_HEADER_BYTES), peer)
                incoming = ctypes.create_string_buffer(max(1, header[1]))
                if header[1]:
                    self._call("recv", incoming, _size(header[1]), peer)
                if header[0] == tag:
                    data = incoming.raw[: header[1]]
                else:
                    self._unclaimed[peer].setdefault(header[0], []).append(incoming.raw[: header[1]])
        if len(data) != nbytes:
            raise ValueError(f"rank {peer} sent {len(data)} bytes with tag {tag}, but {nbytes} were expected")
        ctypes.memmove(address, data, nbytes)
        return peer

    def _remove_names(self, paths: Set[str]) -> None:
        """Remove the names of this rank's shared memory, 64 MB, so that nothing is left of a rank that is killed.

        The other ranks map it when they first exchange a message with this one, and need no name afterwards.
        """
        token = ctypes.create_string_buffer(2 * self._size)
        sizes = [1] * self._size
        for _ in range(2):  # when the second exchange is done, all ranks are done with the first one
            self.all_to_all(ctypes.addressof(token), sizes, ctypes.addressof(token) + self._size, sizes)
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)

    # close() releases nothing, because destroying a communicator blocks if a rank is gone.

    def _call(self, name: str, *arguments: object) -> None:
        self._check(getattr(self._library, f"cpuft_ccl_{name}")(self._group, *arguments))

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"oneCCL: {self._library.cpuft_ccl_error().decode()}")
