"""Run by mpirun: two updates of a fast model in DistributedDataParallel. Usage: ddp_ranks.py FOLDER KIND KERNELS.

Writes FOLDER/RANK.pt, the weights. Without the last word there are no kernels.
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cpuft.kernels import plain_torch
from cpuft.train.fast.acceleration import accelerate
from tests.comm.ranks import become_rank
from tests.train.fast.encoders import make_batch, make_model, make_optimizer


def main(folder: str, kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = make_model(kind)
    model, optimizer = accelerate(model, make_optimizer(model), precision="bf16")
    # As the Trainer does: it looks for parameters without gradients, and its optimizer's state is loaded once more.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer.load_state_dict(optimizer.state_dict())
    half = {name: value[dist.get_rank() :: 2] for name, value in make_batch((9, 7, 9, 7)).items()}
    for _ in range(2):
        wrapped(**half).loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.save(wrapped.state_dict(), f"{folder}/{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    become_rank()
    with contextlib.nullcontext() if sys.argv[3] else plain_torch():
        main(*sys.argv[1:3])
