"""Ranks train apart, and meet every H updates: H times fewer bytes, which travel while ranks train on.

Local SGD (Stich 2018, arXiv:1805.09767) with DiLoCo's outer momentum (Douillard et al. 2023, arXiv:2311.08105): what
ranks have gained is averaged, and the mean is an outer optimizer's gradient. It is applied one meeting later (Douillard
et al. 2025, arXiv:2501.18512, overlap likewise), so that nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from cpuft.comm.compression.int8 import BackgroundMean
from cpuft.comm.process_group import ProgressThread
from cpuft.errors import CpuftError, near_names

DELTAS = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
"""What changes of parameters may be sent as."""
OUTER_RATE = 0.7
"""DiLoCo's, as is the momentum of 0.9."""


class LocalUpdates:
    """Brings ranks together every so many updates of their own. Making one, `meet` and `finish` are collectives.

    In a loop of one's own, without DistributedDataParallel: make one when all ranks have the same parameters, call
    `meet` after every H-th update of the optimizer and `finish` after the last; then all have the same again.

    Parameters
    ----------
    parameters: what is trained.
    compression: none, bf16, fp16, or int8: blocks with error feedback.
    momentum: of the outer optimizer, Nesterov's; 0: the plain mean of what ranks have gained.
    words: one of the parameters, a look-up of which only rows are sent that `name` was told of.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        compression: str = "int8",
        momentum: float = 0.0,
        words: torch.Tensor | None = None,
    ) -> None:
        if compression not in DELTAS:
            raise CpuftError(
                f"changes of parameters cannot be sent as {compression}: {near_names(compression, DELTAS)}"
            )
        self._dense = [p for p in parameters if p.requires_grad and p is not words]
        self._words, self._type, self._momentum = words, DELTAS[compression], momentum
        self._named = torch.zeros(0 if words is None else len(words), dtype=torch.bool)
        # Of its own: on the world's, small messages of each update would wait behind a large one.
        self._group = dist.new_group()
        self._queue = ProgressThread("local updates")
        self.begin_anew()

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Take the parameters as they are, the same on all ranks, for those from which training begins."""
        everything = self._named.new_ones(len(self._named)).nonzero()[:, 0]
        self._common = self._read(everything)
        self._base = self._common.clone()
        self._unsent, self._velocity = torch.zeros_like(self._base), torch.zeros_like(self._base)
        self._arrival: Callable[[], None] | None = None

    def name(self, tokens: torch.Tensor) -> None:
        """Words that any rank has looked up: int64, of any shape; the same on all ranks."""
        if self._words is not None:
            self._named[tokens.reshape(-1)] = True

    @torch.no_grad()
    def meet(self) -> None:
        """Send what this rank has gained since it last met, and take in what all had gained then."""
        rows = self._rows()
        gained = self._gain(rows)
        self._arrive()
        self._send(rows, gained + self._pick(self._unsent, rows))
        self._settle(rows, gained)

    @torch.no_grad()
    def finish(self) -> None:
        """Meet and wait for it, so that all ranks have the same parameters. They may train on, and meet again."""
        rows = self._rows()
        gained = self._gain(rows)
        self._arrive()
        momentum, self._momentum = self._momentum, 0.0
        self._send(rows, gained + self._pick(self._unsent, rows))
        self._arrive()
        self._momentum = momentum
        self._settle(rows, torch.zeros(()))

    def _rows(self) -> torch.Tensor:
        return self._named.nonzero()[:, 0]

    def _gain(self, rows: torch.Tensor) -> torch.Tensor:
        return self._read(rows).sub_(self._pick(self._base, rows))

    def _settle(self, rows: torch.Tensor, gained: torch.Tensor) -> None:
        """Train on from what all have in common, and what this rank has gained beside it."""
        values = self._pick(self._common, rows).add_(gained)
        self._place(self._base, rows, values)
        self._write(rows, values)

    def _send(self, rows: torch.Tensor, message: torch.Tensor) -> None:
        if self._type == torch.int8:
            self._arrival = self._send_blocks(rows, message)
            return
        packed = message.to(self._type).div_(self._group.size())
        work = dist.all_reduce(packed, group=self._group, async_op=True)
        assert work is not None

        def arrive() -> None:
            work.wait()
            self._step(rows, packed.float())

        self._arrival = arrive

    def _send_blocks(self, rows: torch.Tensor, message: torch.Tensor) -> Callable[[], None]:
        sending = BackgroundMean(message, self._group, self._queue)

        def arrive() -> None:
            mean, missed = sending.finish()
            self._place(self._unsent, rows, missed)
            self._step(rows, mean)

        return arrive

    def _arrive(self) -> None:
        if self._arrival:
            self._arrival()
        self._arrival = None

    def _step(self, rows: torch.Tensor, mean: torch.Tensor) -> None:
        """The outer optimizer's, torch.optim.SGD's formula; without momentum ranks' mean as it is."""
        if self._momentum:
            velocity = self._pick(self._velocity, rows).mul_(self._momentum).add_(mean)
            self._place(self._velocity, rows, velocity)
            mean = mean.add_(velocity, alpha=self._momentum).mul_(OUTER_RATE)
        self._place(self._common, rows, self._pick(self._common, rows).add_(mean))

    # Everything kept is one vector: the dense parameters', then all words'. What is sent is the vector of some words.

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        parts = [parameter.detach().reshape(-1).float() for parameter in self._dense]
        if self._words is not None:
            parts.append(self._words.detach()[rows].reshape(-1).float())
        return torch.cat(parts)

    def _write(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        sizes = [parameter.numel() for parameter in self._dense]
        *dense, words = torch.split(values, [*sizes, len(values) - sum(sizes)])
        for parameter, value in zip(self._dense, dense, strict=True):
            parameter.copy_(value.view(parameter.shape))
        if self._words is not None:
            self._words[rows] = words.view(len(rows), *self._words.shape[1:]).to(self._words.dtype)

    def _halves(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a vector: the dense part, and the words, shape (words, width)."""
        dense = sum(parameter.numel() for parameter in self._dense)
        return vector[:dense], vector[dense:].view(max(1, len(self._named)), -1)

    def _pick(self, vector: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        dense, words = self._halves(vector)
        return torch.cat([dense, words[rows].reshape(-1)])

    def _place(self, vector: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
        dense, words = self._halves(vector)
        dense.copy_(values[: len(dense)])
        words[rows] = values[len(dense) :].view(len(rows), words.shape[1])
