"""Checkpoints for a training loop of your own under `cpuft launch`, and how it learns that it should stop.

    saved = cpuft.load_state(model=model, optimizer=optimizer)  # None: there is no checkpoint
    for step in range(saved["step"] if saved else 0, steps):
        ...
        stop = cpuft.interrupted()
        if stop or step % 100 == 99:
            cpuft.save_state(step + 1, model=model, optimizer=optimizer)
        if stop:
            sys.exit(75)  # `cpuft launch --resume` continues the run

All three functions are collective: every rank calls them at the same steps, after `init_process_group` if there are
several ranks.
"""

from __future__ import annotations

import json
import operator
import os
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
from cpuft.serialization import load, parse_json
from cpuft.train.checkpoint.folders import FOLDER, STATE, VALUES, remove_after, to_view, write_checkpoint
from cpuft.train.checkpoint.resume import find_newest_checkpoint
from cpuft.train.checkpoint.state import TYPE_NAMES, pack_tensors
from cpuft.train.checkpoint.writer_thread import choose_writer_ranks
from cpuft.train.ranks import gather

_PLAIN_TYPES = (bool, int, float, str, type(None))


def save_state(step: int, **things: Any) -> bool:
    """Save these things as they are after `step` steps; the newest two checkpoints stay on the disk. Collective.

    Rank 0 and one rank on a second host write them to $CPUFT_RUN_DIR/checkpoints, while all ranks wait. A checkpoint is
    written completely or not at all. Its format is safetensors and JSON; nothing is pickled.

    Parameters
    ----------
    step: number of steps that are done, 0 or more; `load_state` returns it.
    things: under any names except `step`, the same on all ranks: whatever has a `state_dict` (a model, also in
        DistributedDataParallel, an optimizer, a scheduler), tensors, None, bool, int, float, str, and lists, tuples and
        dicts of these, nested, with keys that are str or int.

    Returns
    -------
    On all ranks alike, whether the checkpoint is on at least one disk. A rank whose disk does not take it prints a
    warning on standard error, and earlier checkpoints stay.

    Raises
    ------
    CpuftError
        `step` is below 0 or no whole number; a thing, or something in it, is of another type, such as a NumPy number; a
        tensor is not dense, or has a dtype that safetensors cannot hold here, such as a complex one; $CPUFT_RUN_DIR is
        not set; or several ranks have no process group.
    """
    try:
        update = operator.index(step)
    except TypeError:
        update = -1
    if update < 0:
        raise CpuftError(f"the step {step!r:.40} is not valid: give the number of steps that are done, 0 or more")
    world, root = _find_checkpoints()
    tensors: dict[str, Tensor] = {}
    tree = {name: _separate_tensors(_state_of(thing), name, tensors) for name, thing in things.items()}
    is_written = False
    if world.rank in choose_writer_ranks(gather(world.local_rank)):
        files = {STATE: pack_tensors(tensors).numpy().data, VALUES: to_view([json.dumps(tree)])}
        try:
            write_checkpoint(root, update, world.rank, files)
            is_written = True
        except OSError as error:
            warning = f"the checkpoint of step {step} cannot be written to {root} ({error.strerror})"
            print(f"cpuft: {warning}: earlier checkpoints stay", file=sys.stderr, flush=True)
    return any(gather(is_written))


