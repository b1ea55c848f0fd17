"""accelerate under somebody else's loop: the Hugging Face Trainer, DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

from cpuft.errors import CpuftError
from cpuft.train.fast.acceleration import accelerate
from tests.comm.ranks import fork_ranks
from tests.train.fast.encoders import make_batch, make_model, make_optimizer, relative_error

KEYS = {
    "bert": "bert.encoder.layer.0.intermediate.dense.weight",
    "albert": "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight",
    "deberta-v2": "deberta.encoder.layer.0.attention.self.query_proj.weight",
}
"""The weight that is compared, of each kind of model."""
KEY = KEYS["bert"]


def rows(count: int = 16) -> list[dict[str, Tensor]]:
    batch = make_batch((9,) * count)
    return [{name: value[i] for name, value in batch.items()} for i in range(count)]


def trainer_arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_strategy": "no", "seed": 1}
    sizes = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_steps": 4, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **{**usual, **sizes, **options})


def train(folder: Path, fast: bool, **options: Any) -> Any:
    model = make_model("bert")
    optimizer = make_optimizer(model)
    if fast:
        accelerate(model, optimizer, precision="bf16")
    arguments = trainer_arguments(folder, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(), optimizers=(optimizer, None))
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "options", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2}], ids=["usual", "autocast", "accumulation"]
)
def test_the_trainer_ends_near_where_it_would(tmp_path: Path, options: dict[str, Any]) -> None:
    wanted, found = (train(tmp_path, fast, **options).model.state_dict() for fast in (False, True))
    start = make_model("bert").state_dict()
    moved = relative_error(wanted[KEY], start[KEY])
    assert relative_error(found[KEY], wanted[KEY]) < moved / 2


def test_the_trainer_saves_and_resumes(tmp_path: Path) -> None:
    through = train(tmp_path / "a", True, save_strategy="steps", save_steps=2)
    model = make_model("bert")
    model, optimizer = accelerate(model, make_optimizer(model), precision="bf16")
    arguments = trainer_arguments(tmp_path / "b")
    resumed = Trainer(model=model, args=arguments, train_dataset=rows(), optimizers=(optimizer, None))
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    for key, value in through.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, atol=1e-6, rtol=1e-5)
    through.save_model(str(tmp_path / "c"))
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "c")
    torch.testing.assert_close(again.state_dict()[KEY], through.model.state_dict()[KEY], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("kernels", "kind"),
    [
        (True, "bert"),
        pytest.param(False, "bert", marks=pytest.mark.proof),
        pytest.param(True, "albert", marks=pytest.mark.proof),
        pytest.param(True, "deberta-v2", marks=pytest.mark.proof),
    ],
)
def test_two_ranks_agree_and_train_as_one(tmp_path: Path, kernels: bool, kind: str) -> None:
    """Without kernels, too: a host without a compiler is one of them."""
    done = fork_ranks(2, "tests.train.fast.ddp_ranks", str(tmp_path), kind, "kernels" if kernels else "")
    assert done.returncode == 0, done.stdout
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    model = make_model(kind)
    model, optimizer = accelerate(model, make_optimizer(model), precision="bf16")
    for _ in range(2):
        model(**make_batch((9, 7, 9, 7))).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], atol=0, rtol=0)
        assert value.dtype == torch.float32
    alone, start = model.state_dict()[KEYS[kind]], make_model(kind).state_dict()[KEYS[kind]]
    assert relative_error(first[f"module.{KEYS[kind]}"] - start, alone - start) < 0.2


def test_a_wrapped_model_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_model("bert")
        with pytest.raises(CpuftError, match="then wrap the model"):
            accelerate(DistributedDataParallel(model), make_optimizer(model))
    finally:
        dist.destroy_process_group()
