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
from cpuft.train.fast.masters import MASTERS_ATTRIBUTE, Masters

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
_MOMENTS = ("exp_avg", "exp_avg_sq")
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


class State:
    """The weights of a model and the moments of its AdamW, and their places in a block."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        parameters, kept = dict(model.named_parameters()), model.state_dict().keys()
        found = {name: tensor for name, tensor in (parameters | dict(model.named_buffers())).items() if name in kept}
        frozen = {name: tensor for name, tensor in found.items() if name in parameters and not tensor.requires_grad}
        self._weights = {name: tensor for name, tensor in found.items() if name not in frozen}
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._stepped = {name: p for name, p in parameters.items() if id(p) in stepped}
        self.header, self._places = _lay_out(self._list_tensors(), checksum_frozen(frozen))
        self.nbytes = len(self.header) + sum(self._sizes())
        """Of a block."""

    def _list_tensors(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        masters = self._masters()
        found = [
            (f"model.{name}", torch.float32 if name in masters else tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._weights.items()
        ]
        for moment in _MOMENTS:
            found += [(f"{moment}.{name}", torch.float32, tuple(p.shape)) for name, p in self._stepped.items()]
        return [*found, (_STEP, torch.float32, (len(self._stepped),))]

    def _sizes(self) -> list[int]:
        return [place.dtype.itemsize * torch.Size(place.shape).numel() for place in self._places.values()]

    def _masters(self) -> dict[str, Tensor]:
        """The fp32 masters of bf16 parameters, by name."""
        masters: Masters | None = getattr(self._model, MASTERS_ATTRIBUTE, None)
        if masters is None:
            return {}
        return {name: value for name, p in masters.parameters.items() if (value := masters.get(p)) is not None}

    @torch.no_grad()
    def snapshot(self, block: Tensor) -> None:
        """Copy all of it into a block, uint8 of shape (nbytes,)."""
        block[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        masters = self._masters()
        for name, tensor in self._weights.items():
            self._places[f"model.{name}"].view(block).copy_(masters.get(name, tensor))
        steps = self._places[_STEP].view(block)
        for number, (name, parameter) in enumerate(self._stepped.items()):
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            steps[number] = float(state.get(_STEP, 0))
            for moment in _MOMENTS:
                place = self._places[f"{moment}.{name}"].view(block)
                place.copy_(state[moment]) if state else place.zero_()

    @torch.no_grad()
    def restore(self, block: Tensor) -> None:
        """Take all of it from a block with this header."""
        values = {name: self._places[f"model.{name}"].view(block) for name in self._weights}
        # Not strict: a weight that goes by two names is there once.
        self._model.load_state_dict(values, strict=False)
        for step, (name, parameter) in zip(self._places[_STEP].view(block), self._stepped.items()):
            if step:
                moments = {moment: self._places[f"{moment}.{name}"].view(block).clone() for moment in _MOMENTS}
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
