"""dstack, which rents hosts of many clouds: a distributed task, and dstack's client.

How the nodes of a job find each other: cpuft/schedulers/job_node.py. Sources: dstack's reference, "task", and its
client's help (version 0.22).
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
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

_EXIT_CODES = {"done": 0, "failed": 1, "terminated": 1}


@dataclass(frozen=True)
class DstackOptions(CloudOptions):
    """Options of `cpuft submit dstack`."""

    retries: int = option(
        1, "0: an interrupted job is not started again. Else dstack starts it again for up to a day", least=0, most=1
    )
    volume: str = option(
        "",
        "dstack's network volume that keeps the runs, with ${{ dstack.node_rank }} in its name if there are several "
        "nodes (default: they are deleted with the job)",
        takes="NAME",
    )


class Dstack(Scheduler[DstackOptions]):
    """dstack. Its methods raise CpuftError if the client `dstack` fails."""

    name = "dstack"
    options = DstackOptions
    help = "Submit a launch to dstack, which rents hosts of many clouds."
    takes_sweeps = False

    def render(self, options: DstackOptions, launch: JobLaunch, program: str) -> str:
        """Return the YAML of a task. CpuftError: --nodes does not fit, the launch has ${{, or there is no image."""
        hosts, command = make_node_command(options, launch, program, '"${DSTACK_RUN_ID:-$DSTACK_RUN_NAME}"')
        if any("${{" in word for word in command):
            raise CpuftError("the launch contains ${{, which dstack replaces: leave it out, or put it into a file")
        values: dict[str, Any] = {
            "hosts": hosts,
            "secrets": [JOB_SECRET] if hosts > 1 else None,
            "commands": [shlex.join(command)],
            "cpus": f"{options.cores}..",
            "ram": f"{options.memory}GB..",
            "shm": f"{max(1, options.memory // 4)}GB",
            "volumes": [f"{options.volume}:/work"] if options.volume else None,
            "spot_policy": "auto" if options.spot else "on-demand",
            "limit": options.seconds or None,
            "retry": {"on_events": ["no-capacity", "interruption"], "duration": "1d"} if options.retries else None,
        }
        return fill_template("dstack.yaml", options, values)

    @explain_answers("dstack")
    def submit(self, text: str) -> str:
        """Submit a task by `dstack apply`; return the name in the text. CpuftError: dstack fails, or a run of this name
        has not ended, in whose place dstack would put this one.
        """
        import yaml

        name = str(yaml.safe_load(text)["name"])
        if any(run["status"] not in _EXIT_CODES for run in self._list(name)):
            raise CpuftError(f"dstack's run {name} has not ended, and this one would replace it: choose another --name")
        run_with_secret("dstack", "apply", "--yes", "--detach", "--file", "-", stdin=text)
        return name

    def cancel(self, job: str) -> None:
        """Stop a run by `dstack stop`. CpuftError: dstack fails."""
        run_client("dstack", "stop", "--yes", job)

    @explain_answers("dstack")
    def is_ours(self, job: str) -> bool:
        """Return whether the run has the tag of cpuft's tasks, managed-by: cpuft. CpuftError: there is no such run."""
        return (self._find(job)["run_spec"]["configuration"].get("tags") or {}).get("managed-by") == "cpuft"

    @explain_answers("dstack")
    def status(self, job: str) -> JobStatus:
        """Return the state of a run, with the log of its first node ("" if it cannot be read). CpuftError: no such run.

        The exit code is 0 for done, the first node's (1 if that is 0 or missing) for failed and terminated, else None.
        """
        found = self._find(job)
        state = str(found["status"])
        attempts = found["jobs"][0]["job_submissions"] if found.get("jobs") else []
        code = _EXIT_CODES.get(state)
        if code and attempts:
            code = attempts[-1].get("exit_status") or code
        log = fetch_log("dstack", "logs", job) if attempts else ""
        return JobStatus(state, code, log)

    def _find(self, job: str) -> dict[str, Any]:
        if runs := self._list(job, "--all"):
            return runs[0]
        raise CpuftError(f"dstack has no run {job}: see dstack ps --all")

    def _list(self, name: str, *words: str) -> list[dict[str, Any]]:
        # Without --all, dstack shows those that have not ended, or if there are none the last one.
        runs = json.loads(run_client("dstack", "ps", *words, "--json"))["runs"]
        return [run for run in runs if run["run_spec"]["run_name"] == name]
