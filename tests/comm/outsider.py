"""Run by mpirun: two ranks, and an attacker who has read their whole store and tries to end them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from cpuft import comm
from tests.comm.ranks import become_rank


def read_all(store: TCPStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list_keys()}


def attack(place: dict[str, object]) -> None:
    """Claim to be rank 77, send everything from the store that looks like a password, and tell all ranks to end."""
    hello = {"rank": 77, **place}
    with (
        contextlib.suppress(ConnectionRefusedError),
        socket.create_connection((str(place["host"]), int(str(place["port"])))) as connection,
    ):
        connection.sendall(json.dumps(hello).encode() + b'\n{"end": 77, "why": "mischief"}\n')
        time.sleep(1)


if __name__ == "__main__":
    become_rank()
    comm.start("gloo", timeout_seconds=20)
    dist.barrier()
    if dist.get_rank() == 0:
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        (found,) = [value for key, value in read_all(store).items() if key.endswith("liveness")]
        attack(json.loads(found))
    for _ in range(20):
        time.sleep(0.05)
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    print("passed", flush=True)
