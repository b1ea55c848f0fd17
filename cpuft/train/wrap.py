"""A user's script, unchanged, with the fast path under its Hugging Face Trainer: what `cpuft launch --wrap` runs.

python -m cpuft.train.wrap SCRIPT.py ARGS...
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from typing import Any

from cpuft.errors import CpuftError


def wrap_trainer(done: list[str]) -> None:
    """Make every Trainer of this process accelerate its model with its optimizer, made by it or given to it.

    `done` gets the name of each model's class. The Trainer makes its optimizer when the model is loaded and before
    DistributedDataParallel gets it, which is the moment that `accelerate` wants.
    """
    from transformers import Trainer

    from cpuft.train.fast import accelerate

    own = Trainer.create_optimizer

    @functools.wraps(own)
    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = own(self, *args, **kwargs)
        # When it trains once more, the Trainer has wrapped the optimizer in one of Accelerate's.
        accelerate(self.model, getattr(optimizer, "optimizer", optimizer))
        done.append(type(self.model).__name__)
        return optimizer

    Trainer.create_optimizer = create_optimizer


def main() -> None:
    """Run the script as Python would; exit 2 with one line where its model cannot be accelerated."""
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    done: list[str] = []
    try:
        wrap_trainer(done)
        runpy.run_path(script, run_name="__main__")
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(2)
    if not done:
        print(
            f"cpuft: --wrap changed nothing: {script} made no optimizer in a Hugging Face Trainer; "
            f"call cpuft.accelerate(model, optimizer) in it",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
