"""A small training with everything that a checkpoint has to bring back; and, run by mpirun, the same on some ranks.

Usage: training.py FOLDER KEPT. Writes FOLDER/RANK-of-SIZE.json: what a run of eight updates was that was never
disturbed, and what one was that goes on from the checkpoint in KEPT; where there is none, one is made there after five.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cpuft import comm
from cpuft.config.train import TrainConfig
from cpuft.rank.world import World, parse_world
from cpuft.record import RecordedRank
from cpuft.train.checkpoint.resume import ResumePoint, resume
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.checkpoint.writer_thread import CheckpointWriter
from cpuft.train.data.archive import Prepared, Tokens
from cpuft.train.fast.elementwise import FastDropout
from cpuft.train.loop import train
from cpuft.train.objective.base import Batch, Objective, Predictions
from cpuft.train.ranks import checksum_parameters
from cpuft.train.setup import TrainingSetup
from tests.comm.ranks import become_rank
from tests.records import make_record
from tests.train.tokens import make_tokens

CONFIG = TrainConfig(fast_path=False, learning_rate=0.05, max_steps=8, batch_size=6, warmup_ratio=0.3, weight_decay=0.1)
GLOBAL_BATCH = 6
HEADER = replace(make_record(2).header, options=dict(vars(CONFIG)), ranks=[RecordedRank(0, "a", [0])])


class Reader(torch.nn.Module):
    """Two layers over the sum of a row's words, dropout between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(30, 8)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.Tanh(), FastDropout(dropout), torch.nn.Linear(64, 1)
        )
        self.register_buffer("seen", torch.tensor(7))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.words

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        # Not their mean: that would know of the padding.
        whole = (self.words(input_ids) * attention_mask[..., None]).sum(1)
        outputs: torch.Tensor = self.layers(whole)[:, 0]
        return outputs


class Reading(Objective):
    """Remembers which rows this rank was given."""

    label_type = torch.float32

    def __init__(self) -> None:
        super().__init__((), (), 0, 0)
        self.rows: list[list[int]] = []

    def make_batch(self, tokens: Tokens, rows: Any, epoch: int = -1) -> Batch:
        self.rows.append(rows.tolist())
        return super().make_batch(tokens, rows, epoch)

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        losses: torch.Tensor = (model(**batch.inputs) - batch.labels) ** 2
        return losses

    def predict(self, model: torch.nn.Module, batch: Batch) -> Predictions:
        raise NotImplementedError


def make_loop(world: World, dropout: float) -> TrainingSetup:
    tokens = replace(
        make_tokens([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 9, 2, 6], types=False), labels=np.linspace(-1, 1, 13).astype("f4")
    )
    prepared = Prepared((), (), HEADER.data, 0, tokens, {"": tokens})
    objective = Reading()
    loop = TrainingSetup(Reader(dropout), objective, CONFIG, prepared, "fp32", world, global_batch=GLOBAL_BATCH)
    objective.rows.clear()  # the loop looks once how the model uses its embedding
    return loop


def go(loop: TrainingSetup, writer: CheckpointWriter | None = None, done: int = 0) -> dict[str, Any]:
    """Train to the end; losses, this rank's rows of each forward pass, and the final checksum."""
    losses, loop.evaluation_interval = [], 5  # the lines until then are complete, as before an evaluation
    for line in train(loop, done=done):
        losses.append(line.loss)
        if writer and line.step == 5:
            writer.add_line(HEADER)
            writer.write(5, wait=True)
    assert isinstance(loop.objective, Reading)
    # The first pass is the warm-up's, which is no update.
    return {"losses": losses, "rows": loop.objective.rows[1:], "checksum": checksum_parameters(loop.model)}


def go_on(world: World, root: Path, dropout: float) -> tuple[ResumePoint, dict[str, Any]]:
    """From the newest checkpoint in `root`."""
    loop = make_loop(world, dropout)
    assert isinstance(loop.objective, Reading)
    loop.objective.rows.clear()
    past = resume(TrainingState(loop.model, loop.optimizer), root, world, vars(CONFIG), HEADER.data)
    return past, go(loop, done=past.update)


def make_writer(loop: TrainingSetup, root: Path) -> CheckpointWriter:
    return CheckpointWriter(TrainingState(loop.model, loop.optimizer), root, loop.world.rank, every=0.0)


def compare(world: World, root: Path, dropout: float) -> dict[str, Any]:
    """A run that was never disturbed, and one that goes on from a checkpoint; rank 0 makes it where there is none."""
    loop = make_loop(world, dropout)
    kept = root.exists()
    whole = go(loop, make_writer(loop, root) if world.rank == 0 and not kept else None)
    dist.barrier()
    past, resumed = go_on(world, root, dropout)
    return {"whole": whole, "resumed": resumed, "update": past.update}


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start("gloo", timeout_seconds=60)
    own, (folder, kept) = parse_world(os.environ), map(Path, sys.argv[1:])
    found = {str(dropout): compare(own, kept / str(dropout), dropout) for dropout in (0.0, 0.5)}
    (folder / f"{own.rank}-of-{own.size}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
