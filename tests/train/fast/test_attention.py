"""Attention with windows and shared heads of keys, as kernels and as plain torch, against a dense softmax in fp64."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cpuft.kernels import plain_torch
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import Grid, attention
from cpuft.train.fast.elementwise import NO_MASK, Mask, kept_elements
from tests.train.fast.conftest import need_kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3 / 256}
MASK = Mask(seed=4321, threshold=9000)
LOWEST = torch.finfo(torch.float32).min


def each_way() -> Iterator[contextlib.AbstractContextManager[None]]:
    """First the kernels, then plain torch."""
    need_kernels()
    yield contextlib.nullcontext()
    yield plain_torch()


def mean_error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of `wanted`, or over 1 if that is larger.

    The terms of every sum are about one, and those of a score's gradient may cancel: with one key, it is zero.
    """
    difference, size = (x.detach().double().square().mean().sqrt().item() for x in (found - wanted, wanted))
    return difference / max(size, 1.0)


def split_heads(x: Tensor, grid: Grid, heads: Heads, count: int) -> Tensor:
    """(tokens, count * size) -> (batch, heads, length, size): keys and values are repeated for each query head."""
    places = torch.arange(grid.tokens) if grid.places is None else grid.places
    whole = x.new_zeros(grid.batch * grid.length, x.shape[1]).index_copy(0, places, x)
    split = whole.view(grid.batch, grid.length, count, heads.size).transpose(1, 2)
    return split[:, [head * count // heads.count for head in range(heads.count)]]


def dense_attention(
    query: Tensor, packed: Tensor, bias: Tensor | None, heads: Heads, mask: Mask, grid: Grid, queries: Grid
) -> Tensor:
    """`attention` with all pairs of a query and a key; `query` is given."""
    q = split_heads(query, queries, heads, heads.count)
    k, v = (split_heads(x, grid, heads, heads.keys) for x in packed.chunk(2, 1))
    distances = torch.arange(grid.length) - torch.arange(queries.length)[:, None]
    hidden = (distances < -heads.back) & (heads.back >= 0) | (distances > heads.ahead) & (heads.ahead >= 0)
    scores = q @ k.transpose(2, 3) * heads.factor + (0.0 if bias is None else bias.double())
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0)
    if mask.threshold:
        probabilities = probabilities * kept_elements(mask, probabilities.shape) * mask.scale
    context = (probabilities @ v).transpose(1, 2).flatten(2).flatten(0, 1)
    return context if queries.places is None else context[queries.places]


def key_bias(grid: Grid) -> Tensor | None:
    """What hides the positions without a token from all queries."""
    if grid.places is None:
        return None
    bias = torch.full((grid.batch * grid.length,), LOWEST).index_fill_(0, grid.places, 0.0)
    return bias.view(grid.batch, 1, 1, grid.length)


def check(heads: Heads, grid: Grid, queries: int, mask: Mask, dtype: torch.dtype, bias: Tensor | None) -> None:
    """Compare context and gradients; `queries`: how many of each example are given apart, 0 for all in `packed`."""
    torch.manual_seed(grid.length)
    wide, narrow = heads.count * heads.size, heads.keys * heads.size
    rows = grid.batch * queries if queries else grid.tokens
    query, both = torch.randn(rows, wide).to(dtype), torch.randn(grid.tokens, 2 * narrow).to(dtype)
    weights = torch.randn(rows, wide).to(dtype)
    exact = query.double().requires_grad_(), both.double().requires_grad_()
    wanted = dense_attention(*exact, bias, heads, mask, grid, Grid(grid.batch, queries) if queries else grid)
    wanted_grads = torch.autograd.grad(wanted, exact, weights.double())
    for way in each_way():
        with way:
            mine = query.clone().requires_grad_(), both.clone().requires_grad_()
            if queries:
                found = attention(*mine, bias, heads, mask, grid)
            else:
                found = attention(None, torch.cat(mine, 1), bias, heads, mask, grid)
            grads = torch.autograd.grad(found, mine, weights)
        assert found.dtype == dtype
        for one, other in zip((found, *grads), (wanted, *wanted_grads), strict=True):
            assert one.isfinite().all()
            assert mean_error(one, other) < TOLERANCE[dtype]


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 90))
    kept = draw(st.none() | st.randoms(use_true_random=False))
    if kept is None:
        return Grid(batch, length)
    # Each example has its first token, as layouts have, and holes anywhere else, also at the end.
    share = kept.random()
    places = [place for place in range(batch * length) if place % length == 0 or kept.random() < share]
    return Grid.of(batch, length, torch.tensor(places))


