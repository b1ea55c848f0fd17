"""Gradients whose mean is applied an update late, so that a whole step hides their way, as 8-bit blocks.

A delay of one update is that of pipelined SGD (Li et al. 2018, Pipe-SGD, arXiv:1811.03619).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from cpuft.comm.gradients.blocks import BackgroundMean
from cpuft.comm.group.queues import Queue


class LateGradients:
    """Averages gradients over the ranks while these compute the next. Making one is a collective, like `exchange`.

    In a loop of one's own, without DistributedDataParallel: make one when all ranks have the same parameters, and call
    `exchange` after each backward and before the optimizer's step. The last update's gradients are never applied.

    Parameters
    ----------
    parameters: what is trained; each has a gradient in every update.
    words: one of the parameters, a look-up of which only rows are sent that an update's tokens name.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], words: torch.Tensor | None = None) -> None:
        self._dense = [p for p in parameters if p.requires_grad and p is not words]
        self._words = words
        self._group, self._queue = dist.new_group(), Queue("late gradients")
        self._unsent = torch.zeros(sum(p.numel() for p in self._dense))
        self._unsent_words = torch.zeros(0, 1) if words is None else torch.zeros(words.shape)
        self._rows = torch.zeros(0, dtype=torch.int64)
        self._sending: BackgroundMean | None = None

    @torch.no_grad()
    def exchange(self, tokens: torch.Tensor | None = None) -> None:
        """Send this update's gradients, and put the last one's mean in their place; None in the first.

        Parameters
        ----------
        tokens: all that any rank has looked up for these gradients; the same set on every rank.
        """
        mean, before = None, self._rows
        if self._sending is not None:
            mean, missed = self._sending.finish()
            self._unsent.copy_(missed[: len(self._unsent)])
            self._unsent_words[before] = missed[len(self._unsent) :].view(len(before), self._unsent_words.shape[1])
        self._rows = before[:0] if self._words is None or tokens is None else torch.unique(tokens)
        self._sending = BackgroundMean(self._pack(), self._group, self._queue)
        self._receive(mean, before)

    def _pack(self) -> torch.Tensor:
        """This rank's gradients, and what was not sent of them before."""
        dense = torch.cat([_gradient(parameter).reshape(-1).float() for parameter in self._dense])
        parts = [dense.add_(self._unsent)]
        if self._words is not None:
            parts.append((_gradient(self._words)[self._rows] + self._unsent_words[self._rows]).reshape(-1))
        return torch.cat(parts)

    def _receive(self, mean: torch.Tensor | None, rows: torch.Tensor) -> None:
        everything = [*self._dense, *([] if self._words is None else [self._words])]
        if mean is None:
            for parameter in everything:
                parameter.grad = None
            return
        sizes = [parameter.numel() for parameter in self._dense]
        *dense, words = torch.split(mean, [*sizes, len(mean) - sum(sizes)])
        for parameter, part in zip(self._dense, dense, strict=True):
            _gradient(parameter).copy_(part.view(parameter.shape))
        if self._words is not None:
            gradient = _gradient(self._words).zero_()
            gradient[rows] = words.view(len(rows), *gradient.shape[1:]).to(gradient.dtype)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
