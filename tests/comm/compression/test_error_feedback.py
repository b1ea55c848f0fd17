"""Error feedback: what ranks receive and what is unsent sum up to all gradients, over several steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cpuft.comm.compression.int8 import BlockMean
from cpuft.comm.compression.powersgd import RANK, Matrices, PowerSGD, _split, orthonormalise
from cpuft.kernels import plain_torch, use_kernels
from tests.comm.compression.feedback import Bucket
from tests.comm.ranks import fork_ranks
from tests.train.fast.test_kernels import FOR_PROOFS, RUNNABLE, build_for


def gather(unsent: list[torch.Tensor], generator: torch.Generator) -> Matrices:
    """Matrices of which this is unsent, in a bucket that begins with seven other numbers if they are several."""
    starts = accumulate((one.numel() for one in unsent), initial=7 if len(unsent) > 1 else 0)
    shapes = [(one.shape[0], one.shape[1]) for one in unsent]
    return Matrices(shapes, [*starts][:-1], torch.cat([one.view(-1) for one in unsent]), generator)


@pytest.mark.parametrize(
    "dtype, off", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float64, 1e-5)]
)
def test_two_factors_send_all_of_a_gradient_of_low_rank(dtype: torch.dtype, off: float) -> None:
    generator = torch.Generator().manual_seed(1)
    gradient = (torch.randn(100, 8, generator=generator) @ torch.randn(8, 80, generator=generator)).to(dtype)
    matrices, received = gather([torch.zeros(100, 80, dtype=dtype)], generator), torch.empty_like(gradient)
    p = matrices.compute_p(gradient.view(-1))
    q = matrices.compute_q(p)
    assert (p.shape, q.shape) == ((RANK * 100,), (RANK * 80,))
    matrices.write_approximations(q, q, received.view(-1))
    assert (received - gradient).norm() < off * gradient.norm()
    assert matrices.unsent[0].norm() < off * gradient.norm()


@pytest.mark.parametrize("dtype, off", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_factors_are_the_same_with_kernels_and_without(dtype: torch.dtype, off: float) -> None:
    """What each update sends and leaves unsent, over three updates; what is sent differs a little from Q.

    With bf16, what is unsent is rounded after each of them.
    """
    generator = torch.Generator().manual_seed(2)
    shapes = [(100, 80), (7, 33), (5, 1), (1, 40), (30, 300)]
    starts = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    exact = [start.float() for start in starts]
    draw, again = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    mine, others = gather(starts, draw), gather(starts, again)
    for _ in range(3):
        gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        buffer = torch.cat([torch.ones(7).to(dtype), *(one.view(-1) for one in gradients)])
        p = mine.compute_p(buffer)
        with plain_torch():
            assert_close(_split(others.compute_p(buffer), mine.p_shapes), _split(p, mine.p_shapes), rtol=off, atol=off)
        q = mine.compute_q(p)
        sent, received, approximations = q * 0.99, buffer.clone(), buffer.clone()
        factors = _split(mine._p, mine.p_shapes), _split(sent, mine.q_shapes)
        exact = [
            unsent + gradient.float() - left.T @ right
            for unsent, gradient, left, right in zip(exact, gradients, *factors, strict=True)
        ]
        mine.write_approximations(sent, q, received)
        with plain_torch():
            assert_close(_split(others.compute_q(p), mine.q_shapes), _split(q, mine.q_shapes), rtol=off, atol=off)
            others.write_approximations(sent, q, approximations)
        assert received[:7].tolist() == [1.0] * 7
        assert_close(others._split_buffer(approximations), mine._split_buffer(received), rtol=1e-2, atol=1e-5)
        for one, unsent in zip(mine.unsent + others.unsent, exact * 2, strict=True):
            torch.testing.assert_close(one, unsent, rtol=off, atol=off)


@pytest.fixture
def alone() -> Iterator[Any]:
    """A group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("last, messages", [((20, 40), [4, 2, 2]), ((300, 40), [4, 4, 4])], ids=["small", "large"])
