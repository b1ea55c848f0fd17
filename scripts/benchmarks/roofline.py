"""The limits that this machine's registers and memory set for a matrix product, and a plot of products below them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.compiler import find_compiler, read_cpu_flags
from cpuft.errors import CpuftError, install_command
from cpuft.files import write_atomically
from cpuft.hardware import compiler_target

BLOCK_MEGABYTES = (5, 10, 20, 30)
"""Sizes of the blocks that are read and written, in MB of a million bytes: those of a step's tensors."""
TOTAL_BYTES = 1 << 29
"""Blocks of so many bytes take turns, so that second-level caches hold none of them."""
_REPEATS = 3
MARKERS = {"output": "o", "gradient of an input": "s", "gradient of a weight": "D"}
"""matplotlib's marker for each kind of product."""
MARKS: dict[str, dict[str, Any]] = {
    "filled: cpuft's kernel": {"marker": "o"},
    "hollow: oneDNN": {"marker": "o", "fillstyle": "none"},
    "dash: limit of this product": {"marker": "_", "markersize": 12},
}
"""What the marks of the plot mean, and how matplotlib draws them."""


@dataclass(frozen=True)
class Limits:
    """What the registers and the memory of this machine reach with all threads. A rate that is not known is 0."""

    peak: float
    """Floating-point operations per second of products from registers."""
    read: float
    """Bytes per second that are read from memory."""
    written: float
    """Bytes per second that are written to memory."""

    def attainable(self, operations: float, bytes_read: float, bytes_written: float) -> float:
        """Return the operations per second that a product cannot exceed, if it moves each of these bytes once.

        The smaller one of the registers' rate, and of what memory allows: `operations` in the time that reading and
        writing take. It is 0 if a rate is not known.
        """
        if not (self.peak and self.read and self.written):
            return 0.0
        return min(self.peak, operations / (bytes_read / self.read + bytes_written / self.written))


def measure_limits(threads: int) -> Limits:
    """Return the limits of this machine: for products, bf16 where this CPU multiplies it, else fp32.

    Each rate is the best of three measurements, and those of memory the best of all sizes of blocks. Without a
    compiler, all are 0.
    """
    compiler = find_compiler(os.environ)
    if compiler is None:
        return Limits(0.0, 0.0, 0.0)
    target = compiler_target(os.environ.get("ONEDNN_MAX_CPU_ISA", ""), read_cpu_flags(os.environ))
    options = ("-O3", f"-march={target}", "-std=c++17", "-fopenmp", "-fPIC", "-shared")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "peak.so")
        source = Path(__file__).with_name("peak.cpp")
        subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True, timeout=120)
        loaded = ctypes.CDLL(str(library))
        peak, memory = loaded.measure_peak, loaded.measure_memory
        peak.restype = memory.restype = ctypes.c_double
        memory.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
        read, written = (
            max(
                memory(threads, megabytes * 10**6, TOTAL_BYTES, writes)
                for megabytes in BLOCK_MEGABYTES
                for _ in range(_REPEATS)
            )
            for writes in (0, 1)
        )
        return Limits(max(peak(threads) for _ in range(_REPEATS)), read, written)


def check_plot(path: Path) -> None:
    """Raise CpuftError if a plot cannot be written to `path`: its name must end with .svg, its folder must exist, and
    matplotlib must be installed."""
    if path.suffix != ".svg" or not path.parent.is_dir():
        raise CpuftError(f"--roofline {path}: give a file in an existing folder whose name ends with .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise CpuftError(f"--roofline needs matplotlib: {install_command('plot')}")


def draw_roofline(breakdowns: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Draw the products of one step of each model below the limits of this machine, and write the plot as an SVG.

    Parameters
    ----------
    breakdowns: model -> the line of its record with "kernel_products" and the limits of the machine.

    Raises
    ------
    CpuftError: a step has no product of cpuft's kernel, because its batch is too small.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "roofline", "font.size": 9}):
        figure = Figure(figsize=(7.5, 4.5), layout="constrained")
        axes: Any = figure.subplots()
        for number, (model, breakdown) in enumerate(breakdowns.items()):
            if not breakdown["kernel_products"]:
                raise CpuftError(f"{model}: the kernel made no product of the step; give a larger --batch-size")
            for name, marker in MARKERS.items():
                found = [one for one in breakdown["kernel_products"] if one["name"] == name]
                x = [one["operations"] / (one["bytes_read"] + one["bytes_written"]) for one in found]
                kernel, torch = (
                    [one["operations"] / one[seconds] / 1e12 for one in found]
                    for seconds in ("kernel_seconds", "torch_seconds")
                )
                limit = [one["attainable_operations_per_second"] / 1e12 for one in found]
                style = {"color": f"C{number}", "marker": marker, "linestyle": ""}
                axes.plot(x, kernel, label=f"{model}: {name}", **style)
                axes.plot(x, torch, fillstyle="none", **style)
                axes.plot(x, limit, **style | {"marker": "_", "markersize": 12})
        for label, style in MARKS.items():
            axes.plot([], [], color="black", linestyle="", label=label, **style)
        axes.set(
            xscale="log", yscale="log", ylabel="TFLOP/s", xlabel="operations per byte that is read or written once"
        )
        _draw_limits(axes, next(iter(breakdowns.values())))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        figure.legend(loc="outside lower center", ncols=2, fontsize="small")
        with write_atomically(path) as beside:
            figure.savefig(beside, format="svg", metadata={"Date": None})


def _draw_limits(axes: Any, breakdown: dict[str, Any]) -> None:
    """Draw the registers' rate, and what memory would allow if all bytes were read, or all were written."""
    low, high = axes.get_xlim()
    peak = breakdown["peak_operations_per_second"] / 1e12
    axes.plot([low, high], [peak, peak], color="black", label=f"registers: {peak:.2f} TFLOP/s")
    for kind, style in (("read", "--"), ("written", ":")):
        rate = breakdown[f"{kind}_bytes_per_second"] / 1e12
        x = [low, min(max(low, peak / rate), high), high]
        label = f"memory, if all bytes were {kind}: {1e3 * rate:.1f} GB/s"
        axes.plot(x, [min(peak, one * rate) for one in x], "k" + style, label=label)
