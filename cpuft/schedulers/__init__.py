"""Schedulers of `cpuft submit`, each registered here; its options are those of its class (`Scheduler.options`)."""

from __future__ import annotations

import re
from typing import Any

from cpuft.errors import CpuftError
from cpuft.schedulers.aws_batch import AwsBatch
from cpuft.schedulers.base import Scheduler
from cpuft.schedulers.dstack import Dstack
from cpuft.schedulers.kubernetes import Kubernetes, TrainJob
from cpuft.schedulers.skypilot import SkyPilot
from cpuft.schedulers.slurm import Slurm

SCHEDULERS: dict[str, type[Scheduler[Any]]] = {
    one.name: one for one in (Slurm, Kubernetes, TrainJob, AwsBatch, Dstack, SkyPilot)
}


def parse_job(text: str) -> tuple[Scheduler[Any], str]:
    """Return (scheduler, identifier without the scope) of a job as `cpuft submit` prints it, such as "slurm:1234".

    Nothing is asked: the job need not exist. The scheduler has the job's scope, as of "kubernetes:NAMESPACE/NAME".
    Raises CpuftError for any other text.
    """
    word = "[A-Za-z0-9][A-Za-z0-9_-]*"
    if not (found := re.fullmatch(f"({'|'.join(SCHEDULERS)}):(?:({word})/)?({word})", text)):
        raise CpuftError(f"{text[:80]!r} is not a job: write what cpuft submit printed, e.g. slurm:1234")
    return SCHEDULERS[found[1]](found[2] or ""), found[3]