def test_a_small_last_bucket_shares_the_messages_of_the_bucket_before(
    last: tuple[int, int], messages: list[int], alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, own = list[int](), BlockMean.send

    def send(mean: BlockMean) -> None:
        sent.append(1)
        own(mean)

    monkeypatch.setattr(BlockMean, "send", send)
    parameters = [torch.zeros(300, 40), torch.zeros(last)]
    reducer, counts = PowerSGD(alone, exact_updates=0), []
    for _ in messages:
        gradients = [torch.outer(torch.arange(float(len(one))), torch.ones(40)) for one in parameters]
        pairs = enumerate(zip(parameters, gradients, strict=True))
        buckets: list[Any] = [Bucket([one], [gradient], last=number == 1) for number, (one, gradient) in pairs]
        for bucket, future in zip(buckets, [reducer.reduce(bucket) for bucket in buckets], strict=True):
            assert future.wait() is bucket.buffer()
        for bucket, gradient in zip(buckets, gradients, strict=True):
            assert (bucket.gradients()[0] - gradient).norm() < 0.2 * gradient.norm()
        counts.append(len(sent))
        sent.clear()
    assert counts == messages


def test_after_an_error_nothing_more_is_sent(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may wait for what this rank could not send."""
    sent = list[int]()

    def fail(mean: BlockMean) -> None:
        sent.append(1)
        raise RuntimeError("connection closed by rank 1")

    monkeypatch.setattr(BlockMean, "send", fail)
    reducer = PowerSGD(alone, exact_updates=0)
    buckets: list[Any] = [Bucket([torch.zeros(300, 40)], [torch.ones(300, 40)], last=last) for last in (False, True)]
    for future in [reducer.reduce(bucket) for bucket in buckets]:
        with pytest.raises(RuntimeError, match="connection closed by rank 1"):
            future.wait()
    assert sent == [1]


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], rtol: float, atol: float) -> None:
    """Compare tensors; `atol` is a share of the largest number of each."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol * float(other.abs().max()))


@pytest.mark.parametrize("shape", [(16, 16), (16, 300), (3, 7), (1, 1)])
@pytest.mark.parametrize("kind", ["full", "dependent", "zeros", "tiny"])
def test_rows_are_made_orthonormal(shape: tuple[int, int], kind: str) -> None:
    factor = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    if kind == "dependent":
        factor[len(factor) // 2 :] = factor[:1] * 3
    elif kind != "full":
        factor *= 0.0 if kind == "zeros" else 1e-15
    rows = orthonormalise(factor, torch.float32)
    torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), rtol=0, atol=1e-5)
    # The factor's rows are combinations of them.
    torch.testing.assert_close(factor @ rows.T @ rows, factor, rtol=1e-4, atol=1e-5 * float(factor.abs().max()))
    with plain_torch():
        torch.testing.assert_close(orthonormalise(factor, torch.float32), rows, rtol=1e-3, atol=1e-3)
    rounded = orthonormalise(factor, torch.bfloat16)
    assert rounded.equal(rounded.bfloat16().float())
    torch.testing.assert_close(rounded, rows, rtol=2.0**-8, atol=0)


def test_all_processors_make_the_same_bits_of_the_same_messages() -> None:
    """Ranks with different CPUs would otherwise train with different gradients."""

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(6)
        matrices = gather([torch.zeros(100, 333).bfloat16()], generator)
        matrices._p = orthonormalise(torch.randn(RANK, 100, generator=generator), torch.bfloat16)
        mean, received = torch.randn(RANK, 333, generator=generator), torch.empty(100, 333).bfloat16()
        matrices.write_approximations(mean, mean, received)
        return matrices._p, received

    wanted = make()
    for name in RUNNABLE:
        if name not in FOR_PROOFS:
            with use_kernels(build_for(name)):
                assert all(mine.equal(theirs) for mine, theirs in zip(make(), wanted, strict=True))


@pytest.mark.parametrize("without", [False, True])
def test_a_nan_is_not_hidden_by_orthonormal_rows(without: bool) -> None:
    factor = torch.ones(3, 40)
    factor[1, 7] = torch.nan
    with plain_torch() if without else nullcontext():
        assert orthonormalise(factor, torch.float32).isnan().any(dim=1).tolist() == [False, True, True]


@pytest.mark.parametrize("shape", [(100, 80), (33, 129)])
@pytest.mark.parametrize("without", [False, True])
def test_what_was_sent_is_subtracted_with_more_digits_than_bf16_has(shape: tuple[int, int], without: bool) -> None:
    """A gradient of zeros changes what is unsent by what was sent, and only the difference is rounded to bf16."""
    generator = torch.Generator().manual_seed(4)
    gradient = torch.randn(shape, generator=generator).bfloat16()
    with plain_torch() if without else nullcontext():
        matrices = gather([torch.zeros(shape).bfloat16()], generator)
        q = matrices.compute_q(matrices.compute_p(gradient.view(-1)))
        matrices.write_approximations(q, q, torch.empty_like(gradient).view(-1))
        exact = matrices.unsent[0]
        matrices.compute_p(torch.zeros_like(gradient).view(-1))
        torch.testing.assert_close(matrices._unsent.float().view(shape), exact, rtol=2.0**-8, atol=1e-4)


@pytest.fixture(scope="module", params=(2, 3))
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, dict[str, float]]]:
    folder: Path = tmp_path_factory.mktemp("feedback")
    run = fork_ranks(request.param, "tests.comm.compression.feedback", str(folder), seconds=60)
    assert run.returncode == 0, run.stdout[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("compression, lack", [("int8", 1e-4), ("powersgd", 0.1)])
@pytest.mark.real
def test_nothing_is_lost_over_steps(found: list[dict[str, dict[str, float]]], compression: str, lack: float) -> None:
    for one in found:
        assert one[compression]["gap"] < 1e-6
        # Otherwise this test would also pass with exact sums.
        assert one[compression]["lack"] > lack
        assert one[compression]["differ"] < 1e-9
        assert one["untouched"]


# A received mean in bf16 is rounded once more. Codes have 8 bits, and 4 bits in the later steps of powersgd.
@pytest.mark.parametrize(
    "rows, gap, off",
    [
        ("int8", 1e-6, 0.03),
        ("powersgd", 1e-6, 0.3),
        ("under way", 1e-6, 0.3),
        ("without kernels", 1e-6, 0.03),
        ("bf16", 1e-2, 0.03),
    ],
)
@pytest.mark.real
def test_nothing_is_lost_of_rows_that_only_some_ranks_have(
    found: list[dict[str, dict[str, float]]], rows: str, gap: float, off: float
) -> None:
    name = "rows without kernels" if rows == "without kernels" else f"{rows} rows"
    for one in (report[name] for report in found):
        assert one["gap"] < gap
        assert one["lack"] > 1e-4
        assert (one["differ"], one["named"]) == (0.0, 9)
        # Rounding errors, of which those of the step before are added.
        assert one["off"] < off
    # A rank has between 0 and about 60 of 97 rows; the means of all rows arrive on each rank.
    sent = [report[name]["bytes"] for report in found if rows != "under way"] or [0.6]
    assert 0.5 < min(sent) <= max(sent) < 0.9


# The rounding error of the last message is lost: 1/254 of its largest number, for each rank and for their mean.
@pytest.mark.parametrize("sent_as, off", [("none", 1e-5), ("bf16", 0.1), ("int8", 0.1)])
@pytest.mark.parametrize("how", ["", ", received"])
@pytest.mark.real
def test_local_sgd_ends_at_the_mean_of_the_ranks(
    found: list[dict[str, dict[str, float]]], sent_as: str, off: float, how: str
) -> None:
    for one in found:
        walked = one[f"local {sent_as}{how}"]
        assert walked["off"] < off
        assert walked["differ"] < 1e-12
        assert walked["unnamed"] == 0


@pytest.mark.real
def test_the_mean_is_applied_one_synchronization_later_with_nesterovs_formula(
    found: list[dict[str, list[float]]],
) -> None:
    # Of 1 the first step makes 0.7 * 1.9, the second 0.7 * (1 + 0.9 * 1.9), the third 0.7 * (1 + 0.9 * 2.71).
    steps = [1.33, 0.7 * 2.71, 0.7 * 3.439]
    places = [1.0, steps[0] + 1.0, steps[0] + steps[1] + 1.0, sum(steps) + 1.0]
    for one in found:
        assert one["plain"] == [1.0, 2.0, 3.0, 4.0]
        assert one["outer"] == pytest.approx(places, abs=1e-4)
