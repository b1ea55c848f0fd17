"""When the gradients of an update become ready: measured by hooks that are removed, on layers that set a clock forward.

The clock replaces time.perf_counter, and nothing else moves it: so the wanted times are exact on a slow machine, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.utils.checkpoint import checkpoint

from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.errors import CpuftError
from cpuft.rank.world import World
from cpuft.record import Writer
from cpuft.train.checkpoint.timing import Checkpoints
from cpuft.train.data.archive import Prepared
from cpuft.train.exchange.base import Exchange
from cpuft.train.exchange.data_parallel import DataParallelExchange
from cpuft.train.objective.base import Batch
from cpuft.train.reporter import Progress, RunReporter
from cpuft.train.setup import TrainingSetup
from cpuft.train.training import train_and_evaluate
from scripts.benchmarks import layer_times
from scripts.benchmarks.layer_times import MEASURED_UPDATES, LayerTimes
from scripts.benchmarks.step_times import read_timed_record
from tests.records import make_record
from tests.train.test_loop import Weighing
from tests.train.tokens import make_tokens

CONFIG = TrainConfig(fast_path=False, batch_size=4, max_steps=6)


class Clock:
    """Replaces time.perf_counter. It stands still until `now` is set, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class _Sleep(torch.autograd.Function):
    """Sets the clock forward: by one second in the forward pass, and by the given seconds in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, seconds: int) -> torch.Tensor:
        ctx.seconds = seconds
        CLOCK.now += 1
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        CLOCK.now += ctx.seconds
        return gradients[0], None


class Sleeper(torch.nn.Module):
    """Words, two layers and a scale, with sleeps between them; a parameter is frozen, and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 4)
        self.first = torch.nn.Linear(4, 4, dtype=torch.float64)
        self.second = torch.nn.Linear(4, 1)
        self.scale = torch.nn.LayerNorm(1, bias=False)
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(1))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.words

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        sleep: Any = _Sleep.apply
        hidden = (self.words(input_ids) * attention_mask[..., None]).sum(1)
        hidden = sleep(hidden, 3)
        # The backward pass calls this layer again.
        hidden = checkpoint(self.first, hidden.double(), use_reentrant=False).float()
        hidden = sleep(hidden, 1)
        # Nothing calls the module that owns this weight.
        outputs: torch.Tensor = (self.second(hidden) * self.scale.weight * self.frozen)[:, 0]
        return outputs


class Watching(Weighing):
    """Counts the model's hooks in each forward pass of a training."""

    hooks: list[int]

    def losses(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if model.training:
            parameters: Any = list(model.parameters())
            on_parameters = [p for p in parameters if p._post_accumulate_grad_hooks]
            on_modules = [module for module in model.modules() if module._forward_pre_hooks]
            self.hooks.append(len(on_parameters) + len(on_modules))
        return super().losses(model, batch)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(time, "perf_counter", CLOCK)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_setup(config: TrainConfig) -> TrainingSetup:
    tokens = replace(make_tokens([3, 1, 4, 1, 5, 2, 6, 5], types=False), labels=np.linspace(1, 2, 8, dtype=np.float32))
    prepared = Prepared((), (), "", 0, tokens, {"": tokens})
    return TrainingSetup(Sleeper(), Watching((), (), 0, 0), config, prepared, "fp32", World(0, 1, 0, 1))


def train(run: Path, config: TrainConfig, times: LayerTimes) -> list[int]:
    """Train a sleeper, of which the times are taken; return the number of hooks in each forward pass."""
    setup = make_setup(config)
    setup.observers.append(times)
    objective = setup.objective
    assert isinstance(objective, Watching)
    objective.hooks = []
    reporter = RunReporter(Progress("lines", 1))
    with Writer(str(run)) as reporter.record:
        reporter.record.write(make_record().header)
        train_and_evaluate(setup, reporter, Checkpoints(setup.exchange))
    return objective.hooks


@pytest.mark.parametrize("exchange", [Exchange, DataParallelExchange])
def test_gradients_are_ready_when_the_layers_after_them_have_slept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: type[Exchange]
) -> None:
    """With the exchange of several ranks, too, which has hooks of its own."""
    monkeypatch.setattr("cpuft.train.setup.choose_exchange", lambda config, ranks: exchange)
    observer = LayerTimes()
    train(tmp_path, replace(CONFIG, gradient_accumulation=2), observer)
    times = observer.make_times()
    assert times.updates == 3
    found = {one.name: one for one in times.gradients}
    assert [one.ready_seconds for one in times.gradients] == sorted(one.ready_seconds for one in times.gradients)
    # When a gradient is ready in the last backward pass.
    wanted = {"words.weight": 4, "first.weight": 1, "first.bias": 1}
    wanted |= {"second.weight": 0, "second.bias": 0, "scale.weight": 0}
    assert {name: one.ready_seconds for name, one in found.items()} == wanted
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        "words.weight": ([20, 4], "float32"),
        "first.weight": ([4, 4], "float64"),
        "first.bias": ([4], "float64"),
        "second.weight": ([1, 4], "float32"),
        "second.bias": ([1], "float32"),
        "scale.weight": ([1], "float32"),
    }
    assert [name for name, one in found.items() if one.by_rows] == ["words.weight"]
    # Two passes of two sleeps each; the backward pass calls no sleep again.
    assert (times.forward_seconds, times.backward_seconds, times.last_backward_seconds) == (4, 8, 4)
    assert (times.data_seconds, times.update_seconds) == (0, 0)


def test_hooks_are_there_in_sixteen_updates_after_the_first_three(tmp_path: Path) -> None:
    times = LayerTimes()
    hooks = train(tmp_path / "long", replace(CONFIG, max_steps=25), times)
    assert times.make_times().updates == MEASURED_UPDATES
    trained = 7  # parameters with requires_grad
    assert hooks == [0] * (1 + 3) + [trained] * MEASURED_UPDATES + [0] * 6
    for updates, measured in ((4, 2), (2, 1)):
        times = LayerTimes()
        train(tmp_path / str(updates), replace(CONFIG, max_steps=updates), times)
        assert times.make_times().updates == measured


def test_a_run_of_one_update_has_no_times(tmp_path: Path) -> None:
    times = LayerTimes()
    train(tmp_path, replace(CONFIG, max_steps=1), times)
    with pytest.raises(CpuftError, match="give at least --max-steps=2"):
        times.make_times()


def test_the_times_are_written_beside_the_record_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(config: TrainConfig, worker: WorkerConfig, started: float, observers: list[LayerTimes]) -> None:
        assert config.task == "demo"
        train(Path(worker.run_dir), CONFIG, *observers)

    monkeypatch.setenv("CPUFT_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["layer_times", "--task=demo"])
    monkeypatch.setattr(layer_times, "run", run)
    layer_times.main()
    record = read_timed_record(str(tmp_path))
    assert record.layer_times is not None
    assert (len(record.steps), record.layer_times.updates) == (6, 3)
