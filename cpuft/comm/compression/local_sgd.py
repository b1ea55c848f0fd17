"""Local SGD: ranks train independently and average their parameters every H updates, which sends H times fewer bytes.

Local SGD is by Stich 2018 (arXiv:1805.09767), with the outer momentum of DiLoCo (Douillard et al. 2023,
arXiv:2311.08105): the mean of all ranks' changes is the gradient of an outer optimizer. It is applied one
synchronization later (Douillard et al. 2025, arXiv:2501.18512), so that no rank waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from cpuft.comm.compression.int8 import BackgroundMean
from cpuft.comm.process_group import ProgressThread
from cpuft.errors import CpuftError, suggest_names

WIRE_TYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
"""Compression -> type in which changes of parameters are sent."""
OUTER_LEARNING_RATE = 0.7
"""DiLoCo's value, for its momentum of 0.9."""


class LocalSGD:
    """Synchronizes ranks that train independently. All ranks make one, when all of them have the same parameters.

    In a training loop without DistributedDataParallel, all call `synchronize` after every H-th update of the optimizer,
    and `finish` after the last update, which makes the parameters the same again. If H grows, `receive` in between
    applies a mean before the next one is sent. CpuftError: changes cannot be sent with this compression.

    Parameters
    ----------
    parameters: those without requires_grad are left out.
    compression: none (fp32), bf16, fp16, or int8, which is blocks with error feedback.
    momentum: of the outer optimizer (Nesterov, with the learning rate 0.7); 0 means the plain mean of all changes.
    embedding: one of the parameters, a word embedding of which only the rows given to `note_tokens` are sent.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        compression: str = "int8",
        momentum: float = 0.0,
        embedding: torch.Tensor | None = None,
    ) -> None:
        if compression not in WIRE_TYPES:
            raise CpuftError(
                f"changes of parameters cannot be sent as {compression}: {suggest_names(compression, WIRE_TYPES)}"
            )
        self._dense = [p for p in parameters if p.requires_grad and p is not embedding]
        self._embedding, self._type, self._momentum = embedding, WIRE_TYPES[compression], momentum
        self._used_rows = torch.zeros(0 if embedding is None else len(embedding), dtype=torch.bool)
        # A group of its own: in the group of all ranks, small messages of each update would wait behind large ones.
        # Without a timeout, its operations would wait for torch's 30 minutes.
        self._group = dist.new_group(timeout=getattr(dist.group.WORLD, "timeout", None))
        self._thread = ProgressThread("local updates")
        self.restart()

    # Each saved vector holds the dense parameters, followed by all embedding rows. A message holds the dense part and
    # only some of the rows.

    @torch.no_grad()
    def restart(self) -> None:
        """Start anew from the current parameters, the same on all ranks, and forget a mean that is under way."""
        all_rows = self._used_rows.new_ones(len(self._used_rows)).nonzero()[:, 0]
        self._common = self._read_parameters(all_rows)
        """The parameters on which all ranks have agreed."""
        self._base = self._common.clone()
        """The parameters from which this rank's current changes are counted."""
        self._unsent, self._velocity = torch.zeros_like(self._base), torch.zeros_like(self._base)
        self._receive: Callable[[], None] | None = None
        """Waits for the mean that is under way, and applies it to the common parameters."""

    def note_tokens(self, tokens: torch.Tensor) -> None:
        """Note int64 tokens that any rank has looked up, the same on all ranks: later calls send their rows, too."""
        if self._embedding is not None:
            self._used_rows[tokens.reshape(-1)] = True

    @torch.no_grad()
    def synchronize(self) -> None:
        """Start to send this rank's changes since the last call, and apply the mean of all ranks' previous changes.

        Parameters become those on which all ranks have agreed, plus this rank's latest changes. It waits only if the
        previous mean is not there yet. The first call applies nothing.
        """
        rows = self._used_rows.nonzero()[:, 0]
        changes = self._read_changes(rows)
        self._receive_pending()
        self._send(rows, changes + self._pick(self._unsent, rows))
        self._continue_from_common(rows, changes)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the mean that is under way, if any, and apply it earlier than the next `synchronize` would."""
        if self._receive:
            rows = self._used_rows.nonzero()[:, 0]
            changes = self._read_changes(rows)
            self._receive_pending()
            values = self._pick(self._common, rows)
            self._put(self._base, rows, values)
            self._write_parameters(rows, values + changes)

    @torch.no_grad()
    def finish(self) -> None:
        """Send this rank's changes and wait for all means, so that all ranks have the same parameters.

        The last changes are averaged without outer momentum. What int8 has not sent stays for the next call.
        """
        rows = self._used_rows.nonzero()[:, 0]
        changes = self._read_changes(rows)
        self._receive_pending()
        momentum, self._momentum = self._momentum, 0.0
        self._send(rows, changes + self._pick(self._unsent, rows))
        self._receive_pending()
        self._momentum = momentum
        self._continue_from_common(rows, torch.zeros(()))

    def _read_changes(self, rows: torch.Tensor) -> torch.Tensor:
        return self._read_parameters(rows).sub_(self._pick(self._base, rows))

    def _continue_from_common(self, rows: torch.Tensor, changes: torch.Tensor) -> None:
        """Set the parameters to the common ones plus this rank's changes that are still under way."""
        values = self._pick(self._common, rows).add_(changes)
        self._put(self._base, rows, values)
        self._write_parameters(rows, values)

    def _send(self, rows: torch.Tensor, message: torch.Tensor) -> None:
        if self._type == torch.int8:
            self._receive = self._send_blocks(rows, message)
            return
        packed = message.to(self._type).div_(self._group.size())
        work = dist.all_reduce(packed, group=self._group, async_op=True)
        assert work is not None

        def receive() -> None:
            work.wait()
            self._apply_mean(rows, packed.float())

        self._receive = receive

    def _send_blocks(self, rows: torch.Tensor, message: torch.Tensor) -> Callable[[], None]:
        sending = BackgroundMean(message, self._group, self._thread)

        def receive() -> None:
            mean, error = sending.finish()
            self._put(self._unsent, rows, error)
            self._apply_mean(rows, mean)

        return receive

    def _receive_pending(self) -> None:
        if self._receive:
            self._receive()
        self._receive = None

    def _apply_mean(self, rows: torch.Tensor, mean: torch.Tensor) -> None:
        """Apply the mean to the common parameters: by torch.optim.SGD's formula, or as it is without momentum."""
        if self._momentum:
            velocity = self._pick(self._velocity, rows).mul_(self._momentum).add_(mean)
            self._put(self._velocity, rows, velocity)
            # Not by `alpha`: on some CPUs torch joins its product and sum, and all ranks need the same bits.
            mean = mean.add_(velocity * self._momentum).mul_(OUTER_LEARNING_RATE)
        self._put(self._common, rows, self._pick(self._common, rows).add_(mean))

    def _read_parameters(self, rows: torch.Tensor) -> torch.Tensor:
        parts = [parameter.detach().reshape(-1).float() for parameter in self._dense]
        if self._embedding is not None:
            parts.append(self._embedding.detach()[rows].reshape(-1).float())
        return torch.cat(parts)

    def _write_parameters(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        sizes = [parameter.numel() for parameter in self._dense]
        *dense, embedded = torch.split(values, [*sizes, len(values) - sum(sizes)])
        for parameter, value in zip(self._dense, dense, strict=True):
            parameter.copy_(value.view(parameter.shape))
        if self._embedding is not None:
            self._embedding[rows] = embedded.view(len(rows), *self._embedding.shape[1:]).to(self._embedding.dtype)

    def _view_parts(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a saved vector: the dense part, and the embedding, shape (rows, width)."""
        dense = sum(parameter.numel() for parameter in self._dense)
        return vector[:dense], vector[dense:].view(max(1, len(self._used_rows)), -1)

    def _pick(self, vector: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        dense, embedding = self._view_parts(vector)
        return torch.cat([dense, embedding[rows].reshape(-1)])

    def _put(self, vector: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        dense, embedding = self._view_parts(vector)
        dense.copy_(values[: len(dense)])
        embedding[rows] = values[len(dense) :].view(len(rows), embedding.shape[1])
