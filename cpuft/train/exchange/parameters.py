"""Parameters are averaged now and then: ranks train apart meanwhile, each on its own gradients."""

from __future__ import annotations

from cpuft.comm.gradients.local_updates import average_parameters
from cpuft.train.exchange import Exchange
from cpuft.train.fast import fp32_weights


class ParameterExchange(Exchange):
    """Ranks meet every `sync_every` updates."""

    def meet(self, update: int, last: bool) -> None:
        """The mean of fp32 weights, where the model has them."""
        if last or update % self.config.sync_every == 0:
            with fp32_weights(self.own):
                average_parameters(self.own.parameters())
