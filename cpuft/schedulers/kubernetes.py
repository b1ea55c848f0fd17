"""Kubernetes: the manifest of an MPIJob of Kubeflow's operator (v2beta1), and kubectl.

Where a job's hosts are, and what its workers run: cpuft/hosts/mpijob.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cpuft.config.fields import option
from cpuft.errors import CpuftError
from cpuft.execute import run_command
from cpuft.schedulers.base import (
    ANSWER_SECONDS,
    ContainerOptions,
    JobLaunch,
    JobStatus,
    Scheduler,
    fill_template,
    read_template,
    run_client,
)

_LABEL = re.compile("[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_DEFAULTS = ("--grace-period", "110")
"""Seconds for a checkpoint: a little less than the pod's terminationGracePeriodSeconds."""
_CONDITIONS = ("Failed", "Succeeded", "Suspended", "Restarting", "Running", "Created")
"""States of an MPIJob; of several that are true, the first one here is shown."""


@dataclass(frozen=True)
class KubernetesOptions(ContainerOptions):
    """Options of `cpuft submit kubernetes`."""

    namespace: str = option("", "Namespace (default: kubectl's own)", takes="NAME")
    queue: str = option("", "Local queue of Kueue, which starts the job when its quota allows", takes="NAME")
    claim: str = option(
        "", "Persistent volume claim that keeps the runs (default: they are deleted with the job)", takes="NAME"
    )

    @property
    def scope(self) -> str:
        """The namespace; "" for kubectl's own."""
        return self.namespace


class Kubernetes(Scheduler[KubernetesOptions]):
    """Kubernetes with Kubeflow's MPI operator. Jobs are made by `create`: `apply` would change a job of that name. The
    methods raise CpuftError if kubectl fails.
    """

    name = "kubernetes"
    options = KubernetesOptions
    help = "Submit a launch or a sweep by kubectl, as an MPIJob of Kubeflow's operator."

    def render(self, options: KubernetesOptions, launch: JobLaunch, cpuft: str) -> str:
        """Return a manifest: a launcher that resumes its run after an interruption, and a worker for each host. Raises
        CpuftError: the name, namespace or --nodes does not fit, or there is no image.
        """
        hosts, ranks = launch.count_hosts(options.nodes)
        last_host = f"{options.name}-worker-{hosts - 1}"
        for flag, text, label in (
            ("name", options.name, last_host),
            ("namespace", options.namespace, options.namespace or "a"),
            ("queue", options.queue, options.queue or "a"),
        ):
            if not _LABEL.fullmatch(label):
                most = 63 - len(label) + len(text)
                raise CpuftError(
                    f"--{flag} {text[:80]!r}: use at most {most} small letters, digits and dashes, a letter first"
                )
        lines = launch.to_shell(options.name, '$(has_begun "$run")', *_DEFAULTS)
        script = f"cpuft={cpuft}\n{read_template('has_begun.sh')}{lines}{read_template('kubernetes.sh')}"
        claim = {"claimName": options.claim} if options.claim else None
        values: dict[str, Any] = {
            "hosts": hosts,
            "ranks": ranks,
            "script": escape_variables(script),
            "claim": claim,
            "scratch": None if claim else {},
            "cores": str(options.cores),
            "memory": f"{options.memory}Gi",
            "shm": f"{options.memory << 8}Mi",
            "namespace": options.namespace or None,
            "queue": options.queue or None,
            "seconds": options.seconds or None,
        }
        return fill_template("kubernetes.yaml", options, values)

    def submit(self, text: str) -> str:
        """Create an MPIJob; return "NAME", or "NAMESPACE/NAME" with a namespace. Raises CpuftError: kubectl fails."""
        created = run_client("kubectl", "create", "--output=name", "--filename=-", stdin=text)
        name = created.strip().rpartition("/")[2]  # "mpijob.kubeflow.org/NAME"
        return f"{self.scope}/{name}" if self.scope else name

    def cancel(self, job: str) -> None:
        """Delete an MPIJob and its pods by kubectl."""
        run_client("kubectl", "delete", "mpijob", job, *self._namespace)

    def is_ours(self, job: str) -> bool:
        """Return whether the MPIJob has the label of cpuft's manifests, app.kubernetes.io/managed-by: cpuft."""
        return self._get("mpijob", job, r"{.metadata.labels.app\.kubernetes\.io/managed-by}") == ["cpuft"]

    def status(self, job: str) -> JobStatus:
        """Return the state of an MPIJob, with the log of its launcher's pod; the log is "" if it cannot be read.

        The exit code is 0 for Succeeded, the pod's (1 if there is none) for Failed, else None.
        """
        launcher = f"--selector=training.kubeflow.org/job-name={job},training.kubeflow.org/job-role=launcher"
        true = self._get("mpijob", job, '{.status.conditions[?(@.status=="True")].type}')
        codes = self._get("pods", launcher, "{.items[*].status.containerStatuses[0].state.terminated.exitCode}")
        state = next((condition for condition in _CONDITIONS if condition in true), "Pending")
        log = run_command(("kubectl", "logs", launcher, "--tail=-1", *self._namespace), ANSWER_SECONDS)
        exit_code = {"Succeeded": 0, "Failed": int(codes[-1]) if codes else 1}.get(state)
        return JobStatus(state, exit_code, "" if log.exit_code else log.output)

    @property
    def _namespace(self) -> tuple[str, ...]:
        return (f"--namespace={self.scope}",) if self.scope else ()

    def _get(self, kind: str, which: str, path: str) -> list[str]:
        return run_client("kubectl", "get", kind, which, *self._namespace, f"--output=jsonpath={path}").split()


def escape_variables(text: str) -> str:
    """Double `$` before `$` and `(`: in a container's command, Kubernetes replaces $(NAME), and $$ by $."""
    return re.sub(r"\$(?=[$(])", "$$", text)
