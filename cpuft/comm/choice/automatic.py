"""The backend `auto` means on these hosts: remembered, or measured now; the same on all ranks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import socket
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store

from cpuft.comm.choice.choosing import MESSAGE_BYTES, Choice, cache_key, read_choice, write_choice
from cpuft.comm.choice.measure import choose

_PACKAGES = ("torch", "impi-rt", "oneccl-cpu", "mpi4py")


def choose_automatically(store: Store, rank: int, size: int, cache: Path, dtype: str = "float32") -> Choice:
    """The choice of rank 0's cache, else a measured one that is put there. All ranks call it together.

    `dtype` is what gradients are sent as: not every library sums 16-bit floats fast.
    """
    store = PrefixStore("automatic", store)
    store.set(f"host/{rank}", socket.gethostname())
    hosts = [store.get(f"host/{other}").decode() for other in range(size)]
    key = cache_key(hosts, size, _versions() | {"type": dtype, "bytes": str(MESSAGE_BYTES)})
    if rank == 0:
        remembered = read_choice(cache, key)
        store.set("remembered", json.dumps(remembered and [remembered.backend, remembered.reason]))
    found = json.loads(store.get("remembered"))
    if found:
        return Choice(found[0], f"{found[1]}, as measured earlier")
    choice = choose(store, rank, size, dtype=dtype)
    if rank == 0:
        with contextlib.suppress(OSError):  # a full disk: the next run measures again
            write_choice(cache, key, choice)
    return choice


def _versions() -> dict[str, str]:
    """Versions of what is measured; a package that is missing is part of the answer."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found
