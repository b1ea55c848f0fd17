"""Norms with and without residuals, and gated linear units, as kernels and as plain torch, against torch in fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.eurobert.modeling_eurobert import EuroBertRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm

from cpuft.kernels import plain_torch
from cpuft.train.fast.elementwise import (
    GATES,
    NO_MASK,
    Mask,
    Norm,
    add_norm,
    apply_norm,
    glu,
    kept_elements,
    read_norm,
)
from tests.train.fast.conftest import need_kernels
from tests.train.fast.encoders import relative_error

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3 / 256}
MASK = Mask(seed=777, threshold=9000)
RMS_NORMS: tuple[Callable[..., nn.Module], ...] = (
    LlamaRMSNorm,
    Qwen3RMSNorm,
    SmolLM3RMSNorm,
    EuroBertRMSNorm,
    Gemma3RMSNorm,
)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}

dtypes = st.sampled_from(list(TOLERANCE))
# Less than a vector, vectors and a part, whole ones.
widths = st.integers(1, 40) | st.sampled_from([64, 100, 384])
row_counts = st.sampled_from([1, 2, 7, 33])


def each_way() -> Iterator[contextlib.AbstractContextManager[None]]:
    """First the kernels, then plain torch."""
    need_kernels()
    yield contextlib.nullcontext()
    yield plain_torch()


def exact_norm(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm in fp64, with these parameters in the place of its own."""
    centred = x - x.mean(-1, keepdim=True) if norm.is_centred else x
    normed = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    if weight is not None:
        normed = normed * (weight + norm.weight_offset)
    return normed if bias is None else normed + bias


def draw_norm(columns: int, is_centred: bool, has_weight: bool, has_bias: bool, offset: float) -> Norm:
    weight, bias = (torch.randn(columns, requires_grad=True) for _ in range(2))
    # A small eps would multiply rounding in a narrow row, whose deviation may be small.
    return Norm(weight if has_weight else None, bias if has_bias else None, 0.1, is_centred, offset)


def with_grads(
    run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], weights: list[Tensor | None]
) -> list[Tensor]:
    """Results of `run`, then the gradients of `inputs`; results without weights take no part in backward."""
    results = run(*inputs)
    used = [(result, weight) for result, weight in zip(results, weights, strict=True) if weight is not None]
    outputs = [result for result, _ in used]
    grads = torch.autograd.grad(outputs, inputs, [w.to(r.dtype) for r, w in used], allow_unused=True)
    return [*results, *(torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True))]


def check(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        size = other.detach().square().mean().sqrt().item()
        error = (one.detach().double() - other.detach()).square().mean().sqrt().item()
        assert error < TOLERANCE[dtype] * max(size, 1.0), number


@given(
    rows=row_counts,
    columns=widths,
    dtype=dtypes,
    mask=st.sampled_from([NO_MASK, MASK]),
    flows=st.sampled_from([(True, True), (True, False), (False, True)]),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0])),
)
def test_add_norm(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    mask: Mask,
    flows: tuple[bool, bool],
    parts: tuple[bool, bool, bool, float],
) -> None:
    torch.manual_seed(rows * columns)
    norm = draw_norm(columns, *parts)
    x, residual = (torch.randn(rows, columns).to(dtype).requires_grad_() for _ in range(2))
    parameters = [p for p in (norm.weight, norm.bias) if p is not None]
    weights = [torch.randn(rows, columns).to(dtype) if flow else None for flow in flows]
    keep = kept_elements(mask, x.shape) * mask.scale if mask.threshold else torch.ones(())

    def exact(x: Tensor, residual: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x * keep
        rounded = total + (total.to(dtype).double() - total).detach()
        rest = list(given)
        weight = rest.pop(0) if norm.weight is not None else None
        return total, exact_norm(rounded, norm, weight, rest.pop(0) if norm.bias is not None else None)

    doubles = [t.detach().double().requires_grad_() for t in (x, residual, *parameters)]
    wanted = with_grads(exact, doubles, weights)
    for way in each_way():
        with way:
            found = with_grads(
                lambda x, residual, *_: add_norm(x, residual, norm, mask), [x, residual, *parameters], weights
            )
        assert found[0].dtype == found[1].dtype == dtype
        check(found, wanted, dtype)


@given(
    shape=st.tuples(row_counts, widths) | st.tuples(st.just(2), st.just(3), widths),
    dtype=dtypes,
    mask=st.sampled_from([NO_MASK, MASK]),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0.0, 1.0])),
)
def test_apply_norm(
    shape: tuple[int, ...], dtype: torch.dtype, mask: Mask, parts: tuple[bool, bool, bool, float]
) -> None:
    torch.manual_seed(shape[-1])
    norm = draw_norm(shape[-1], *parts)
    x, weights = torch.randn(shape).to(dtype).requires_grad_(), [torch.randn(shape).to(dtype)]
    keep = kept_elements(mask, x.shape) * mask.scale if mask.threshold else torch.ones(())
    parameters = [p for p in (norm.weight, norm.bias) if p is not None]

    def exact(x: Tensor, *given: Tensor) -> tuple[Tensor]:
        rest = list(given)
        weight = rest.pop(0) if norm.weight is not None else None
        return (exact_norm(x, norm, weight, rest.pop(0) if norm.bias is not None else None) * keep,)

    wanted = with_grads(exact, [t.detach().double().requires_grad_() for t in (x, *parameters)], [*weights])
    for way in each_way():
        with way:
            found = with_grads(lambda x, *_: (apply_norm(x, norm, mask),), [x, *parameters], [*weights])
        assert found[0].dtype == dtype
        check(found, wanted, dtype)


