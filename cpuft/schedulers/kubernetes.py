"""Kubernetes: the manifests of an MPIJob of Kubeflow's operator (v2beta1) and of a TrainJob of Kubeflow's Trainer
(v1alpha1), and kubectl.

Where a job's hosts are, and what its workers run: cpuft/hosts/mpijob.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from cpuft.config.fields import option
from cpuft.errors import CpuftError
from cpuft.execute import run_command
from cpuft.schedulers.base import (
    ANSWER_SECONDS,
    ContainerOptions,
    JobLaunch,
    JobStatus,
    Scheduler,
    fetch_log,
    fill_template,
    read_template,
    run_client,
)

_LABEL = re.compile("[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_DEFAULTS = ("--grace-period", "110")
"""Seconds for a checkpoint: a little less than the pod's terminationGracePeriodSeconds."""
_CONDITIONS = ("Failed", "Succeeded", "Complete", "Suspended", "Restarting", "Running", "Created")
"""States of an MPIJob or a TrainJob; of several that are true, the first one here is shown."""


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
    _kinds: ClassVar[str] = "mpijob"
    """Kinds of the objects that make up a job, the job's own first."""
    _last_pod: ClassVar[str] = "{name}-worker-{last}"
    """The longest name that the operator makes of a job's."""
    _launcher: ClassVar[str] = "training.kubeflow.org/job-name={name},training.kubeflow.org/job-role=launcher"
    """Labels of the launcher's pod."""

    def render(self, options: KubernetesOptions, launch: JobLaunch, program: str) -> str:
        """Return a manifest: a launcher that resumes its run after an interruption, and a worker for each host. Raises
        CpuftError: the name or --nodes does not fit, or there is no image.
        """
        hosts, ranks = launch.count_hosts(options.nodes)
        last_pod = self._last_pod.format(name=options.name, last=hosts - 1)
        if not _LABEL.fullmatch(last_pod):
            most = 63 - len(last_pod) + len(options.name)
            raise CpuftError(
                f"--name {options.name[:80]!r}: use at most {most} small letters, digits and dashes, a letter first"
            )
        lines = launch.to_shell(options.name, '$(has_begun "$run")', *_DEFAULTS)
        script = f"cpuft={program}\n{read_template('has_begun.sh')}{lines}{read_template('kubernetes.sh')}"
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
        """Create a job; return "NAME", or "NAMESPACE/NAME" if the scheduler has a scope. CpuftError: kubectl fails."""
        name = _create(text).rpartition("/")[2]  # "mpijob.kubeflow.org/NAME"
        return f"{self.scope}/{name}" if self.scope else name

    def cancel(self, job: str) -> None:
        """Delete a job and its pods by kubectl. CpuftError: kubectl fails."""
        run_client("kubectl", "delete", self._kinds, job, *self._namespace)

    def is_ours(self, job: str) -> bool:
        """Return whether all objects of the job have the label of cpuft's manifests.

        The label is app.kubernetes.io/managed-by: cpuft. Raises CpuftError: an object is not there.
        """
        label = r"{.metadata.labels.app\.kubernetes\.io/managed-by}"
        return all(self._get(kind, job, label) == ["cpuft"] for kind in self._kinds.split(","))

    def status(self, job: str) -> JobStatus:
        """Return the state of a job, with the log of its launcher's pod; the log is "" if it cannot be read.

        A job without a condition has the pod's phase as state, or Pending. The exit code is 0 for Succeeded and
        Complete, the pod's (1 if there is none) for Failed, else None. CpuftError: kubectl fails.
        """
        launcher = f"--selector={self._launcher.format(name=job)}"
        true = self._get(self._kinds.partition(",")[0], job, '{.status.conditions[?(@.status=="True")].type}')
        codes = self._get("pods", launcher, "{.items[*].status.containerStatuses[0].state.terminated.exitCode}")
        state = next((condition for condition in _CONDITIONS if condition in true), "")
        if not state:  # a TrainJob has no condition while it runs
            state = ["Pending", *self._get("pods", launcher, "{.items[*].status.phase}")][-1]
        log = fetch_log("kubectl", "logs", launcher, "--tail=-1", *self._namespace)
        exit_code = {"Succeeded": 0, "Complete": 0, "Failed": int(codes[-1]) if codes else 1}.get(state)
        return JobStatus(state, exit_code, log)

    @property
    def _namespace(self) -> tuple[str, ...]:
        return (f"--namespace={self.scope}",) if self.scope else ()

    def _get(self, kind: str, which: str, path: str) -> list[str]:
        return run_client("kubectl", "get", kind, which, *self._namespace, f"--output=jsonpath={path}").split()


class TrainJob(Kubernetes):
    """Kubernetes with Kubeflow's Trainer: a TrainJob, and a TrainingRuntime of the same name that has its pods.

    The runtime's MPI policy gives the pods the same key and hostfile as an MPIJob, for any implementation of MPI: those
    that the policy knows differ only in the hostfile's form and in variables of Open MPI. Source: kubeflow/trainer,
    pkg/runtime/framework/plugins/mpi/mpi.go (2.0 to 2.3).
    """

    name = "trainjob"
    help = "Submit a launch or a sweep by kubectl, as a TrainJob of Kubeflow's Trainer (version 2)."
    _kinds = "trainjob,trainingruntime"
    _last_pod = "{name}-launcher-0-{last}-abcde"
    _launcher = "jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/replicatedjob-name=launcher"

    def render(self, options: KubernetesOptions, launch: JobLaunch, program: str) -> str:
        """Return the manifests of a runtime and a job. CpuftError: name or --nodes is wrong, or no image."""
        import yaml

        spec = yaml.safe_load(super().render(options, launch, program))["spec"]
        values: dict[str, Any] = {"ranks": spec["slotsPerWorker"], "seconds": options.seconds or None}
        values |= {"namespace": options.namespace or None, "queue": options.queue or None}
        for role, replicas in spec["mpiReplicaSpecs"].items():
            pod = replicas["template"]["spec"]
            container = pod["containers"][0] | {"name": "node"}  # the policy leaves others as they are
            values[role.lower()] = pod | {"restartPolicy": replicas["restartPolicy"], "containers": [container]}
            values["hosts"] = replicas["replicas"]  # the workers come last
        values["launcher"]["containers"][0]["env"].append({"name": "K_MPI_JOB_ROLE", "value": "launcher"})
        return fill_template("trainjob.yaml", options, values)

    def submit(self, text: str) -> str:
        """Create a runtime and its job, or neither; return "NAME" or "NAMESPACE/NAME". CpuftError: kubectl fails."""
        runtime, job = text.split("\n---\n")
        made = _create(runtime)
        try:
            return super().submit(job)
        except CpuftError:
            run_command(("kubectl", "delete", made, *self._namespace), ANSWER_SECONDS)
            raise


def _create(text: str) -> str:
    """Create what a manifest describes; return what kubectl calls it, such as "mpijob.kubeflow.org/NAME"."""
    return run_client("kubectl", "create", "--output=name", "--filename=-", stdin=text).strip()


def escape_variables(text: str) -> str:
    """Double `$` before `$` and `(`: in a container's command, Kubernetes replaces $(NAME), and $$ by $."""
    return re.sub(r"\$(?=[$(])", "$$", text)
