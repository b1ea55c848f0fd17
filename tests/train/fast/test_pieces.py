"""Each fast piece against the plain torch it stands for: fp32 to 1e-5, bf16 to two units of its 8 bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import Grid, attention
from cpuft.train.fast.elementwise import NO_MASK, Mask, dropout_add_norm, gelu, kept_elements
from cpuft.train.fast.gradient_checkpointing import ForwardPass, run_with_recompute
from cpuft.train.fast.projection import PackedLinear, can_feed_forward, feed_forward, linear, product
from tests.train.fast.encoders import relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2 / 256}
MASK = Mask(seed=12345, threshold=6554)
HEADS = Heads(count=3, size=8, factor=8**-0.5)
GRID = Grid(batch=2, length=11)
# The second row of the batch has four tokens.
LOOSE = Grid.of(2, 11, torch.tensor([*range(11), *range(11, 15)]))

pytestmark = pytest.mark.usefixtures("each_way")

both_dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])
with_and_without_mask = pytest.mark.parametrize("mask", [NO_MASK, MASK], ids=["no-dropout", "dropout"])


def compare(
    fast: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """Outputs and gradients of `fast` on inputs in `dtype` against `plain` in fp64 on the same values."""
    mine = [x.to(dtype).requires_grad_() for x in inputs]
    theirs = [x.detach().double().requires_grad_() for x in mine]
    found, wanted = fast(*mine), plain(*theirs)
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    assert relative_error(found, wanted) < TOLERANCE[dtype]
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found.backward(weights)  # type: ignore[no-untyped-call]
    wanted.backward(weights.double())  # type: ignore[no-untyped-call]
    for x, y in zip(mine, theirs, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert relative_error(x.grad, y.grad) < TOLERANCE[dtype]


def plain_dropout(x: Tensor, mask: Mask) -> Tensor:
    return x * kept_elements(mask, x.shape) * mask.scale if mask.threshold else x


@both_dtypes
@with_and_without_mask
@pytest.mark.parametrize("shape", [(1, 4), (37, 24), (2, 5, 33)], ids=str)
def test_dropout_add_norm(dtype: torch.dtype, mask: Mask, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(shape[-1], eps=1e-5)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    exact = nn.LayerNorm(shape[-1], eps=1e-5).double()
    exact.load_state_dict(norm.state_dict())
    compare(
        lambda x, shift, residual: dropout_add_norm(x, shift, residual, norm, mask),
        lambda x, shift, residual: exact(residual + plain_dropout(x + shift, mask)),
        [torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)],
        dtype,
    )
    for fast, plain in zip(norm.parameters(), exact.parameters(), strict=True):
        assert fast.grad is not None
        assert plain.grad is not None
        assert relative_error(fast.grad, plain.grad) < TOLERANCE[dtype]


def plain_attention(query: Tensor, packed: Tensor, bias: Tensor | None, mask: Mask) -> Tensor:
    q, k, v = (
        x.view(x.shape[0], -1, HEADS.count, HEADS.size).transpose(1, 2) for x in (query, *packed.chunk(2, dim=-1))
    )
    scores = q @ k.transpose(2, 3) * HEADS.factor
    probabilities = (scores if bias is None else scores + bias).softmax(-1)
    return (plain_dropout(probabilities, mask) @ v).transpose(1, 2).flatten(2)


def key_mask() -> Tensor:
    shut = torch.arange(11) >= torch.tensor([11, 4])[:, None]
    return (shut * torch.finfo(torch.float32).min)[:, None, None, :]


BIASES = {
    "none": None,
    "keys": key_mask(),
    "queries": torch.randn(2, 1, 11, 11, generator=torch.Generator().manual_seed(5)),
    "heads": torch.randn(1, 3, 1, 11, generator=torch.Generator().manual_seed(6)),
}


@both_dtypes
@with_and_without_mask
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_attention(dtype: torch.dtype, mask: Mask, bias: Tensor | None) -> None:
    torch.manual_seed(0)
    compare(
        lambda packed: attention(None, packed.flatten(0, 1), bias, HEADS, mask, GRID).view(2, 11, 24),
        lambda packed: plain_attention(packed[..., :24], packed[..., 24:], bias, mask),
        [torch.randn(2, 11, 72)],
        dtype,
    )


@both_dtypes
@with_and_without_mask
def test_attention_with_one_query(dtype: torch.dtype, mask: Mask) -> None:
    torch.manual_seed(0)
    compare(
        lambda query, packed: attention(query, packed.flatten(0, 1), BIASES["keys"], HEADS, mask, GRID),
        lambda query, packed: plain_attention(query.unsqueeze(1), packed, BIASES["keys"], mask).squeeze(1),
        [torch.randn(2, 24), torch.randn(2, 11, 48)],
        dtype,
    )


@both_dtypes
@with_and_without_mask
def test_attention_without_padding(dtype: torch.dtype, mask: Mask) -> None:
    torch.manual_seed(0)
    assert LOOSE.places is not None
    places = LOOSE.places

    def padded(packed: Tensor) -> Tensor:
        whole = packed.new_zeros(22, 72).index_copy(0, places, packed).view(2, 11, 72)
        context = plain_attention(whole[..., :24], whole[..., 24:], BIASES["keys"], mask)
        return context.flatten(0, 1)[places]

    compare(
        lambda packed: attention(None, packed, BIASES["keys"], HEADS, mask, LOOSE),
        padded,
        [torch.randn(15, 72)],
        dtype,
    )


@both_dtypes
def test_attention_of_several_blocks_of_queries(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compare(
        lambda packed: attention(None, packed.flatten(0, 1), None, HEADS, MASK, Grid(2, 170)).view(2, 170, 24),
        lambda packed: plain_attention(packed[..., :24], packed[..., 24:], None, MASK),
        [torch.randn(2, 170, 72)],
        dtype,
    )


def spread(position_bias: Tensor, queries: int) -> Tensor:
    """(heads, 2 * length - 1) -> (heads, queries, length), where query i is at position i."""
    length = (position_bias.shape[1] + 1) // 2
    return torch.stack([position_bias[:, length - 1 - query :][:, :length] for query in range(queries)], 1)


@both_dtypes
@with_and_without_mask
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_attention_with_a_position_bias(dtype: torch.dtype, mask: Mask, bias: Tensor | None) -> None:
    torch.manual_seed(0)
    compare(
        lambda packed, positions: attention(
            None, packed.flatten(0, 1), bias, HEADS, mask, GRID, position_bias=positions.float()
        ).view(2, 11, 24),
        lambda packed, positions: plain_attention(
            packed[..., :24], packed[..., 24:], spread(positions, 11) + (0 if bias is None else bias), mask
        ),
        [torch.randn(2, 11, 72), torch.randn(3, 21)],
        dtype,
    )


@both_dtypes
def test_attention_of_several_blocks_of_queries_with_a_position_bias(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compare(
        lambda packed, positions: attention(
            None, packed.flatten(0, 1), None, HEADS, MASK, Grid(2, 170), position_bias=positions.float()
        ).view(2, 170, 24),
        lambda packed, positions: plain_attention(packed[..., :24], packed[..., 24:], spread(positions, 170), MASK),
        [torch.randn(2, 170, 72), torch.randn(3, 339)],
        dtype,
    )


@both_dtypes
def test_attention_with_one_query_and_a_position_bias(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compare(
        lambda query, packed, positions: attention(
            query, packed.flatten(0, 1), BIASES["keys"], HEADS, MASK, GRID, position_bias=positions.float()
        ),
        lambda query, packed, positions: plain_attention(
            query.unsqueeze(1), packed, spread(positions, 1) + key_mask(), MASK
        ).squeeze(1),
        [torch.randn(2, 24), torch.randn(2, 11, 48), torch.randn(3, 21)],
        dtype,
    )


@both_dtypes
def test_attention_without_padding_with_a_position_bias(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert LOOSE.places is not None
    places = LOOSE.places

    def padded(packed: Tensor, positions: Tensor) -> Tensor:
        whole = packed.new_zeros(22, 72).index_copy(0, places, packed).view(2, 11, 72)
        context = plain_attention(whole[..., :24], whole[..., 24:], spread(positions, 11) + key_mask(), MASK)
        return context.flatten(0, 1)[places]

    compare(
        lambda packed, positions: attention(
            None, packed, BIASES["keys"], HEADS, MASK, LOOSE, position_bias=positions.float()
        ),
        padded,
        [torch.randn(15, 72), torch.randn(3, 21)],
        dtype,
    )


def test_a_position_bias_that_is_frozen_gets_no_gradient() -> None:
    packed, positions = torch.randn(22, 72, requires_grad=True), torch.randn(3, 21)
    attention(None, packed, None, HEADS, MASK, GRID, position_bias=positions).sum().backward()  # type: ignore[no-untyped-call]
    assert packed.grad is not None
    assert positions.grad is None


def test_attention_keeps_no_scores() -> None:
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda _: torch.empty(0)):
        attention(None, torch.randn(22, 72, requires_grad=True), BIASES["keys"], HEADS, MASK, GRID)
    assert kept == [(22, 72)]


def test_attention_gives_masked_keys_no_gradient() -> None:
    packed = torch.randn(22, 72, requires_grad=True)
    attention(None, packed, BIASES["keys"], HEADS, MASK, GRID).sum().backward()  # type: ignore[no-untyped-call]
    assert packed.grad is not None
    assert packed.grad[15:, 24:].count_nonzero() == 0


def test_a_row_with_nothing_to_see_is_no_nan() -> None:
    bias = torch.full((2, 1, 1, 11), torch.finfo(torch.float32).min)
    assert attention(None, torch.randn(22, 72), bias, HEADS, NO_MASK, GRID).isfinite().all()


@both_dtypes
def test_gelu(dtype: torch.dtype) -> None:
    compare(
        gelu,
        lambda x, bias: functional.gelu(x + bias),
        [torch.linspace(-6, 6, 4002).view(69, 58), torch.linspace(-1, 1, 58)],
        dtype,
    )


def test_gelu_absolute_error() -> None:
    x = torch.linspace(-12, 12, 100001, requires_grad=True)
    error = (gelu(x[None], torch.zeros(100001)).double() - functional.gelu(x.double())).abs().max().item()
    assert error < 2e-6


def test_gelu_far_out() -> None:
    x = torch.tensor([math.nan, -100.0, 100.0, 1e30])
    torch.testing.assert_close(gelu(x[None], torch.zeros(4))[0], functional.gelu(x), equal_nan=True)


@both_dtypes
@pytest.mark.parametrize("first", [0, 1])
def test_packed_linear(dtype: torch.dtype, first: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 24).to(dtype) for _ in range(3)]
    exact = [nn.Linear(16, 24).double() for _ in range(3)]
    for layer, copy in zip(layers, exact, strict=True):
        copy.load_state_dict(layer.state_dict())
    compare(
        lambda x: PackedLinear(layers)(x, first),
        lambda x: torch.cat([layer(x) for layer in exact[first:]], -1),
        [torch.randn(9, 16)],
        dtype,
    )
    for layer, copy in zip(layers[first:], exact[first:], strict=True):
        for mine, theirs in zip(layer.parameters(), copy.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert relative_error(mine.grad, theirs.grad) < TOLERANCE[dtype]


@both_dtypes
@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("run", [linear, lambda layer, x: product(layer, x) + layer.bias], ids=["linear", "product"])
def test_linear(dtype: torch.dtype, tokens: int, run: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layer, exact = nn.Linear(16, 40).to(dtype), nn.Linear(16, 40).double()
    exact.load_state_dict(layer.state_dict())
    compare(lambda x: run(layer, x), exact, [torch.randn(tokens, 16)], dtype)
    for mine, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert relative_error(mine.grad, theirs.grad) < TOLERANCE[dtype]


def run_once(part: Callable[..., Any], *tensors: Tensor) -> Any:
    return part(ForwardPass.ONLY, *tensors)


@both_dtypes
@pytest.mark.parametrize("tokens", [9, 1100])
@pytest.mark.parametrize("run", [run_once, run_with_recompute])
def test_feed_forward(dtype: torch.dtype, tokens: int, run: Callable[..., tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    inner, outer = nn.Linear(64, 96).to(dtype), nn.Linear(96, 64, bias=False).to(dtype)
    exact = deepcopy(inner).double(), deepcopy(outer).double()
    if not can_feed_forward(inner, outer, torch.empty(0, dtype=dtype)):
        return

    def fast(x: Tensor) -> Tensor:
        y, x = run(lambda forward_pass, x: feed_forward(x, inner, outer, forward_pass), x)
        return y + x * 3

    def plain(x: Tensor) -> Tensor:
        y: Tensor = exact[1](functional.gelu(exact[0](x)))
        return y + x * 3

    compare(fast, plain, [torch.randn(tokens, 64)], dtype)
    for layer, other in zip((inner, outer), exact, strict=True):
        for mine, theirs in zip(layer.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert relative_error(mine.grad, theirs.grad) < TOLERANCE[dtype]


def test_feed_forward_makes_only_the_gradients_that_are_wanted() -> None:
    inner, outer, x = nn.Linear(8, 12), nn.Linear(12, 8), torch.randn(3, 8)
    if not can_feed_forward(inner, outer, x):
        return
    inner.requires_grad_(False)
    y, same = feed_forward(x, inner, outer, ForwardPass.ONLY)
    assert torch.equal(same, x)
    (found,) = torch.autograd.grad(y.sum(), outer.weight)
    assert relative_error(found, functional.gelu(inner(x)).sum(0).expand(8, 12)) < 1e-5
    x.requires_grad_()
    (found,) = torch.autograd.grad(feed_forward(x, inner, outer, ForwardPass.ONLY)[1].sum(), x)
    assert torch.equal(found, torch.ones(3, 8))


@both_dtypes
@pytest.mark.parametrize("tokens", [9, 1100])
def test_the_gradient_of_a_packed_layers_input_contains_that_of_its_other_use(dtype: torch.dtype, tokens: int) -> None:
    torch.manual_seed(0)
    layers, exact = [nn.Linear(64, 64).to(dtype) for _ in range(2)], [nn.Linear(64, 64).double() for _ in range(2)]
    for mine, theirs in zip(layers, exact, strict=True):
        theirs.load_state_dict(mine.state_dict())
    packed = PackedLinear(layers)

    def fast(x: Tensor) -> Tensor:
        y, x = packed.branch(x)
        return y + torch.cat([x, x], -1)

    compare(fast, lambda x: torch.cat([layer(x) + x for layer in exact], -1), [torch.randn(tokens, 64)], dtype)


def test_packed_linear_follows_weights_that_were_moved() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    packed = PackedLinear(layers)
    layers[1].weight.data = torch.ones(4, 4)
    x = torch.randn(2, 4)
    torch.testing.assert_close(packed(x), torch.cat([layer(x) for layer in layers], -1))


@pytest.mark.parametrize("gap", [0, 1])
def test_packed_linear_is_one_product_where_weights_were_moved_together(gap: int) -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    packed, weights = PackedLinear(layers), [layer.weight for layer in layers]
    block = torch.zeros(70)
    for place, weight in zip((0, 16, 32 + gap), weights, strict=True):
        moved = block[7 + place :][:16].view(4, 4)
        moved.copy_(weight.detach())
        weight.data = moved
    whole, _, parameters = packed.current()
    assert parameters == [*weights, *(layer.bias for layer in layers)]
    assert (whole.data_ptr() == weights[0].data_ptr()) == (gap == 0)
    assert torch.equal(whole, torch.cat(weights))
    x = torch.randn(2, 4)
    torch.testing.assert_close(packed(x, 1), torch.cat([layer(x) for layer in layers[1:]], -1))


def test_packed_linear_forgets_where_weights_were() -> None:
    layers = [nn.Linear(4, 4) for _ in range(3)]
    packed, weights = PackedLinear(layers), [layer.weight for layer in layers]
    first = packed.current()[0]
    assert packed.current()[0] is first
    for _ in range(2):  # a copy is made anew each time
        weights[1].data = torch.randn(4, 4)
        assert torch.equal(packed.current()[0], torch.cat(weights))
        weights[0].data.add_(1.0)
        assert torch.equal(packed.current()[0], torch.cat(weights))
    other = deepcopy(packed)
    other.layers[0].weight.data.zero_()
    assert torch.equal(other.current()[0], torch.cat([layer.weight for layer in other.layers]))
    whole = torch.randn(12, 4)
    for weight, view in zip(weights, torch.split(whole, 4), strict=True):
        weight.data = view
    assert packed.current()[0].data_ptr() == whole.data_ptr()