def test_frozen_norms_give_their_input_its_gradient() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, requires_grad=True), torch.randn(24, requires_grad=True)
    for way in each_way():
        x, residual = (torch.randn(5, 24, requires_grad=True) for _ in range(2))
        with way:
            for is_centred in (True, False):
                free, frozen = (Norm(w, b, 1e-5, is_centred) for w, b in ((weight, bias), (weight.data, bias.data)))
                grads = [
                    torch.autograd.grad(add_norm(x, residual, norm, MASK)[1][0].sum(), [x, residual])
                    for norm in (free, frozen)
                ]
                assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("make", RMS_NORMS)
def test_norms_of_transformers_are_known(make: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    module: Any = make(24, eps=1e-3)
    weight: Tensor = nn.init.normal_(module.weight)
    x = torch.randn(7, 24)
    norm = read_norm(module)
    assert norm is not None
    assert norm.weight is weight
    assert norm.bias is None
    for way in each_way():
        with way:
            assert relative_error(apply_norm(x, norm), module(x)) < 1e-6
            # An optimizer writes to the parameter after its norm was read.
            with torch.no_grad():
                weight.add_(0.5)
            assert relative_error(apply_norm(x, norm), module(x)) < 1e-6


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_layer_norms_are_known(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    module = nn.LayerNorm(24, eps=1e-3, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x, norm = torch.randn(7, 24), read_norm(module)
    assert norm is not None
    for way in each_way():
        with way:
            assert relative_error(apply_norm(x, norm), module(x)) < 1e-6


def test_other_modules_are_no_norms() -> None:
    own = type("LlamaRMSNorm", (LlamaRMSNorm,), {"__module__": __name__})  # it might compute anything
    others: list[nn.Module] = [nn.Linear(2, 2), nn.LayerNorm((2, 3)), nn.BatchNorm1d(2), own(2), nn.RMSNorm(2)]
    assert [read_norm(other) for other in others] == [None] * len(others)


@given(rows=row_counts, columns=widths, dtype=dtypes, kind=st.sampled_from(list(ACTIVATIONS)))
def test_glu(rows: int, columns: int, dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(rows * columns)
    x, weights = (3 * torch.randn(rows, 2 * columns)).to(dtype).requires_grad_(), [torch.randn(rows, columns).to(dtype)]
    wanted = with_grads(
        lambda x: (ACTIVATIONS[kind](x[:, :columns]) * x[:, columns:],),
        [x.detach().double().requires_grad_()],
        [*weights],
    )
    for way in each_way():
        with way:
            found = with_grads(lambda x: (glu(x, kind),), [x], [*weights])
        assert found[0].dtype == dtype
        check(found, wanted, dtype)


@pytest.mark.parametrize("kind", list(ACTIVATIONS))
def test_activations_are_exact_and_finite_far_out(kind: str) -> None:
    far = torch.tensor([-1e30, -1e4, -200.0, -89.0, -40.0, 40.0, 89.0, 200.0, 1e4, 1e18])
    x = torch.cat([torch.linspace(-12, 12, 20001), far]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(ACTIVATIONS[kind](exact).sum(), exact)
    need_kernels()
    found = glu(torch.cat([x, torch.ones_like(x)])[None], kind)[0]
    (slope,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(found.double(), ACTIVATIONS[kind](exact), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(slope.double(), wanted, rtol=1e-6, atol=3e-6)


def test_glu_keeps_nothing_but_its_input() -> None:
    need_kernels()
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda _: torch.empty(0)):
        glu(torch.randn(5, 48, requires_grad=True), "silu")
    assert kept == [(5, 48)]


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "swish"])
def test_gates_are_the_activations_of_transformers(name: str) -> None:
    x = torch.linspace(-3, 3, 50)
    activation = ACT2FN[name]
    for way in each_way():
        with way:
            assert relative_error(glu(torch.cat([x, torch.ones(50)])[None], GATES[name])[0], activation(x)) < 1e-6


def test_an_unknown_gate_is_refused() -> None:
    with pytest.raises(KeyError):
        glu(torch.randn(2, 4), "relu")
