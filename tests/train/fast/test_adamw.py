from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from cpuft.kernels import plain_torch
from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.adamw import clip_gradients
from tests.train.fast.encoders import make_batch, make_model, make_optimizer, make_pair, relative_error

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.01}),
    "AdamW, no decay": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-6, "betas": (0.8, 0.99)}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}),
    "AMSGrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}
KEY = "bert.encoder.layer.1.output.dense.weight"


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_is_the_plain_optimizer_s_on_fp32(name: str, kernels: bool) -> None:
    """Three updates from given gradients: masters as torch's own optimizer leaves fp32 weights, to 1e-6."""
    make, options = OPTIMIZERS[name]
    plain, fast = make_pair("bert")
    theirs = make(plain.parameters(), **options)
    _, mine = accelerate(fast, make(fast.parameters(), **options), precision="bf16")
    generator = torch.Generator().manual_seed(1)
    with contextlib.nullcontext() if kernels else plain_torch():
        for _ in range(3):
            for slow, quick in zip(plain.parameters(), fast.parameters(), strict=True):
                gradient = torch.randn(slow.shape, generator=generator).to(quick.dtype)
                slow.grad, quick.grad = gradient.float(), gradient
            theirs.step()
            mine.step()
    wanted = plain.state_dict()
    for key, value in fast.state_dict().items():
        torch.testing.assert_close(value, wanted[key], atol=2e-6, rtol=1e-5, msg=key)
    for parameter, value in zip(fast.parameters(), plain.parameters(), strict=True):
        assert parameter.dtype == torch.float32 or (parameter - value).abs().max() < value.abs().max() / 128
    for own, other in zip(fast.parameters(), plain.parameters(), strict=True):
        quick = mine.state[own]
        for entry, value in theirs.state[other].items():
            assert entry == "step" or quick[entry] is None or quick[entry].dtype == torch.float32
            torch.testing.assert_close(quick[entry], value, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("most", [1.0, 1e6], ids=["clips", "does not clip"])
def test_clipping_is_torch_s(name: str, kernels: bool, most: float) -> None:
    make, options = OPTIMIZERS[name]
    plain, fast = make_pair("bert")
    theirs = make(plain.parameters(), **options)
    _, mine = accelerate(fast, make(fast.parameters(), **options), precision="bf16")
    generator = torch.Generator().manual_seed(1)
    with contextlib.nullcontext() if kernels else plain_torch():
        for _ in range(2):
            for slow, quick in zip(plain.parameters(), fast.parameters(), strict=True):
                gradient = torch.randn(slow.shape, generator=generator).to(quick.dtype)
                slow.grad, quick.grad = gradient.float(), gradient.clone()
            wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), most)
            # torch's own on bf16 gradients, which SGD takes, is a bf16 number.
            assert clip_gradients(mine, fast.parameters(), most) == pytest.approx(float(wanted), rel=5e-3)
            theirs.step()
            mine.step()
    tolerance = 1e-5 if name == "AdamW" else 5e-3
    start = make_model("bert").state_dict()
    for key, value in fast.state_dict().items():
        moved = plain.state_dict()[key] - start[key]
        torch.testing.assert_close(value - start[key], moved, atol=tolerance * float(moved.abs().max()), rtol=1e-2)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_the_norm_is_that_of_parts_elsewhere_too(kernels: bool) -> None:
    def elsewhere(squares: torch.Tensor) -> None:
        assert squares.dtype == torch.float64
        squares.mul_(4)

    models = [make_model("bert") for _ in range(2)]
    optimizers = [accelerate(model, make_optimizer(model), precision="fp32")[1] for model in models]
    with contextlib.nullcontext() if kernels else plain_torch():
        for model in models:
            model(**make_batch()).loss.backward()
        alone, whole = (
            clip_gradients(optimizer, model.parameters(), most, add_up)
            for optimizer, model, most, add_up in zip(optimizers, models, (0.01, 0.02), (None, elsewhere), strict=True)
        )
        assert whole == pytest.approx(2 * alone, rel=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    # Half of twice as much is scaled down alike.
    first, second = (
        [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        for optimizer, model in zip(optimizers, models, strict=True)
    )
    torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-5)


def test_a_norm_that_is_no_number_is_passed_on() -> None:
    model, optimizer = accelerate(model := make_model("bert"), make_optimizer(model), precision="bf16")
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert math.isnan(clip_gradients(optimizer, model.parameters(), 1.0))
    optimizer.step()
    assert model.get_parameter(KEY).isnan().all()


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_checkpoint_goes_on_as_the_run_would(name: str) -> None:
    make, options = OPTIMIZERS[name]
    batch = make_batch()

    def run(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    first, one = accelerate(first := make_model("bert"), make(first.parameters(), **options), precision="bf16")
    run(first, one, 2)
    saved = copy.deepcopy((first.state_dict(), one.state_dict()))
    run(first, one, 2)
    second, two = accelerate(second := make_model("bert"), make(second.parameters(), **options), precision="bf16")
    second.load_state_dict(saved[0])
    two.load_state_dict(saved[1])
    run(second, two, 2)
    for key, value in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[key], value, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_scheduler_reaches_the_update(order: str) -> None:
    model = make_model("bert")
    optimizer = make_optimizer(model, lr=1.0)
    schedulers = [LambdaLR(optimizer, lambda step: 0.0)] if order == "before" else []
    accelerate(model, optimizer, precision="bf16")
    schedulers = schedulers or [LambdaLR(optimizer, lambda step: 0.0)]
    before = copy.deepcopy(model.state_dict())
    model(**make_batch()).loss.backward()
    optimizer.step()
    schedulers[0].step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], atol=0, rtol=0)


