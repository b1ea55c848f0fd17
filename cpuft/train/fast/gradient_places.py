"""Places for gradients: kernels write a parameter's first gradient of an update to where it is sent from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

_ATTRIBUTE = "_cpuft_gradient_place"


def offer_place(parameter: Tensor, place: Tensor) -> None:
    """Let the next gradient of a parameter be written to `place`, a contiguous tensor of its shape and type.

    Only some layers do so: look afterwards where the gradient is, and withdraw the offer, lest a later one be written
    over it.
    """
    setattr(parameter, _ATTRIBUTE, place)


def withdraw_place(parameter: Tensor) -> None:
    """End an offer, if there is one."""
    vars(parameter).pop(_ATTRIBUTE, None)


def take_place(parameters: Sequence[Tensor]) -> Tensor | None:
    """End the offers, and return the memory for these parameters' gradients, one after another: (sum of rows, ...).

    None if a place was not offered or was taken before (a shared weight has several gradients in one backward pass), or
    if they do not lie one after another. It is a new view, because torch takes a gradient without a copy only then.
    """
    places: list[Tensor | None] = [vars(parameter).pop(_ATTRIBUTE, None) for parameter in parameters]
    found = [place for place in places if place is not None]
    if len(found) < len(places) or len({place.untyped_storage().data_ptr() for place in found}) > 1:
        return None
    if any(a.data_ptr() + a.nbytes != b.data_ptr() for a, b in pairwise(found)):
        return None
    first = found[0]
    return first.as_strided((sum(map(len, found)), *first.shape[1:]), first.stride())


def make_gradient(like: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return memory for these parameters' gradients, of the shape and type of `like`: by `take_place`, or new."""
    place = take_place(parameters)
    return torch.empty_like(like) if place is None else place
