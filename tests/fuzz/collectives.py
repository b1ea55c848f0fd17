"""Random calls of collectives, which must end on cpuft's backends as on torch's own gloo, or in an exception.

Run by mpirun for `fuzz_backend`: collectives.py BACKEND FOLDER SEED FIRST LAST. Each rank appends the outcome of each
call to FOLDER/RANK.jsonl. BACKEND is one of cpuft's, or "torch" for torch's own gloo.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

import cpuft.comm  # noqa: F401, registers the backends
from cpuft.rank.process import remove_shared_memory
from tests.comm.ranks import become_rank, mpirun

RANKS = 2
_SECONDS = 5
"""Time limit of a call; with torch's gloo, some calls that it does not check wait for ever."""
_TYPES = ("float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64")
_OPERATIONS = (
    *("all_reduce", "coalesced", "reduce", "broadcast", "all_gather", "all_gather_single", "reduce_scatter"),
    *("reduce_scatter_single", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier", "message"),
)
_FAULTS = ("type", "size", "count", "root", "device", "layout", "empty", "splits")
_GLOO_ENDS = "Received data size doesn't match expected size"
"""How gloo ends the process of a rank that gets more than its tensor holds."""
_BROKEN = re.compile("clos|connection|timed? ?out|enforce|reset", re.IGNORECASE)
"""Errors of gloo after which its group cannot be used."""
_APART = re.compile("Timed out waiting|pair closure|closed by peer")
"""Errors of ranks that waited for each other in different calls, after one of them had raised in an earlier call."""

Outcome = list[str]
"""["ok", hash of all outputs], or the name of an exception and what it says."""


@dataclass(frozen=True)
class Call:
    """A call of all ranks. A fault is in the arguments of the ranks `at`; the other ranks' are right."""

    operation: str
    dtype: str
    other: str
    """Type of the tensor that has the wrong one."""
    rows: int
    columns: int
    strided: bool
    root: int
    reduction: str
    group: str
    """world, again (another group of all ranks) or alone (a group of this rank)."""
    fault: str
    where: int
    at: tuple[int, ...]
    values: int
    """Seed of the numbers in the tensors."""


def draw_call(seed: int, number: int) -> Call:
    """Return a call, the same on all ranks. Half of them are right, and one of 50 is wrong on one rank only."""
    draw = random.Random(f"{seed} {number}")
    fault = draw.choice(_FAULTS) if draw.random() < 0.5 else ""
    return Call(
        operation=draw.choice(_OPERATIONS),
        dtype=draw.choice(_TYPES),
        other=draw.choice(_TYPES),
        rows=draw.choice((0, 1, 2, 3, 8, 700)),
        columns=draw.choice((1, 2, 5)),
        strided=draw.random() < 0.2,
        root=draw.choice((-1, 2, 7)) if fault == "root" else draw.randrange(RANKS),
        reduction=draw.choice(("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")),
        group=draw.choices(("world", "again", "alone"), (8, 1, 1))[0],
        fault=fault,
        where=draw.randrange(2),
        at=(draw.randrange(RANKS),) if draw.random() < 0.04 else tuple(range(RANKS)),
        values=draw.randrange(2**32),
    )


def prepare(call: Call, rank: int, size: int) -> tuple[Callable[[Any], Any], list[list[torch.Tensor]]]:
    """Return a function that runs the call on a process group, and the lists of its outputs."""

    def new(rows: int, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(call.values + 1000 * rank + salt)
        values = torch.randint(0, 3, (rows, call.columns), generator=generator).to(getattr(torch, call.dtype))
        return values.t().contiguous().t() if call.strided else values

    root, rows = call.root, call.rows
    if call.fault != "root":
        root %= size
    elif rank not in call.at:
        root = 0
    whole, parts = rows * size, range(size)
    at_root = rank == root or call.fault == "root"
    operation = getattr(dist.ReduceOp, call.reduction)
    splits: list[int] = []
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor]
    match call.operation:
        case "coalesced":
            outputs = [new(rows + salt, salt) for salt in range(3)]
        case "all_gather" | "gather":
            outputs, inputs = (
                [new(rows, 50 + part) for part in parts if at_root or call.operation[0] == "a"],
                [new(rows)],
            )
        case "all_gather_single":
            outputs, inputs = [new(whole, 50)], [new(rows)]
        case "reduce_scatter":
            outputs, inputs = [new(rows, 50)], [new(rows, part) for part in parts]
        case "scatter":
            outputs, inputs = [new(rows, 50)], [new(rows, part) for part in parts if at_root]
        case "reduce_scatter_single":
            outputs, inputs = [new(rows, 50)], [new(whole)]
        case "all_to_all":
            outputs, inputs = [new(rows, 50 + part) for part in parts], [new(rows, part) for part in parts]
        case "all_to_all_single":
            outputs, inputs = [new(whole, 50)], [new(whole)]
            splits = [rows] * size if call.where else []
        case _:
            outputs = [new(rows)]
    if rank in call.at:
        _spoil(call, [outputs, inputs], splits)

    def options(kind: Any) -> Any:
        made = kind()
        if hasattr(made, "rootRank"):
            made.rootRank = root
        if hasattr(made, "reduceOp"):
            made.reduceOp = operation
        return made

    def run(group: Any) -> Any:
        match call.operation:
            case "all_reduce":
                return group.allreduce(outputs, options(dist.AllreduceOptions))
            case "coalesced":
                return group.allreduce_coalesced(outputs, options(dist.AllreduceCoalescedOptions))
            case "reduce":
                return group.reduce(outputs, options(dist.ReduceOptions))
            case "broadcast":
                return group.broadcast(outputs, options(dist.BroadcastOptions))
            case "all_gather":
                return group.allgather([outputs], inputs)
            case "all_gather_single":
                return group.all_gather_single(outputs[0], inputs[0])
            case "reduce_scatter":
                return group.reduce_scatter(outputs, [inputs], options(dist.ReduceScatterOptions))
            case "reduce_scatter_single":
                return group.reduce_scatter_single(outputs[0], inputs[0], options(dist.ReduceScatterOptions))
            case "all_to_all":
                return group.alltoall(outputs, inputs)
            case "all_to_all_single":
                return group.all_to_all_single(outputs[0], inputs[0], splits, splits)
            case "gather":
                return group.gather([outputs] if outputs else [], inputs, options(dist.GatherOptions))
            case "scatter":
                return group.scatter(outputs, [inputs] if inputs else [], options(dist.ScatterOptions))
            case "barrier":
                return group.barrier()
        peer = root if call.fault == "root" else 1 - rank
        # A tag of its own: the message of an earlier call that the other rank has refused may still be there.
        return (group.send if rank == 0 else group.recv)(outputs, peer, call.values % 30_000)

    return run, [outputs]


def _spoil(call: Call, lists: list[list[torch.Tensor]], splits: list[int]) -> None:
    """Put the fault of a call into its tensors or lengths."""
    if call.fault == "splits" and splits:
        splits[0] += call.columns
        splits[-1] -= call.columns + call.where
    chosen = lists[call.where] or lists[1 - call.where]
    if not chosen:
        return
    match call.fault:
        case "type":
            chosen[-1] = chosen[-1].to(getattr(torch, call.other))
        case "size":
            chosen[-1] = torch.zeros((call.rows + 1, call.columns), dtype=chosen[-1].dtype)
        case "count":
            chosen.append(chosen[-1].clone())
        case "device":
            chosen[-1] = chosen[-1].to("meta")
        case "layout":
            chosen[-1] = chosen[-1].to_sparse()
        case "empty":
            chosen.clear()


def end_of(call: Call, rank: int, groups: dict[str, Any]) -> Outcome:
    """Run a call, and return its outcome."""
    group = groups[call.group]
    try:
        run, lists = prepare(call, rank if call.group != "alone" else 0, group.size())
        work = run(group)
        if work is not None:
            work.wait()
    except Exception as error:
        return [type(error).__name__, str(error).strip()[:300]]
    digest = hashlib.sha256()
    if call.operation == "barrier" or (call.operation == "reduce" and rank != call.root):
        return ["ok", ""]  # torch's gloo leaves any values on the other ranks of a reduction
    for tensor in lists[0]:
        if tensor.device.type == "cpu":
            dense = tensor.to_dense() if tensor.is_sparse else tensor
            digest.update(dense.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    return ["ok", digest.hexdigest()]


def connect(backend: str, store: Any, rank: int) -> dict[str, Any]:
    """Make the groups of `Call.group`."""
    name = {"torch": "gloo", "gloo": "cpuft_gloo"}.get(backend, backend)
    dist.init_process_group(name, store=store, rank=rank, world_size=RANKS)
    alone = [dist.new_group([other]) for other in range(RANKS)][rank]
    groups = {"world": dist.group.WORLD, "again": dist.new_group(), "alone": alone}
    for group in groups.values():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_SECONDS), group)
    return groups


