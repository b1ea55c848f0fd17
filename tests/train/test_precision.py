from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.hardware import Cpu, Precision, choose_precision
from cpuft.train.embedder import Embedder
from cpuft.train.embedding_form import EmbeddingForm, write_form
from cpuft.train.fast.acceleration import has_bf16_products
from cpuft.train.precision import drop_slow_bf16, format_products, measure_products
from tests.train.tiny import save_tiny


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16", marks=pytest.mark.proof), "fp32", pytest.param("int8", marks=pytest.mark.proof)]
)
def test_products_are_measured_and_nothing_is_printed(precision: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = measure_products(precision)
    assert capfd.readouterr().out == ""
    assert found["teraflops"] > 0
    assert found["fp32_teraflops"] > 0


def test_in_int8_the_products_of_the_fast_path_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    monkeypatch.setattr("cpuft.train.fast.int8_products.multiply", lambda x, right: made.append(len(right)))
    assert measure_products("int8")["teraflops"] > 0
    assert len(made) == 6  # the first one is not timed


@pytest.mark.parametrize(
    ("products", "line"),
    [
        ({"teraflops": 2.2, "fp32_teraflops": 0.3}, "2.20 TFLOP/s measured, fp32 0.30"),
        ({"teraflops": 0.3, "fp32_teraflops": 0.3}, "0.30 TFLOP/s measured"),
    ],
)
def test_one_line(products: dict[str, float], line: str) -> None:
    assert format_products(products) == line


def test_a_limit_of_onednn_hides_bf16_from_the_fast_path_too() -> None:
    code = "from cpuft.train.fast.acceleration import has_bf16_products; print(has_bf16_products())"
    environ = dict(os.environ) | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environ)
    still = has_bf16_products() and platform.machine() != "x86_64"  # oneDNN for Arm does not know AVX2
    assert done.stdout == f"{still}\n", done.stderr


def test_a_bf16_that_torch_multiplies_slowly_is_dropped() -> None:
    flags = ("asimd", "bf16")
    bf16 = choose_precision("auto", False, flags)

    def drop(teraflops: float, chosen: Precision = bf16, earlier: str = "") -> Precision:
        return drop_slow_bf16(chosen, flags, {"teraflops": teraflops, "fp32_teraflops": 0.2}, earlier)

    assert drop(0.5) == drop(0.17) == bf16
    slow = Precision("fp32", "bf16 is slower with this torch (0.02 TFLOP/s measured)")
    assert drop(0.02) == slow
    assert drop(0.2, slow) == slow
    assert drop(0.02, earlier="bf16") == bf16
    assert drop(0.5, earlier="fp32") == Precision("fp32", "as when the run began")


def test_a_busy_x86_host_keeps_bf16() -> None:
    """There torch always uses it; a measurement beside other programs would only differ from run to run."""
    bf16 = choose_precision("auto", False, ("avx512_bf16",))
    assert drop_slow_bf16(bf16, ("avx512_bf16",), {"teraflops": 0.07, "fp32_teraflops": 0.2}) == bf16


@pytest.mark.parametrize(
    ("flags", "wanted", "chosen"),
    [
        (("asimd", "bf16"), "auto", "fp32"),
        (("asimd", "bf16"), "bf16", "bf16"),
        (("asimd",), "auto", "fp32"),
        (("amx_bf16",), "auto", "bf16"),
    ],
)
def test_embeddings_are_not_computed_in_a_slow_bf16_on_arm(
    flags: tuple[str, ...], wanted: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speeds = {"teraflops": 0.02, "fp32_teraflops": 0.2}
    monkeypatch.setattr("cpuft.train.precision.read_cpu", lambda: Cpu("one", flags))
    monkeypatch.setattr("cpuft.train.precision._measure_once", lambda precision: speeds)
    write_form(Path(save_tiny(tmp_path / "tiny")), EmbeddingForm(), 32)
    assert Embedder(str(tmp_path / "tiny"), wanted).precision == chosen
