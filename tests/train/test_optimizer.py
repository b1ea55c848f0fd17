"""What updates the weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import os, torch
from cpuft.options.fields import TrainConfig
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
