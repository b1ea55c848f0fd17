"""A model and its optimizer in a block of memory, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cpuft.config.train import TrainConfig
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.lora import add_adapters
from cpuft.train.optimizer import make_optimizer
from cpuft.train.ranks import checksum_parameters
from tests.train.fast.encoders import make_batch, make_model


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(**make_batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def take(state: TrainingState) -> torch.Tensor:
    block = torch.empty(state.nbytes, dtype=torch.uint8)
    state.snapshot(block)
    return block


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_updates_after_it_are_the_same_to_the_bit(plain: bool, precision: str, tmp_path: Path) -> None:
    config = TrainConfig(fast_path=not plain, learning_rate=1e-3, weight_decay=0.1)
    model, other = make_model("bert"), make_model("bert")
    optimizer, others = (make_optimizer(one, config, precision) for one in (model, other))
    for _ in range(2):
        step(model, optimizer)
    with torch.no_grad():
        model.classifier.bias.add_(1)
    block = take(TrainingState(model, optimizer))
    TrainingState(other, others).restore(block)
    assert checksum_parameters(other) == checksum_parameters(model)
    for _ in range(2):
        step(model, optimizer)
        step(other, others)
    assert checksum_parameters(other) == checksum_parameters(model)
    # Nothing of what was taken over is the block's own memory.
    assert torch.equal(take(TrainingState(model, optimizer)), take(TrainingState(other, others)))
    (tmp_path / "state.safetensors").write_bytes(block.numpy().data)
    kept = load_file(tmp_path / "state.safetensors")
    assert kept["model.classifier.weight"].dtype == torch.float32
    assert kept["exp_avg.classifier.weight"].abs().sum() > 0
    assert set(kept["step"].tolist()) == {2.0}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_of_a_model_with_adapters_what_is_trained_alone_is_kept(precision: str) -> None:
    config = TrainConfig(lora_rank=4, learning_rate=1e-2)
    model, other, whole = (add_adapters(make_model("bert"), 4, "", ()) for _ in range(3))
    optimizer, others = (make_optimizer(one, config, precision) for one in (model, other))
    for _ in range(2):
        step(model, optimizer)
    block = take(TrainingState(model, optimizer))
    kept = {name for name in TrainingState(model, optimizer)._places if name.startswith("model.")}
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    assert kept - trained == {f"model.{name}" for name, _ in model.named_buffers() if name in model.state_dict()}
    TrainingState(other, others).restore(block)
    for _ in range(2):
        step(model, optimizer)
        step(other, others)
    assert checksum_parameters(other) == checksum_parameters(model)
    # On hosts of another precision the frozen weights are the same, and of another base they are not.
    header = TrainingState(model, optimizer).header
    assert TrainingState(whole, make_optimizer(whole, config, "fp32")).header == header
    with torch.no_grad():
        dict(whole.named_parameters())["base_model.model.bert.embeddings.word_embeddings.weight"][0, 0] += 1
    assert TrainingState(whole, torch.optim.AdamW(whole.parameters())).header != header


def test_what_no_update_has_touched_has_no_moments() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer, others = (torch.optim.AdamW(one.parameters()) for one in (model, other))
    model(torch.ones(1, 2)).sum().backward()
    model.bias.grad = None
    optimizer.step()
    TrainingState(other, others).restore(take(TrainingState(model, optimizer)))
    assert set(others.state) == {other.weight}
    assert torch.equal(others.state[other.weight]["exp_avg_sq"], optimizer.state[model.weight]["exp_avg_sq"])


def test_models_of_other_shapes_have_other_headers() -> None:
    models = [torch.nn.Linear(2, 3), torch.nn.Linear(3, 2), torch.nn.Linear(2, 3, bias=False)]
    headers = {TrainingState(one, torch.optim.AdamW(one.parameters())).header for one in models}
    assert len(headers) == 3
