"""Losses and gradients computed in chunks, held against torch's own of all logits at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, linear

from cpuft.train.objective import chunked_loss
from cpuft.train.objective.chunked_loss import HeadForm, compute_token_losses, predict_tokens

FORMS = (HeadForm(), HeadForm(factor=0.25), HeadForm(softcap=2.0), HeadForm(factor=1.5, softcap=3.0))


def make_inputs(tokens: int, vocabulary: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states, weight and bias, which need gradients; and targets."""
    torch.manual_seed(seed)
    floats = [torch.randn(tokens, 6), torch.randn(vocabulary, 6), torch.randn(vocabulary)]
    return [one.requires_grad_() for one in floats], torch.randint(vocabulary, (tokens,))


def compute_plainly(inputs: list[torch.Tensor], targets: torch.Tensor, form: HeadForm) -> torch.Tensor:
    """Of all logits, as transformers does."""
    logits = linear(*inputs) * form.factor
    if form.softcap:
        logits = torch.tanh(logits / form.softcap) * form.softcap
    return cross_entropy(logits, targets, reduction="none")


def gradients(losses: torch.Tensor, inputs: list[torch.Tensor], factor: float = 1.0) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(losses.sum() * factor, inputs)


@settings(max_examples=40)
@given(
    st.integers(0, 23),
    st.integers(1, 40),
    st.sampled_from(FORMS),
    st.integers(1, 200),
    st.integers(0, 99),
)
def test_losses_and_gradients_are_torchs_own(
    tokens: int, vocabulary: int, form: HeadForm, chunk: int, seed: int
) -> None:
    inputs, targets = make_inputs(tokens, vocabulary, seed)
    wanted = compute_plainly(inputs, targets, form)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_loss, "CHUNK_LOGITS", chunk)
        hidden, weight, bias = inputs
        found = compute_token_losses(hidden, weight, bias, targets, form)
        losses, is_right = predict_tokens(hidden, weight, bias, targets, form)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        for one, other in zip(gradients(found, inputs, 0.3), gradients(wanted, inputs, 0.3), strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(losses, wanted, atol=1e-5, rtol=1e-5)
    assert is_right.tolist() == [int(row.argmax()) == int(t) for row, t in zip(linear(*inputs), targets)]


def test_different_factors_are_refused() -> None:
    """The gradients of the sum are computed before anybody knows them."""
    (hidden, weight, bias), targets = make_inputs(5, 9)
    losses = compute_token_losses(hidden, weight, bias, targets, HeadForm())
    with pytest.raises(ValueError, match="different factors"):
        torch.autograd.backward((losses * torch.arange(5)).sum())


def test_what_is_frozen_gets_no_gradient() -> None:
    (hidden, weight, bias), targets = make_inputs(5, 9)
    weight.requires_grad_(False)
    losses = compute_token_losses(hidden, weight, None, targets, HeadForm())
    torch.autograd.backward(losses.sum())
    assert hidden.grad is not None
    assert (weight.grad, bias.grad) == (None, None)
    with torch.no_grad():
        assert not compute_token_losses(hidden, weight, bias, targets, HeadForm()).requires_grad


def test_products_have_the_type_of_autocast_and_gradients_that_of_the_weights() -> None:
    inputs, targets = make_inputs(30, 50)
    wanted = gradients(compute_plainly(inputs, targets, HeadForm()), inputs)
    hidden, weight, bias = inputs
    with torch.autocast("cpu", torch.bfloat16):
        losses = compute_token_losses(hidden, weight, bias, targets, HeadForm())
    found = gradients(losses, inputs)
    assert (losses.dtype, {one.dtype for one in found}) == (torch.float32, {torch.float32})
    difference = (losses - compute_plainly(inputs, targets, HeadForm())).abs().max()
    assert 1e-4 < float(difference.detach()) < 0.1
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.05)


def test_no_more_logits_than_those_of_a_chunk_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK_LOGITS", 40)
    (hidden, weight, bias), targets = make_inputs(64, 20)
    shapes = list[int]()

    def note(*given: torch.Tensor) -> torch.Tensor:
        made = linear(*given)
        shapes.append(made.numel())
        return made

    monkeypatch.setattr(chunked_loss, "linear", note)
    losses = compute_token_losses(hidden, weight, bias, targets, HeadForm())
    torch.autograd.backward(losses.sum())
    assert shapes == [40] * 32
