"""cpuft: fine-tune transformers on a cluster of CPU hosts, and show honestly how much faster N hosts are than one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuft.train.fast import accelerate

__all__ = ["__version__", "accelerate"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`cpuft.accelerate` loads torch only when it is asked for: the command line does not need it."""
    if name == "accelerate":
        from cpuft.train.fast import accelerate

        return accelerate
    raise AttributeError(f"module 'cpuft' has no attribute {name!r}")
