"""The kernels built for other processors than this one: each of the ways that kernels.cpp has through its vectors."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cpuft import kernels as kernels_module
from cpuft.compiler import TARGETS, compile_target, find_compiler, native_options, read_cpu_flags
from cpuft.errors import CpuftError
from cpuft.kernels import Kernels, build, kernels_for, plain_torch, use_kernels
from cpuft.train.fast.adamw import clip_gradients, use_masters
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import Grid, attention
from cpuft.train.fast.disentangled import disentangled_attention
from cpuft.train.fast.elementwise import NO_MASK, Mask, Norm, add_norm, dropout_add_norm, gelu, glu, masked
from cpuft.train.fast.int8_products import multiply, quantise_rows
from cpuft.train.fast.master_weights import MasterWeights
from cpuft.train.fast.projection import column_sums
from cpuft.train.fast.rotary import Angles, rotate
from tests.conftest import COMPILE_ONCE
from tests.train.fast.encoders import relative_error
from tests.train.fast.test_attention import check_whole_heads
from tests.train.fast.test_first_token import check as check_first_token_half

MASK = Mask(seed=99, threshold=6554)
HEADS = Heads(count=2, size=5, factor=0.5)
# Both query heads share one of keys and values, and see a part of the longest rows.
NARROW = Heads(count=2, size=5, factor=0.5, key_count=1, back=20, ahead=2)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2 / 256}
ROWS = 5
# Less than any vector, vectors and a part, whole ones.
WIDTHS = (3, 37, 64)
PROCESSORS = {
    "haswell": "avx2",
    "skylake-avx512": "avx512vl",
    "cascadelake": "avx512_vnni",
    "cooperlake": "avx512_bf16",
    "sandybridge": "avx",
    "x86-64": "sse2",
    "armv8-a": "asimd",
    "armv8.2-a+dotprod": "asimddp",
    "armv8.2-a+bf16+i8mm": "bf16",
}
"""What the compiler is told, and the flag of a CPU that runs it. The host's own: every other test has it."""
RUNNABLE = [name for name, flag in PROCESSORS.items() if flag in read_cpu_flags({})]
# The same way as that of a wheel, skylake-avx512, which needs no build of its own; and two that no known host goes.
FOR_PROOFS = ("cascadelake", "sandybridge", "x86-64")


@functools.cache
def build_for(processor: str) -> Kernels:
    """Kernels for a processor: those of a release, if it has them with the same options."""
    compiler = shutil.which("g++")
    assert compiler, "tests of kernels need g++"
    options = native_options(processor)
    for target in TARGETS:
        if target.options == options:
            with tempfile.NamedTemporaryFile(suffix=".so") as file:
                Path(file.name).write_bytes(compile_target(COMPILE_ONCE, target))
                return Kernels(Path(file.name))
    return Kernels(build(compiler, processor))


