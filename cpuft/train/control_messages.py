"""Control messages: what ranks tell each other about their updates, about once per second.

A message has a rank's numbers of all updates since the last one, for the record, and what the rank requests: a
checkpoint or the end. It is sent in the background after an update that all ranks compute alike from the last message,
and read within the next update, after which all ranks carry out the requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from cpuft.errors import CpuftError
from cpuft.record import StepLine
from cpuft.train.checkpoint.timing import Checkpoints, Request
from cpuft.train.ranks import gather_numbers
from cpuft.train.setup import TrainingSetup

_SECONDS = 1.0
"""Time between two messages, as far as updates allow it."""


class ControlMessages:
    """The updates of this rank whose lines are not complete yet, and what ranks request of each other; a rank that
    trains alone sends nothing. `done` is the number of updates before this start of the run.
    """

    def __init__(self, setup: TrainingSetup, checkpoints: Checkpoints, done: int) -> None:
        self._is_alone, self._independent = setup.independent or setup.world.size == 1, setup.independent
        self._checkpoints = checkpoints
        self._request = Request.NOTHING
        """What ranks have requested. Each message replaces it, as a rank repeats a request until it is carried out."""
        self._is_acting = False
        """Whether requests are carried out after the update that is being made, so that they are not sent again."""
        self._unsent, self._numbers = list[StepLine](), list[float]()
        """This rank's lines since the last message, and for each of them the sum of losses, the number of their terms,
        examples, tokens, seconds without communication, and all seconds."""
        self._sent = list[StepLine]()
        """Updates of the message that is under way; empty if there is none."""
        self._read: Callable[[], torch.Tensor] = torch.Tensor
        """Waits for the messages of all ranks: (ranks, 1 + 6 for each of `_sent`)."""
        self._next_message = done + 1
        """Update after which the next message is sent."""
        self._complete = deque[tuple[StepLine, torch.Tensor]]()
        """Updates and the numbers of all ranks, (ranks, 6)."""

    def find_due(self, may_save: bool) -> Request:
        """Wait for the message under way, and return what all ranks carry out after this update: the same on all of
        them. Without `may_save`, a requested checkpoint waits for a later update, but a stop does not.
        """
        self._receive()
        if self._is_alone:
            self._request = self._checkpoints.find_request()
        due = self._request if may_save or self._request == Request.STOP else Request.NOTHING
        self._is_acting = bool(due)
        if due:
            self._request = Request.NOTHING
        return due

    def add(self, own: StepLine, terms: float, is_pause: bool) -> None:
        """Add an update that this rank has made, whose loss is a sum over `terms` terms. Send a message if it is time;
        before a pause (an evaluation, a comparison, a checkpoint or the end), send it and wait until all lines are
        complete.
        """
        self._unsent.append(own)
        self._numbers += [own.loss, terms, own.samples, own.tokens, *own.compute_seconds, own.step_seconds]
        if self._is_alone:
            self._complete.append((own, torch.tensor([self._numbers], dtype=torch.float64)))
            self._unsent, self._numbers = [], []
        elif is_pause or own.step >= self._next_message:
            self._receive()  # nothing was due after the last update, so that nobody has asked
            request = Request.NOTHING if self._is_acting else self._checkpoints.find_request()
            self._read = gather_numbers([request, *self._numbers])
            self._sent, self._unsent, self._numbers = self._unsent, [], []
        if is_pause:
            self._receive()

    def _receive(self) -> None:
        """Wait for the message under way, if there is one, and choose the update of the next one."""
        if not self._sent:
            return
        table = self._read()
        self._request = Request.merge(float(table[:, 0].sum()))
        by_update = table[:, 1:].view(len(table), len(self._sent), -1).unbind(1)
        self._complete.extend(zip(self._sent, by_update, strict=True))
        slowest = max(float(numbers[:, -1].max()) for numbers in by_update)
        self._next_message = self._sent[-1].step + max(1, int(_SECONDS / slowest))
        self._sent = []

    def take_lines(self) -> Iterator[StepLine]:
        """Yield each complete line once, in the order of updates: with the mean loss of a term, samples and tokens of
        all ranks, the compute seconds of each rank ([] for independent ranks), and this rank's other numbers. Raises
        CpuftError: a loss is not finite.
        """
        while self._complete:
            own, numbers = self._complete.popleft()
            total, terms, examples, tokens, _, _ = numbers.sum(0).tolist()
            loss = total / (terms or 1.0)
            if not math.isfinite(loss):
                raise CpuftError(
                    f"the loss is {loss} at update {own.step}, because the training diverged at learning rate "
                    f"{own.learning_rate:g}: lower --learning-rate, or look for huge numbers among the data's scores"
                )
            seconds = [] if self._independent else numbers[:, 4].tolist()
            yield replace(own, loss=loss, samples=int(examples), tokens=int(tokens), compute_seconds=seconds)