def main() -> None:
    backend, folder = sys.argv[1], Path(sys.argv[2])
    seed, first, last = map(int, sys.argv[3:6])
    become_rank()
    torch.set_num_threads(1)
    store, rank, _ = next(rendezvous("env://"))
    groups = connect(backend, PrefixStore(str(first), store), rank)
    with (folder / f"{rank}.jsonl").open("a") as file:
        for number in range(first, last):
            call = draw_call(seed, number)
            # With unequal arguments torch's gloo waits for its time limit, and says nothing about the call. For a
            # message to itself or to a rank that does not exist it waits for ever.
            is_lost = call.operation == "message" and (call.group == "alone" or call.fault == "root")
            is_compared = backend != "torch" or (len(call.at) == RANKS and not is_lost)
            found = end_of(call, rank, groups) if is_compared else ["not tried", ""]
            print(json.dumps(found), file=file, flush=True)
            if backend == "mpi" or (backend == "ccl" and call.group != "again"):
                continue
            is_broken = is_compared and found[0] != "ok" and bool(_BROKEN.search(found[1]) or len(call.at) < RANKS)
            store.set(f"{number} {rank}", str(is_broken))
            if b"True" in [store.get(f"{number} {other}") for other in range(RANKS)]:
                if backend == "ccl":  # in one process, oneCCL sometimes hangs when it connects again
                    store.set(f"end {rank}", "")
                    store.wait([f"end {other}" for other in range(RANKS)])  # rank 0 has the store
                    break
                dist.destroy_process_group()
                groups = connect(backend, PrefixStore(f"after {number}", store), rank)
    remove_shared_memory(os.getpid())
    os._exit(0)


