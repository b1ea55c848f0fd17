"""Disentangled attention: the kernels against plain torch, and against transformers' own formula in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DebertaV2Config, DisentangledSelfAttention

from cpuft.kernels import plain_torch
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import Grid
from cpuft.train.fast.disentangled import Distances, disentangled_attention, number_embeddings
from cpuft.train.fast.elementwise import NO_MASK, Mask
from tests.train.fast.conftest import need_kernels
from tests.train.fast.encoders import relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3 / 256}
MASK = Mask(seed=12345, threshold=6554)


def make_inputs(grid: Grid, heads: Heads, dtype: torch.dtype, first_only: bool) -> list[Tensor | None]:
    """The arguments of the attention that have gradients."""
    generator = torch.Generator().manual_seed(grid.tokens)
    width = heads.count * heads.size
    shapes = [(grid.batch, width), (grid.tokens, (2 if first_only else 3) * width), *[(2 * grid.length - 1, width)] * 2]
    made = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return [made[0] if first_only else None, *made[1:]]


def make_key_mask(lengths: list[int], longest: int) -> Tensor:
    shut = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    return (shut * torch.finfo(torch.float32).min)[:, None, None, :]


def run_attention(
    inputs: list[Tensor | None], bias: Tensor | None, heads: Heads, mask: Mask, grid: Grid
) -> list[Tensor]:
    """The context, and the gradients of all inputs for random gradients of the context."""
    query, packed, position_keys, position_queries = inputs
    assert packed is not None
    assert position_keys is not None
    assert position_queries is not None
    context = disentangled_attention(query, packed, position_keys, position_queries, bias, heads, mask, grid)
    weights = torch.randn(context.shape, generator=torch.Generator().manual_seed(2)).to(context.dtype)
    return [context, *torch.autograd.grad(context, [x for x in inputs if x is not None], weights)]


LENGTHS = st.one_of(st.integers(1, 5), st.integers(1, 140))


@given(
    st.lists(LENGTHS, min_size=1, max_size=4),
    st.sampled_from([(1, 3), (3, 8), (2, 64), (2, 24)]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([NO_MASK, MASK]),
    st.sampled_from(list(TOLERANCE)),
)
@example([97], (2, 64), False, False, NO_MASK, torch.float32)
@settings(max_examples=60, deadline=None)
def test_kernels_are_plain_torch(
    lengths: list[int], shape: tuple[int, int], packs: bool, first_only: bool, mask: Mask, dtype: torch.dtype
) -> None:
    need_kernels()
    longest = max(lengths)
    bias = make_key_mask(lengths, longest)
    places = (bias == 0).flatten().nonzero().squeeze(1)
    grid = Grid.of(len(lengths), longest, places if packs else None)
    heads = Heads(*shape, factor=(3 * shape[1]) ** -0.5)
    inputs = make_inputs(grid, heads, dtype, first_only)
    found = run_attention(inputs, bias, heads, mask, grid)
    wide = [None if x is None else x.detach().float().requires_grad_() for x in inputs]
    with plain_torch():
        wanted = run_attention(wide, bias, heads, mask, grid)
    names = ["context", *(["query"] if first_only else []), "packed", "position_keys", "position_queries"]
    # Where all of an array's gradients are rounding, as with one token, they are compared with the others.
    floor = max(float(x.detach().abs().max()) for x in wanted[1:])
    for name, mine, theirs in zip(names, found, (x.detach() for x in wanted), strict=True):
        assert mine.dtype == dtype
        assert mine.isfinite().all(), name
        error = float((mine.float() - theirs).detach().norm())
        assert error <= TOLERANCE[dtype] * max(float(theirs.norm()), floor), name


@pytest.mark.parametrize("biased", ["queries", "heads", "none"])
def test_kernels_with_other_biases(biased: str) -> None:
    need_kernels()
    shape = {"queries": (2, 1, 37, 37), "heads": (1, 3, 1, 37), "none": None}[biased]
    bias = None if shape is None else torch.randn(shape)
    grid, heads = Grid(2, 37), Heads(3, 8, 0.3)
    inputs = make_inputs(grid, heads, torch.float32, False)
    found = run_attention(inputs, bias, heads, MASK, grid)
    with plain_torch():
        wanted = run_attention(inputs, bias, heads, MASK, grid)
    assert all(relative_error(mine, theirs) < 1e-5 for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    need_kernels()
    grid, heads = Grid(7, 45), Heads(3, 16, 0.2)
    inputs = make_inputs(grid, heads, dtype, False)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(run_attention(inputs, None, heads, MASK, grid))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for some in found[1:] for one, other in zip(found[0], some, strict=True))


@pytest.mark.parametrize("length", [1, 2, 33, 100])
@pytest.mark.parametrize("buckets", [-1, 8])
def test_scores_are_those_of_transformers(length: int, buckets: int, each_way: None) -> None:
    """In fp64, their own module has other embeddings for far distances (log buckets), or one for each distance."""
    torch.manual_seed(0)
    config = DebertaV2Config(
        hidden_size=24,
        num_attention_heads=3,
        relative_attention=True,
        position_buckets=buckets,
        max_relative_positions=64,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    own = DisentangledSelfAttention(config).double()
    hidden = torch.randn(2, length, 24, dtype=torch.float64)
    embeddings = torch.randn(128 if buckets < 0 else 16, 24, dtype=torch.float64)
    wanted = own(hidden, torch.ones(2, 1, length, length), rel_embeddings=embeddings)[0]
    distances = Distances.of(number_embeddings(length, buckets, 64))
    used = distances.select(embeddings)
    position_keys, position_queries = own.key_proj(used), own.query_proj(used)
    packed = torch.cat([layer(hidden) for layer in (own.query_proj, own.key_proj, own.value_proj)], 2).flatten(0, 1)
    heads = Heads(3, 8, factor=24**-0.5)
    ahead, behind = position_keys[distances.for_keys].float(), position_queries[distances.for_queries].float()
    found = disentangled_attention(None, packed.float(), ahead, behind, None, heads, NO_MASK, Grid(2, length))
    assert relative_error(found.view(2, length, 24), wanted) < 1e-5


def test_attention_keeps_no_scores() -> None:
    kept: list[torch.Size] = []
    grid, heads = Grid(2, 11), Heads(3, 8, 0.3)
    _, packed, position_keys, position_queries = make_inputs(grid, heads, torch.float32, False)
    assert packed is not None
    assert position_keys is not None
    assert position_queries is not None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda _: torch.empty(0)):
        disentangled_attention(None, packed, position_keys, position_queries, None, heads, replace(MASK), grid)
    assert kept == [(22, 72), (21, 24), (21, 24)]
