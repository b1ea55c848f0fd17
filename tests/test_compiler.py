"""Kernels that are compiled in advance: which of them a CPU gets, and that a host without a compiler runs them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft import compiler as compiler_module
from cpuft.compiler import (
    MACHINES,
    PACKAGE,
    TARGETS,
    compile_target,
    describe_build,
    find_compiler,
    find_installed,
    name_library,
)
from cpuft.errors import CpuftError
from cpuft.hardware import Cpu, parse_cpuinfo
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
    monkeypatch.setattr(compiler_module, "TARGETS", MACHINES["x86_64"])
    for target in MACHINES["x86_64"]:
        (tmp_path / name_library(target)).touch()
    (tmp_path / "kernels-0123456789abcdef-amx.so").touch()  # of other sources
    found = find_installed(flags, [tmp_path / "none", tmp_path])
    assert (found.name.rpartition("-")[2].removesuffix(".so") if found else "") == name
    if found:
        found.unlink()
        slower = find_installed(flags, [tmp_path])
        order = [target.name for target in MACHINES["x86_64"]]
        assert slower is None or order.index(slower.stem.rpartition("-")[2]) > order.index(name)
    monkeypatch.setattr(compiler_module, "TARGETS", MACHINES["aarch64"])
    assert find_installed(flags | {"asimd"}, [tmp_path]) is None
    bf16, dotprod, neon = MACHINES["aarch64"]
    for target in (bf16, dotprod, neon):
        (tmp_path / name_library(target)).touch()
    graviton1 = {"asimd", "crc32"}
    graviton2 = graviton1 | {"atomics", "asimdrdm", "asimddp"}
    assert find_installed(graviton1, [tmp_path]) == tmp_path / name_library(neon)
    assert find_installed(graviton2, [tmp_path]) == tmp_path / name_library(dotprod)
    assert find_installed(graviton2 | {"bf16"}, [tmp_path]) == tmp_path / name_library(dotprod)
    assert find_installed(graviton2 | {"bf16", "i8mm"}, [tmp_path]) == tmp_path / name_library(bf16)
    assert find_installed(flags, [tmp_path]) is None


@pytest.mark.parametrize(
    "flags, limit, wheel, compiler, setting, build",
    [
        (AVX2, "", True, True, "", "from the wheel, for AVX2"),
        (BF16, "", True, False, "", "from the wheel, for AVX512_BF16"),
        (BF16, "AVX2", True, False, "", "from the wheel, for AVX2"),
        (BF16, "AVX512_CORE", True, False, "", "from the wheel, for AVX512"),
        (AVX512, "", True, True, "compile", "compiled on this host by COMPILER, for AVX512"),
        (AVX512, "", True, False, "compile", "none: no C++ compiler"),
        (AVX512, "", True, True, "0", "none: CPUFT_KERNELS=0"),
        (BF16, "", False, True, "", "compiled on this host by COMPILER, for AVX512_BF16"),
        ({"sse2"}, "", True, True, "", "compiled on this host by COMPILER, for x86_64"),
        (BF16, "", False, False, "", "none: no C++ compiler"),
    ],
)
def test_the_build_of_a_host_can_be_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: set[str],
    limit: str,
    wheel: bool,
    compiler: bool,
    setting: str,
    build: str,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiler_module, "TARGETS", MACHINES["x86_64"])
    monkeypatch.setattr(compiler_module, "parse_cpuinfo", lambda *_: Cpu("Xeon", tuple(sorted(flags))))
    folder = tmp_path / "compiled"
    folder.mkdir()
    for target in MACHINES["x86_64"] if wheel else ():
        (folder / name_library(target)).touch()
    if compiler:
        (tmp_path / "c++").touch(mode=0o755)
    environ = {"PATH": str(tmp_path), "ONEDNN_MAX_CPU_ISA": limit, "CPUFT_KERNELS": setting}
    assert describe_build(environ, [folder]) == build.replace("COMPILER", str(tmp_path / "c++"))


def test_kernels_of_another_compiler_s_openmp_are_refused(tmp_path: Path) -> None:
    """Their calls (__kmpc_...) are not in the OpenMP library of torch, so no host could load them."""
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\necho __kmpc_fork_call >"$1"\n')
    compiler.chmod(0o700)
    with pytest.raises(CpuftError, match=r"is not GCC, .* use g\+\+"):
        compile_target(str(compiler), TARGETS[-1])


@pytest.mark.proof
def test_a_host_without_a_compiler_runs_kernels_from_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As provisioning brings them: installed beside cpuft, with nothing in PATH that compiles.

    Such a host need not have an OpenMP library other than torch's, so the kernels must not name one.
    """
    compiler = find_compiler(os.environ)
    assert compiler, "tests of kernels need g++"
    flags = parse_cpuinfo(Path("/proc/cpuinfo").read_text(), platform.machine()).flags
    target = next(target for target in TARGETS if target.needs <= set(flags))
    monkeypatch.setitem(MACHINES, platform.machine(), (target,))
    path = write_kernels_wheel(compiler, tmp_path / "wheels", platform.machine())
    assert [one.name for one in (tmp_path / "wheels").iterdir()] == [path.name]
    assert Wheel(str(path), path.name, "").pin == f"{PACKAGE}=={path.name.split('-')[1]}"
    site = tmp_path / "site"
    words = ["install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(path)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120)
    (site / "cpuft").symlink_to(Path(__file__).parents[1] / "cpuft")
    missing = "off: no C++ compiler; install one (Debian: apt-get install g++)"
    (library,) = (site / PACKAGE).glob("*.so")
    assert b"libgomp" not in library.read_bytes()
    code = (
        "from cpuft.kernels import kernel_status; print(kernel_status()); "
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))"
    )
    for settings, status in (({"PYTHONPATH": str(site)}, "on"), ({}, missing)):
        environ = {"PATH": str(tmp_path), "HOME": str(tmp_path)} | settings
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.splitlines() == [status, "1"]
