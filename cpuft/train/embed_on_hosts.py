"""Embeddings of the texts of a file, computed by the ranks of several hosts, which `cpuft predict --hostfile` starts.

Rank 0, whose host alone needs the file, sends windows of texts to all ranks in turn, and writes the embeddings that
come back in the order of the file. Each rank has two windows at a time, so that it never waits.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cpuft.config.fields import parse_arguments
from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError
from cpuft.rank.diagnostics import start_reporting
from cpuft.rank.world import World, parse_world
from cpuft.secret_variables import take_secrets
from cpuft.train.startup import resume_garbage_collection, run_as_process
from cpuft.train.write_embeddings import (
    Computed,
    Window,
    choose_embeddings_file,
    compute_here,
    compute_in_turn,
    make_embedder,
    open_windows,
    open_writer,
    write_all,
)

if TYPE_CHECKING:
    from cpuft.train.embedder import Embedder, Embeddings

CHECK = "check"
"""First argument of `python -m cpuft.train.embed_on_hosts` that only checks the request, before any rank starts."""
_WINDOW_TEXTS_ON_HOSTS = 1024
"""Most texts of a window. With smaller windows than those of one process, all ranks end at about the same time."""
_WINDOWS_AHEAD = 2
_TIMEOUT_SECONDS = 3600.0
"""How long a rank waits for another one that still answers: a window may take long. Lost ranks are noticed at once."""


def _embed_as_rank(request: PredictConfig, world: World) -> None:
    """Compute embeddings as one of the ranks; rank 0, which alone needs --file, writes them. Collective."""
    import torch.distributed as dist

    from cpuft.train.precision import find_precision
    from cpuft.train.ranks import check_ranks, checksum_parameters, gather, join_process_group

    with join_process_group(world, "gloo", _TIMEOUT_SECONDS):
        check_ranks(world)
        # Hosts with and without bf16, or with a slow one, compute in the same format, as in a training.
        precisions = set(gather(find_precision(request.precision)))
        precision = precisions.pop() if len(precisions) == 1 else "fp32"
        embedder = make_embedder(replace(request, precision=precision))
        refuse_other_models(gather((checksum_parameters(embedder.model), repr(embedder.form), socket.gethostname())))
        resume_garbage_collection()
        if world.rank:
            _compute_for_rank_0(embedder, request.batch_size)
        else:
            windows = open_windows(request, _WINDOW_TEXTS_ON_HOSTS)
            with open_writer(choose_embeddings_file(request), embedder.dimensions, bool(request.id_column)) as write:
                write_all(write, _compute_on_ranks(embedder, request.batch_size, windows, world.size))
        dist.barrier()  # rank 0, through which ranks notice losses, ends last


def refuse_other_models(found: list[tuple[str, str, str]]) -> None:
    """Raise CpuftError if the ranks' items (checksum of parameters, form of embeddings, host) show different models."""
    for rank, (*model, host) in enumerate(found):
        if model != list(found[0][:2]):
            raise CpuftError(f"rank {rank} on {host} has another model than rank 0 on {found[0][2]}: give a folder")


def _compute_on_ranks(embedder: Embedder, batch_size: int, windows: Iterator[Window], ranks: int) -> Iterator[Computed]:
    """Yield windows in order with their embeddings by all ranks; the others have to be in `_compute_for_rank_0`."""
    import torch
    import torch.distributed as dist

    reader = ThreadPoolExecutor(1)

    def start(texts: list[str]) -> Callable[[], Embeddings]:
        encoded = reader.submit(embedder.encode, texts)
        return lambda: embedder.embed_encoded(encoded.result(), batch_size)

    others = [partial(_send_window, dimensions=embedder.dimensions, rank=rank) for rank in range(1, ranks)]
    yield from compute_in_turn(windows, [start, *others], _WINDOWS_AHEAD)
    for rank in range(1, ranks):
        dist.send(torch.zeros(1, dtype=torch.int64), rank)


def _send_window(texts: list[str], dimensions: int, rank: int) -> Callable[[], Embeddings]:
    """Begin to send texts (number of bytes, then JSON list) and to receive embeddings; return what waits for these."""
    import torch
    import torch.distributed as dist

    payload = torch.frombuffer(bytearray(json.dumps(texts).encode()), dtype=torch.uint8)
    found = torch.empty(len(texts), dimensions)
    works = [dist.isend(torch.tensor([len(payload)]), rank), dist.isend(payload, rank), dist.irecv(found, rank)]

    def finish() -> Embeddings:
        for work in works:
            assert work is not None  # this process is a member of the group
            work.wait()
        return found.numpy()

    return finish


def _receive_windows() -> Iterator[Window]:
    """Yield the windows that rank 0 sends, without ids; a size of 0 bytes ends them."""
    import torch
    import torch.distributed as dist

    size = torch.empty(1, dtype=torch.int64)
    while True:
        dist.recv(size, 0)
        if not size.item():
            return
        payload = torch.empty(int(size.item()), dtype=torch.uint8)
        dist.recv(payload, 0)
        yield Window(json.loads(payload.numpy().tobytes()), [])


def _compute_for_rank_0(embedder: Embedder, batch_size: int) -> None:
    """Compute the windows that rank 0 sends, and send their embeddings back; the next one is received meanwhile."""
    import torch
    import torch.distributed as dist

    # After an error nobody waits for the thread, which may wait for rank 0: this process has to end at once.
    reader = ThreadPoolExecutor(1)
    for _, embeddings in compute_here(embedder, batch_size, _receive_windows(), reader):
        dist.send(torch.from_numpy(embeddings), 0)


def check_request(request: PredictConfig) -> None:
    """Raise CpuftError if file, model or output cannot be used on the host that needs them; no weights are loaded.
    Secret variables that the launcher has sent to this host are put into the environment.
    """
    os.environ.update(take_secrets(os.environ, "prepare"))
    choose_embeddings_file(request)
    open_windows(request, _WINDOW_TEXTS_ON_HOSTS)


def main() -> None:
    """Compute embeddings as a rank, or with the first argument `check` only check the request; see `run_as_process`."""
    if sys.argv[1:2] == [CHECK]:
        run_as_process(lambda: check_request(parse_arguments(PredictConfig, sys.argv[2:])))
        return
    start_reporting()
    code = 0
    try:
        run_as_process(lambda: _embed_as_rank(parse_arguments(PredictConfig, sys.argv[1:]), parse_world(os.environ)))
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    from cpuft.comm.registration import exit_process  # imports torch, so not before garbage collection is paused

    # Other ranks may hang in an operation, and a normal exit would wait for them.
    exit_process(code)


if __name__ == "__main__":
    main()