WINDOWS = st.sampled_from([-1, 0, 1, 2, 7, 31, 32, 33, 64, 89, 90, 1000])
# (heads, heads of keys)
COUNTS = st.sampled_from([(1, 0), (2, 1), (4, 2), (3, 1), (4, 4), (6, 3)])
SIZES = st.sampled_from([1, 5, 8, 16, 24, 64])


@given(
    grid=grids(),
    counts=COUNTS,
    size=SIZES,
    back=WINDOWS,
    ahead=WINDOWS,
    queries=st.sampled_from([0, 0, 1, 2]),
    mask=st.sampled_from([NO_MASK, MASK]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@example(Grid(1, 1), (1, 0), 8, 0, 0, 0, NO_MASK, torch.float32)
@example(Grid(2, 90), (4, 1), 64, 9, 3, 0, MASK, torch.bfloat16)
@example(Grid.of(1, 90, torch.tensor([0])), (1, 0), 8, 0, 0, 2, NO_MASK, torch.float32)
def test_windows_and_shared_heads(
    grid: Grid,
    counts: tuple[int, int],
    size: int,
    back: int,
    ahead: int,
    queries: int,
    mask: Mask,
    dtype: torch.dtype,
) -> None:
    heads = Heads(counts[0], size, size**-0.5, counts[1], back, ahead)
    check(heads, grid, min(queries, grid.length), mask, dtype, key_bias(grid))


# With a window, an example is processed in parts of 256 queries or more.
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
@pytest.mark.parametrize("queries", [0, 2, 300])
@pytest.mark.parametrize(("back", "ahead"), [(64, 64), (0, 0), (5, 1), (130, 3), (2, 200), (-1, 0), (0, -1)])
def test_windows_over_several_parts(dtype: torch.dtype, queries: int, back: int, ahead: int) -> None:
    gaps = torch.arange(2 * 650) % 7 != 3
    for grid in (Grid(1, 650), Grid.of(2, 650, gaps.nonzero().squeeze(1)[:1000])):
        check(Heads(2, 16, 0.25, 1, back, ahead), grid, queries, MASK, dtype, key_bias(grid))


def test_a_window_saves_time(one_thread: None) -> None:
    need_kernels()
    packed, seconds = torch.randn(2048, 3 * 64, requires_grad=True), []
    for window in (-1, 16):
        fastest = math.inf
        for _ in range(3):
            start = time.thread_time()
            context = attention(None, packed, None, Heads(1, 64, 0.125, 0, window, window), NO_MASK, Grid(1, 2048))
            torch.autograd.grad(context, packed, context)
            fastest = min(fastest, time.thread_time() - start)
        seconds.append(fastest)
    # Of 2,048 keys, a block of queries sees 64 to 80.
    assert seconds[1] < seconds[0] / 3, seconds


def check_whole_heads(size: int, longest: int, queries: int, shift: float, mask: Mask) -> None:
    """Compare attention in bf16 for examples of three lengths.

    One key of three of the first example is masked, and all keys of the longest one. `shift` is added to all scores.
    """
    lengths = (longest // 2 + 1, longest, 1)
    places = torch.cat([example * longest + torch.arange(length) for example, length in enumerate(lengths)])
    grid = Grid.of(3, longest, places)
    bias = key_bias(grid)
    assert bias is not None
    bias[0, ..., 1::3] = LOWEST
    bias[1] = LOWEST
    bias[bias == 0] = shift
    check(Heads(2, size, size**-0.5), grid, min(queries, longest), mask, torch.bfloat16, bias)


# With tiles, heads of up to 512 tokens are computed as a whole, 32 queries at a time; with AVX512_BF16 alone, of up to
# 256. If all scores are near 100, exponentials are too large; if they are near -100, too small: then the highest score
# is subtracted first.
@pytest.mark.parametrize("size", [32, 64, 96])
@pytest.mark.parametrize("longest", [1, 15, 32, 54, 100, 256, 512, 513])
@pytest.mark.parametrize(
    ("queries", "shift", "mask"), [(0, 0.0, MASK), (0, 100.0, MASK), (0, -100.0, NO_MASK), (33, 0.0, MASK)]
)
def test_whole_heads(size: int, longest: int, queries: int, shift: float, mask: Mask) -> None:
    check_whole_heads(size, longest, queries, shift, mask)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("lengths", [(50, 50, 50, 50, 50), (1, 2, 9, 33, 50), (50, 1, 1, 2, 1)], ids=str)
def test_whole_heads_repeat_bit_by_bit(threads: int, lengths: tuple[int, ...]) -> None:
    need_kernels()
    grid = Grid.of(5, 50, torch.cat([50 * example + torch.arange(one) for example, one in enumerate(lengths)]))
    packed = torch.randn(grid.tokens, 3 * 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    results, before = [], torch.get_num_threads()
    for count in (1, threads, threads):
        torch.set_num_threads(count)
        context = attention(None, packed, None, Heads(2, 32, 0.2), MASK, grid)
        results.append((context, *torch.autograd.grad(context, packed, context)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_what_is_not_finite_stays_in_its_example(one_thread: None) -> None:
    packed = torch.randn(64 + 40, 3 * 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    grid = Grid.of(2, 64, torch.arange(64 + 40))
    for way in each_way():
        found = list[torch.Tensor]()
        with way:
            for value in (1.0, math.nan):
                weights = torch.ones(64 + 40, 64).bfloat16()
                weights[:64] = value
                context = attention(None, packed, key_bias(grid), Heads(2, 32, 0.2), MASK, grid)
                found += torch.autograd.grad(context, packed, weights)
        assert torch.equal(found[0][64:], found[1][64:])


def test_keys_outside_of_a_window_get_no_gradient() -> None:
    heads = Heads(2, 8, 0.3, 1, back=3, ahead=2)
    for way in each_way():
        packed = torch.randn(200, 32, requires_grad=True)
        with way:
            context = attention(None, packed, None, heads, NO_MASK, Grid(1, 200))
            (grad,) = torch.autograd.grad(context[100].sum(), packed)
        assert grad[:, 16:].abs().sum(1).nonzero().squeeze(1).tolist() == [97, 98, 99, 100, 101, 102]


def test_a_query_whose_window_the_bias_masks_is_no_nan() -> None:
    bias = torch.full((2, 1, 1, 40), LOWEST)
    for heads in (Heads(2, 8, 0.3, 1, 3, 0), Heads(2, 8, 0.3, 0, -1, 0)):
        check(heads, Grid(2, 40), 0, NO_MASK, torch.float32, bias)


def test_a_query_whose_window_holds_no_key_gets_zeros() -> None:
    # Of the second example there is only position 0, and position 3 is asked.
    grid = Grid.of(2, 5, torch.tensor([0, 1, 2, 3, 4, 5]))
    heads = Heads(1, 8, 0.3, 0, back=1, ahead=0)
    need_kernels()
    query, packed = (torch.randn(rows, width, requires_grad=True) for rows, width in ((8, 8), (6, 16)))
    context = attention(query, packed, None, heads, MASK, grid)
    assert context[7].count_nonzero() == 0
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(context.sum(), [query, packed]))


def test_a_window_beyond_the_length_changes_no_bit() -> None:
    torch.manual_seed(0)
    packed, whole = torch.randn(2 * 70, 3 * 24, requires_grad=True), Heads(3, 8, 0.3)
    for way in each_way():
        with way:
            results = []
            for heads in (whole, replace(whole, key_count=3), replace(whole, back=70, ahead=70)):
                context = attention(None, packed, None, heads, MASK, Grid(2, 70))
                results.append((context, *torch.autograd.grad(context.sum(), packed)))
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@pytest.mark.parametrize("length", [1, 20, 300])  # with 300, distances beyond the largest bucket's begin, 128
def test_with_a_bias_for_distances_it_is_t5_s_encoder_attention(length: int) -> None:
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    torch.manual_seed(0)
    config = T5Config(d_model=24, d_kv=8, num_heads=3, dropout_rate=0.0)
    assert (config.relative_attention_num_buckets, config.relative_attention_max_distance) == (32, 128)
    own = T5Attention(config, has_relative_attention_bias=True).eval()
    for weight in own.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    hidden = torch.randn(2, length, 24)
    wanted = own(hidden)[0]
    wanted.square().sum().backward()
    heads = Heads(3, 8, factor=1.0)  # T5 does not divide scores by the root of the size of a head
    for way in each_way():
        table = own.relative_attention_bias.weight.detach().requires_grad_()
        # An encoder's buckets tell keys before a query from those after it.
        distances = torch.arange(1 - length, length)
        buckets = T5Attention._relative_position_bucket(distances, bidirectional=True, num_buckets=32, max_distance=128)
        packed = torch.cat([one(hidden).detach() for one in (own.q, own.k, own.v)], -1).flatten(0, 1)
        with way:
            context = attention(
                None, packed, None, heads, NO_MASK, Grid(2, length), position_bias=table[buckets].T.contiguous()
            )
        found = own.o(context).view_as(wanted)
        assert mean_error(found, wanted) < 1e-5
        found.square().sum().backward()
        assert own.relative_attention_bias.weight.grad is not None
        assert mean_error(table.grad, own.relative_attention_bias.weight.grad) < 1e-5