def load_state(**things: Any) -> dict[str, Any] | None:
    """Load the newest checkpoint that `save_state` has written on any host into things of the same names. Collective.

    Rank 0 prints a line on standard error for each damaged checkpoint. These are left out, and removed if they are
    newer than the one that is loaded.

    Parameters
    ----------
    things: each has a `load_state_dict`, such as a model (also in DistributedDataParallel) or an optimizer.

    Returns
    -------
    A dict with everything in the checkpoint that is not among `things`, by name, as it was saved (tensors on the CPU;
    the state dict of what had one), and the number of steps as `step`. None, and nothing is loaded, if there is no
    checkpoint.

    Raises
    ------
    CpuftError
        On all ranks alike: the checkpoint lacks a name or does not fit a thing (those before it are loaded already), or
        is none of `save_state`; all are damaged; $CPUFT_RUN_DIR is not set; or several ranks have no process group.
    """
    world, root = _find_checkpoints()
    newest, read = find_newest_checkpoint(root, world, VALUES)
    if newest.update < 0:
        return None
    checkpoint = f"the checkpoint of step {newest.update}"
    block = bytes(read().numpy().data)  # collective, so before anything is raised
    try:
        tensors, tree = load_tensors(block), load(dict[str, Any], parse_json(newest.text or "{}"), VALUES)
        saved = {name: _insert_tensors(value, tensors) for name, value in tree.items()}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = f"{checkpoint} on {newest.host} is none of cpuft.save_state ({type(error).__name__}: {error!s:.200})"
        raise CpuftError(f"{problem}: remove {root}, and start a new run without --resume") from None
    for name, thing in things.items():
        if name not in saved:
            raise CpuftError(f"{checkpoint} has no {name}: load what was saved, or start a new run without --resume")
        try:
            _unwrap(thing).load_state_dict(saved.pop(name))
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise CpuftError(
                f"{checkpoint} does not fit {name} ({reason:.300}): start a new run without --resume"
            ) from None
    if world.local_rank == 0:
        remove_after(root, newest.update)
    return {**saved, "step": newest.update}


def interrupted() -> bool:
    """Return on all ranks alike whether any rank was told to stop, by the launcher or an interruption notice.

    Collective. Once True, it stays True: call `save_state` and exit with code 75. It costs an all-reduce of one number.
    A script that handles SIGUSR1 itself gets that signal instead. CpuftError: several ranks have no process group.
    """
    _check_group(parse_world(os.environ))
    told = torch.tensor([float(is_interrupted())])
    if dist.is_initialized():
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told)


def _find_checkpoints() -> tuple[World, Path]:
    world, run_dir = parse_world(os.environ), os.environ.get("CPUFT_RUN_DIR", "")
    if not run_dir:
        raise CpuftError("checkpoints need a folder: start the script with cpuft launch, or set CPUFT_RUN_DIR to one")
    _check_group(world)
    return world, Path(run_dir, FOLDER)


def _check_group(world: World) -> None:
    if world.size > 1 and not dist.is_initialized():
        raise CpuftError(f"{world.size} ranks write checkpoints together: call init_process_group before")


def _unwrap(thing: Any) -> Any:
    return thing.module if isinstance(thing, DistributedDataParallel) else thing


def _state_of(thing: Any) -> Any:
    thing = _unwrap(thing)
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def _separate_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return what JSON can hold of a value, and add its tensors to `tensors`. Raises CpuftError for anything else."""
    if isinstance(value, Tensor):
        # All ranks check this, and not only those that write: the others would wait for ranks that have ended.
        if value.dtype not in TYPE_NAMES:
            raise CpuftError(f"{name} is of type {value.dtype}, which cannot be saved: convert it before")
        if value.layout != torch.strided or value.is_meta:
            raise CpuftError(f"{name} is {value.layout} on {value.device}, which cannot be saved: make it dense before")
        name = name if name not in tensors else f"{name}#{len(tensors)}"
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _separate_tensors(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if type(value) in (list, tuple):
        items = [_separate_tensors(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": items} if type(value) is tuple else items
    if type(value) not in _PLAIN_TYPES:
        raise CpuftError(f"{name} is a {type(value).__name__}, which JSON cannot hold: save tensors, numbers and texts")
    return value


def _insert_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value from which `_separate_tensors` has made `value` and `tensors`."""
    if isinstance(value, list):
        return [_insert_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "tuple":
        return tuple(_insert_tensors(item, tensors) for item in inside)
    return {key: _insert_tensors(item, tensors) for key, item in inside}
