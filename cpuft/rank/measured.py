"""What the first start of a run has measured, which later starts on the same hosts reuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cpuft.record import Header


@dataclass(frozen=True)
class EarlierMeasurements:
    """Measurements of a run's first start."""

    ranks: int
    """Number of ranks then."""
    backend: str = ""
    """The backend that `auto` chose; "" if nothing was measured."""
    gradients: str = ""
    """The compression that `auto` chose, as in the header."""
    products: dict[str, Any] = field(default_factory=dict)
    """Speed of matrix products, as in the header."""
    products_of: tuple[str, ...] = ()
    """What the products were measured with, see `describe_products`."""


def read_measurements(header: Header) -> EarlierMeasurements:
    """Return the measurements in a record's header."""
    was_given = header.options.get("backend") != "auto" or header.world_size == 1
    backend = "" if was_given else header.backend
    return EarlierMeasurements(header.world_size, backend, header.gradients, header.products, describe_products(header))


def describe_products(header: Header) -> tuple[str, ...]:
    """Return what the speed of matrix products depends on: the CPU's model and flags, precision and torch's version."""
    return (header.cpu_model, *header.cpu_flags, header.precision, header.versions.get("torch", ""))
