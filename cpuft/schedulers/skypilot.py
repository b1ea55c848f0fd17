"""SkyPilot, which rents hosts of many clouds: a managed job, and SkyPilot's client.

How the nodes of a job find each other: cpuft/schedulers/job_node.py. Sources: SkyPilot's reference, "SkyPilot YAML",
and its client's help (version 0.14).
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuft.config.fields import option
from cpuft.errors import CpuftError
from cpuft.schedulers.base import (
    JOB_SECRET,
    CloudOptions,
    JobLaunch,
    JobStatus,
    Scheduler,
    explain_answers,
    fetch_log,
    fill_template,
    make_node_command,
    run_client,
    run_with_secret,
)

_JOB_ID = re.compile(r"\bJob ID: (\d+)")
_NAME_PREFIX = "cpuft-"
"""Beginning of the names of cpuft's jobs: `sky jobs queue` does not show the labels of their hosts."""
_LAUNCH_SECONDS = 1800.0
"""Time limit of `sky jobs launch`, which first rents a host for SkyPilot's own controller if there is none."""


@dataclass(frozen=True)
class SkyPilotOptions(CloudOptions):
    """Options of `cpuft submit skypilot`."""

    retries: int = option(
        1,
        "0: a job that was interrupted or has lost a host ends, unless its hosts were taken away. Else SkyPilot starts "
        "it again each time",
        least=0,
        most=1,
    )
    infra: str = option("", "Cloud and region, such as gcp/us-central1 (default: the cheapest)", takes="NAME")
    bucket: str = option(
        "",
        "URL of a bucket that keeps the runs, such as s3://runs (default: they are deleted with the job)",
        takes="URL",
    )


class SkyPilot(Scheduler[SkyPilotOptions]):
    """SkyPilot. Its methods raise CpuftError if the client `sky` fails."""

    name = "skypilot"
    options = SkyPilotOptions
    help = "Submit a launch to SkyPilot, which rents hosts of many clouds, as a managed job."
    takes_sweeps = False

    def render(self, options: SkyPilotOptions, launch: JobLaunch, program: str) -> str:
        """Return the YAML of a task. CpuftError: --nodes does not fit, or there is no image."""
        hosts, command = make_node_command(options, launch, program, '"$SKYPILOT_TASK_ID"')
        run = shlex.join(command)
        values: dict[str, Any] = {
            "job_name": _NAME_PREFIX + options.name,
            "hosts": hosts,
            "infra": options.infra or None,
            "cpus": f"{options.cores}+",
            "ram": f"{options.memory}+",
            "container": f"docker:{options.image}",
            "codes": [75] if options.retries else None,
            "secrets": {JOB_SECRET: ""} if hosts > 1 else None,
            "mounts": {"/work": {"source": options.bucket, "mode": "MOUNT_CACHED"}} if options.bucket else None,
            "script": f"timeout {options.seconds} {run}\n" if options.seconds else f"{run}\n",
        }
        return fill_template("skypilot.yaml", options, values)

    def submit(self, text: str) -> str:
        """Submit a managed job by `sky jobs launch`; return its number, such as "12". CpuftError: sky fails."""
        with tempfile.TemporaryDirectory(prefix="cpuft-") as folder:
            path = Path(folder, "task.yaml")
            path.write_text(text, encoding="utf-8")
            secret = (f"--secret={JOB_SECRET}",) if JOB_SECRET in text else ()
            words = ("jobs", "launch", "--yes", "--detach-run", *secret, str(path))
            said = run_with_secret("sky", *words, seconds=_LAUNCH_SECONDS)
        if not (found := _JOB_ID.search(said)):
            raise CpuftError(f"sky did not say the number of the job ({said.strip()[-300:]}): see sky jobs queue")
        return found[1]

    def cancel(self, job: str) -> None:
        """End a managed job by `sky jobs cancel`. CpuftError: sky fails."""
        run_client("sky", "jobs", "cancel", "--yes", job)

    @explain_answers("sky")
    def is_ours(self, job: str) -> bool:
        """Return whether the job's name begins as those of cpuft's jobs do, with cpuft-. CpuftError: no such job."""
        return str(self._find(job)["job_name"]).startswith(_NAME_PREFIX)

    @explain_answers("sky")
    def status(self, job: str) -> JobStatus:
        """Return the state of a managed job, with its log ("" if it cannot be read). CpuftError: no such job.

        The exit code is 0 for SUCCEEDED, 1 for CANCELLED and all FAILED states (SkyPilot shows no other), else None.
        """
        state = str(self._find(job)["status"])
        has_ended = state in ("SUCCEEDED", "CANCELLED") or state.startswith("FAILED")
        log = "" if state in ("PENDING", "STARTING") else fetch_log("sky", "jobs", "logs", "--no-follow", job)
        return JobStatus(state, int(state != "SUCCEEDED") if has_ended else None, log)

    def _find(self, job: str) -> dict[str, Any]:
        for one in json.loads(run_client("sky", "jobs", "queue", "--all", "--output", "json")):
            if str(one.get("job_id")) == job:
                return dict(one)
        raise CpuftError(f"SkyPilot has no managed job {job}: see sky jobs queue --all")
