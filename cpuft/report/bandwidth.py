"""A record of `cpuft bench comm` as a plot: time and bus bandwidth over the size of the message."""

from __future__ import annotations

from pathlib import Path

from cpuft.errors import CpuftError, install_command
from cpuft.files import written_beside
from cpuft.measurement import Measurement
from cpuft.record import parse_measurements


def write_plot(record: str) -> Path:
    """Plot a record into an SVG beside it; its path.

    Raises CpuftError: no such record, or matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CpuftError(f"a plot needs matplotlib: {install_command('plot')}") from None
    rows = parse_measurements(Path(record).read_text(encoding="utf-8"), record)
    figure = Figure(figsize=(9, 4), layout="constrained")
    time_axes, rate_axes = figure.subplots(1, 2)
    for label in sorted({_label(row) for row in rows}):
        own = sorted((row for row in rows if _label(row) == label), key=lambda row: row.nbytes)
        sizes = [row.nbytes for row in own]
        time_axes.plot(sizes, [1e3 * row.median_seconds for row in own], marker="o", label=label)
        rate_axes.plot(sizes, [row.bus_bytes_per_second / 1e9 for row in own], marker="o", label=label)
    time_axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="milliseconds (median)")
    rate_axes.set(xscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s")
    time_axes.legend(fontsize="small")
    path = Path(record).with_suffix(".svg")
    with written_beside(path) as beside:
        figure.savefig(beside, format="svg")
    return path


def _label(row: Measurement) -> str:
    return f"{row.backend} {row.operation} {row.dtype}"
