"""Local SGD on a single rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cpuft.comm.compression.local_sgd import LocalSGD
from cpuft.errors import CpuftError


@pytest.mark.parametrize("compression", ["powersgd", "auto", "int9"])
def test_an_unknown_compression_is_refused(compression: str) -> None:
    # There is no process group here: the error comes before any rank waits for another.
    with pytest.raises(CpuftError, match=f"cannot be sent as {compression}: .*int8") as refused:
        LocalSGD([torch.nn.Parameter(torch.zeros(1))], compression)
    assert "\n" not in str(refused.value)


def test_tokens_are_ignored_without_an_embedding() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        local = LocalSGD([parameter], "none")
        parameter.data.add_(1.0)
        local.note_tokens(torch.tensor([5, 1]))
        local.synchronize()
        local.finish()
    finally:
        dist.destroy_process_group()
    assert torch.equal(parameter.detach(), torch.ones(3))


def test_changes_before_a_restart_are_not_sent() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    learnt = torch.tensor([1.0, -2.0, 3.0])
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        local = LocalSGD([parameter], "none", momentum=0.9)
        parameter.data.copy_(learnt)
        local.restart()
        local.synchronize()
        local.finish()
    finally:
        dist.destroy_process_group()
    assert torch.equal(parameter.detach(), learnt)
