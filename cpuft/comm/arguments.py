"""The collectives of a process group, and the checks of their arguments before a buffer is touched.

A check raises RuntimeError, as torch's gloo does, or returns a text about the call that must be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from cpuft.comm.backends.base import GroupMembership

Tensors = list[torch.Tensor]


def reduction_name(operation: object) -> str:
    """Return the name of a ReduceOp in lower case, such as "avg" or "band". NotImplementedError: PREMUL_SUM or none."""
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor"):
        if operation == getattr(dist.ReduceOp, name.upper()):
            return name
    raise NotImplementedError(f"{operation} exists in NCCL only: scale the tensor and use ReduceOp.SUM")


def count_bytes(value: Any) -> int:
    """Return the bytes of a tensor (sparse: indices and values), or their sum in nested lists; 0 for other objects."""
    if isinstance(value, torch.Tensor):
        return value._indices().nbytes + value._values().nbytes if value.is_sparse else value.nbytes
    return sum(map(count_bytes, value)) if isinstance(value, list | tuple) else 0


def flatten(value: Any) -> Tensors:
    """Return a list of the one given tensor, or of all tensors of nested lists, in their order."""
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in flatten(part)]


def transpose(lists: Sequence[Tensors]) -> list[Tensors]:
    """Return a list of all first tensors, one of all second tensors, and so on; ValueError: unequal lengths."""
    return [list(tensors) for tensors in zip(*lists, strict=True)]


def _accept_forms(method: Method, start: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Let a method of a group accept every form of its arguments that torch's own groups accept.

    `start` gets the group, as many arguments as `method` has, and an object of options. A caller may also pass single
    tensors, names of arguments, and a ReduceOp, a root or a timeout instead of the object.
    """

    def call(self: Any, *arguments: Any, **named: Any) -> dist.Work:
        chosen = [named.pop(name) for name in ("opts", "root", "op", "timeout") if name in named]
        # torch's names of the others begin with tensor, output or input, and those of lengths hold "split".
        order = sorted(named, key=lambda name: ("split" in name, name.startswith("input")))
        values = [*arguments, *(named[name] for name in order)]
        own, rest = values[: method.tensors], [*values[method.tensors :], *chosen]
        opts = next((value for value in rest if hasattr(value, "timeout")), None) or method.options()
        for value in rest:
            if isinstance(value, timedelta):
                opts.timeout = value
            elif isinstance(value, int):
                opts.rootRank = value
            elif isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType):
                opts.reduceOp = value
        if method.lists and any(isinstance(value, torch.Tensor) for value in own):
            # A rank that has no outputs or inputs, as in gather, passes None or an empty list for them.
            own = [[value] if isinstance(value, torch.Tensor) or value else [] for value in own]
        return start(self, *own, opts)

    return call


def _check_all_reduce(
    group: GroupMembership, tensors: Tensors, opts: Any, name: str = "all_reduce", coalesced: bool = False
) -> str:
    """Check one tensor, or several of one type if they are `coalesced`; a sparse one can only be summed."""
    reduction = reduction_name(opts.reduceOp)
    if not coalesced:
        _check_one(name, tensors)
    _check_tensors(name, tensors, sparse=name == "all_reduce" and reduction == "sum")
    for at, tensor in enumerate(tensors):
        _check_like(name, tensor, tensors[0], at, shape=False)
    _check_reduction(name, tensors[0], reduction)
    return f"{name} ({reduction}) of {_describe(tensors)}"


def _check_reduce(group: GroupMembership, tensors: Tensors, opts: Any) -> str:
    _check_root("reduce", group, opts.rootRank)
    return _check_all_reduce(group, tensors, opts, "reduce") + f" to {opts.rootRank}"


def _check_broadcast(group: GroupMembership, tensors: Tensors, opts: Any) -> str:
    _check_root("broadcast", group, opts.rootRank)
    _check_one("broadcast", tensors)
    _check_tensors("broadcast", tensors)
    return f"broadcast of {_describe(tensors)} from {opts.rootRank}"


