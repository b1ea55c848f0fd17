"""The fast path around peft's LoRA, against the same model without it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cpuft.train.fast.acceleration import accelerate, describe_layers
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE
from cpuft.train.fast.stack import find_stacks
from cpuft.train.lora import add_adapters
from tests.train.fast.encoders import KINDS, make_batch, make_model, relative_error

pytestmark = pytest.mark.usefixtures("one_thread")  # kernels on several have tests of their own

# Of the gradient of one parameter: sums of fp32 taken in another order; bf16 through two layers and back.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.05}


def make_adapted(kind: str) -> Any:
    """A small classifier with adapters that have learnt something: peft's begin as zero.

    No ReLU in its head (DistilBERT's) is near zero, where rounding would decide whether it has a gradient.
    """
    model = make_model(kind)
    for name, parameter in model.named_parameters():
        if name == "pre_classifier.bias":
            torch.nn.init.constant_(parameter, 3.0)
    return with_weights(add_adapters(model, rank=4, source="", new=()))


def with_weights(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(3))
    return model.train()


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


def is_fast(model: torch.nn.Module) -> bool:
    return any(type(module).__name__.startswith("Fast") and hasattr(module, "fast_parts") for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", TOLERANCE)
def test_loss_and_gradients_are_those_of_peft_s_own_layers(kind: str, precision: str) -> None:
    plain = make_adapted(kind)
    fast = copy.deepcopy(plain)
    accelerate(fast, make_optimizer(fast), precision=precision, adapters=True)
    assert is_fast(fast)
    wanted, found = plain(**make_batch()), fast(**make_batch())
    assert relative_error(found.logits, wanted.logits) < TOLERANCE[precision]
    wanted.loss.backward()
    found.loss.backward()
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    ours = {name: p.grad for name, p in fast.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    assert all("lora" in name or "classifier" in name or "model.pooler" in name for name in ours)
    whole, expected = (torch.cat([grads[name].flatten().float() for name in sorted(ours)]) for grads in (ours, theirs))
    assert relative_error(whole, expected) < TOLERANCE[precision]


def test_frozen_weights_have_no_masters_and_trained_ones_do() -> None:
    model = make_adapted("bert")
    accelerate(model, make_optimizer(model), precision="bf16", adapters=True)
    masters = getattr(model, MASTERS_ATTRIBUTE)
    assert masters.parameters.keys() == {name for name, _ in model.named_parameters() if "lora_" in name}
    low = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    assert {name for name in low if "lora_" not in name} == {
        name
        for name, p in model.named_parameters()
        if "encoder.layer" in name and "LayerNorm" not in name and "lora_" not in name
    }
    kept = {name: value.dtype for name, value in model.state_dict().items() if "lora_" in name}
    assert set(kept.values()) == {torch.float32}


def test_an_update_moves_the_masters_of_adapters_and_nothing_frozen() -> None:
    model = make_adapted("bert")
    optimizer = make_optimizer(model)
    accelerate(model, optimizer, precision="bf16", adapters=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(**make_batch()).loss.backward()
    optimizer.step()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_are_left_alone_unless_they_are_asked_for() -> None:
    model = make_adapted("bert")
    accelerate(model, make_optimizer(model), precision="fp32")
    assert not is_fast(model)
    assert "because it does not know the linear layer Linear, or the form of its adapter" in describe_layers(model)


@pytest.mark.parametrize(
    "options",
    [
        {"lora_dropout": 0.1},
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "lora_only"},
    ],
    ids=str,
)
def test_adapters_of_other_forms_run_unchanged(options: dict[str, Any]) -> None:
    settings = {"r": 4, "target_modules": ["query", "key", "value"], "task_type": "SEQ_CLS", **options}
    plain = with_weights(get_peft_model(make_model("bert"), LoraConfig(**settings)))
    assert find_stacks(plain, adapters=True) == []


@pytest.mark.parametrize("targets", [["query"], ["key", "value", "output.dense"]], ids=str)
def test_only_some_layers_may_have_adapters(targets: list[str]) -> None:
    plain = with_weights(
        get_peft_model(make_model("bert"), LoraConfig(r=4, target_modules=targets, task_type="SEQ_CLS"))
    )
    fast = copy.deepcopy(plain)
    accelerate(fast, make_optimizer(fast), precision="fp32", adapters=True)
    assert is_fast(fast)
    wanted, found = plain(**make_batch()), fast(**make_batch())
    wanted.loss.backward()
    found.loss.backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in fast.named_parameters():
        if parameter.requires_grad and theirs[name].grad is not None:
            assert relative_error(parameter.grad, theirs[name].grad) < TOLERANCE["fp32"], name


def test_a_frozen_layer_keeps_no_input() -> None:
    model = make_adapted("bert")
    accelerate(model, make_optimizer(model), precision="fp32", adapters=True)
    kept = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(**make_batch())
    # 48 wide is what the second layer of a feed-forward reads, of all rows or first ones: GELU's own input alone.
    assert sum(shape[-1:] == (48,) and len(shape) == 2 and shape[0] != 32 for shape in kept) == 2
