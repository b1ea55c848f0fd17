"""Local SGD: ranks train independently and average their parameters every H updates, which sends H times fewer bytes.

Local SGD is by Stich 2018 (arXiv:1805.09767), with the outer momentum of DiLoCo (Douillard et al. 2023,
arXiv:2311.08105): the mean of all ranks' changes is the gradient of an outer optimizer. It is applied one
synchronization later (Douillard et al. 2025, arXiv:2501.18512), so that no rank waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from cpuft.comm.compression.int8 import BlockMean
from cpuft.comm.process_group import ProgressThread
from cpuft.errors import CpuftError, suggest_names

WIRE_TYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
OUTER_LEARNING_RATE = 0.7
"""DiLoCo's value, for its momentum of 0.9."""


class _Numbers:
    """A parameter, and what this rank knows of it: fp32, in its shape."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.common = weight.detach().to(torch.float32, copy=True)
        """The values on which all ranks have agreed."""
        self.base = self.common.clone()
        """The values from which this rank's current changes are counted."""
        self.unsent, self.velocity = torch.zeros_like(self.base), torch.zeros_like(self.base)

    def read_changes(self, place: Any) -> torch.Tensor:
        return self.weight[place].float() - self.base[place]

    def write(self, place: Any, values: torch.Tensor) -> None:
        self.weight[place] = values.to(self.weight.dtype)


class LocalSGD:
    """Synchronizes ranks that train independently. All ranks make one, when all of them have the same parameters.

    All call `synchronize` after every H-th update of the optimizer, and `finish` after the last update. If H grows,
    `receive` in between applies a mean before the next one is sent. `momentum` is that of the outer optimizer
    (Nesterov, with the learning rate 0.7); 0 means the plain mean of all changes. Of `embedding`, one of the
    parameters, only the rows given to `note_tokens` are sent. CpuftError: WIRE_TYPES does not have `compression`.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        compression: str = "int8",
        momentum: float = 0.0,
        embedding: torch.Tensor | None = None,
    ) -> None:
        if compression not in WIRE_TYPES:
            raise CpuftError(f"parameters cannot be sent as {compression}: {suggest_names(compression, WIRE_TYPES)}")
        dense: list[torch.Tensor] = [p for p in parameters if p.requires_grad and p is not embedding]
        self._weights = dense if embedding is None else [*dense, embedding]
        self._embedding, self._type, self._momentum = embedding, WIRE_TYPES[compression], momentum
        self._used_rows = torch.zeros(0 if embedding is None else len(embedding), dtype=torch.bool)
        # A group of its own: in the group of all ranks, small messages of each update would wait behind large ones.
        # Without a timeout, its operations would wait for torch's 30 minutes.
        self._group = dist.new_group(timeout=getattr(dist.group.WORLD, "timeout", None))
        self._thread = ProgressThread("local updates")
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Start anew from the parameters, equal on all ranks; forget momentum, unsent changes and a mean under way."""
        self._numbers = [_Numbers(weight) for weight in self._weights]
        self._receive: Callable[[], None] | None = None
        """Waits for the mean that is under way, and applies it to the common values."""

    def note_tokens(self, tokens: torch.Tensor) -> None:
        """Send the rows of these int64 tokens, equal on all ranks, from now on; does nothing without `embedding`."""
        if self._embedding is not None:
            self._used_rows[tokens.reshape(-1)] = True

    @torch.no_grad()
    def synchronize(self) -> None:
        """Start to send this rank's changes since the last call, and apply the mean of all ranks' previous changes.

        Parameters become those on which all ranks have agreed, plus this rank's latest changes. It waits only if the
        previous mean is not there yet. The first call applies nothing.
        """
        self._receive_pending()
        self._send()
        for one, place in self._select():
            values = one.read_changes(place) + one.common[place]
            one.base[place] = values
            one.write(place, values)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the mean that is under way, if any, and apply it earlier than the next `synchronize` would."""
        if self._receive:
            self._receive_pending()
            for one, place in self._select():
                one.write(place, one.read_changes(place) + one.common[place])
                one.base[place] = one.common[place]

    @torch.no_grad()
    def finish(self) -> None:
        """Average the latest changes without outer momentum, and wait: all ranks get equal parameters. Collective."""
        self._receive_pending()
        momentum, self._momentum = self._momentum, 0.0
        self._send()
        self._receive_pending()
        self._momentum = momentum
        for one, place in self._select():
            one.write(place, one.common[place])
            one.base[place] = one.common[place]

    def _select(self) -> list[tuple[_Numbers, Any]]:
        """Return for each parameter an index of what is sent: the noted rows of the embedding, all of the others."""
        rows = self._used_rows.nonzero()[:, 0]
        return [(one, rows if one.weight is self._embedding else ...) for one in self._numbers]

    def _send(self) -> None:
        selected = self._select()
        parts = [one.read_changes(place).add_(one.unsent[place]) for one, place in selected]
        shapes, message = [part.shape for part in parts], torch.cat([part.reshape(-1) for part in parts])

        def split(numbers: torch.Tensor) -> list[tuple[_Numbers, Any, torch.Tensor]]:
            found = torch.split(numbers, [shape.numel() for shape in shapes])
            return [(*one, part.view(shape)) for one, part, shape in zip(selected, found, shapes, strict=True)]

        if self._type == torch.int8:
            blocks = BlockMean(message, self._group)
            blocks.send()
            averaged = self._thread.submit(blocks.average_share)

            def receive() -> None:
                averaged.result()
                mean = blocks.finish()
                for one, place, part in split(blocks.error):
                    one.unsent[place] = part
                self._apply_mean(split(mean))
        else:
            packed = message.to(self._type).div_(self._group.size())
            work = dist.all_reduce(packed, group=self._group, async_op=True)
            assert work is not None

            def receive() -> None:
                work.wait()
                self._apply_mean(split(packed.float()))

        self._receive = receive

    def _receive_pending(self) -> None:
        if self._receive:
            self._receive()
        self._receive = None

    def _apply_mean(self, means: Iterable[tuple[_Numbers, Any, torch.Tensor]]) -> None:
        """Apply the mean to the common values: by torch.optim.SGD's formula, or as it is without momentum."""
        for one, place, mean in means:
            if self._momentum:
                velocity = one.velocity[place] * self._momentum + mean
                one.velocity[place] = velocity
                # Not by `alpha`: on some CPUs torch joins its product and sum, and all ranks need the same bits.
                mean = mean.add_(velocity * self._momentum).mul_(OUTER_LEARNING_RATE)
            one.common[place] += mean
