"""The attention half of first tokens alone, against a dense softmax in fp64, and models with it against others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import cpuft
from cpuft.train.fast import layers
from cpuft.train.fast.architectures import Heads
from cpuft.train.fast.attention import Grid
from cpuft.train.fast.elementwise import NO_MASK, Mask, kept_elements
from cpuft.train.fast.first_token import can_run_first_token_half, first_token_half
from cpuft.train.fast.projection import PackedLinear
from tests.train.fast.conftest import need_kernels
from tests.train.fast.encoders import make_batch, make_model, make_optimizer, relative_error
from tests.train.fast.test_attention import MASK, TOLERANCE, dense_attention, grids, key_bias, mean_error

OUTPUT_MASK = Mask(seed=99, threshold=7000)


def make_parts(heads: Heads, dtype: torch.dtype) -> Any:
    """Return what of a layer's parts the half needs, with scores far from uniform."""
    hidden = heads.count * heads.size
    linears = [nn.Linear(hidden, hidden, dtype=dtype) for _ in range(4)]
    norm = nn.LayerNorm(hidden)
    for one in (*linears, norm):
        weight, bias = one.parameters()
        nn.init.normal_(weight, float(one is norm), hidden**-0.5)
        nn.init.normal_(bias, 0.0, 0.3)
    *projections, output = linears
    modules = {"projections": projections, "attention_output": output, "attention_norm": norm}
    switches = {"int8": False, "recomputes": False, "positions": None}
    return SimpleNamespace(heads=heads, packed=PackedLinear(projections), **modules, **switches)


def list_parameters(parts: Any) -> list[Tensor]:
    projections = [getattr(one, name) for name in ("weight", "bias") for one in parts.projections]
    return [*projections, *parts.attention_output.parameters(), *parts.attention_norm.parameters()]


def run_dense(x: Tensor, parameters: list[Tensor], heads: Heads, mask: Mask, grid: Grid) -> Tensor:
    weights, biases, (weight, bias, gain, shift) = parameters[:3], parameters[3:6], parameters[6:]
    first = x[slice(None, None, grid.length) if grid.rows is None else grid.rows[:: grid.length]]
    both = torch.cat([x @ weights[i].T + biases[i] for i in (1, 2)], 1)
    query, queries = first @ weights[0].T + biases[0], Grid(grid.batch, 1)
    context = dense_attention(query, both, key_bias(grid), heads, mask, grid, queries)
    output = context @ weight.T + bias
    if mask.threshold:
        output = output * kept_elements(OUTPUT_MASK, output.shape) * OUTPUT_MASK.scale
    return functional.layer_norm(first + output, first.shape[1:], gain, shift)


def run_half(x: Tensor, parts: Any, mask: Mask, grid: Grid) -> Tensor:
    assert can_run_first_token_half(parts, x)
    return first_token_half(parts, x, grid, key_bias(grid), mask, OUTPUT_MASK if mask.threshold else NO_MASK)


def check(heads: Heads, grid: Grid, mask: Mask, dtype: torch.dtype) -> None:
    """Compare the output and all gradients."""
    torch.manual_seed(grid.length)
    parts, hidden = make_parts(heads, dtype), heads.count * heads.size
    x = torch.randn(grid.tokens, hidden).to(dtype).requires_grad_()
    parameters, weights = list_parameters(parts), torch.randn(grid.batch, hidden).to(dtype)
    y = run_half(x, parts, mask, grid)
    found = torch.autograd.grad(y, [x, *parameters], weights)
    exact = [one.detach().double().requires_grad_() for one in (x, *parameters)]
    wanted_y = run_dense(exact[0], exact[1:], heads, mask, grid)
    wanted = torch.autograd.grad(wanted_y, exact, weights.double())
    assert y.dtype == dtype
    for one, other in zip((y, *found), (wanted_y, *wanted), strict=True):
        assert one.isfinite().all()
        assert mean_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    grid=grids(),
    heads=st.sampled_from([Heads(1, 32, 0.18), Heads(3, 32, 0.18), Heads(2, 64, 0.125), Heads(17, 32, 0.18)]),
    mask=st.sampled_from([NO_MASK, MASK]),
)
@settings(max_examples=30, deadline=None)
def test_it_is_dense_attention(dtype: torch.dtype, grid: Grid, heads: Heads, mask: Mask) -> None:
    need_kernels()
    check(heads, grid, mask, dtype)


