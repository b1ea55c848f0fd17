"""The limits of a matrix product, and the plot of products below them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cpuft.errors import CpuftError
from scripts.benchmarks.roofline import Limits, check_plot, draw_roofline, measure_limits


def test_a_product_is_limited_by_registers_or_by_memory() -> None:
    limits = Limits(peak=100.0, read=10.0, written=5.0)
    # 20 bytes are read in 2 s, and 10 are written in 2 s.
    assert limits.attainable(80.0, 20.0, 10.0) == 20.0
    assert limits.attainable(8000.0, 20.0, 10.0) == 100.0
    assert Limits(100.0, 0.0, 5.0).attainable(80.0, 20.0, 10.0) == 0.0


def test_registers_and_memory_have_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.benchmarks.roofline.BLOCK_MEGABYTES", (5,))
    monkeypatch.setattr("scripts.benchmarks.roofline.TOTAL_BYTES", 20_000_000)
    limits = measure_limits(1)
    assert limits.peak > 1e6  # on a busy machine, an emulated Arm CPU reached 2e7; any other CPU reaches more than 1e9
    # Rates of any memory of this century. A loop that the compiler has left out would be faster.
    assert 1e8 < limits.read < 1e12
    assert 1e8 < limits.written < 1e12


def test_without_a_compiler_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.benchmarks.roofline.find_compiler", lambda environment: None)
    assert measure_limits(1) == Limits(0.0, 0.0, 0.0)


def test_the_plot_shows_each_product_below_the_limits(tmp_path: Path) -> None:
    limits = {"peak_operations_per_second": 4e12, "read_bytes_per_second": 2e10, "written_bytes_per_second": 1e10}

    def product(name: str, read: int) -> dict[str, object]:
        seconds = {"kernel_seconds": 0.5, "torch_seconds": 1.0, "attainable_operations_per_second": 3e12}
        return {"name": name, "operations": 113 * 10**10, "bytes_read": read, "bytes_written": 10**9, **seconds}

    products = [product("output", 10**9), product("output", 3 * 10**9), product("gradient of a weight", 10**9)]
    path = tmp_path / "roofline.svg"
    draw_roofline({"one": {**limits, "kernel_products": products}}, path)
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    for label in (
        *("one: output", "one: gradient of a weight", "filled: cpuft's kernel", "hollow: oneDNN"),
        *("registers: 4.00 TFLOP/s", "memory, if all bytes were read: 20.0 GB/s"),
    ):
        assert f">{label}</text>" in text
    # The marks of products that move as many bytes lie above each other: limits at the top, then kernels, then oneDNN.
    marks = re.findall(r'<use xlink:href="#m\w+" x="([\d.]+)" y="([\d.]+)"', text)
    places = sorted({x for x, _ in marks}, key=float)[1:]  # The first one is the axis on the left.
    columns = [sorted(float(y) for x, y in marks if x == place) for place in places]
    (pair,), (one,) = ([column for column in columns if len(column) == size] for size in (6, 3))
    assert one[0] < one[1] < one[2]
    assert pair == [one[0], one[0], one[1], one[1], one[2], one[2]]
    draw_roofline({"one": {**limits, "kernel_products": products}}, path)
    assert path.read_text(encoding="utf-8") == text


def test_a_step_without_the_kernel_has_no_plot(tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match="one: the kernel made no product of the step"):
        draw_roofline({"one": {"kernel_products": []}}, tmp_path / "roofline.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["roofline.png", "missing/roofline.svg"])
def test_a_plot_is_an_svg_in_an_existing_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(CpuftError, match=r"give a file in an existing folder whose name ends with \.svg"):
        check_plot(tmp_path / name)
    check_plot(tmp_path / "roofline.svg")
