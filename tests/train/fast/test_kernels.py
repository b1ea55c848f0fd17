"""The kernels built for other processors than this one: each of the ways that kernels.cpp has through its vectors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cpuft.errors import CpuftError
from cpuft.train.fast.kernels import Kernels, addresses, build, kernels_for, numbers

ROWS, COLS = 5, 37
# x86-64-v3 has no AVX-512, v4 has it without bf16.
PROCESSORS = {"x86-64-v3": "avx2", "x86-64-v4": "avx512_vl"}


def run_all(kernels: Kernels, dtype: torch.dtype) -> list[Tensor]:
    """What the kernels with vectors give for the same inputs."""
    torch.manual_seed(0)
    x, residual, dy = (torch.randn(ROWS, COLS).to(dtype) for _ in range(3))
    weight, bias = torch.randn(2, COLS)
    mask = (99, 6554, 65536 / (65536 - 6554))
    dropped, total, y, dx, dresidual, probs, kept, z, slope = (torch.zeros_like(x) for _ in range(9))
    (mean, rstd), (dweight, dbias, sums) = torch.zeros(2, ROWS), torch.zeros(3, COLS)
    squares = torch.zeros((), dtype=torch.float64)
    kernels.run("dropout", dtype, x, dropped, x.numel(), *mask)
    kernels.run("norm_forward", dtype, x, residual, weight, bias, total, y, mean, rstd, ROWS, COLS, *mask, 1e-5)
    arrays = (dy, total, mean, rstd, weight, dx, dresidual, dweight, dbias)
    kernels.run("norm_backward", dtype, *arrays, ROWS, COLS, *mask)
    kernels.run("softmax_forward", dtype, x, bias, probs, kept, ROWS, 1, 1, COLS, 0, 0, 0, 0.5, *mask)
    grad = dy.clone()
    kernels.run("softmax_backward", dtype, probs, kept, grad, ROWS, COLS, 0.5, mask[2])
    kernels.run("gelu", dtype, x, z, slope, x.numel())
    kernels.run("column_sums", dtype, x, sums, ROWS, COLS)
    kernels.run("square_sum", dtype, addresses([x, dy]), numbers([x.numel(), dy.numel()]), squares, 2)
    found = [dropped, total, y, mean, rstd, dx, dresidual, dweight, dbias, probs, kept, grad, z, slope, sums, squares]
    rounded, scales, product = torch.zeros(ROWS, COLS, dtype=torch.int8), torch.zeros(ROWS), torch.zeros_like(x)
    kernels.run("quantise_rows", dtype, x, weight, rounded, scales, ROWS, COLS)
    kernels.run("dequantise", dtype, rounded.int(), scales, weight, bias, product, ROWS, COLS)
    return [tensor.float() for tensor in (*found, rounded, scales, product)]


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_processor_s_build_gives_the_same(processor: str, dtype: torch.dtype) -> None:
    native, compiler = kernels_for(torch.empty(0)), shutil.which("g++")
    if native is None or compiler is None or not torch.cpu.get_capabilities().get(PROCESSORS[processor]):
        pytest.skip(f"no C++ compiler, or this CPU does not run {processor}")
    tolerance = 1e-5 if dtype == torch.float32 else 2 / 256
    found = run_all(Kernels(build(compiler, processor)), dtype)
    for mine, theirs in zip(found, run_all(native, dtype), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path: Path, own_cache: None) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\necho planted >"$1"\n')
    compiler.chmod(0o700)
    planted = build(str(compiler))
    assert build(str(compiler)) == planted
    planted.parent.chmod(0o777)
    with pytest.raises(CpuftError, match=r"is open to others' writing \(mode 777\)"):
        build(str(compiler))
