"""What tests of training in this process share: a process group of one rank, and nothing that has to be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cpuft.kernels import plain_torch


@pytest.fixture
def alone() -> Iterator[None]:
    """The process group of this rank alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of several threads are added as they come; and they wait for each other at every tiny product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plain(own_cache: None, one_thread: None) -> Iterator[None]:
    """The cache is the test's own, and no kernel is compiled."""
    with plain_torch():
        yield


@pytest.fixture
def plain_processes(plain: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do processes compile one that are started."""
    monkeypatch.setenv("CPUFT_KERNELS", "0")
