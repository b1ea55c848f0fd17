"""Kernels that are compiled in advance: which of them a CPU gets, and that a host without a compiler runs them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.compiler import PACKAGE, TARGETS, find_compiler, find_installed, name_library
from cpuft.hardware import parse_cpuinfo
from cpuft.provision.wheels import Wheel, write_kernels_wheel

AVX2 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
BF16 = AVX512 | {"avx512_vnni", "avx512_bf16"}


@pytest.mark.parametrize(
    "flags, name",
    [
        ({"sse2"}, ""),
        (AVX2, "avx2"),
        (AVX512, "avx512"),
        (AVX512 | {"avx512_vnni"}, "avx512"),
        (BF16, "avx512_bf16"),
        (BF16 | {"amx_tile", "amx_int8", "amx_bf16"}, "amx"),
    ],
)
def test_a_cpu_gets_the_fastest_library_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: set[str], name: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for target in TARGETS:
        (tmp_path / name_library(target)).touch()
    (tmp_path / "kernels-0123456789abcdef-amx.so").touch()  # of other sources
    found = find_installed(flags, tmp_path)
    assert (found.name.rpartition("-")[2].removesuffix(".so") if found else "") == name


def test_a_host_without_a_compiler_runs_kernels_from_the_wheel(tmp_path: Path) -> None:
    """As provisioning brings them: installed beside cpuft, with nothing in PATH that compiles."""
    compiler = find_compiler(os.environ)
    assert compiler, "tests of kernels need g++"
    flags = parse_cpuinfo(Path("/proc/cpuinfo").read_text(), platform.machine()).flags
    target = next(target for target in TARGETS if target.needs <= set(flags))
    path = write_kernels_wheel(compiler, tmp_path / "wheels", [target])
    assert [one.name for one in (tmp_path / "wheels").iterdir()] == [path.name]
    assert Wheel(str(path), path.name, "").pin == f"{PACKAGE}=={path.name.split('-')[1]}"
    site = tmp_path / "site"
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(path)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120)
    (site / "cpuft").symlink_to(Path(__file__).parents[1] / "cpuft")
    missing = "off: no C++ compiler; install one (Debian: apt-get install g++)"
    for settings, status in (({"PYTHONPATH": str(site)}, "on"), ({}, missing)):
        environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)} | settings
        command = [sys.executable, "-c", "from cpuft.train.fast.kernels import kernel_status; print(kernel_status())"]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.strip() == status
