"""Run by mpirun: trainings with given options, one after another, each on all ranks.

Usage: decoder_ranks.py FOLDER. Reads FOLDER/wanted.json, the options of each training by its name, and writes
FOLDER/found.json: by the same names `losses`, `metrics` and `weights`, a sum of all trained parameters' squares.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpuft import comm
from cpuft.config.train import TrainConfig
from cpuft.rank.world import World, parse_world
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.prepare import prepare
from cpuft.train.evaluate import evaluate
from cpuft.train.loop import train
from cpuft.train.objective.table import make_objective
from cpuft.train.ranks import prove_equal_parameters
from cpuft.train.setup import TrainingSetup
from tests.comm.ranks import become_rank

ALONE = World(0, 1, 0, 1)


def make_setup(config: TrainConfig, world: World = ALONE) -> TrainingSetup:
    """Load data and model as a rank does; torch.distributed has begun."""
    prepared = read_prepared(str(prepare(config)))
    objective = make_objective(config, prepared)
    torch.manual_seed(0)
    model = objective.load_model(config)
    return TrainingSetup(model, objective, config, prepared, "fp32", world)


def learn(config: TrainConfig, world: World = ALONE) -> dict[str, Any]:
    """Train and evaluate on all ranks, as a run does."""
    setup = make_setup(config, world)
    losses = [line.loss for line in train(setup)]
    metrics = evaluate(setup, setup.updates).metrics
    with setup.exchange.full_weights():
        prove_equal_parameters(setup.model, "at the end")
        weights = sum(float(one.detach().double().square().sum()) for one in setup.model.parameters())
    return {"losses": losses, "metrics": metrics, "weights": weights}


def main(folder: Path) -> None:
    world = parse_world(os.environ)
    wanted = json.loads((folder / "wanted.json").read_text(encoding="utf-8"))
    found = {name: learn(TrainConfig(**options), world) for name, options in wanted.items()}
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    become_rank()
    torch.set_num_threads(1)
    comm.start("gloo", timeout_seconds=60)
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
