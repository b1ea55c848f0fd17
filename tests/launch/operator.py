"""A small stand-in for Kubeflow's operator and its Trainer: it makes pods of the manifest of an MPIJob or of a TrainJob
with its runtime, each one a simulated host.

As the real ones: a key for the job, names for pods, a hostfile, the launcher's variables, and a
launcher that starts once all workers are ready. The last host is the launcher's.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cpuft.files import cache_folder
from tests.provision.simulated import Simulated

_READY_SECONDS = 60.0
_MOUNT = """set -e
hostname "$1"
for place in etc root; do
    mkdir /dev/shm/$place
    mount -t tmpfs tmpfs /dev/shm/$place
    mkdir /dev/shm/$place/upper /dev/shm/$place/work
    mount -t overlay overlay -o lowerdir=/$place,upperdir=/dev/shm/$place/upper,workdir=/dev/shm/$place/work /$place
done
mount --bind "$2/hosts" /etc/hosts
mkdir -p "$4" /root/.cache
mount --bind "$2/secret" "$4"
mount --bind "$3" /root/.cache
mount -t tmpfs tmpfs /var/tmp
"""
"""What a kubelet does; on these hosts all else is this machine's."""


def expand(text: str, known: Mapping[str, str]) -> str:
    """What Kubernetes makes of a command: $(NAME) is the variable's value, if there is one, and $$ is $."""

    def put(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else known.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", put, text)


@dataclass(frozen=True)
class Operator:
    """One that has seen a manifest, and has its workers running."""

    job: dict[str, Any]
    cluster: Simulated
    folder: Path
    runtime: dict[str, Any] = field(default_factory=dict)
    """The specification of a TrainJob's runtime; empty for an MPIJob."""

    @property
    def workers(self) -> int:
        spec = self.job["spec"]
        return int(spec["trainer"]["numNodes"] if self.runtime else spec["mpiReplicaSpecs"]["Worker"]["replicas"])

    @property
    def slots(self) -> int:
        policy = self.runtime["mlPolicy"]["mpi"] if self.runtime else {}
        return int(policy["numProcPerNode"] if policy else self.job["spec"]["slotsPerWorker"])

    def pod(self, role: str, number: int = 0) -> str:
        name = self.job["metadata"]["name"]
        if self.runtime:
            return f"{name}-{'node' if role == 'worker' else role}-0-{number}"
        return f"{name}-{role}" + f"-{number}" * (role == "worker")

    def _enter(self, number: int) -> tuple[str, ...]:
        holder = (self.cluster.folder / "state" / self.cluster.name / "nodes" / str(number) / "pid").read_text().strip()
        target = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0]
        return ("nsenter", "--target", target, "--all", f"--wd={self.folder / 'work'}")

    def prepare(self) -> None:
        """Key, names and hostfile of the job, on all of its hosts."""
        secret, name = self.folder / "secret", self.job["metadata"]["name"]
        for path in (secret, self.folder / "work"):
            path.mkdir(parents=True)
        key = ("ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(secret / "id_rsa"))
        subprocess.run(key, check=True)
        (secret / "authorized_keys").write_bytes((secret / "id_rsa.pub").read_bytes())
        for path in secret.iterdir():
            path.chmod(0o640 if self.runtime else 0o644)
        secret.chmod(0o1777)
        space = self.job["metadata"].get("namespace", "default")
        pods = [self.pod("worker", number) for number in range(self.workers)] + [self.pod("launcher")]
        names = [f"{pod}.{name}" + f".{space}.svc" * (not self.runtime) for pod in pods]
        lines = [f"{host.name} {at} {pod}" for host, at, pod in zip(self.cluster.hosts, names, pods)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n", encoding="utf-8")
        line = "{} slots={}\n" if self.runtime else "{}:{}\n"
        text = "".join(line.format(at, self.slots) for at in names[:-1])
        (self.folder / "hostfile").write_text(text, encoding="utf-8")
        cache = cache_folder(os.environ).parent  # kernels are built once
        for number, pod in enumerate(pods, start=1):
            keys = (self.runtime["mlPolicy"]["mpi"] if self.runtime else self.job["spec"])["sshAuthMountPath"]
            words = ("sh", "-c", _MOUNT, "kubelet", pod, str(self.folder), str(cache), keys)
            subprocess.run((*self._enter(number), *words), check=True)

    def container(self, role: str) -> dict[str, Any]:
        if self.runtime:
            jobs = {one["name"]: one["template"]["spec"] for one in self.runtime["template"]["spec"]["replicatedJobs"]}
            template = jobs["node" if role == "Worker" else "launcher"]["template"]
        else:
            template = self.job["spec"]["mpiReplicaSpecs"][role]["template"]
        return dict(template["spec"]["containers"][0])

    @contextmanager
    def pod_of(self, role: str, host: int, words: Sequence[str], **more: str) -> Iterator[subprocess.Popen[str]]:
        """A container on a host, with no variable but its own; it goes with its pod."""
        environ = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        environ |= more if self.runtime else {"K_MPI_JOB_ROLE": role, **more}
        words = [*self._enter(host), *(expand(word, environ) for word in words)]
        out, null = subprocess.PIPE, subprocess.DEVNULL
        process = subprocess.Popen(
            words, env=environ, stdin=null, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=10)

    @contextmanager
    def launcher(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """The launcher with its own command, or another one."""
        container, hostfile = self.container("Launcher"), str(self.folder / "hostfile")
        # The Trainer's policy sets these, and no others, in a container of this name only.
        told = {"OMPI_MCA_orte_default_hostfile": hostfile, "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}
        if not self.runtime:
            told = {
                "I_MPI_HYDRA_HOST_FILE": hostfile,
                "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10",
                "I_MPI_PERHOST": str(self.slots),
            }
        elif container["name"] != "node":
            told.clear()
        told |= {one["name"]: one["value"] for one in container["env"] if one["name"].startswith("K_")}
        command = words or container["command"]
        with self.pod_of("launcher", self.workers + 1, command, **told) as process:
            yield process

    def launch(self, *words: str, seconds: float = 200.0) -> tuple[int, str]:
        """Run the launcher to its end: its exit code, and what it said."""
        with self.launcher(*words) as process:
            said, _ = process.communicate(timeout=seconds)
        return process.returncode, said

    def tell_to_go(self, launcher: subprocess.Popen[str]) -> None:
        """As a node that is drained does; the program that entered the host passes no signal on."""
        child = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()[0]
        os.kill(int(child), signal.SIGTERM)


@contextmanager
def operate(text: str, cluster: Simulated) -> Iterator[Operator]:
    """Make pods of a manifest, and take the workers away at the end."""
    *runtimes, job = yaml.safe_load_all(text)
    made = Operator(job, cluster, cluster.folder / "operator", *(one["spec"] for one in runtimes))
    made.prepare()
    worker = made.container("Worker")
    with ExitStack() as stack:
        for number in range(1, made.workers + 1):
            stack.enter_context(made.pod_of("worker", number, worker["command"]))
        for host in cluster.hosts[: made.workers]:
            _wait_for(host.name, worker["readinessProbe"]["tcpSocket"]["port"])
        yield made


def _wait_for(address: str, port: int) -> None:
    end = time.monotonic() + _READY_SECONDS
    while True:
        try:
            socket.create_connection((address, port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < end, f"{address} did not become ready"
            time.sleep(0.05)