def test_gradients_are_clipped_to_the_norm() -> None:
    model, _ = accelerate(model := make_model("bert"), make_optimizer(model), precision="bf16")
    model(**make_batch()).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    squares = sum(p.grad.float().square().sum() for p in model.parameters() if p.grad is not None)
    assert float(squares) ** 0.5 == pytest.approx(0.01, rel=0.02)


def test_accumulated_gradients_are_the_sum() -> None:
    model, _ = accelerate(model := make_model("bert"), make_optimizer(model), precision="bf16")
    batch = make_batch()
    model(**batch).loss.backward()
    once = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model(**batch).loss.backward()
    for name, gradient in once.items():
        torch.testing.assert_close(model.get_parameter(name).grad, 2 * gradient)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "LBFGS", "LBFGS, line search"])
def test_a_closure_is_evaluated(name: str) -> None:
    model, batch = make_model("bert"), make_batch()
    searches: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "LBFGS": (torch.optim.LBFGS, {"lr": 1e-2, "max_iter": 3}),
        "LBFGS, line search": (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    }
    make, options = {**OPTIMIZERS, **searches}[name]
    optimizer = make(model.parameters(), **options)
    accelerate(model, optimizer, precision="bf16")

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return float(loss.detach())

    first = optimizer.step(closure)
    assert first is not None
    assert closure() < first
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_fails_can_be_repeated(name: str) -> None:
    def fail() -> float:
        raise ValueError("no loss")

    make, options = OPTIMIZERS[name]
    model, optimizer = accelerate(model := make_model("bert"), make(model.parameters(), **options), precision="bf16")
    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(fail)
    before = model.state_dict()[KEY].clone()
    model(**make_batch()).loss.backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()[KEY], before)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_hooks_of_a_step_run_once(name: str, kernels: bool) -> None:
    make, options = OPTIMIZERS[name]
    model, optimizer = accelerate(model := make_model("bert"), make(model.parameters(), **options), precision="bf16")
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *call: calls.append("before"))
    optimizer.register_step_post_hook(lambda *call: calls.append("after"))
    model(**make_batch()).loss.backward()
    with contextlib.nullcontext() if kernels else plain_torch():
        optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("name", ["AdamW", "AMSGrad", "SGD"])
def test_a_state_that_is_refused_leaves_the_optimizer_as_it_was(name: str) -> None:
    make, options = OPTIMIZERS[name]
    model, optimizer = accelerate(model := make_model("bert"), make(model.parameters(), **options), precision="bf16")
    other = make(torch.nn.Linear(3, 3).parameters(), **options)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(other.state_dict())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
    before = model.state_dict()[KEY].clone()
    model(**make_batch()).loss.backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()[KEY], before)


def train_together(make: Any, options: dict[str, Any], fast: bool) -> tuple[Any, Any, Any, Any]:
    """Two BERTs and a linear layer in bf16 after three clipped updates by one optimizer, from given gradients."""
    models = [make_model("bert"), make_model("distilbert")]
    torch.manual_seed(5)
    linear = torch.nn.Linear(32, 7).to(torch.bfloat16)
    parameters = [p for module in (*models, linear) for p in module.parameters()]
    optimizer = make(parameters, **options)
    for model in models if fast else ():
        accelerate(model, optimizer, precision="bf16")
        accelerate(model, optimizer, precision="bf16")
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16)
            parameter.grad = gradient.to(parameter.dtype)
        clip_gradients(optimizer, parameters, 1.0)
        optimizer.step()
    return (*models, linear, optimizer)


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_one_optimizer_updates_two_models_and_other_parameters_in_bf16(name: str, kernels: bool) -> None:
    make, options = OPTIMIZERS[name]
    options = {**options, "lr": 1e-2}
    with contextlib.nullcontext() if kernels else plain_torch():
        *found, optimizer = train_together(make, options, True)
    *wanted, theirs = train_together(make, options, False)
    start = [make_model("bert"), make_model("distilbert")]
    for fast, plain, begin in zip(found, wanted, start):
        for key, value in fast.state_dict().items():
            moved = plain.state_dict()[key] - begin.state_dict()[key]
            assert relative_error(value - begin.state_dict()[key], moved) < 0.02, key
    # One optimizer knows the norm of all gradients in fp32, the other one in bf16.
    torch.testing.assert_close(found[-1].weight, wanted[-1].weight, atol=1e-3, rtol=2**-7)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    masters = [p for model in found[:-1] for p in model.parameters() if p.dtype == torch.bfloat16]
    moment = "exp_avg" if name == "AdamW" else "momentum_buffer"
    assert {optimizer.state[p][moment].dtype for p in masters} == {torch.float32}


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
def test_one_optimizer_clips_the_embeddings_of_two_models(kernels: bool) -> None:
    weights = []
    for fast in (True, False):
        models = [make_model("bert"), make_model("distilbert")]
        optimizer = torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-3, weight_decay=0.0)
        for model in models if fast else ():
            accelerate(model, optimizer, precision="fp32")
        with contextlib.nullcontext() if kernels else plain_torch():
            for _ in range(2):
                for model in models:
                    model(**make_batch()).loss.backward()
                norm = clip_gradients(optimizer, [p for model in models for p in model.parameters()], 0.01)
                optimizer.step()
                optimizer.zero_grad()
        weights.append((norm, *(model.get_input_embeddings().weight for model in models)))
    for found, wanted in zip(*weights):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
