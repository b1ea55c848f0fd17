"""What makes the next update the same on any number of ranks, as one block of memory: fp32 weights, AdamW's moments.

Weights that are not trained are not in it; its header has their checksum, so that it fits no other ones.

The block is a safetensors file as it stands (a header in JSON, then all tensors without gaps), so that it is written
and read in one piece; the library's own writer holds the GIL meanwhile, and training would wait.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cpuft.errors import CpuftError
from cpuft.train.exchange.optimizer_shards import MOMENTS, WEIGHTS, OptimizerShards
from cpuft.train.fast.adamw import MASTERS_ATTRIBUTE, MasterWeights

_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_STEP = "step"
"""AdamW's count of the updates of each parameter, all in one tensor."""


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte of the block at which the tensor begins."""

    def view(self, block: Tensor) -> Tensor:
        nbytes = self.dtype.itemsize * torch.Size(self.shape).numel()
        return block[self.start : self.start + nbytes].view(self.dtype).view(self.shape)


class TrainingState:
    """The weights of a model and the moments of its AdamW, and their places in a block.

    `parts`: where ranks have parts of them only. Their block is the same.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, parts: OptimizerShards | None = None) -> None:
        self._model, self._optimizer, self._parts = model, optimizer, parts
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        # Not asked for a state_dict, which gives whole weights: there may be parts of them only.
        for prefix, module in model.named_modules():
            for name in module._non_persistent_buffers_set:
                buffers.pop(f"{prefix}.{name}".removeprefix("."), None)
        frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        found: dict[str, Tensor] = parameters | buffers
        self._weights = {name: tensor for name, tensor in found.items() if name not in frozen}
        everything = parts.parameters if parts else [p for group in optimizer.param_groups for p in group["params"]]
        stepped = set(map(id, everything))
        self._stepped = {name: p for name, p in parameters.items() if id(p) in stepped}
        self.header, self._places = _lay_out(self._list_tensors(), checksum_frozen(frozen))
        self.nbytes = len(self.header) + sum(self._sizes())
        """Of a block."""

    def _list_tensors(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        masters: MasterWeights | None = getattr(self._model, MASTERS_ATTRIBUTE, None)
        wide = masters.parameters if masters else {}
        found = [
            (f"{WEIGHTS}.{name}", torch.float32 if name in wide else tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._weights.items()
        ]
        for moment in MOMENTS:
            found += [(f"{moment}.{name}", torch.float32, tuple(p.shape)) for name, p in self._stepped.items()]
        return [*found, (_STEP, torch.float32, (len(self._stepped),))]

    def _sizes(self) -> list[int]:
        return [place.dtype.itemsize * torch.Size(place.shape).numel() for place in self._places.values()]

    def _masters(self) -> dict[str, Tensor]:
        """The fp32 masters of bf16 parameters, by name, as far as this rank has them whole."""
        masters: MasterWeights | None = getattr(self._model, MASTERS_ATTRIBUTE, None)
        if masters is None:
            return {}
        return {name: value for name, p in masters.parameters.items() if (value := masters.get(p)) is not None}

    def _place(self, block: Tensor, kind: str, name: str) -> Tensor:
        return self._places[f"{kind}.{name}"].view(block)

    @torch.no_grad()
    def snapshot(self, block: Tensor) -> None:
        """Copy all of it into a block, uint8 of shape (nbytes,). With parts, all others `stand_by` meanwhile."""
        block[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        masters = self._masters()
        for name, tensor in self._weights.items():
            self._place(block, WEIGHTS, name).copy_(masters.get(name, tensor))
        steps = self._places[_STEP].view(block)
        if self._parts:
            names = {parameter: name for name, parameter in self._stepped.items()}
            for kind, parameter, value in self._parts.gather_state():
                self._place(block, kind, names[parameter]).copy_(value)
            steps.fill_(self._parts.step)
            return
        for number, (name, parameter) in enumerate(self._stepped.items()):
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            steps[number] = float(state.get(_STEP, 0))
            for moment in MOMENTS:
                place = self._place(block, moment, name)
                place.copy_(state[moment]) if state else place.zero_()

    @torch.no_grad()
    def restore(self, block: Tensor) -> None:
        """Take all of it from a block with this header."""
        values = {name: self._place(block, WEIGHTS, name) for name in self._weights}
        # Not strict: a weight that goes by two names is there once.
        self._model.load_state_dict(values, strict=False)
        steps = self._places[_STEP].view(block)
        if self._parts:
            names = {parameter: name for name, parameter in self._stepped.items()}
            self._parts.restore(lambda kind, parameter: self._place(block, kind, names[parameter]), steps.max())
            return
        for step, (name, parameter) in zip(steps, self._stepped.items()):
            if step:
                moments = {moment: self._place(block, moment, name).clone() for moment in MOMENTS}
                self._optimizer.state[parameter] = {_STEP: step.clone(), **moments}


def checksum_frozen(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of these weights, rounded to bf16, as which the fast path keeps some of them; empty without any."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().to(torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if tensors else ""


def pack_tensors(tensors: Mapping[str, Tensor]) -> Tensor:
    """These tensors in one block, a safetensors file as it stands. Raises CpuftError: one has a type without a name."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CpuftError(f"{name} is of type {tensor.dtype}, which is not kept: make it one of another type before")
    header, places = _lay_out([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    block = torch.empty(len(header) + sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for name, tensor in tensors.items():
        places[name].view(block).copy_(tensor)
    return block


def _lay_out(
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]], frozen: str = ""
) -> tuple[bytes, dict[str, _Place]]:
    """A safetensors header of these tensors, and where in a block each one stands: the widest type first, so that
    every tensor is aligned. `frozen`: checksum of what has no place in it."""
    tensors = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    said: dict[str, Any] = {"__metadata__": {"frozen": frozen}} if frozen else {}
    starts, end = list[int](), 0
    for name, dtype, shape in tensors:
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        starts.append(start)
        said[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(said).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {name: _Place(dtype, shape, len(header) + start) for (name, dtype, shape), start in zip(tensors, starts)}
    return header, places
