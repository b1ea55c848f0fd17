"""Collectives of oneCCL, through the C functions of ccl_shim.cpp."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from cpuft.errors import CpuftError, install_command
from cpuft.rank.world import is_of_srun, parse_world

# Places in the enums `datatype` and `reduction` of oneCCL 2021's oneapi/ccl/types.hpp.
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
_SLACK_MICROSECONDS = 500
"""How long a worker that shares its core sleeps when nothing has come, instead of Linux' 50."""


def find_library(name: str, distribution: str) -> str:
    """The path of a shared library that a wheel installed, or its bare name for the loader's own search."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    places = [Path(str(file.locate())) for file in files if file.name == name]
    places += [Path(root, "lib", name) for root in (os.environ.get("CCL_ROOT"), sys.prefix) if root]
    return next((str(place.resolve()) for place in places if place.exists()), name)


def _load_first(name: str, distribution: str) -> None:
    """Load a library so that those that ask for its name find it, wherever it is installed."""
    try:
        ctypes.CDLL(find_library(name, distribution))
    except OSError as error:
        raise CpuftError(
            f"backend ccl needs {name} of {distribution} ({error}): {install_command('train', 'ccl')}, "
            "or use --backend mpi or gloo"
        ) from None


@functools.lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The shim, with libccl behind it.

    Raises
    ------
    CpuftError: the shim was not built, or a library is missing.
    """
    shims = sorted(Path(__file__).parent.glob("_ccl_shim*.so"))
    if not shims:
        raise CpuftError(
            "backend ccl was not built when cpuft was installed (no C++17 compiler, or no oneCCL headers): "
            "install g++ (Debian: apt-get install g++), then run this twice, because the first run brings the headers "
            f"that the second one compiles with: {install_command('train', 'ccl')}; "
            "or use --backend mpi or gloo"
        )
    for name, value in worker_settings(dict(os.environ), os.sched_getaffinity(0)).items():
        os.environ.setdefault(name, value)
    # oneCCL opens libfabric by its bare name, which is found only if it is loaded already.
    _load_first("libfabric.so.1", "impi-rt")
    _load_first("libccl.so.1", "oneccl-cpu")
    library = ctypes.CDLL(str(shims[0]))
    library.cpuft_ccl_error.restype = ctypes.c_char_p
    library.cpuft_ccl_address_size.restype = ctypes.c_size_t
    return library


def worker_settings(environment: dict[str, str], cores: set[int]) -> dict[str, str]:
    """What oneCCL needs to run here and was not told, from the environment and the cores this rank may use.

    `cpuft launch` sets all of this with better knowledge of the host; this is for scripts started some other way.
    """
    local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("MPI_LOCALNRANKS") or "1"
    workers = int(environment.get("CCL_WORKER_COUNT", "1")) * int(local_size)
    last_first = sorted(cores, reverse=True)
    settings = {
        # Without its own workers oneCCL must not be called from two threads, and it drops them where cores are few.
        "CCL_WORKER_OFFLOAD": "1",
        # "auto" would give the host's last cores to every rank. One entry for each worker of each rank of the host.
        "CCL_WORKER_AFFINITY": ",".join(str(last_first[worker % len(cores)]) for worker in range(workers)),
        "CCL_ATL_TRANSPORT": "ofi",
        # Ranks of one host meet in shared memory, not over its loopback.
        "CCL_ATL_SHM": "1",
    }
    at = environment.get("CCL_WORKER_AFFINITY", settings["CCL_WORKER_AFFINITY"])
    if cores.intersection(int(core) for core in at.split(",") if core.isdigit()):
        # A worker without a core of its own gets out of the way; the default keeps spinning. Not by sched_yield, for
        # the reason in the shim.
        settings["CCL_YIELD"] = "sleep"
    # srun's pmi2 does not tell oneCCL the rank's place on its host.
    if "PMI_RANK" not in environment or is_of_srun(environment):
        settings |= {
            "CCL_PROCESS_LAUNCHER": "none",
            "CCL_LOCAL_RANK": environment.get("LOCAL_RANK", "0"),
            "CCL_LOCAL_SIZE": local_size,
        }
    return settings


class CclCollectives:
    """Collectives over a oneCCL communicator. Its sends have no tags, so tags travel in a header here."""

    name = "ccl"

    def __init__(self, store: Store, rank: int, size: int, label: str) -> None:
        self._library = load()
        self._size = size
        self._group = ctypes.c_void_p()
        here = parse_world(os.environ)
        # In one host's shared memory a message takes less time than this.
        slack = ctypes.c_ulong(_SLACK_MICROSECONDS if here.local_size < here.size else 0)
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

    def reduces(self, dtype: torch.dtype, reduction: str) -> bool:
        """Sum, product, min and max of all types but bool."""
        return dtype in _TYPES and reduction in _REDUCTIONS

    def all_reduce(self, address: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """ccl::allreduce in place."""
        self._call("all_reduce", _pointer(address), _size(count), _TYPES[dtype], _REDUCTIONS[reduction])

    def reduce_scatter(self, source: int, target: int, count: int, dtype: torch.dtype, reduction: str) -> None:
        """ccl::reduce_scatter."""
        places = _pointer(source), _pointer(target)
        self._call("reduce_scatter", *places, _size(count), _TYPES[dtype], _REDUCTIONS[reduction])

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        """ccl::broadcast of bytes."""
        self._call("broadcast", _pointer(address), _size(nbytes), root)

    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        """ccl::allgather of bytes."""
        self._call("all_gather", _pointer(source), _pointer(target), _size(nbytes))

    def all_to_all(self, source: int, source_sizes: Sequence[int], target: int, target_sizes: Sequence[int]) -> None:
        """ccl::alltoallv of bytes."""
        sizes = ctypes.c_size_t * self._size
        sent, received = sizes(*source_sizes), sizes(*target_sizes)
        self._call("all_to_all", _pointer(source), sent, _pointer(target), received, self._size)

    def send(self, address: int, nbytes: int, peer: int, tag: int) -> None:
        """ccl::send of a header (tag, bytes) and the bytes."""
        header = (ctypes.c_int64 * 2)(tag, nbytes)
        with self._sending[peer]:
            self._call("send", header, _size(_HEADER_BYTES), peer)
            if nbytes:
                self._call("send", _pointer(address), _size(nbytes), peer)

    def recv(self, address: int, nbytes: int, peer: int | None, tag: int) -> int:
        """ccl::recv until the tag comes; what comes before it under other tags is kept for its own recv."""
        if peer is None:
            raise CpuftError("backend ccl cannot receive from any rank: name the source, or use --backend mpi")
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
            raise ValueError(f"rank {peer} sent {len(data)} bytes under tag {tag}, and {nbytes} were expected")
        ctypes.memmove(address, data, nbytes)
        return peer

    def close(self) -> None:
        """Nothing: destroying a communicator blocks when a rank is gone, and it goes with the process."""

    def _call(self, name: str, *arguments: object) -> None:
        self._check(getattr(self._library, f"cpuft_ccl_{name}")(self._group, *arguments))

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"oneCCL: {self._library.cpuft_ccl_error().decode()}")


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _size(number: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(number)
