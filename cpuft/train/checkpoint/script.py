"""For a training loop of one's own under `cpuft launch`: keep what it needs to go on, and learn that it is to stop.

    kept = cpuft.load_state(model=model, optimizer=optimizer)  # None: there is nothing to go on from
    for step in range(kept["step"] if kept else 0, steps):
        ...
        stops = cpuft.interrupted()
        if stops or step % 100 == 99:
            cpuft.save_state(step + 1, model=model, optimizer=optimizer)
        if stops:
            sys.exit(75)  # `cpuft launch --resume` goes on

All of them are collectives: every rank calls them at the same steps, after `init_process_group`, if there are several.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cpuft.errors import CpuftError
from cpuft.rank.interruption import is_interrupted
from cpuft.rank.world import World, parse_world
from cpuft.record import RecordedRank
from cpuft.serialization import load, parse_json
from cpuft.train.checkpoint.files import FOLDER, STATE, VALUES, remove_after, to_view, write_checkpoint
from cpuft.train.checkpoint.policy import choose_writer_ranks, find_newest_checkpoint
from cpuft.train.checkpoint.state import pack_tensors
from cpuft.train.process_group import gather

_PLAIN = (bool, int, float, str, type(None))


def save_state(step: int, **things: Any) -> bool:
    """Keep these things as they are after so many steps; those of the newest two stay.

    They are written to $CPUFT_RUN_DIR/checkpoints by the first rank and by one on a second host, whole or not at all,
    while all ranks wait: as safetensors and JSON, nothing is pickled.

    Parameters
    ----------
    things: by any names: whatever has a `state_dict` (a model, also in DistributedDataParallel, an optimizer, a
    scheduler), tensors, and what JSON holds, nested as you like. The same on all ranks.

    Returns
    -------
    Whether a disk has them. A full one is said, and what was kept before stays.

    Raises CpuftError: nothing but Python's pickle could keep one of them, or $CPUFT_RUN_DIR is not set.
    """
    world, root = _find_place()
    tensors: dict[str, Tensor] = {}
    tree = {name: _take_apart(_state_of(thing), name, tensors) for name, thing in things.items()}
    ranks = [RecordedRank(rank, host, []) for rank, host in enumerate(gather(socket.gethostname()))]
    problem = None
    if world.rank in choose_writer_ranks(ranks):
        files = {STATE: pack_tensors(tensors).numpy().data, VALUES: to_view([json.dumps(tree)])}
        try:
            write_checkpoint(root, step, world.rank, files)
            problem = ""
        except OSError as error:
            problem = error.strerror
            said = f"step {step} cannot be kept in {root} ({problem})"
            print(f"cpuft: {said}: what was kept before stays", file=sys.stderr, flush=True)
    return "" in gather(problem)


def load_state(**things: Any) -> dict[str, Any] | None:
    """Bring back what `save_state` kept last, on any host, into the things that go by the same names.

    Returns
    -------
    All else that was kept, with `step`; None where nothing was.

    Raises CpuftError: on all ranks alike, what was kept does not fit, or is damaged.
    """
    world, root = _find_place()
    newest, read = find_newest_checkpoint(root, world, VALUES)
    if newest.update < 0:
        return None
    what = f"what was kept after step {newest.update}"
    block = bytes(read().numpy().data)  # a collective: before anything is raised
    try:
        tensors, tree = load_tensors(block), load(dict[str, Any], parse_json(newest.text or "{}"), VALUES)
        kept = {name: _put_together(value, tensors) for name, value in tree.items()}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        said = f"{what} on {newest.host} is no state of cpuft.save_state ({type(error).__name__}: {error!s:.200})"
        raise CpuftError(f"{said}: remove {root}, and start anew without --resume") from None
    for name, thing in things.items():
        if name not in kept:
            raise CpuftError(f"{what} has no {name}: load what the script has saved, or start anew without --resume")
        try:
            _unwrap(thing).load_state_dict(kept.pop(name))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise CpuftError(f"{what} does not fit {name} ({reason:.300}): start anew without --resume") from None
    if world.local_rank == 0:
        remove_after(root, newest.update)
    return {**kept, "step": newest.update}


def interrupted() -> bool:
    """Whether any rank was told that the run is to stop, by its launch or a notice on its host: save, and exit with 75.

    Costs an all-reduce of one number. A script that catches SIGUSR1 itself is told by that instead.
    """
    _check_group(parse_world(os.environ))
    told = torch.tensor([float(is_interrupted())])
    if dist.is_initialized():
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told)


def _find_place() -> tuple[World, Path]:
    world, run_dir = parse_world(os.environ), os.environ.get("CPUFT_RUN_DIR", "")
    if not run_dir:
        raise CpuftError("a state needs a place: start the script with cpuft launch, or set CPUFT_RUN_DIR to a folder")
    _check_group(world)
    return world, Path(run_dir, FOLDER)


def _check_group(world: World) -> None:
    if world.size > 1 and not dist.is_initialized():
        raise CpuftError(f"{world.size} ranks keep a state together: call torch.distributed.init_process_group before")


def _unwrap(thing: Any) -> Any:
    return thing.module if isinstance(thing, DistributedDataParallel) else thing


def _state_of(thing: Any) -> Any:
    thing = _unwrap(thing)
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def _take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON holds of a value; its tensors go into `tensors`. Raises CpuftError: there is something else in it."""
    if isinstance(value, Tensor):
        name = name if name not in tensors else f"{name}#{len(tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _take_apart(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        items = [_take_apart(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": items} if type(value) is tuple else items
    if type(value) not in _PLAIN:
        raise CpuftError(f"{name} is a {type(value).__name__}, which JSON cannot hold: keep tensors, numbers and texts")
    return value


def _put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_put_together(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "tuple":
        return tuple(_put_together(item, tensors) for item in inside)
    return {key: _put_together(item, tensors) for key, item in inside}
