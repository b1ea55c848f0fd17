"""A user's script, unchanged, with the fast path under its Hugging Face Trainer: what `cpuft launch --wrap` runs.

python -m cpuft.train.wrap SCRIPT.py ARGS...
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from cpuft.errors import CpuftError
from cpuft.rank.interruption import handle_interruption
from cpuft.rank.script import end_process, prepare_torch, run_script


def wrap_trainer(done: list[str]) -> None:
    """Make every Trainer of this process accelerate its model with its optimizer, made by it or given to it.

    `done` gets the name of each model's class. The Trainer makes its optimizer when the model is loaded and before
    DistributedDataParallel gets it, which is the moment that `accelerate` wants.
    """
    from transformers import Trainer

    from cpuft.train.fast.acceleration import accelerate
    from cpuft.train.fast.encoder import describe_layers

    own = Trainer.create_optimizer

    @functools.wraps(own)
    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = own(self, *args, **kwargs)
        # When it trains once more, the Trainer has wrapped the optimizer in one of Accelerate's.
        accelerate(self.model, getattr(optimizer, "optimizer", optimizer))
        if not done and os.environ.get("RANK", "0") == "0":
            name, layers = type(self.model).__name__, describe_layers(self.model)
            print(f"cpuft: --wrap: fast path of {name}: {layers}", file=sys.stderr, flush=True)
        done.append(type(self.model).__name__)
        return optimizer

    Trainer.create_optimizer = create_optimizer


def main() -> int:
    """Run the script as Python would; 2 after one line where its model cannot be accelerated, else its exit code."""
    done: list[str] = []
    check = prepare_torch()
    handle_interruption()
    wrap_trainer(done)
    code = run_script(sys.argv[1:], refusals=(CpuftError,), check=check)
    if not done and not code:
        print(
            f"cpuft: --wrap changed nothing: {sys.argv[0]} made no optimizer in a Hugging Face Trainer; "
            f"call cpuft.accelerate(model, optimizer) in it, if it does not yet",
            file=sys.stderr,
        )
    return code


if __name__ == "__main__":
    end_process(main())
