"""Run by mpirun: Hugging Face's Trainer and Accelerator over a backend. Usage: trainers.py BACKEND FOLDER."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from cpuft import comm
from tests.comm.ranks import become_rank


class Line(torch.nn.Module):
    """A linear model with the Trainer's calling convention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the predictions."""
        predicted = self.layer(x).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(predicted, labels), "logits": predicted}


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": value, "labels": value.sum()} for value in torch.randn(32, 4, generator=generator)]


def same_everywhere(model: torch.nn.Module) -> bool:
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, flat)
    return all(torch.equal(part, flat) for part in parts)


def use_trainer(folder: str) -> bool:
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no"
    )
    trainer = Trainer(model=Line(), args=arguments, train_dataset=rows(), eval_dataset=rows())
    trainer.train()
    trainer.evaluate()
    return same_everywhere(trainer.model) and arguments.world_size == dist.get_world_size()


def use_accelerator() -> bool:
    accelerator = Accelerator(cpu=True)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(rows(), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
    return same_everywhere(model) and accelerator.num_processes == dist.get_world_size()


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start(sys.argv[1], timeout_seconds=20)
    assert use_trainer(sys.argv[2])
    assert use_accelerator()
    dist.barrier()
    dist.destroy_process_group()
    print("passed", flush=True)
