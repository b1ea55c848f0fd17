"""Layers that run as two halves, against the same layers step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cpuft
from cpuft.train.fast import encoder_layer, layers, products
from cpuft.train.fast.encoder_layer import can_run_halves
from tests.train.fast.conftest import need_kernels
from tests.train.fast.encoders import make_batch, make_model, make_optimizer, relative_error

KINDS = ("bert", "roberta", "electra")


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel with tiles multiply small matrices, too."""
    need_kernels()
    for limit in ("_MIN_ROWS", "_MIN_FEW_ROWS", "_MIN_TOKENS", "_MIN_WORK"):
        monkeypatch.setattr(products, limit, 0)


def make_fast(
    kind: str, dropout: float = 0.0, first_token: bool = True, precision: str = "bf16", heads: int = 4
) -> Any:
    """A fast model whose sizes are multiples of 32; the size of a head is one with one head only."""
    model = make_model(kind, dropout, intermediate_size=64, num_attention_heads=heads)
    return cpuft.accelerate(model, make_optimizer(model), precision=precision, first_token=first_token)[0]


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets a name for each half that runs."""
    calls: list[str] = []
    for name in ("attention_half", "feed_forward_half"):
        own = getattr(encoder_layer, name)

        def run(*given: Any, own: Callable[..., Any] = own, name: str = name) -> Any:
            calls.append(name)
            return own(*given)

        monkeypatch.setattr(layers, name, run)
    return calls


def train_once(model: Any, lengths: tuple[int, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a batch, and all gradients, which the model does not have any more."""
    torch.manual_seed(7)
    loss = model(**make_batch(lengths)).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.item(), gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("first_token", [True, False])
@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("lengths", [(17, 9, 5, 3), (17, 17)], ids=["packed", "without padding"])
def test_halves_compute_what_the_steps_do(
    kind: str, dropout: float, first_token: bool, heads: int, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = make_fast(kind, dropout, first_token, heads=heads), count_calls(monkeypatch)
    loss, gradients = train_once(model, lengths)
    has_products = products.can_multiply(*2 * (torch.empty(32, 32, dtype=torch.bfloat16),))
    wanted_calls = ["attention_half", "feed_forward_half"] * (1 if first_token else 2)
    wanted_calls += ["feed_forward_half"] * (first_token and heads == 1)  # smaller heads have no half for first tokens
    assert calls == (wanted_calls if has_products else [])
    monkeypatch.setattr(layers, "can_run_halves", lambda *given, **more: False)
    wanted_loss, wanted = train_once(model, lengths)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == wanted[name].dtype
        # The halves may add up the gradients of these biases before rounding, and that of a key's is zero but for it.
        limit = 8e-3 if heads == 1 and name.endswith(("query.bias", "value.bias")) else 2e-3
        assert relative_error(gradient, wanted[name]) < limit or name.endswith("key.bias"), name


def test_halves_read_norms_of_a_model_that_was_converted_to_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_fast("bert", first_token=False).to(torch.bfloat16), count_calls(monkeypatch)
    loss, gradients = train_once(model, (17, 9))
    monkeypatch.setattr(layers, "can_run_halves", lambda *given, **more: False)
    wanted_loss, wanted = train_once(model, (17, 9))
    assert len(calls) in (0, 4)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert max(relative_error(gradients[name], wanted[name]) for name in wanted if "key.bias" not in name) < 2e-2


def test_halves_without_a_gradient_of_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = make_fast("bert", first_token=False), count_calls(monkeypatch)
    for parameter in model.bert.embeddings.parameters():
        parameter.requires_grad_(False)
    loss, gradients = train_once(model, (17, 9))
    monkeypatch.setattr(layers, "can_run_halves", lambda *given, **more: False)
    wanted_loss, wanted = train_once(model, (17, 9))
    assert len(calls) in (0, 4)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert max(relative_error(gradients[name], wanted[name]) for name in wanted if "key.bias" not in name) < 2e-3


@pytest.mark.parametrize(
    "what", ["all", "no gradients", "frozen", "fp32", "checkpointing", "window", "another linear", "rows", "relu"]
)
def test_only_plain_layers_run_as_halves(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has_products", lambda kernels: True)
    model = make_fast("bert", precision="fp32" if what == "fp32" else "bf16")
    parts = model.bert.encoder.layer[0].fast_parts
    x = torch.empty(48, 32, dtype=torch.float32 if what == "fp32" else torch.bfloat16)
    if what == "frozen":
        parts.outer.bias.requires_grad_(False)
    elif what == "checkpointing":
        parts.recomputes = True
    elif what == "window":
        parts.heads = type(parts.heads)(4, 8, 1.0, back=3, ahead=3)
    elif what == "another linear":
        parts.outer = torch.nn.Bilinear(1, 1, 1)
    elif what == "relu":
        parts.activation = torch.nn.ReLU()
    elif what == "rows":
        monkeypatch.setattr(products, "_MIN_ROWS", 49)
    with torch.set_grad_enabled(what != "no gradients"):
        assert can_run_halves(parts, x) == (what == "all")


def test_a_product_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tiles, or without memory, C++ computes nothing."""
    model = make_fast("bert", first_token=False)
    monkeypatch.setattr(products, "_has_products", lambda kernels: True)
    monkeypatch.setattr("cpuft.kernels.Kernels.run", lambda *given: None)
    with pytest.raises(MemoryError, match="not enough memory"):
        train_once(model, (17, 17))
