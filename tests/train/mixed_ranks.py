"""Run by mpirun: runs whose ranks are not alike, one after another. Usage: mixed_ranks.py JOBS.json [WORD ...].

The file lists the configuration, run folder and port of each run. A word NAME=VALUE is a variable of rank 1 alone. With
`damage`, rank 1 changes its parameters at the end. With `slow`, metrics take longer than a message may. With `doubt`,
bf16 is slow by what rank 0 measures, and fast by what rank 1 does. Each rank writes RUN.RANK.json: how often it drew
masks of training examples, and how often it computed metrics.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

rank = int(os.environ["PMI_RANK"])
words = sys.argv[2:]
if rank:
    os.environ.update({word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word})

import pytest  # noqa: E402
import torch  # noqa: E402  (torch reads the variables)

from cpuft.comm.registration import exit_process  # noqa: E402
from cpuft.config.train import TrainConfig, WorkerConfig  # noqa: E402
from cpuft.errors import CpuftError  # noqa: E402
from cpuft.hardware import Cpu  # noqa: E402
from cpuft.train import evaluate  # noqa: E402
from cpuft.train.checkpoint.timing import Checkpoints  # noqa: E402
from cpuft.train.objective.masked_lm import MaskedLanguageModelling  # noqa: E402
from cpuft.train.run import run  # noqa: E402
from tests.comm.ranks import become_rank  # noqa: E402

calls = Counter[str]()
own_mask, own_join = MaskedLanguageModelling.mask_example, evaluate.join_batches


def mask(self: Any, tokens: Any, example: int, epoch: int) -> Any:
    calls["masks"] += epoch >= 0
    return own_mask(self, tokens, example, epoch)


def join(parts: Any) -> Any:
    calls["metrics"] += 1
    time.sleep(22.0 * ("slow" in words))
    return own_join(parts)


def damage(self: Any, updates: int) -> None:
    with torch.no_grad():
        for parameter in self._exchange.bare_model.parameters() if rank else ():
            parameter.add_(1.0)


become_rank()
patch = pytest.MonkeyPatch()
patch.setattr(MaskedLanguageModelling, "mask_example", mask)
patch.setattr(evaluate, "join_batches", join)
if "doubt" in words:
    patch.setattr("cpuft.train.run.read_cpu", lambda: Cpu("Arm", ("asimd", "bf16")))
    speeds = {"kernel": "", "teraflops": 0.4 if rank else 0.1, "fp32_teraflops": 0.2}
    patch.setattr("cpuft.train.run.measure_products", lambda precision: speeds)
if "damage" in words:
    patch.setattr(Checkpoints, "write_final", damage)
code = 0
for config, folder, port in json.loads(Path(sys.argv[1]).read_text()):
    os.environ["MASTER_PORT"] = str(port)
    calls.clear()
    try:
        run(TrainConfig(**config), WorkerConfig(folder), time.perf_counter())
    except CpuftError as error:
        print(f"rank {rank}: {error}", flush=True)
        code = error.exit_code
    Path(f"{folder}.{rank}.json").write_text(json.dumps(calls))
exit_process(code)