def run_layers(dtype: torch.dtype, cols: int) -> list[Tensor]:
    """Outputs and gradients of what a layer is made of, and dropout alone."""
    torch.manual_seed(0)
    x, residual = (torch.randn(ROWS, cols).to(dtype).requires_grad_() for _ in range(2))
    shift = torch.randn(cols).to(dtype).requires_grad_()
    # The second row of the batch has half of the tokens.
    short = cols // 2
    grid = Grid.of(2, cols, torch.arange(cols + short))
    bias = (torch.arange(cols) >= torch.tensor([cols, short])[:, None]) * torch.finfo(torch.float32).min
    packed = torch.randn(grid.tokens, 3 * HEADS.count * HEADS.size).to(dtype).requires_grad_()
    positions = torch.randn(HEADS.count, 2 * cols - 1, requires_grad=True)
    norm = nn.LayerNorm(cols)
    nn.init.normal_(norm.weight)
    context = attention(None, packed, bias[:, None, None], HEADS, MASK, grid, position_bias=positions)
    shared = (
        torch.randn(grid.tokens, 4 * NARROW.size, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    )
    near = attention(None, shared, bias[:, None, None], NARROW, MASK, grid)
    outputs = [dropout_add_norm(x, shift, residual, norm, MASK), gelu(x, shift), context, near]
    weights = [torch.randn(output.shape).to(dtype) for output in outputs]
    found = torch.autograd.grad(outputs, [x, shift, residual, packed, shared, positions, *norm.parameters()], weights)
    return [masked(x.detach(), MASK), *outputs, *found, column_sums(x.detach())]


def run_gated(dtype: torch.dtype, cols: int) -> list[Tensor]:
    """Outputs and gradients of what a layer has whose norms come first."""
    torch.manual_seed(3)
    x, residual = (torch.randn(ROWS, 2 * cols).to(dtype).requires_grad_() for _ in range(2))
    norm = Norm(torch.randn(2 * cols, requires_grad=True), None, 1e-5, is_centred=False)
    assert norm.weight is not None
    packed = torch.randn(ROWS, 4 * 2 * cols).to(dtype).requires_grad_()
    angles = Angles(*torch.randn(2, ROWS, cols))
    both = ((None, None), (norm, norm))
    turned = [rotate(packed, angles, Heads(2, 2 * cols, 1.0, 1), norms) for norms in both]
    outputs = [*add_norm(x, residual, norm, MASK), *(glu(x, kind) for kind in ("silu", "gelu", "gelu_tanh")), *turned]
    weights = [torch.randn(output.shape).to(dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [x, residual, packed, norm.weight], weights)]


def run_disentangled(dtype: torch.dtype, cols: int) -> list[Tensor]:
    """Output and gradients of attention with positions, of two examples with `cols` tokens and half of these."""
    torch.manual_seed(3)
    width = HEADS.count * HEADS.size
    grid = Grid.of(2, cols, torch.arange(cols + cols // 2))
    bias = (torch.arange(cols) >= torch.tensor([cols, cols // 2])[:, None]) * torch.finfo(torch.float32).min
    packed = torch.randn(grid.tokens, 3 * width).to(dtype).requires_grad_()
    keys, queries = (torch.randn(2 * cols - 1, width).to(dtype).requires_grad_() for _ in range(2))
    context = disentangled_attention(None, packed, keys, queries, bias[:, None, None], HEADS, MASK, grid)
    weights = torch.randn(context.shape).to(dtype)
    return [context, *torch.autograd.grad(context, [packed, keys, queries], weights)]


def run_int8(dtype: torch.dtype, cols: int) -> list[Tensor]:
    """Rows in 8 bits, and a product of them."""
    torch.manual_seed(1)
    rounded, scales = quantise_rows(torch.randn(ROWS, cols).to(dtype), torch.randn(cols))
    right = torch.randint(-127, 127, (cols, cols), dtype=torch.int8)
    return [rounded, scales, multiply((rounded, scales), right, torch.randn(cols), torch.randn(cols))]


def run_update(dtype: torch.dtype, cols: int) -> list[Tensor]:
    """A gradient's norm, and weights after two updates, clipped."""
    torch.manual_seed(2)
    module = nn.Linear(cols, ROWS)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    use_masters(optimizer, MasterWeights(module, list(module.parameters()) if dtype == torch.bfloat16 else []))
    norms = []
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape).to(dtype)
        norms.append(clip_gradients(optimizer, module.parameters(), 1.0))
        optimizer.step()
    return [torch.tensor(norms), *module.parameters(), *module.state_dict().values()]


@pytest.mark.parametrize(
    "processor", [pytest.param(name, marks=[pytest.mark.proof] * (name in FOR_PROOFS)) for name in RUNNABLE]
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
def test_every_processor_s_build_gives_what_plain_torch_does(processor: str, dtype: torch.dtype) -> None:
    for run in (run_layers, run_gated, run_disentangled, run_int8, run_update):
        for cols in WIDTHS:
            with use_kernels(build_for(processor)):
                assert kernels_for(torch.empty(0)) is build_for(processor)
                found = run(dtype, cols)
            with plain_torch():
                wanted = run(dtype, cols)
            for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
                assert relative_error(mine, theirs) < TOLERANCE[dtype], (run.__name__, number, cols)
    with use_kernels(build_for(processor)):
        check_first_token_half(Heads(3, 32, 0.18), Grid(5, 37), MASK, dtype)


@pytest.mark.skipif("cooperlake" not in RUNNABLE, reason="this CPU has no AVX512_BF16")
@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.parametrize("longest", [1, 33, 100, 256, 257])
@pytest.mark.parametrize(("queries", "shift", "mask"), [(0, 0.0, MASK), (0, 100.0, MASK), (33, -100.0, NO_MASK)])
def test_whole_heads_without_tiles(size: int, longest: int, queries: int, shift: float, mask: Mask) -> None:
    """As on a CPU with AVX512_BF16 and without AMX, or with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16."""
    with use_kernels(build_for("cooperlake")):
        check_whole_heads(size, longest, queries, shift, mask)


@pytest.fixture
def compilations(tmp_path: Path) -> Iterator[Path]:
    """A file with a line for each time that the compiler ran, which copies this CPU's library instead of compiling."""
    compiler, calls, made = tmp_path / "compiler", tmp_path / "calls", tmp_path / "made.so"
    own = find_compiler({})
    assert own is not None
    shutil.copy(build(own), made)
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\necho >>"{calls}"\n'
        f'while [ $# -gt 1 ]; do shift; done\ncp "{made}" "$1"\n'
    )
    compiler.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        patch.setattr(kernels_module, "find_compiler", lambda environment: str(compiler))
        yield calls


def test_a_library_gets_its_name_when_it_is_on_the_disk(compilations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, synced = compilations.parent / "cpuft", list[bytes]()

    def sync(descriptor: int) -> None:
        assert not list(folder.glob("kernels-*.so"))
        synced.append(Path(f"/proc/self/fd/{descriptor}").read_bytes())

    monkeypatch.setattr(os, "fsync", sync)
    for _ in range(2):
        assert kernels_module._load_own()[1] == "on"
    (library,) = folder.glob("kernels-*.so")
    assert synced == [library.read_bytes()]
    assert len(compilations.read_text()) == 1


def test_a_library_that_cannot_be_loaded_is_named(compilations: Path) -> None:
    (compilations.parent / "made.so").write_text("no library")
    found, status = kernels_module._load_own()
    (library,) = (compilations.parent / "cpuft").glob("kernels-*.so")
    assert found is None
    assert status == f"off: {library} cannot be loaded: {library}: file too short"
    assert len(compilations.read_text()) == 1


def test_a_compiler_that_fails_is_quoted(compilations: Path) -> None:
    (compilations.parent / "compiler").write_text("#!/bin/sh\necho one >&2\necho 'two words' >&2\nexit 1\n")
    expected = f"off: {compilations.parent / 'compiler'} could not build the kernels: two words"
    assert kernels_module._load_own() == (None, expected)
    (compilations.parent / "compiler").write_text("#!/bin/sh\n[ $1 = --version ] || { echo bad >&2; exit 1; }\n")
    expected = f"off: {compilations.parent / 'compiler'} could not build the kernels: bad"
    assert kernels_module._load_own() == (None, expected)


def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path: Path, own_cache: None) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\necho planted >"$1"\n')
    compiler.chmod(0o700)
    planted = build(str(compiler))
    assert build(str(compiler)) == planted
    planted.parent.chmod(0o777)
    with pytest.raises(CpuftError, match=r"can be written to by other users \(mode 777\)"):
        build(str(compiler))
