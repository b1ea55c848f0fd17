"""A job of AWS Batch: a multi-node parallel job's definition and its submission, as calls of AWS's."""

from __future__ import annotations

from typing import Any

from cpuft.errors import CpuftError
from cpuft.schedulers.options import JobConfig
from cpuft.schedulers.work import Work, fill

ENTRY = ("python", "-m", "cpuft.schedulers.aws_batch_node", "/work")
"""What every node starts, to work in that folder; the main node runs the words behind it, once all have met there."""
_TOKEN = "CPUFT_BATCH_TOKEN"
"""What it reads the job's secret from."""
_FIRST = ("--grace-period", "20")
"""Batch sends SIGKILL 30 s after SIGTERM."""


def format_job(config: JobConfig, work: Work, cpuft: str) -> str:
    """Two calls of AWS's, each name with its parameters: the job's definition, and the job.

    Raises CpuftError: no image, queue or secret, or words of which Batch would take some for its own.
    """
    lines = work.format(config.name, "${AWS_BATCH_JOB_ATTEMPT#1}", *_FIRST)
    if not config.queue:
        raise CpuftError("which job queue? give --queue NAME")
    if "Ref::" in lines:
        raise CpuftError("AWS Batch puts parameters for Ref::NAME: leave such words out, or put them into a file")
    hosts, script = work.spread(config.nodes)[0], f'cpuft={cpuft}\n{lines}launch "$@"\n'
    if hosts > 1 and not (config.secret and config.role):
        raise CpuftError("how do the job's nodes know each other? give --secret ARN and --role ARN, which may read it")
    given: dict[str, Any] = {"hosts": hosts, "command": [*ENTRY, "sh", "-c", script], "role": config.role or None}
    given["secrets"] = [{"name": _TOKEN, "valueFrom": config.secret}] if config.secret else None
    given |= {"cores": str(config.cores), "memory": str(config.memory << 10), "shm": config.memory << 8}
    given |= {"attempts": config.retries + 1, "timeout": None, "volumes": None, "mounts": None}
    if config.seconds:
        given["timeout"] = {"attemptDurationSeconds": config.seconds}
    if config.efs:
        given["volumes"] = [{"name": "work", "efsVolumeConfiguration": {"fileSystemId": config.efs}}]
        given["mounts"] = [{"sourceVolume": "work", "containerPath": "/work"}]
    return fill("batch.yaml", config, given)
