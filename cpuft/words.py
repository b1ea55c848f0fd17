"""The earlier name of cpuft.argv, which plans printed by earlier versions import."""

from cpuft.argv import run_module

__all__ = ["run_module"]
