"""What a run's first start has measured, and a later one need not measure again."""

from __future__ import annotations

from typing import Any

from cpuft.comm.selection import Choice
from cpuft.errors import counted
from cpuft.rank.measured import EarlierMeasurements, describe_products
from cpuft.record import Header
from cpuft.serialization import load, parse_json
from cpuft.train.precision import measure_products


def recall(text: str, ranks: int) -> EarlierMeasurements:
    """What the launch tells of it, in JSON; nothing where it tells nothing. `ranks`: of now."""
    return load(EarlierMeasurements, parse_json(text), "--measured") if text else EarlierMeasurements(ranks)


def recall_backend(measured: EarlierMeasurements, ranks: int) -> Choice | None:
    """What `auto` was when the run began, for so many ranks now; None where that was not measured."""
    if not measured.backend:
        return None
    others = f", on {counted(measured.ranks, 'rank')}" if measured.ranks != ranks else ""
    return Choice(measured.backend, f"as measured when the run began{others}")


def find_products(header: Header, measured: EarlierMeasurements) -> dict[str, Any]:
    """What products run on here: as measured when the run began, if that was on such a CPU, too; else measured now."""
    if measured.products and measured.products_of == describe_products(header):
        return measured.products
    return measure_products(header.precision)