def _check_lists(name: str, group: GroupMembership, lists: list[Tensors], own: Tensors, side: str) -> None:
    """Check lists with one tensor for each rank, of which this rank's has the shape of `own`; the others may differ."""
    if not own or len(lists) != len(own):
        _refuse(name, "requires input/output tensor lists to have the same length")
    for at, (tensors, one) in enumerate(zip(lists, own, strict=True)):
        _check_count(name, tensors, group.size, f"{side} tensor list at index {at}")
        _check_tensors(name, [one, *tensors])
        for rank, tensor in enumerate(tensors):
            _check_like(name, tensor, one, rank, shape=rank == group.rank)


def _check_all_gather(group: GroupMembership, outputs: list[Tensors], inputs: Tensors, opts: Any) -> str:
    _check_lists("all_gather", group, outputs, inputs, "output")
    return f"all_gather of {_describe(flatten(outputs))}"


def _check_all_gather_coalesced(group: GroupMembership, outputs: list[Tensors], inputs: Tensors, opts: Any) -> str:
    if any(len(targets) != len(inputs) for targets in outputs):
        _refuse("all_gather", "requires input/output tensor lists to have the same length")
    return _check_all_gather(group, transpose(outputs), inputs, opts)


def _check_gather_parts(group: GroupMembership, output: Any, source: Any, opts: Any) -> str:
    _check_parts("all_gather", group, flatten(output), flatten(source), "output", "input")
    return f"all_gather of {_describe(flatten(source))}"


def _check_reduce_scatter(group: GroupMembership, outputs: Tensors, inputs: list[Tensors], opts: Any) -> str:
    reduction = reduction_name(opts.reduceOp)
    _check_lists("reduce_scatter", group, inputs, outputs, "input")
    for output in outputs:
        _check_reduction("reduce_scatter", output, reduction)
    return f"reduce_scatter ({reduction}) of {_describe(flatten(inputs))}"


def _check_scatter_parts(group: GroupMembership, output: Any, source: Any, opts: Any) -> str:
    reduction = reduction_name(opts.reduceOp)
    _check_parts("reduce_scatter", group, flatten(source), flatten(output), "input", "output")
    for tensor in flatten(output):
        _check_reduction("reduce_scatter", tensor, reduction)
    return f"reduce_scatter ({reduction}) of {_describe(flatten(source))}"


def _check_all_to_all(group: GroupMembership, outputs: Tensors, inputs: Tensors, opts: Any) -> str:
    for name, tensors in (("input", inputs), ("output", outputs)):
        _check_count("all_to_all", tensors, group.size, f"{name} tensor list")
        _check_tensors("all_to_all", tensors)
    return "all_to_all of lists"


def _check_all_to_all_single(
    group: GroupMembership,
    output: torch.Tensor,
    source: torch.Tensor,
    output_sizes: Sequence[int],
    source_sizes: Sequence[int],
    opts: Any,
) -> str:
    """Check that the lengths of the slices add up to the first dimension, or that it can be divided into equal ones."""
    _check_tensors("all_to_all", [output, source])
    _check_like("all_to_all", output, source, 0, shape=False)
    for tensor, sizes in ((output, output_sizes), (source, source_sizes)):
        if not tensor.dim():
            _refuse("all_to_all", "requires tensors with at least one dimension")
        rows = tensor.shape[0]
        if not sizes and rows % group.size:
            _refuse("all_to_all", f"dim 0 of {rows} does not divide equally across a group of {group.size}")
        if sizes and len(sizes) != group.size:
            _refuse("all_to_all", f"number of tensor splits ({len(sizes)}) not equal to group size ({group.size})")
        if sizes and (min(sizes) < 0 or sum(sizes) != rows):
            _refuse("all_to_all", f"split sizes {list(sizes)} don't match total dim 0 size ({rows})")
    if output_sizes or source_sizes:
        return "all_to_all with split sizes"
    if output.numel() != source.numel():
        _refuse("all_to_all", f"the output has {output.numel()} elements, and the input {source.numel()}")
    return f"all_to_all of {_describe([source])}"


def _check_gather(group: GroupMembership, outputs: list[Tensors], inputs: Tensors, opts: Any) -> str:
    return _check_rooted("gather", group, outputs, inputs, opts.rootRank, "output") + f" to {opts.rootRank}"


