"""Trained parameters in buckets, whose gradients are sent as one message as soon as a backward pass has filled them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from cpuft.train.fast.gradient_places import offer_place, withdraw_place
from cpuft.train.ranks import broadcast_value

B = TypeVar("B", bound="Bucket")
UNUSED_ATTRIBUTE = "_cpuft_unused"
"""Attribute of a model with the names of the trained parameters that the first forward pass did not use."""


def plan_buckets(
    parameters: Sequence[nn.Parameter],
    find_kind: Callable[[nn.Parameter], Hashable],
    min_elements: int,
    unused: Collection[nn.Parameter] = (),
) -> list[list[nn.Parameter]]:
    """Return the parameters of each bucket; buckets are in descending order of their first one in `parameters`.

    A bucket has parameters of one kind (`find_kind`) in their given order, and at least `min_elements` elements, except
    the one with the first parameters of a kind. Parameters of a kind in one block of memory, which are multiplied as
    one, stay side by side. Buckets that begin with one of `unused` come last: others would wait for them.
    """
    blocks: dict[tuple[int, Hashable], list[nn.Parameter]] = {}
    for parameter in parameters:
        blocks.setdefault((parameter.untyped_storage().data_ptr(), find_kind(parameter)), []).append(parameter)
    open_buckets: dict[Hashable, list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for (_, kind), block in reversed(blocks.items()):
        bucket = open_buckets.setdefault(kind, [])
        if sum(parameter.numel() for parameter in bucket) >= min_elements:
            full.append(bucket)
            bucket = open_buckets[kind] = []
        bucket[:0] = block
    places = {parameter: place for place, parameter in enumerate(parameters)}
    late = {*unused}
    return sorted([*full, *open_buckets.values()], key=lambda bucket: (bucket[0] in late, -places[bucket[0]]))


def list_unused(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that `try_model` found unused on rank 0, in model order; [] if it never ran. Collective."""
    # Rank 0 decides: other CPUs may choose another expert, but the buckets must be the same on all ranks.
    parameters = dict(model.named_parameters())
    return [parameters[name] for name in broadcast_value(getattr(model, UNUSED_ATTRIBUTE, ()))]


class Bucket:
    """Parameters of one type whose gradients lie side by side in a buffer, with methods of torch's GradBucket.
    `begin` makes the buffer; `length` is its number of elements with padding at the end, 0 without padding.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], length: int = 0) -> None:
        self._parameters, self._sizes = [*parameters], [parameter.numel() for parameter in parameters]
        self._length, self._buffer, self._is_last = max(length, sum(self._sizes)), torch.empty(0), False

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters in the order of the model."""
        return self._parameters

    def buffer(self) -> Tensor:
        """Return all gradients and the padding: one-dimensional, in the parameters' type."""
        return self._buffer

    def is_last(self) -> bool:
        """Return whether this is the last bucket of an update."""
        return self._is_last

    def split(self, whole: Tensor) -> list[Tensor]:
        """Return each parameter's part of `whole`, one-dimensional and long as the buffer, as a view in its shape."""
        *found, _ = torch.split(whole, [*self._sizes, self._length - sum(self._sizes)])
        return [value.view(parameter.shape) for value, parameter in zip(found, self._parameters, strict=True)]

    def begin(self, is_last: bool) -> None:
        """Make the buffer, of zeros, note whether the bucket is the last one, and do what `clear` does."""
        self._is_last, self._buffer = is_last, torch.zeros(self._length, dtype=self._parameters[0].dtype)
        self._views = dict(zip(self._parameters, self.split(self._buffer), strict=True))
        self.clear()

    def take(self, parameter: nn.Parameter) -> None:
        """Make a parameter's `grad` a view of the buffer: one that a kernel wrote there stays, any other one is copied
        there, and zeros stand for None. KeyError: it is not in the bucket.
        """
        withdraw_place(parameter)
        view, grad = self._views[parameter], parameter.grad
        if grad is None:
            view.zero_()
        elif grad.data_ptr() != view.data_ptr():
            view.copy_(grad)
        parameter.grad = view

    def clear(self) -> None:
        """Set the gradients to None and the padding to zero, and let kernels write new gradients into the buffer."""
        self._buffer[sum(self._sizes) :].zero_()
        for parameter, view in self._views.items():
            parameter.grad = None
            offer_place(parameter, view)


class GradientBuckets(Generic[B]):
    """Sends buckets in their order, each as soon as the last pass of an update has filled it and those before it.

    A pass must give each parameter its whole gradient at once, as torch does unless gradients are checkpointed with
    `use_reentrant`. `send` must not wait until the bucket is sent.
    """

    def __init__(self, buckets: Sequence[B], send: Callable[[B], None]) -> None:
        self._buckets, self._send = buckets, send
        self.begin_pass(is_last=False)
        for number, bucket in enumerate(buckets):
            bucket.begin(is_last=number == len(buckets) - 1)
            parameters: list[Any] = [*bucket.parameters()]  # torch has no types for its hooks
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._note_ready, number))

    def begin_pass(self, is_last: bool) -> None:
        """Begin a forward and a backward pass; buckets are sent only in the last one of an update."""
        self._missing: list[set[nn.Parameter]] = [set(bucket.parameters()) for bucket in self._buckets]
        """For each bucket, the parameters whose gradients are not complete yet."""
        self._next = 0 if is_last else len(self._buckets)
        """Number of the bucket to send next; the number of buckets if none is to be sent."""

    def _note_ready(self, number: int, parameter: nn.Parameter) -> None:
        self._buckets[number].take(parameter)
        self._missing[number].discard(parameter)
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        for parameter in self._missing[self._next]:
            bucket.take(parameter)
        self._next += 1
        self._send(bucket)

    def send_rest(self) -> None:
        """Send the buckets that the last pass of an update has not sent; parameters without a gradient, which no
        example of this rank has used, are sent as zeros.
        """
        while self._next < len(self._buckets):
            self._send_next()

    def clear(self) -> None:
        """Call `Bucket.clear` of all buckets."""
        for bucket in self._buckets:
            bucket.clear()
