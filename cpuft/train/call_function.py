"""Call a user's function on this rank, for `cpuft.launch(function)`: `python -m cpuft.train.call_function DIGEST`.

The ranks have formed torch's default process group (gloo) when the function begins. Rank 0 gets the results as bytes,
which are not loaded on the way, and writes them into the run's folder.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from cpuft.errors import CpuftError, requires
from cpuft.rank.call import CALL_FILE, CallHeader, read_call, sign_result, write_result
from cpuft.rank.connection_check import ConnectionCheck, RefusedScriptError
from cpuft.rank.interruption import handle_interruption
from cpuft.rank.process import RAISED_MARK
from cpuft.rank.script import end_process, prepare_torch, report_exception
from cpuft.rank.world import World, parse_world

_RESULT_DAYS = 30
"""How long a rank that has returned waits for the others; --time-limit ends a run earlier."""


@contextmanager
def _join_ranks() -> Iterator[Any]:
    """Form torch's default process group for the function, whose own calls that form or end it change nothing, and
    yield a group of all ranks for the results.
    """
    with requires("train", "the ranks of a function need torch to find each other"):
        import torch.distributed as dist
        from torch.distributed import distributed_c10d
    dist.init_process_group("gloo")
    results = dist.new_group(timeout=timedelta(days=_RESULT_DAYS), backend="gloo")
    destroy = dist.destroy_process_group

    def init_process_group(backend: object = None, *args: Any, **kwargs: Any) -> None:
        name = str(backend or "gloo")
        if "gloo" not in name.lower():
            raise RefusedScriptError(
                f'the function calls init_process_group("{name}"), but has a group of gloo already: leave the call out'
            )

    def destroy_process_group(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    for module in (dist, distributed_c10d):
        vars(module).update(init_process_group=init_process_group, destroy_process_group=destroy_process_group)
    yield results


def _call_function(world: World, run_dir: str, digest: str, check: ConnectionCheck | None) -> None:
    """Load the run's call, whose SHA-256 is `digest`, call the function, and bring its result to rank 0. Collective."""
    header, pickled = read_call(run_dir, digest)
    sys.path[:0] = [os.getcwd()]
    sys.path += [folder for folder in header.path if folder not in sys.path and os.path.isdir(folder)]
    with _join_ranks() as results:
        function, args, kwargs = load_call(pickled)
        try:
            result = function(*args, **kwargs)
        except SystemExit as end:
            if end.code:
                raise
            raise CpuftError(f"the function ended rank {world.rank} with sys.exit: let it return instead") from None
        if check:
            check.check_end()
        signed = pickle_result(header, world, result)
        for rank, content in _gather_bytes(signed, world, results):
            write_result(run_dir, rank, content)
        if world.rank == 0:
            os.unlink(os.path.join(run_dir, CALL_FILE))


def load_call(pickled: bytes) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return (function, args, kwargs) of a call whose digest has been checked. Raises CpuftError: a module that the
    call needs cannot be imported on this host; other errors of pickle pass through.
    """
    try:
        function, args, kwargs = pickle.loads(pickled)
    except ImportError as error:
        raise CpuftError(f"the function cannot be loaded here ({error}): install that module on all hosts") from None
    return function, args, kwargs


def pickle_result(header: CallHeader, world: World, result: object) -> bytes:
    """Return this rank's result pickled, after a signature of 32 bytes. Raises CpuftError: it cannot be pickled."""
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(result)
    except Exception as error:  # objects raise errors of their own when they are pickled
        raise CpuftError(
            f"rank {world.rank} returned a {type(result).__name__} that cannot be pickled ({error}): return numbers"
        ) from None
    return sign_result(header.key, world.rank, pickled)


def _gather_bytes(content: bytes, world: World, group: Any) -> Iterator[tuple[int, bytes]]:
    """Yield (rank, bytes) of every rank on rank 0, and nothing on others. Collective: all must consume the iterator."""
    import torch
    import torch.distributed as dist

    size = torch.tensor([len(content)])
    sizes = [torch.zeros_like(size) for _ in range(world.size)]
    dist.all_gather(sizes, size, group=group)
    if world.rank:
        dist.send(torch.frombuffer(bytearray(content), dtype=torch.uint8), 0, group=group)
        return
    yield 0, content
    for rank in range(1, world.size):
        received = torch.empty(int(sizes[rank]), dtype=torch.uint8)
        dist.recv(received, rank, group=group)
        yield rank, received.numpy().tobytes()


def main() -> int:
    """Call the function of the run in $CPUFT_RUN_DIR whose digest is the first argument. Return 0 if the result has
    reached rank 0, 2 after a CpuftError, else the exit code of a script (`cpuft.rank.script`).
    """
    check = prepare_torch()
    handle_interruption(is_script=True)
    try:
        _call_function(parse_world(os.environ), os.environ["CPUFT_RUN_DIR"], sys.argv[1], check)
    except BaseException as error:
        return report_exception(error, (CpuftError,), __file__, check, RAISED_MARK)
    return 0


if __name__ == "__main__":
    end_process(main())
