"""Local SGD: each rank updates its own parameters; after some updates, the changes of all ranks are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from cpuft.comm.compression.embedding_rows import find_embedding
from cpuft.comm.compression.local_sgd import LocalSGD
from cpuft.config.train import TrainConfig
from cpuft.train.exchange.base import Exchange
from cpuft.train.fast.master_weights import fp32_weights


class LocalSGDExchange(Exchange):
    """Average the ranks' parameters, or their fp32 masters, every N updates. Making it is collective, and
    raises CpuftError for a `--grad-compression` that cannot send changes of parameters.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        super().__init__(model, optimizer, config, precision)
        embedding = find_embedding(model)
        compression = "int8" if config.grad_compression == "auto" else config.grad_compression
        words = None if embedding is None else embedding.weight
        with fp32_weights(model, self.trained) as weights:
            self._local = LocalSGD(weights, compression, config.outer_momentum, words)
        self._updates_since_sent = 0

    def reset(self) -> None:
        """Count changes from the parameters of now, as after a checkpoint; unsent changes and momentum are dropped."""
        with fp32_weights(self.bare_model, self.trained):
            self._local.restart()
        self._updates_since_sent = 0

    def average_gradients(self, find_token_ids: Callable[[], Sequence[torch.Tensor]]) -> float:
        """Leave gradients as they are, remember which rows of the word embedding have one, and return 0.0."""
        for tokens in find_token_ids():
            self._local.note_tokens(tokens)
        return 0.0

    @contextmanager
    def common_weights(self) -> Iterator[None]:
        """Give the model the mean of all ranks' parameters inside this context, and its own ones afterwards. Collective
        at its beginning; averages that are under way, and later updates, stay as they are without it.
        """
        with fp32_weights(self.bare_model, self.trained) as weights, torch.no_grad():
            own = [weight.detach().clone() for weight in weights]
            for weight in weights:
                dist.all_reduce(weight)
                weight.div_(dist.get_world_size())
        try:
            yield
        finally:
            with fp32_weights(self.bare_model, self.trained) as weights, torch.no_grad():
                for weight, value in zip(weights, own, strict=True):
                    weight.copy_(value)

    def synchronize_parameters(self, is_due: bool, wait: bool) -> None:
        """Start to send this rank's changes in the background if an average is due; their mean is applied at most
        `--sync-every` updates later. With `wait`, due or not, changes are sent, averaged and applied at once.
        """
        self._updates_since_sent += 1
        is_mean_due = self._updates_since_sent == self.config.sync_every
        if not (is_due or wait or is_mean_due):
            return
        with fp32_weights(self.bare_model, self.trained):
            if wait:
                self._local.finish()
            elif is_due:
                self._local.synchronize()
            else:
                self._local.receive()
        if is_due or wait:
            self._updates_since_sent = 0
