"""cpuft: fine-tune transformers on one CPU host or several, and show honestly how much faster N hosts are than one."""

from __future__ import annotations

import sys

# `python -m cpuft` has the working folder in front of its path, where others may write; -I and -P do not.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].partition(".")[0] == "cpuft":
    del sys.path[: 0 if sys.flags.isolated or getattr(sys.flags, "safe_path", False) else 1]

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuft.api import ComparedRuns, Run, compare, launch
    from cpuft.errors import CpuftError
    from cpuft.train.checkpoint.user_loop import interrupted, load_state, save_state
    from cpuft.train.fast.acceleration import accelerate

__all__ = [
    "ComparedRuns",
    "CpuftError",
    "Run",
    "__version__",
    "accelerate",
    "compare",
    "interrupted",
    "launch",
    "load_state",
    "save_state",
]
__version__ = "0.1.0"
_MODULES = {
    **dict.fromkeys(("ComparedRuns", "Run", "compare"), "api"),
    "CpuftError": "errors",
    "accelerate": "train.fast.acceleration",
    **dict.fromkeys(("interrupted", "load_state", "save_state"), "train.checkpoint.user_loop"),
}


def __getattr__(name: str) -> Any:
    """Import a name of the public API when it is first used: the command line starts quickly, without torch."""
    if name == "launch":  # the package, which can be called
        return importlib.import_module("cpuft.launch")
    if name not in _MODULES:
        raise AttributeError(f"module 'cpuft' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cpuft.{_MODULES[name]}"), name)
