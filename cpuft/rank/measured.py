"""What the first start of a run has measured, for the ranks of later ones on its hosts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cpuft.record import Header


@dataclass(frozen=True)
class Measured:
    """What need not be measured again."""

    ranks: int
    backend: str = ""
    """Of gradients; '' where that was no question."""
    gradients: str = ""
    """As in the header."""
    products: dict[str, Any] = field(default_factory=dict)
    """As in the header."""
    products_of: tuple[str, ...] = ()
    """What they hold for: see `describe_products`."""


def list_measured(header: Header) -> Measured:
    """All that a header tells of it."""
    was_asked = header.options.get("backend") != "auto" or header.world_size == 1
    backend = "" if was_asked else header.backend
    return Measured(header.world_size, backend, header.gradients, header.products, describe_products(header))


def describe_products(header: Header) -> tuple[str, ...]:
    """What products depend on: CPU, precision and torch."""
    return (header.cpu_model, *header.cpu_flags, header.precision, header.versions.get("torch", ""))
