"""The options of `cpuft errors`."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import option


@dataclass(frozen=True)
class ErrorsConfig:
    """What `cpuft errors` lists."""

    run: str = option("", "Folder of the run")
    most: int = option(20, "Largest number of examples in each list", least=1)
