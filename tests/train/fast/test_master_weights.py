from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from cpuft.train.fast.acceleration import accelerate
from cpuft.train.fast.master_weights import MASTERS_ATTRIBUTE, MasterWeights, fp32_weights
from tests.train.fast.encoders import make_batch, make_model, make_optimizer, make_pair

KEY = "bert.encoder.layer.1.output.dense.weight"


class _Assigning(torch.optim.SGD):
    """SGD that gives parameters new data, as optimizers that take back an earlier step do."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.5 * parameter.grad


def test_an_optimizer_may_assign_new_data_to_parameters() -> None:
    model = make_model("bert")
    _, optimizer = accelerate(model, _Assigning(model.parameters(), lr=1.0), precision="bf16")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.state_dict()[KEY], before[KEY] - 0.5)
    weight = model.get_parameter(KEY)
    torch.testing.assert_close(weight, (before[KEY] - 0.5).to(weight.dtype))


def test_masters_that_are_handed_over_are_gone_until_they_are_taken_back() -> None:
    model, _ = accelerate(model := make_model("bert"), make_optimizer(model), precision="bf16")
    masters: MasterWeights = getattr(model, MASTERS_ATTRIBUTE)
    before, parameter = model.state_dict(), model.get_parameter(KEY)
    given = masters.hand_over([parameter, model.classifier.weight])
    assert list(given) == [parameter]
    with pytest.raises(KeyError):
        model.state_dict()
    model.load_state_dict({key: value + 1 for key, value in before.items()})
    torch.testing.assert_close(parameter, (before[KEY] + 1).to(torch.bfloat16), atol=0, rtol=0)
    masters.take_back({parameter: before[KEY] + 1})
    torch.testing.assert_close(model.state_dict()[KEY], before[KEY] + 1, atol=0, rtol=0)


def test_steps_too_small_for_bf16_add_up() -> None:
    model, optimizer = accelerate(model := make_model("bert"), make_optimizer(model, lr=1e-5), precision="bf16")
    before = model.state_dict()[KEY].clone()
    for _ in range(10):
        parameter = model.get_parameter(KEY)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.testing.assert_close(before - model.state_dict()[KEY], torch.full_like(before, 1e-4), rtol=0.01, atol=1e-7)


def test_saved_weights_are_fp32_under_their_own_names(tmp_path: Path) -> None:
    plain, fast = make_pair("bert")
    accelerate(fast, make_optimizer(fast), precision="bf16")
    fast.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.dtype == torch.float32
    wanted = plain.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for key, value in again.state_dict().items():
        torch.testing.assert_close(value, wanted[key], atol=0, rtol=0)


def test_a_module_of_the_model_saves_and_loads_masters_too() -> None:
    """As sentence-transformers does with the model inside of its own."""
    inner = make_model("bert")
    outer = torch.nn.Sequential(inner)
    accelerate(outer, make_optimizer(outer), precision="bf16")
    wanted = {name: torch.randn_like(value) for name, value in inner.bert.state_dict().items()}
    inner.bert.load_state_dict(wanted)
    for module, prefix in ((inner.bert, ""), (inner, "bert."), (outer, "0.bert.")):
        found = module.state_dict()
        for name, value in wanted.items():
            torch.testing.assert_close(found[prefix + name], value, atol=0, rtol=0)


def test_loading_gives_masters_all_their_bits() -> None:
    plain, fast = make_pair("bert")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1e-4)
    accelerate(fast, make_optimizer(fast), precision="bf16")
    fast.load_state_dict(plain.state_dict())
    for key, value in fast.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[key], atol=0, rtol=0)
    torch.testing.assert_close(fast.get_parameter(KEY), plain.get_parameter(KEY).to(torch.bfloat16), atol=0, rtol=0)


def test_a_weight_written_from_outside_overrules_its_master() -> None:
    model, optimizer = accelerate(model := make_model("bert"), make_optimizer(model), precision="bf16")
    with torch.no_grad():
        model.get_parameter(KEY).fill_(0.5)
    assert torch.equal(model.state_dict()[KEY], torch.full_like(model.state_dict()[KEY], 0.5))
    optimizer.step()
    assert torch.all(model.get_parameter(KEY) == 0.5)


def test_weights_can_be_changed_in_all_their_bits() -> None:
    model, _ = accelerate(model := make_model("bert"), make_optimizer(model), precision="bf16")
    before = model.state_dict()[KEY].clone()
    parameter, bias = model.get_parameter(KEY), model.classifier.bias
    for change in (1e-6, 1e-2):
        with fp32_weights(model, [parameter, bias]) as (weight, same), torch.no_grad():
            assert (weight.dtype, same) == (torch.float32, bias)
            weight.add_(change)
        before += change
        torch.testing.assert_close(model.state_dict()[KEY], before, atol=1e-8, rtol=0)
        assert torch.equal(parameter, model.state_dict()[KEY].to(torch.bfloat16))


def test_a_second_optimizer_shares_the_masters() -> None:
    model, _ = accelerate(model := make_model("bert"), make_optimizer(model), precision="bf16")
    _, second = accelerate(model, make_optimizer(model), precision="bf16")
    before = model.state_dict()[KEY].clone()
    model(**make_batch()).loss.backward()
    second.step()
    assert not torch.equal(model.state_dict()[KEY], before)