def _check_scatter(group: GroupMembership, outputs: Tensors, inputs: list[Tensors], opts: Any) -> str:
    return _check_rooted("scatter", group, inputs, outputs, opts.rootRank, "input") + f" from {opts.rootRank}"


def check_message(name: str, group: GroupMembership, tensors: Tensors, peer: int | None, tag: int) -> None:
    """Raise RuntimeError unless there is one dense CPU tensor, `peer` is another rank of the group, or None, and `tag`
    is not negative.
    """
    _check_one(name, tensors)
    _check_tensors(name, tensors)
    if peer is not None and (not 0 <= peer < group.size or peer == group.rank):
        _refuse(name, f"invalid rank: {peer} is not another rank in a group of {group.size}")
    if tag < 0:
        _refuse(name, f"invalid tag: {tag} is negative")


def _check_rooted(name: str, group: GroupMembership, lists: list[Tensors], own: Tensors, root: int, side: str) -> str:
    _check_root(name, group, root)
    _check_one(name, own)
    if group.rank == root:
        if len(lists) != 1:
            _refuse(name, f"requires a single-element {side} list containing a list with {group.size} tensors")
        _check_count(name, lists[0], group.size, f"{side} tensor list")
    elif lists:
        _refuse(name, f"requires empty {side} on non-root")
    tensors = flatten(lists)
    _check_tensors(name, [*own, *tensors])
    for rank, tensor in enumerate(tensors):
        _check_like(name, tensor, own[0], rank)
    return f"{name} of {_describe(own)}"


def _refuse(name: str, reason: str) -> NoReturn:
    raise RuntimeError(f"{name}: {reason}")


def _check_tensors(name: str, tensors: Sequence[torch.Tensor], sparse: bool = False) -> None:
    if not tensors:
        _refuse(name, "requires non-empty tensor list")
    for tensor in tensors:
        if tensor.device.type != "cpu":
            _refuse(name, f"only supports CPU tensors, and not one of the device {tensor.device}")
        if tensor.layout == torch.sparse_coo and sparse:
            continue
        if tensor.layout != torch.strided:
            only = " (a sparse gradient can only be summed by all_reduce)" if tensor.layout == torch.sparse_coo else ""
            _refuse(name, f"only supports dense tensors, and not the layout {tensor.layout}{only}")


def _check_like(name: str, tensor: torch.Tensor, like: torch.Tensor, at: int, shape: bool = True) -> None:
    if tensor.dtype != like.dtype or tensor.layout != like.layout:
        expected, got = _type_name(like), _type_name(tensor)
        _refuse(name, f"invalid tensor type at index {at} (expected {expected}, got {got})")
    if shape and tensor.shape != like.shape:
        expected, got = (f"({', '.join(map(str, one.shape))})" for one in (like, tensor))
        _refuse(name, f"invalid tensor size at index {at} (expected {expected}, got {got})")


def _check_parts(
    name: str, group: GroupMembership, wholes: Tensors, parts: Tensors, whole_name: str, part_name: str
) -> None:
    if len(wholes) != len(parts):
        _refuse(name, "requires input/output tensor lists to have the same length")
    _check_tensors(name, [*wholes, *parts])
    for at, (whole, part) in enumerate(zip(wholes, parts, strict=True)):
        if whole.dtype != part.dtype:
            types = f"{_type_name(whole)} and {_type_name(part)}"
            _refuse(name, f"invalid tensor type at index {at}: Tensors are not equal in data type ({types})")
        if whole.numel() != group.size * part.numel():
            sizes = f"expected {group.size} * {part.numel()} elements, got {whole.numel()}"
            rule = f"{whole_name} tensor size must be equal to world_size times {part_name} tensor size"
            _refuse(name, f"invalid tensor size at index {at}: {rule} ({sizes})")


def _check_count(name: str, tensors: Sequence[torch.Tensor], count: int, what: str) -> None:
    if len(tensors) != count:
        _refuse(name, f"invalid {what} (expected length {count}, got {len(tensors)})")


def _check_one(name: str, tensors: Tensors) -> None:
    if len(tensors) != 1:
        _refuse(name, "requires a single-element tensor list")


def _check_root(name: str, group: GroupMembership, root: int) -> None:
    if not 0 <= root < group.size:
        _refuse(name, f"invalid root rank: {root} is an unexpected rank in a group of {group.size}")


