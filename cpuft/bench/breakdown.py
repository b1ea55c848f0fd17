"""Where the time of one training step goes, from torch.profiler, and what its matrix products take alone."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

# The first row whose names fit an operator, or one that it runs inside of, names its kind.
KINDS: dict[str, tuple[str, ...]] = {
    "optimizer": ("Optimizer.", "aten::_foreach_norm", "aten::linalg_vector_norm"),
    "attention": ("_Attention", "aten::scaled_dot_product", "aten::_scaled_dot", "aten::bmm", "aten::_softmax"),
    "products": ("aten::mm", "aten::addmm", "aten::_int_mm"),
    "dropout": ("_Dropout", "aten::dropout", "aten::native_dropout", "aten::bernoulli_"),
    "norms and activations": ("aten::native_layer_norm", "aten::gelu", "_Gelu", "aten::tanh"),
    "casts and copies": ("aten::copy_", "aten::fill_", "aten::cat", "aten::index", "aten::_to_copy", "aten::empty"),
}
# Dropout, residual and norm are one kernel in the fast path: it counts as a norm.
FUSED_NORM = "_DropoutAddNorm"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(frozen=True)
class Product:
    """(rows x inner) times (inner x columns), `batch` of them at once."""

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
class Breakdown:
    """One step. Seconds by kind add up to `seconds`; what no operator covers is idle (Python, mostly)."""

    seconds: float
    kinds: dict[str, float]
    products: Counter[Product]


def kind_of(names: list[str]) -> str:
    """The kind of an operator, from its own name and those it runs inside of."""
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
    it: one call alone may have met the kernel zeroing new pages.
    """
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    profiles = sorted((_profile(step, bf16) for _ in range(repeats)), key=lambda found: found.seconds)
    return replace(profiles[repeats // 2], seconds=median(seconds))


def _profile(step: Callable[[], None], bf16: bool) -> Breakdown:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
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
    """Seconds that these products take alone: each shape by itself, the median of `repeats`, operands at hand."""
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
