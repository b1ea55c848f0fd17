"""What ranks that train apart may send."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cpuft.comm.compression.local_sgd import LocalSGD
from cpuft.errors import CpuftError


@pytest.mark.parametrize("compression", ["powersgd", "auto", "int9"])
def test_changes_of_parameters_have_types_of_their_own(compression: str) -> None:
    # Refused before any rank waits for another: there is no process group here.
    with pytest.raises(CpuftError, match=f"cannot be sent as {compression}: .*int8") as refused:
        LocalSGD([torch.nn.Parameter(torch.zeros(1))], compression)
    assert "\n" not in str(refused.value)


def test_ranks_without_words_of_their_own_are_told_of_words() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        local = LocalSGD([parameter], "none")
        parameter.data.add_(1.0)
        local.note_tokens(torch.tensor([5, 1]))
        local.finish()
    finally:
        dist.destroy_process_group()
    assert torch.equal(parameter.detach(), torch.ones(3))


def test_what_a_resumed_run_brings_with_it_is_no_gain() -> None:
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


def test_names_of_words_say_nothing_where_no_look_up_travels_by_rows() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        local = LocalSGD([torch.nn.Parameter(torch.zeros(3))], "none")
        local.note_tokens(torch.arange(9))
        local.synchronize()
        local.finish()
    finally:
        dist.destroy_process_group()