def _check_reduction(name: str, tensor: torch.Tensor, reduction: str) -> None:
    is_integral = not (tensor.is_floating_point() or tensor.is_complex())
    if reduction in ("band", "bor", "bxor") and not is_integral:
        _refuse(name, f"cannot use ReduceOp.{reduction.upper()} with non-integral dtype {_type_name(tensor)}")
    if (tensor.is_complex() and reduction in ("min", "max")) or (tensor.dtype == torch.bool and reduction == "avg"):
        _refuse(name, f"cannot use ReduceOp.{reduction.upper()} with dtype {_type_name(tensor)}")


def _type_name(tensor: torch.Tensor) -> str:
    sparse = "" if tensor.layout == torch.strided else "sparse "
    return sparse + str(tensor.dtype).removeprefix("torch.")


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    """Return the elements and types of tensors: "3 + 4 float32"; a sparse tensor's type includes its shape."""
    if any(tensor.is_sparse for tensor in tensors):
        return " + ".join(f"{_type_name(tensor)} {tuple(tensor.shape)}" for tensor in tensors)
    return " + ".join(str(tensor.numel()) for tensor in tensors) + f" {_type_name(tensors[0])}"


@dataclass(frozen=True)
class Method:
    """A collective of torch's ProcessGroup."""

    operation: str
    check: Callable[..., str]
    """The check of its arguments. gloo itself checks only a part of them, and a wrong one may end the process."""
    options: Callable[[], Any]
    tensors: int = 2
    """Number of its arguments before the options; the first one receives the result."""
    lists: bool = True
    contribution: int = 1
    """Index of the argument that is this rank's contribution."""


METHODS = {
    "allreduce": Method("all_reduce", _check_all_reduce, c10d.AllreduceOptions, 1, contribution=0),
    "allreduce_coalesced": Method(
        "all_reduce", partial(_check_all_reduce, coalesced=True), c10d.AllreduceCoalescedOptions, 1, contribution=0
    ),
    "broadcast": Method("broadcast", _check_broadcast, c10d.BroadcastOptions, 1, contribution=0),
    "reduce": Method("reduce", _check_reduce, c10d.ReduceOptions, 1, contribution=0),
    "allgather": Method("all_gather", _check_all_gather, c10d.AllgatherOptions),
    "allgather_coalesced": Method("all_gather", _check_all_gather_coalesced, c10d.AllgatherOptions),
    "all_gather_single": Method("all_gather", _check_gather_parts, c10d.AllgatherOptions, lists=False),
    "all_gather_single_coalesced": Method("all_gather", _check_gather_parts, c10d.AllgatherOptions),
    "reduce_scatter": Method("reduce_scatter", _check_reduce_scatter, c10d.ReduceScatterOptions),
    "reduce_scatter_single": Method("reduce_scatter", _check_scatter_parts, c10d.ReduceScatterOptions, lists=False),
    "reduce_scatter_single_coalesced": Method("reduce_scatter", _check_scatter_parts, c10d.ReduceScatterOptions),
    "alltoall": Method("all_to_all", _check_all_to_all, c10d.AllToAllOptions),
    "all_to_all_single": Method("all_to_all", _check_all_to_all_single, c10d.AllToAllOptions, 4, lists=False),
    "gather": Method("gather", _check_gather, c10d.GatherOptions),
    "scatter": Method("scatter", _check_scatter, c10d.ScatterOptions, contribution=0),
    "barrier": Method("barrier", lambda group, opts: "barrier", c10d.BarrierOptions, 0),
}
"""The collectives by their names in torch 2.13."""
_OLD_NAMES = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}


def add_methods(group: type[dist.ProcessGroup], make: Callable[[str, str], Callable[..., dist.Work]]) -> None:
    """Set all collectives that this torch knows, under torch's old and new names, as methods of a class of groups.

    `make(name, key)` returns the method, given its name in torch and the key of the collective in METHODS.
    """
    for name, key in ({key: key for key in METHODS} | _OLD_NAMES).items():
        if hasattr(dist.ProcessGroup, name):
            setattr(group, name, _accept_forms(METHODS[key], make(name, key)))
