"""What updates the weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cpuft.train.optimizer import group_parameters, learning_rate_factor

CODE = """
import os, torch
from cpuft.config import TrainConfig
from cpuft.train.optimizer import make_optimizer
make_optimizer(torch.nn.Linear(2, 2), TrainConfig(compile=True), "fp32")
from torch._inductor.runtime.cache_dir_utils import cache_dir
print(cache_dir())
"""


def test_what_torch_compiles_is_loaded_from_where_only_this_user_writes(tmp_path: Path) -> None:
    environ = dict(os.environ) | {"XDG_CACHE_HOME": str(tmp_path)}
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == f"{tmp_path}/cpuft/inductor\n"


@pytest.mark.parametrize(
    "updates, warmup, factors",
    [(4, 0.0, [1.0, 0.75, 0.5, 0.25, 0.0]), (4, 0.5, [0.0, 0.5, 1.0, 0.5, 0.0]), (1, 1.0, [0.0, 0.0])],
)
def test_the_rate_climbs_and_falls_to_zero(updates: int, warmup: float, factors: list[float]) -> None:
    assert [learning_rate_factor(update, updates, warmup) for update in range(updates + 1)] == factors


def test_matrices_are_decayed_and_frozen_ones_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2), torch.nn.Linear(2, 1))
    model[2].requires_grad_(False)
    groups = group_parameters(model, 0.01)
    assert [(group["weight_decay"], [tuple(p.shape) for p in group["params"]]) for group in groups] == [
        (0.01, [(2, 3)]),
        (0.0, [(2,), (2,), (2,)]),
    ]