def test_many_examples_and_many_tokens() -> None:
    need_kernels()
    for dtype in (torch.float32, torch.bfloat16):
        check(Heads(2, 32, 0.18), Grid(37, 5), MASK, dtype)
        check(Heads(2, 32, 0.18), Grid(2, 300), MASK, dtype)


def test_an_example_whose_tokens_are_all_masked_is_finite() -> None:
    need_kernels()
    parts = make_parts(Heads(2, 32, 0.18), torch.bfloat16)
    x = torch.randn(12, 64).bfloat16().requires_grad_()
    bias = torch.zeros(3, 1, 1, 4)
    bias[1] = torch.finfo(torch.float32).min
    y = first_token_half(parts, x, Grid(3, 4), bias, NO_MASK, NO_MASK)
    (grad,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert y.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("lengths", [(17, 9, 5, 3), (17, 17)], ids=["packed", "without padding"])
def test_a_model_trains_as_with_keys_and_values(
    kind: str, precision: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_kernels()
    model = make_model(kind, 0.2, num_attention_heads=1)
    model = cpuft.accelerate(model, make_optimizer(model), precision=precision)[0]
    calls = []

    def run(*given: Any) -> Any:
        calls.append(given)
        return first_token_half(*given)

    def train() -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(7)
        model.zero_grad()
        loss = model(**make_batch(lengths)).loss
        loss.backward()
        return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    monkeypatch.setattr(layers, "first_token_half", run)
    loss, gradients = train()
    assert len(calls) == 1
    monkeypatch.setattr(layers, "can_run_first_token_half", lambda *given: False)
    wanted_loss, wanted = train()
    assert len(calls) == 1
    assert loss.item() == pytest.approx(wanted_loss.item(), rel=1e-4 if precision == "fp32" else 1e-2)
    assert gradients.keys() == wanted.keys()
    found, exact = (torch.cat([some[name].flatten().float() for name in wanted]) for some in (gradients, wanted))
    assert relative_error(found, exact) < (1e-4 if precision == "fp32" else 2e-2)


def test_threads_do_not_change_a_bit() -> None:
    need_kernels()
    before, parts = torch.get_num_threads(), make_parts(Heads(3, 32, 0.18), torch.bfloat16)
    x = torch.randn(200, 96).bfloat16().requires_grad_()
    results = []
    try:
        for threads in (1, 2, 7, 33):
            torch.set_num_threads(threads)
            y = run_half(x, parts, MASK, Grid(8, 25))
            results.append([y, *torch.autograd.grad(y, [x, *list_parameters(parts)[:7]], torch.ones_like(y))])
    finally:
        torch.set_num_threads(before)
    assert all(one.equal(other) for some in results for one, other in zip(some, results[0], strict=True))


@pytest.mark.parametrize("what", ["all", "int8", "checkpointing", "window", "heads of 16", "another linear"])
def test_other_layers_keep_keys_and_values(what: str) -> None:
    need_kernels()
    heads = {"window": Heads(2, 32, 1.0, back=3), "heads of 16": Heads(4, 16, 1.0)}.get(what, Heads(2, 32, 1.0))
    parts = make_parts(heads, torch.float32)
    parts.int8, parts.recomputes = what == "int8", what == "checkpointing"
    if what == "another linear":
        parts.projections[2] = nn.Bilinear(1, 1, 1)
    assert can_run_first_token_half(parts, torch.empty(5, 64)) == (what == "all")
