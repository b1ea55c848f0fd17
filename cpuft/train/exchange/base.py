"""The contract of an exchange: what brings the ranks' gradients or parameters together in an update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.optim import Optimizer

from cpuft.config import TrainConfig
from cpuft.train.exchange.optimizer_shards import Parts
from cpuft.train.fast.adamw import clip_gradients


class Exchange:
    """What brings ranks together in an update. As it stands: one rank, and nothing travels.

    To be made when the optimizer has its parameters; an update calls its methods once each, in their order.
    """

    def __init__(self, own: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        self.own, self.optimizer, self.config = own, optimizer, config
        self.model = own
        """What forward passes go through."""
        self.parts: Parts | None = None
        """What this rank holds of the optimizer, where that is not all of it."""

    def begin_anew(self) -> None:
        """Called when parameters, the same on all ranks, were put in the place of those that it was made with."""

    def whole(self) -> AbstractContextManager[object]:
        """Inside, this rank's model has all of its fp32 weights, to be looked at or saved. A collective."""
        return self.parts.whole() if self.parts else nullcontext()

    def stand_by(self) -> None:
        """Give ranks that take a snapshot what they need of this one, which takes none. A collective, with theirs."""
        for _ in self.parts.gather() if self.parts else ():
            pass

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Around each forward and backward pass; gradients may travel in the `last`."""
        return nullcontext()

    def average(self, name_tokens: Callable[[], torch.Tensor]) -> float:
        """Make gradients the mean over ranks of what each has added up.

        Parameters
        ----------
        name_tokens: gives all words that any rank looked up, int64, with repetitions.

        Returns
        -------
        Seconds of backward in which all gradients of this rank were ready.
        """
        return 0.0

    def clip(self) -> None:
        """Scale all gradients down to the norm asked for; 0 asks for none."""
        if self.config.max_grad_norm:
            clip_gradients(self.optimizer, self.own.parameters(), self.config.max_grad_norm)

    def clear(self) -> None:
        """Forget gradients that the optimizer has used."""
        self.optimizer.zero_grad()

    def meet(self, update: int, last: bool) -> None:
        """Bring parameters together after this update, counted from 1, where it is time to; it is after the `last`."""
