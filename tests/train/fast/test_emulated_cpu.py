"""The kernels' code for AVX-512 and AMX, whose instructions emulated_cpu.h emulates: its bits, and that they repeat."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cpuft.comm.compression.powersgd import Matrices, orthonormalise
from cpuft.compiler import SOURCES
from cpuft.kernels import Kernels, kernels_for, use_kernels
from cpuft.train.fast import products
from cpuft.train.fast.adamw import clip_gradients, use_masters
from cpuft.train.fast.master_weights import MasterWeights
from tests.conftest import COMPILE_ONCE
from tests.train.fast.encoders import relative_error
from tests.train.fast.test_attention import MASK, check_whole_heads
from tests.train.fast.test_gradient_places import check_places
from tests.train.fast.test_kernels import build_for
from tests.train.fast.test_threads import check_threads

HEADER = Path(__file__).with_name("emulated_cpu.h")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if platform.machine() != "x86_64":
        pytest.skip("only x86-64 runs this code, and AVX2 is among what is compared")
    library = tmp_path_factory.mktemp("emulated") / "kernels.so"
    # As with -O3, products and sums are joined, on which powersgd relies.
    flags = ["-march=haswell", "-include", str(HEADER), "-O2", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-w"]
    subprocess.run([COMPILE_ONCE, *flags, SOURCES[0], "-o", library], check=True)
    return Kernels(library)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def multiply(kernels: Kernels, rows: int, columns: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    """A product and the sums of its columns, and the product in fp64; rows are of very different sizes."""
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(rows, inner, generator=generator) * 10 ** torch.rand(rows, 1, generator=generator).mul(4)
    left, right = left.bfloat16(), torch.randn(inner, columns, generator=generator).bfloat16()
    done, sums = torch.zeros(1, dtype=torch.int64), torch.zeros(columns)
    product = torch.empty(rows, columns, dtype=torch.bfloat16)
    arrays = (left, right, None, None, None, sums, None, product, done)
    kernels.run("matrix_product", torch.bfloat16, *arrays, rows, columns, inner, 0, 0, 0)
    assert done
    return product, sums, left.double() @ right.double()


@pytest.mark.parametrize("sizes", [(1, 1, 32), (33, 31, 64), (100, 80, 1088), (1030, 96, 384)])
def test_sums_of_columns_with_tiles_are_those_of_fp64(emulated: Kernels, sizes: tuple[int, int, int]) -> None:
    for count in (1, 3):
        with threads(count):
            product, sums, exact = multiply(emulated, *sizes)
        assert relative_error(product, exact) < 4e-3
        assert relative_error(sums, exact.sum(0)) < 1e-4


def test_sums_of_columns_with_tiles_repeat_bit_by_bit(emulated: Kernels) -> None:
    with threads(5):
        _, first, _ = multiply(emulated, 700, 64, 64)
        for _ in range(40):
            assert multiply(emulated, 700, 64, 64)[1].equal(first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_all_cpus_make_the_same_updates(emulated: Kernels, dtype: torch.dtype) -> None:
    """With AVX2, AVX-512 and without an instruction that multiplies and adds, by one thread and by three."""

    def update() -> list[Tensor]:
        torch.manual_seed(2)
        module = nn.Sequential(nn.Linear(211, 97), nn.Linear(97, 3))
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, weight_decay=0.1)
        use_masters(optimizer, MasterWeights(module, list(module.parameters()) if dtype == torch.bfloat16 else []))
        norms = []
        for _ in range(3):
            for parameter in module.parameters():
                sizes = 10 ** torch.rand(parameter.shape, dtype=torch.float64).mul(12).sub(6)
                parameter.grad = (torch.randn(parameter.shape, dtype=torch.float64) * sizes).to(dtype)
            norms.append(clip_gradients(optimizer, module.parameters(), 1.0))
            optimizer.step()
        return [torch.tensor(norms, dtype=torch.float64), *module.parameters(), *module.state_dict().values()]

    own = kernels_for(torch.empty(0))
    assert own is not None
    wanted = update()
    for kernels in (own, build_for("haswell"), build_for("sandybridge"), emulated):
        for count in (1, 3):
            with use_kernels(kernels), threads(count):
                assert all(mine.equal(theirs) for mine, theirs in zip(update(), wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_all_cpus_make_the_same_factors_of_powersgd(emulated: Kernels, dtype: torch.dtype) -> None:
    """With AVX2, also where GCC avoids the instruction that multiplies and adds, with AVX-512, and without it."""

    def make() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(6)
        matrices = Matrices([(100, 333)], [0], torch.zeros(100 * 333, dtype=dtype), generator)
        matrices._p = orthonormalise(torch.randn(12, 100, generator=generator), dtype)
        mean, received = torch.randn(12, 333, generator=generator), torch.empty(100, 333, dtype=dtype)
        matrices.write_approximations(mean, mean, received)
        return matrices._p, received

    with use_kernels(build_for("haswell")):
        wanted = make()
    for kernels in (build_for("znver3"), build_for("sandybridge"), emulated):
        with use_kernels(kernels):
            assert all(mine.equal(theirs) for mine, theirs in zip(make(), wanted, strict=True))


def test_halves_with_tiles_write_gradients_into_buckets(emulated: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_MIN_ROWS", "_MIN_TOKENS", "_MIN_WORK"):
        monkeypatch.setattr(products, limit, 0)
    with use_kernels(emulated):
        check_places("bert", "bf16")


def test_steps_with_tiles_are_the_same_with_any_number_of_threads(
    emulated: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_MIN_ROWS", "_MIN_TOKENS", "_MIN_WORK"):
        monkeypatch.setattr(products, limit, 0)
    with use_kernels(emulated):
        check_threads("bert", "bf16", same_bits=True)


@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize(("size", "longest"), [(32, 1), (32, 54), (64, 33)])
def test_whole_heads_with_tiles(emulated: Kernels, size: int, longest: int, shift: float) -> None:
    with use_kernels(emulated):
        check_whole_heads(size, longest, 0, shift, MASK)
