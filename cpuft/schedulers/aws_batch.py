"""AWS Batch: a multi-node parallel job as two calls of AWS's API, and a client that makes them.

Where a job's hosts are, and what its nodes run: cpuft/schedulers/job_node.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpuft.config.fields import option
from cpuft.errors import CpuftError, requires
from cpuft.schedulers.base import (
    JOB_SECRET,
    NODE_COMMAND,
    ContainerOptions,
    JobLaunch,
    JobStatus,
    Scheduler,
    fill_template,
)

_DEFAULTS = ("--grace-period", "20")
"""Seconds for a checkpoint: Batch sends SIGKILL 30 s after SIGTERM."""


@dataclass(frozen=True)
class BatchOptions(ContainerOptions):
    """Options of `cpuft submit batch`."""

    queue: str = option("", "Job queue (required)", takes="NAME")
    region: str = option("", "AWS region (default: the region of your AWS settings)", takes="NAME")
    secret: str = option(
        "",
        "Secret in Secrets Manager by which the job's nodes recognize each other; required from two hosts on",
        takes="ARN",
    )
    role: str = option("", "Execution role that may read the secret; required from two hosts on", takes="ARN")
    efs: str = option("", "EFS file system that keeps the runs (default: they are deleted with the job)", takes="ID")

    @property
    def scope(self) -> str:
        """The region; "" for the region of the user's AWS settings."""
        return self.region


class AwsBatch(Scheduler[BatchOptions]):
    """AWS Batch, multi-node parallel jobs on EC2, in one region. Its methods raise CpuftError if AWS refuses a call."""

    name = "batch"
    options = BatchOptions
    help = "Submit a launch to AWS Batch, as a multi-node parallel job."
    takes_sweeps = False

    def render(self, options: BatchOptions, launch: JobLaunch, program: str) -> str:
        """Return YAML with two API calls, each name with its parameters: `register_job_definition` and `submit_job`.
        Raises CpuftError: the launch has Ref::, --nodes does not fit, or an option is missing.
        """
        lines = launch.to_shell(options.name, "${AWS_BATCH_JOB_ATTEMPT#1}", *_DEFAULTS)
        if not options.queue:
            raise CpuftError("no job queue is given: add --queue NAME")
        if "Ref::" in lines:
            raise CpuftError("the launch contains Ref::, which AWS Batch would replace: put it into a file")
        hosts, _ = launch.count_hosts(options.nodes)
        if hosts > 1 and not (options.secret and options.role):
            raise CpuftError("several nodes need a secret: add --secret ARN, and --role ARN of a role that may read it")
        volumes = [{"name": "work", "efsVolumeConfiguration": {"fileSystemId": options.efs}}] if options.efs else None
        values: dict[str, Any] = {
            "hosts": hosts,
            "command": [*NODE_COMMAND, "sh", "-c", f'cpuft={program}\n{lines}launch "$@"\n'],
            "role": options.role or None,
            "secrets": [{"name": JOB_SECRET, "valueFrom": options.secret}] if options.secret else None,
            "cores": str(options.cores),
            "memory": str(options.memory << 10),
            "shm": options.memory << 8,
            "attempts": options.retries + 1,
            "timeout": {"attemptDurationSeconds": options.seconds} if options.seconds else None,
            "volumes": volumes,
            "mounts": [{"sourceVolume": "work", "containerPath": "/work"}] if volumes else None,
        }
        return fill_template("aws_batch.yaml", options, values)

    def submit(self, text: str) -> str:
        """Register the job definition, which stays if the second call fails, and submit the job; return "REGION/ID"."""
        import yaml

        calls = yaml.safe_load(text)
        definition = self._call("batch", "register_job_definition", calls["register_job_definition"])
        arn = definition["jobDefinitionArn"]
        job = self._call("batch", "submit_job", calls["submit_job"] | {"jobDefinition": arn})
        return f"{arn.split(':')[3]}/{job['jobId']}"

    def cancel(self, job: str) -> None:
        """Request that Batch terminates a job. CpuftError: AWS refuses."""
        self._call("batch", "terminate_job", {"jobId": job, "reason": "cpuft submit cancel"})

    def is_ours(self, job: str) -> bool:
        """Return whether the job has the tag of cpuft's jobs, managed-by: cpuft. CpuftError: there is no such job."""
        return bool(self._describe(job)[job].get("tags", {}).get("managed-by") == "cpuft")

    def status(self, job: str) -> JobStatus:
        """Return the state of a job, with the log of its main node as far as that has started. CpuftError: no such job
        (any more), or AWS refuses.

        The exit code is 0 for SUCCEEDED, the main node's (1 if that is 0 or missing) for FAILED, else None.
        """
        described = self._describe(job)
        main, state, log = described.get(f"{job}#0", {}).get("container", {}), described[job]["status"], ""
        page = {"logGroupName": "/aws/batch/job", "logStreamName": main.get("logStreamName"), "startFromHead": True}
        while page["logStreamName"]:
            found = self._call("logs", "get_log_events", page)
            log += "".join(f"{event['message']}\n" for event in found["events"])
            if found["nextForwardToken"] == page.get("nextToken"):  # pages in the middle may be empty
                break
            page["nextToken"] = found["nextForwardToken"]
        return JobStatus(state, {"SUCCEEDED": 0, "FAILED": main.get("exitCode") or 1}.get(state), log)

    def _describe(self, job: str) -> dict[str, Any]:
        """Return the descriptions of a job and of its main node (JOB#0), by identifier."""
        found = self._call("batch", "describe_jobs", {"jobs": [job, f"{job}#0"]})["jobs"]
        jobs = {one["jobId"]: one for one in found}
        if job not in jobs:
            raise CpuftError(f"AWS Batch has no job {job} any more: CloudWatch may still have its log")
        return jobs

    def _call(self, service: str, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        with requires("aws", "AWS Batch needs boto3"):
            import boto3
            import botocore.exceptions as faults
            from botocore.config import Config
        config = Config(retries={"total_max_attempts": 1})  # a call without an answer may have been carried out
        try:
            client = boto3.session.Session(region_name=self.scope or None).client(service, config=config)
            return dict(getattr(client, method)(**parameters))
        except (faults.ClientError, faults.BotoCoreError) as error:
            raise CpuftError(f"AWS refused {method} ({' '.join(str(error).split())[:500]}): correct that") from None
