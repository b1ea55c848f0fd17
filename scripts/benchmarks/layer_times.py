"""Train on one rank, and write into the run's folder when gradients become ready: scripts/record-layer-times.

scripts/bench-slow-motion and scripts/check-estimate need these times.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpuft.comm.compression.embedding_rows import find_embedding
from cpuft.errors import CpuftError
from cpuft.train.__main__ import parse_worker
from cpuft.train.passes import Clock
from cpuft.train.run import run
from cpuft.train.setup import TrainingSetup
from scripts.benchmarks.step_times import FILE_NAME, GradientTime, StepTimes

MEASURED_UPDATES = 16
"""Largest number of updates that are measured."""
_WARM_UP_UPDATES = 3
"""Number of first updates that are not measured, because caches and kernels warm up; at most half of the updates."""


@dataclass(frozen=True)
class _UpdateTimes:
    """The times of one update, in seconds."""

    ready: dict[str, float]
    """Of each gradient by its parameter's name, from the start of the last backward pass."""
    phases: dict[str, float]
    """By names of fields of StepTimes, such as data_seconds."""


class LayerTimes:
    """Measures in some updates when gradients become ready, by hooks that are on the model only in these updates."""

    def __init__(self) -> None:
        self._model = torch.nn.Module()
        """The model itself, without the wrapper of an exchange; empty until the first update."""
        self._updates = 0
        """Number of updates that have begun."""
        self._measured: list[_UpdateTimes] = []
        self._hooks: list[Any] = []
        """Handles of the registered hooks; empty while no update is measured."""
        self._ready_at: dict[str, float] = {}
        """When each parameter's latest gradient was accumulated, as perf_counter counts."""

    def begin_update(self, setup: TrainingSetup) -> None:
        """Register the hooks if the update that follows is the first one to measure."""
        self._updates += 1
        if self._updates == 1 + min(_WARM_UP_UPDATES, max(1, setup.updates // 2)):
            self._model = setup.model
            self._register_hooks()

    def end_update(self, clock: Clock, waited: float) -> None:
        """Keep the times of the update if it was measured. After the last such update, remove the hooks."""
        if not self._hooks:
            return
        seconds = clock.seconds
        start, end = clock.last_laps["backward"]
        ready = {name: at - start for name, at in self._ready_at.items() if at >= start}
        # An exchange may have waited before the last gradient was ready: then all later times include that.
        last_backward = max(0.0, end - start - waited, *ready.values())
        phases = {
            "data_seconds": seconds["data"],
            "forward_seconds": seconds["forward"],
            "backward_seconds": seconds["backward"] - (end - start) + last_backward,
            "last_backward_seconds": last_backward,
            "update_seconds": seconds["update"],
        }
        self._measured.append(_UpdateTimes(ready, phases))
        self._ready_at.clear()
        if len(self._measured) == MEASURED_UPDATES:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _register_hooks(self) -> None:
        for name, parameter in self._list_trained():
            untyped: Any = parameter  # torch has no types for its hooks
            self._hooks.append(untyped.register_post_accumulate_grad_hook(partial(self._note_ready, name)))

    def _list_trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return (item for item in self._model.named_parameters() if item[1].requires_grad)

    def _note_ready(self, name: str, _: torch.Tensor) -> None:
        self._ready_at[name] = time.perf_counter()

    def make_times(self) -> StepTimes:
        """Return the medians of all measured updates. Parameters that never had a gradient are left out.

        Raises CpuftError: no update was measured.
        """
        if not self._measured:
            raise CpuftError("no update was measured, because the first one is left out: give at least --max-steps=2")
        embedding = find_embedding(self._model)
        gradients: list[GradientTime] = []
        for name, parameter in self._list_trained():
            ready = [update.ready[name] for update in self._measured if name in update.ready]
            if ready:
                gradients.append(
                    GradientTime(
                        name=name,
                        shape=list(parameter.shape),
                        dtype=str(parameter.dtype).removeprefix("torch."),
                        ready_seconds=statistics.median(ready),
                        by_rows=embedding is not None and parameter is embedding.weight,
                    )
                )
        phases = {
            name: statistics.median(update.phases[name] for update in self._measured)
            for name in self._measured[0].phases
        }
        gradients.sort(key=lambda one: one.ready_seconds)
        return StepTimes(gradients=gradients, updates=len(self._measured), **phases)


def main() -> None:
    """Train as the command line says, as `python -m cpuft.train` does, in the folder of the run that was launched."""
    started, times = time.perf_counter(), LayerTimes()
    try:
        config, worker = parse_worker([*sys.argv[1:], f"--run-dir={os.environ['CPUFT_RUN_DIR']}"])
        run(config, worker, started, [times])
        Path(worker.run_dir, FILE_NAME).write_text(json.dumps(asdict(times.make_times())), encoding="utf-8")
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
