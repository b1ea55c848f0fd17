"""The schedulers' own clients: each submits a job, looks at it, and cancels it; raises CpuftError when refused."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpuft.errors import CpuftError, install_command
from cpuft.execute import run_quietly

_SECONDS, _EVERY_SECONDS, _MISSES = 120.0, 5.0, 20
"""How long a scheduler may take to answer; how often it is asked; and how often in a row it may fail to answer."""
_ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT"
_CONDITIONS = ("Failed", "Succeeded", "Suspended", "Restarting", "Running", "Created")
_HOPELESS = re.compile(
    r"\((PartitionNodeLimit|PartitionTimeLimit|PartitionConfig|PartitionInactive|BadConstraints|AssocMaxNodePerJobLimit"
    r"|QOSMaxNodePerJobLimit|QOSMaxCpuPerJobLimit|AccountNotAllowed|QOSNotAllowed|InvalidAccount|InvalidQOS)\)"
)
"""Reasons for which Slurm keeps a job waiting that no passing of time removes (squeue(1), JOB REASON CODES)."""
Sight = tuple[str, int | None, str]
"""A job: its state in the scheduler's own word, its exit code if it has ended, and what it has said."""


def _ask(*words: str, text: str = "") -> str:
    """What a program says. Raises CpuftError: it is missing, or refuses, in its own words."""
    answer = run_quietly(words, _SECONDS, text)
    if answer.exit_code:
        said = " ".join(answer.said.split())[-500:] or "without a word"
        raise CpuftError(f"{words[0]} does not do it ({said}): correct that, and say it again")
    return answer.output


class _Programs:
    """A scheduler that is reached by its programs; jobs of `place`, or of where these look by themselves."""

    _submit: tuple[str, ...]
    _cancel: tuple[str, ...]

    def __init__(self, place: str) -> None:
        self._place, self._where = f"{place}/" * bool(place), (f"--namespace={place}",) * bool(place)

    def submit(self, text: str) -> str:
        """Hand in a job's text; the job's name, with its place in front."""
        return self._place + _ask(*self._submit, text=text).strip().partition(";")[0].rpartition("/")[2]

    def cancel(self, name: str) -> None:
        """End a job."""
        _ask(*self._cancel, name, *self._where)


class _Slurm(_Programs):
    """Of several clusters SLURM_CLUSTERS names one, for all of its programs."""

    _submit, _cancel = ("sbatch", "--parsable"), ("scancel",)

    def is_ours(self, name: str) -> bool:
        """Whether its script is one of cpuft's. After some values, this one among them, scontrol prints a space."""
        return bool(re.search(r"^ *Comment=cpuft *$", _ask("scontrol", "show", "job", name), re.MULTILINE))

    def look(self, name: str) -> Sight:
        """Of an array, its states and the worst of its exit codes."""
        said = _ask("scontrol", "show", "job", name)
        found = re.findall(r"\bJobState=(\w+)(?: Reason=([\w,]+))?", said)
        # A job that waits says for what: more nodes than its partition has will never come.
        waits = [f"{state} ({reason})" if _HOPELESS.search(f"({reason})") else state for state, reason in found]
        states = list(dict.fromkeys(waits))
        codes = [(int(code), int(end)) for code, end in re.findall(r"\bExitCode=(\d{1,3}):(\d{1,3})", said)]
        worst = max([code or (end and 128 + end) for code, end in codes], default=0) or int(states != ["COMPLETED"])
        files = [Path(found) for found in re.findall(r"^ *StdOut=(.*)$", said, re.MULTILINE)]
        log = "".join(file.read_text(errors="replace") for file in files if file.is_file())
        return ", ".join(states), worst if all(state in _ENDED for state in states) else None, log


class _Kubernetes(_Programs):
    """By `create`: `apply` would change a job that has the same name."""

    _submit, _cancel = ("kubectl", "create", "--output=name", "--filename=-"), ("kubectl", "delete", "mpijob")

    def is_ours(self, name: str) -> bool:
        """Whether its manifest is one of cpuft's."""
        return self._get("mpijob", name, r"{.metadata.labels.app\.kubernetes\.io/managed-by}") == ["cpuft"]

    def look(self, name: str) -> Sight:
        """The log and the exit code are those of its launcher's container, while that is there."""
        role = f"--selector=training.kubeflow.org/job-name={name},training.kubeflow.org/job-role=launcher"
        true = self._get("mpijob", name, '{.status.conditions[?(@.status=="True")].type}')
        codes = self._get("pods", role, "{.items[*].status.containerStatuses[0].state.terminated.exitCode}")
        state = next((word for word in _CONDITIONS if word in true), "Pending")
        log = run_quietly(("kubectl", "logs", role, "--tail=-1", *self._where), _SECONDS)
        code = {"Succeeded": 0, "Failed": int(codes[-1]) if codes else 1}.get(state)
        return state, code, "" if log.exit_code else log.output

    def _get(self, kind: str, which: str, path: str) -> list[str]:
        return _ask("kubectl", "get", kind, which, *self._where, f"--output=jsonpath={path}").split()


