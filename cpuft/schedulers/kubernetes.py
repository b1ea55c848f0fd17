"""A job of Kubernetes: the manifest of an MPIJob, as Kubeflow's operator takes it (v2beta1)."""

from __future__ import annotations

import re
from typing import Any

from cpuft.errors import CpuftError
from cpuft.schedulers.options import JobConfig
from cpuft.schedulers.work import HERE, Work, fill

_LABEL = re.compile("[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_ONCE = (HERE / "once.sh").read_text(encoding="utf-8")
_FIRST = ("--grace-period", "110")
"""A little less than the pod's own."""


def format_job(config: JobConfig, work: Work, cpuft: str) -> str:
    """A manifest: a launcher that goes on where it was interrupted, and a worker for each host.

    Raises CpuftError: no image, or a name that the operator would refuse, which makes names of hosts of it.
    """
    hosts, ranks = work.spread(config.nodes)
    last = f"{config.name}-worker-{hosts - 1}"
    for flag, text, label in (("name", config.name, last), ("namespace", config.namespace, config.namespace or "a")):
        if not _LABEL.fullmatch(label):
            most = 63 - len(label) + len(text)
            raise CpuftError(f"--{flag} {text[:80]!r}: use small letters, digits and dashes, {most} at most")
    script = f"cpuft={cpuft}\n{work.format(config.name, 'yes', *_FIRST)}{_ONCE}"
    claim = {"claimName": config.claim} if config.claim else None
    given: dict[str, Any] = {"hosts": hosts, "ranks": ranks, "script": escape(script), "claim": claim}
    given |= {"cores": str(config.cores), "memory": f"{config.memory}Gi", "shm": f"{config.memory << 8}Mi"}
    given |= {"namespace": config.namespace or None, "seconds": config.seconds or None}
    return fill("mpijob.yaml", config, given | {"scratch": None if claim else {}})


def escape(text: str) -> str:
    """Kubernetes puts a variable's value for $(NAME), and $ for $$, in a container's command."""
    return re.sub(r"\$(?=[$(])", "$$", text)
