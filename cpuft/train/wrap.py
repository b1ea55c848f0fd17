"""Run a user's script unchanged, with the fast path in its Hugging Face Trainer, for `cpuft launch --wrap`."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from cpuft.errors import CpuftError
from cpuft.rank.interruption import handle_interruption
from cpuft.rank.script import end_process, prepare_torch, run_script


def _wrap_trainer(accelerated: list[str]) -> None:
    """Make every Trainer accelerate model and optimizer when it has made the latter, and note the model's class."""
    from transformers import Trainer

    from cpuft.train.fast.acceleration import accelerate, describe_layers

    original = Trainer.create_optimizer

    @functools.wraps(original)
    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = original(self, *args, **kwargs)
        # When a Trainer trains a second time, its optimizer is wrapped in one of Accelerate's.
        accelerate(self.model, getattr(optimizer, "optimizer", optimizer))
        if not accelerated and os.environ.get("RANK", "0") == "0":
            name, layers = type(self.model).__name__, describe_layers(self.model)
            print(f"cpuft: --wrap: fast path of {name}: {layers}", file=sys.stderr, flush=True)
        accelerated.append(type(self.model).__name__)
        return optimizer

    Trainer.create_optimizer = create_optimizer


def main() -> int:
    """Run the script of the command line as Python would, with accelerated Trainers; return its exit code, or 2 if its
    model cannot be accelerated or its ranks were not connected. A script without a Trainer only gets a message.
    """
    accelerated: list[str] = []
    check = prepare_torch()
    handle_interruption()
    _wrap_trainer(accelerated)
    code = run_script(sys.argv[1:], refusals=(CpuftError,), check=check)
    if not accelerated and not code:
        why = f"{sys.argv[0]} made no optimizer in a Hugging Face Trainer; call cpuft.accelerate(model, optimizer)"
        print(f"cpuft: --wrap changed nothing: {why} in it, if it does not yet", file=sys.stderr)
    return code


if __name__ == "__main__":
    end_process(main())