class _Batch:
    """Jobs of one region; of the AWS settings' own, where none is named."""

    def __init__(self, place: str) -> None:
        self._place = place

    def submit(self, text: str) -> str:
        import yaml

        calls = yaml.safe_load(text)
        made = self._ask("batch", "register_job_definition", calls["register_job_definition"])["jobDefinitionArn"]
        job = self._ask("batch", "submit_job", calls["submit_job"] | {"jobDefinition": made})
        return f"{made.split(':')[3]}/{job['jobId']}"

    def cancel(self, name: str) -> None:
        self._ask("batch", "terminate_job", {"jobId": name, "reason": "cpuft submit cancel"})

    def is_ours(self, name: str) -> bool:
        """Whether it has cpuft's tag."""
        return bool(self._find(name)[name].get("tags", {}).get("managed-by") == "cpuft")

    def _find(self, name: str) -> dict[str, Any]:
        """What AWS tells of a job, and of its main node, by their names. Raises CpuftError: it is gone."""
        jobs = {job["jobId"]: job for job in self._ask("batch", "describe_jobs", {"jobs": [name, f"{name}#0"]})["jobs"]}
        if name not in jobs:
            raise CpuftError(f"AWS Batch knows no job {name} any more: CloudWatch may still have its log")
        return jobs

    def look(self, name: str) -> Sight:
        """The main node, which is a job of its own, has the log and the exit code."""
        jobs = self._find(name)
        main, state, log = jobs.get(f"{name}#0", {}).get("container", {}), jobs[name]["status"], ""
        page = {"logGroupName": "/aws/batch/job", "logStreamName": main.get("logStreamName"), "startFromHead": True}
        while page["logStreamName"] and (found := self._ask("logs", "get_log_events", page))["events"]:
            log += "".join(f"{event['message']}\n" for event in found["events"])
            page["nextToken"] = found["nextForwardToken"]
        return state, {"SUCCEEDED": 0, "FAILED": main.get("exitCode") or 1}.get(state), log

    def _ask(self, service: str, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        try:
            import boto3
            import botocore.exceptions as faults
            from botocore.config import Config
        except ImportError:
            raise CpuftError(f"AWS Batch needs boto3: {install_command('aws')}") from None
        config = Config(retries={"total_max_attempts": 1})  # what nobody answered may have been done
        try:
            client = boto3.session.Session(region_name=self._place or None).client(service, config=config)
            return dict(getattr(client, method)(**parameters))
        except (faults.ClientError, faults.BotoCoreError) as error:
            raise CpuftError(f"AWS does not do it ({' '.join(str(error).split())[:500]}): correct that") from None


Client = _Slurm | _Kubernetes | _Batch
CLIENTS: dict[str, Callable[[str], Client]] = {"slurm": _Slurm, "kubernetes": _Kubernetes, "batch": _Batch}


def parse_job(text: str) -> tuple[Client, str]:
    """Who knows what a submission printed (slurm:12, kubernetes:SPACE/NAME), and as what. Raises CpuftError."""
    word = "[A-Za-z0-9][A-Za-z0-9_-]*"
    if not (found := re.fullmatch(f"({'|'.join(CLIENTS)}):(?:({word})/)?({word})", text)):
        raise CpuftError(f"{text[:80]!r} is no job: write what cpuft submit has printed, e.g. slurm:1234")
    return CLIENTS[found[1]](found[2] or ""), found[3]


def follow(client: Client, name: str, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep) -> int:
    """Say what the job says, until it ends; its exit code. After a restart its log may begin anew.

    Raises CpuftError: the scheduler does not answer, or keeps the job waiting for what it will never have.
    """
    code: int | None = None
    state, said, log, misses = "", "", "", 0
    while code is None:
        try:
            (state, code, log), misses = client.look(name), 0
        except CpuftError:
            misses += 1
            if misses == _MISSES:
                raise
        if reason := _HOPELESS.search(state):
            raise CpuftError(
                f"job slurm:{name} waits for what Slurm will never give it ({reason[1]}): cpuft submit cancel "
                f"slurm:{name}, then ask for less, e.g. with --nodes or a smaller --np"
            )
        say(log.removeprefix(said))
        said = log
        if code is None:
            sleep(_EVERY_SECONDS)
    return code