def run_calls(backend: str, seed: int, calls: int) -> list[list[Outcome]]:
    """Run the calls on all ranks, with new ranks behind each that ends a group. Returns each call's outcome by rank."""
    outcomes: list[list[Outcome]] = []
    while len(outcomes) < calls:
        with tempfile.TemporaryDirectory() as folder:
            words = backend, folder, *map(str, (seed, len(outcomes), calls))
            try:
                ended = mpirun(RANKS, "tests.fuzz.collectives", *words, seconds=300)
                said, code = ended.stdout, ended.returncode
            except subprocess.TimeoutExpired:
                said, code = "", -1
            paths = [Path(folder, f"{rank}.jsonl") for rank in range(RANKS)]
            found = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths if path.exists()]
        if len(found) < RANKS:
            raise RuntimeError(f"{backend} did not start: {said[-2000:]}")
        outcomes += map(list, zip(*found, strict=False))
        if len(outcomes) < calls and code != 0:
            # A rank ended within the next call; another one may have been done with it.
            signal = next((number for number in re.findall(r"KILLED BY SIGNAL: (\d+)", said) if number != "9"), "")
            how = f"signal {signal}" if signal else "hangs" if code < 0 else f"exit code {code}"
            at = min(map(len, found))
            text = _GLOO_ENDS * (_GLOO_ENDS in said) + said.strip()[-1500:]
            outcomes.append([rows[at] if len(rows) > at else [how, text] for rows in found])
        elif not any(found):
            raise RuntimeError(f"{backend} ends without a call: {said[-2000:]}")
    return outcomes


def find_fault(call: Call, wanted: list[Outcome], found: list[Outcome]) -> str:
    """Return what is wrong with the outcomes of a call, or an empty text.

    Parameters
    ----------
    wanted: of each rank on torch's gloo.
    found: of each rank on a backend of cpuft.
    """
    is_unequal = len(call.at) < RANKS
    if not is_unequal and any(_APART.search(text) for _, text in wanted):
        return ""
    has_raised = any(outcome[0] not in ("ok", "exit code 75") for outcome in found)
    for want, outcome in zip(wanted, found, strict=True):
        kind = outcome[0]
        if is_unequal and kind == "signal 6" and _GLOO_ENDS in outcome[1]:
            continue  # torch's gloo ends the process as well
        # The watchdog ends a rank that waits for one that has raised.
        if kind.startswith(("signal", "hangs", "exit code")) and not (has_raised and kind == "exit code 75"):
            return kind
        if is_unequal or (want[0] != "ok" and kind != "ok"):
            continue
        if kind not in ("ok", "exit code 75") and not _is_less(call):
            return f"{kind} where torch's gloo answers"
        if kind == "ok" and want[0] == "ok" and outcome[1] != want[1]:
            return "other values than torch's gloo"
        if kind == "ok" and want[0] != "ok" and not _is_more(call):
            return "an answer where torch's gloo raises"
    return ""


def _is_more(call: Call) -> bool:
    """Return whether cpuft's backends answer where torch's gloo cannot: more types, layouts and lists of all_to_all."""
    dtypes = (call.dtype, call.other) if call.fault == "type" else (call.dtype,)
    is_integral_mean = call.reduction == "AVG" and not all(getattr(torch, one).is_floating_point for one in dtypes)
    has_type = not {"int16", "complex64"}.isdisjoint((call.dtype, call.other))
    return has_type or is_integral_mean or call.strided or call.operation == "all_to_all"


def _is_less(call: Call) -> bool:
    """Return whether cpuft's backends refuse what torch's gloo accepts.

    These are tensors on the device meta, with which it does nothing, several tensors in one reduction or broadcast,
    and types that differ in all_to_all.
    """
    return call.fault in ("device", "count") or (call.fault == "type" and call.operation.startswith("all_to_all"))


if __name__ == "__main__":
    main()
