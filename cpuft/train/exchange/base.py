"""The contract of an exchange: what brings the ranks' gradients or parameters together in an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch.optim import Optimizer

from cpuft.config.train import TrainConfig
from cpuft.train.exchange.optimizer_shards import OptimizerShards
from cpuft.train.fast.adamw import clip_gradients


class Exchange:
    """What brings ranks together in an update. This class itself is the exchange of one rank, which sends nothing.

    An exchange is made after the optimizer has the model's parameters, on all ranks together. In every update the
    training loop calls, on all ranks and in this order: `begin_pass` before each forward and backward pass,
    `average_gradients`, `clip_gradients`, the optimizer's step, `clear_gradients` and `synchronize_parameters`. Before
    an evaluation, a comparison of parameters, a checkpoint or the end, it calls `finish_messages`. Between updates it
    may call `full_weights`, `common_weights` and `contribute_to_checkpoint`. Subclasses override what differs from one
    rank alone. `precision` is bf16, fp32 or int8.
    """

    sends_gradients: ClassVar[bool] = False
    """Whether gradients are sent in every update, so that `--grad-compression auto` has something to choose."""
    allows_warm_up: ClassVar[bool] = True
    """Whether a backward pass outside of an update is harmless, as the loop makes one before the first update."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, config: TrainConfig, precision: str) -> None:
        self.config = config
        self.bare_model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        """The trained parameters, kept because walking through all modules takes a millisecond."""
        self.forward_model = model
        """What forward passes go through: the model or a wrapper around it."""
        self.optimizer = optimizer
        """The optimizer that the loop steps: the given one or a wrapper around it."""
        self.shards: OptimizerShards | None = None
        """This rank's shards of the optimizer state; None if each rank has all of it."""

    def reset(self) -> None:
        """Forget unsent changes, here none, after all ranks got the same new parameters, as from a checkpoint."""

    def full_weights(self) -> AbstractContextManager[object]:
        """Return a context in which this rank's model has all of its fp32 weights, to read or save.

        With shards it is collective: entering gathers the fp32 weights of bf16 parameters. Without, it does nothing.
        """
        return self.shards.full_weights() if self.shards else nullcontext()

    def common_weights(self) -> AbstractContextManager[object]:
        """Return a context in which all ranks' models have the same parameters, to evaluate or to store them.

        Afterwards each rank has its own parameters again, and the training goes on as without the context. Here it does
        nothing, as parameters are the same between updates; in a subclass where ranks differ, it is collective.
        """
        return nullcontext()

    def contribute_to_checkpoint(self) -> None:
        """Take part in the snapshots that other ranks make, while this rank makes none.

        Collective with shards: it blocks until all shards have been gathered. Without shards it does nothing.
        """
        for _ in self.shards.gather_state() if self.shards else ():
            pass

    def begin_pass(self, is_last: bool) -> None:
        """Begin a forward and backward pass; in the last one of an update, gradients are sent. Here it does nothing."""

    def average_gradients(self, find_token_ids: Callable[[], Sequence[torch.Tensor]]) -> float:
        """Make the gradients the mean over ranks of the sums that each rank has accumulated, and block until they are.

        With powersgd, embedding rows can be those of the update before. Here gradients stay, and the result is 0.0.

        Parameters
        ----------
        find_token_ids: returns all token ids that each rank may have looked up in this update, in the order of ranks:
            int64, with repetitions; the same on all ranks. It is called at most once.

        Returns
        -------
        Seconds of the last backward pass in which this rank encoded gradients, or waited for messages.
        """
        return 0.0

    def finish_messages(self) -> None:
        """Wait for messages of this update whose result only the next update applies; here there are none."""

    def clip_gradients(self) -> None:
        """Scale all gradients down to the norm `--max-grad-norm` if theirs is larger; 0 means no clipping.

        With the fused optimizer the gradients stay as they are, and its next step multiplies them by the factor.
        """
        if self.config.max_grad_norm:
            clip_gradients(self.optimizer, self.trained, self.config.max_grad_norm)

    def clear_gradients(self) -> None:
        """Set the gradients of the optimizer's parameters to None."""
        self.optimizer.zero_grad()

    def synchronize_parameters(self, is_due: bool, wait: bool) -> None:
        """Bring the ranks' parameters together after an update, if the exchange sends parameters; this one does not.

        `is_due`: an average of the ranks' parameters is planned after this update (--sync-every). `wait`: all ranks
        must have the same parameters afterwards; otherwise the exchange decides when they do.
        """
