"""The state of a training as one block of memory, with which the next update is the same on any number of ranks.

It has the fp32 weights and AdamW's moments, and in its header a checksum of the frozen weights, which are not in it.
The block is a complete safetensors file, written and read in one piece; the library's writer would hold the GIL.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cpuft.train.exchange.optimizer_shards import MOMENTS, WEIGHTS, OptimizerShards
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE, MasterWeights

TYPE_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
"""Names in safetensors files of all dtypes that a block can hold."""
_STEP = "step"
"""AdamW's number of updates of each parameter, all in one tensor."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in a block; `start` is in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """The tensor's size in the block."""
        return self.dtype.itemsize * math.prod(self.shape)

    def view(self, block: Tensor) -> Tensor:
        """Return the tensor, which shares the memory of the block, uint8 of shape (bytes,)."""
        return block[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


class TrainingState:
    """The weights of a model and the moments of its AdamW, and where each lies in a block; nothing is copied yet.

    The block is the same with `shards`, those of a sharded optimizer, as without. Raises KeyError if the model has a
    tensor of a dtype that blocks cannot hold, such as a complex one.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, shards: OptimizerShards | None = None) -> None:
        self._model, self._optimizer, self._shards = model, optimizer, shards
        self._masters: MasterWeights | None = getattr(model, MASTERS_ATTRIBUTE, None)
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        # `state_dict` would need all fp32 weights, of which this rank may have shards only.
        for prefix, module in model.named_modules():
            for name in module._non_persistent_buffers_set:
                buffers.pop(f"{prefix}.{name}".removeprefix("."), None)
        frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
        found: dict[str, Tensor] = parameters | buffers
        self._weights = {name: tensor for name, tensor in found.items() if name not in frozen}
        trained = {*(shards.parameters if shards else [p for group in optimizer.param_groups for p in group["params"]])}
        self._trained = {parameter: name for name, parameter in parameters.items() if parameter in trained}
        self.header, self._places = lay_out(self._list_tensors(), _checksum_frozen(frozen))
        """The first bytes of every block: names, dtypes and shapes of the tensors, and the frozen weights' checksum."""
        self.nbytes = len(self.header) + sum(place.nbytes for place in self._places.values())

    def _list_tensors(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        with_masters = self._masters.parameters if self._masters else {}
        found = [
            (f"{WEIGHTS}.{name}", torch.float32 if name in with_masters else tensor.dtype, tuple(tensor.shape))
            for name, tensor in self._weights.items()
        ]
        for moment in MOMENTS:
            found += [(f"{moment}.{name}", torch.float32, tuple(p.shape)) for p, name in self._trained.items()]
        return [*found, (_STEP, torch.float32, (len(self._trained),))]

    def _view(self, block: Tensor, *names: str) -> Tensor:
        return self._places[".".join(names)].view(block)

    @torch.no_grad()
    def snapshot(self, block: Tensor) -> None:
        """Copy the header and the state into a block, uint8 of shape (nbytes,).

        With shards this is collective: other ranks call this, too, or `Exchange.contribute_to_checkpoint`.
        """
        block[: len(self.header)] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for name, tensor in self._weights.items():
            master = self._masters.get(tensor) if self._masters else None  # None also if this rank has shards only
            self._view(block, WEIGHTS, name).copy_(tensor if master is None else master)
        steps = self._view(block, _STEP)
        if self._shards:
            for kind, parameter, value in self._shards.gather_state():
                self._view(block, kind, self._trained[parameter]).copy_(value)
            steps.fill_(self._shards.step)
            return
        for number, (parameter, name) in enumerate(self._trained.items()):
            state: dict[str, Any] = self._optimizer.state.get(parameter, {})
            steps[number] = float(state.get(_STEP, 0))
            for moment in MOMENTS:
                place = self._view(block, moment, name)
                place.copy_(state[moment]) if state else place.zero_()

    @torch.no_grad()
    def restore(self, block: Tensor) -> None:
        """Copy the state from a block into model and optimizer. The caller has compared its beginning with `header`."""
        values = {name: self._view(block, WEIGHTS, name) for name in self._weights}
        # Not strict, because a weight with two names is in the block once.
        self._model.load_state_dict(values, strict=False)
        steps = self._view(block, _STEP)
        if self._shards:
            self._shards.restore(lambda kind, p: self._view(block, kind, self._trained[p]), steps.max())
            return
        for step, (parameter, name) in zip(steps, self._trained.items()):
            if step:
                moments = {moment: self._view(block, moment, name).clone() for moment in MOMENTS}
                self._optimizer.state[parameter] = {_STEP: step.clone(), **moments}


def _checksum_frozen(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of these weights, rounded to bf16 as the fast path stores some; "" if there are none."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().to(torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if tensors else ""


def pack_tensors(tensors: Mapping[str, Tensor]) -> Tensor:
    """Copy tensors into the bytes of a safetensors file: uint8, (bytes,). KeyError: a dtype is not in TYPE_NAMES."""
    header, places = lay_out([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
    block = torch.empty(len(header) + sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for name, tensor in tensors.items():
        places[name].view(block).copy_(tensor)
    return block


def lay_out(
    tensors: list[tuple[str, torch.dtype, tuple[int, ...]]], frozen: str = ""
) -> tuple[bytes, dict[str, TensorPlace]]:
    """Return a safetensors header, and each tensor's place in the file. KeyError: a dtype is not in TYPE_NAMES."""
    header: dict[str, Any] = {"__metadata__": {"frozen": frozen}} if frozen else {}
    places, end = dict[str, TensorPlace](), 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: -tensor[1].itemsize):  # so that every one is aligned
        places[name] = place = TensorPlace(dtype, shape, end)
        end += place.nbytes
        header[name] = {"dtype": TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [place.start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    encoded = len(text).to_bytes(8, "little") + text
    return encoded, {name: replace(place, start=len(encoded) + place.start) for name, place in places.items()}
