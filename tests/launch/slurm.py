"""A real Slurm on simulated hosts: munge and the controller here, a slurmd in each host. It goes without a trace."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import wait_until
from tests.provision.simulated import Simulated

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
_CONF = """ClusterName={name}
SlurmctldHost={here}({address})
SlurmctldPort=17817
SlurmdPort=17818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
SlurmdTimeout=40
SlurmctldTimeout=10
KillWait=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:4 PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2
"""
_CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\n"
CORES = 2
"""Of each host, as Slurm has it."""


@dataclass(frozen=True)
class Slurm:
    """One that runs."""

    cluster: Simulated
    folder: Path
    seconds: float
    """From the first program's start to the last idle host."""

    @property
    def environ(self) -> dict[str, str]:
        own = {"SLURM_CONF": str(self.folder / "slurm.conf"), "CPUFT_STATE": str(self.cluster.folder / "state")}
        return {name: value for name, value in os.environ.items() if name != "TEST_OF"} | own

    def ask(self, *words: str, seconds: float = 30.0) -> subprocess.CompletedProcess[str]:
        """What one of Slurm's own programs says."""
        return subprocess.run(words, env=self.environ, capture_output=True, text=True, timeout=seconds, check=False)

    def cpuft(self, *words: str, seconds: float = 240.0) -> subprocess.CompletedProcess[str]:
        """A command of ours, where this Slurm is the one that it finds."""
        command = [sys.executable, "-m", "cpuft", *words]
        folder = self.cluster.folder
        return subprocess.run(command, cwd=folder, env=self.environ, capture_output=True, text=True, timeout=seconds)

    def submit(self, script: str, *options: str, seconds: float = 240.0) -> tuple[int, str]:
        """Run a script as a job to its end: its exit code, and what it said."""
        output = self.cluster.folder / f"job-{secrets.token_hex(4)}.out"
        path = output.with_suffix(".sh")
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        place = (f"--output={output}", f"--chdir={self.cluster.folder}")
        done = self.ask("sbatch", "--wait", "--parsable", *place, *options, str(path), seconds=seconds)
        return done.returncode, done.stderr + (output.read_text(encoding="utf-8") if output.exists() else "")


@contextmanager
def open_slurm(cluster: Simulated) -> Iterator[Slurm]:
    """Slurm on all hosts of a cluster, named as they name themselves."""
    folder = cluster.folder / "slurm"
    (folder / "state").mkdir(parents=True)
    names = [cluster.on(number, "hostname") for number in range(1, len(cluster.hosts) + 1)]
    _write_configuration(cluster, folder, names)
    started = time.monotonic()
    with ExitStack() as stack:
        # They are ended in the order of this list's end: those of Slurm by its own word, and then who vouches for them.
        stack.callback(_forget_groups)
        stack.enter_context(_program(_munged(folder)))
        wait_until(lambda: (folder / "munge.sock").exists(), "munge did not come up")
        slurm = Slurm(cluster, folder, 0.0)
        stack.enter_context(_program(("slurmctld", "-D", "-f", slurm.environ["SLURM_CONF"]), slurm))
        for number, name in enumerate(names, start=1):
            (folder / f"spool-{name}").mkdir()
            inside = ("nsenter", "--target", _first_process(cluster, number), "--all", "--wd=/")
            words = (*inside, "slurmd", "-D", "-f", slurm.environ["SLURM_CONF"])
            stack.enter_context(_program(words, slurm))
        stack.callback(slurm.ask, "scontrol", "shutdown")
        count = str(len(names))
        wait_until(
            lambda: (
                slurm.ask("sinfo", "--noheader", "--partition=all", "--states=idle", "--format=%D").stdout.strip()
                == count
            ),
            "Slurm did not come up",
        )
        yield Slurm(cluster, folder, time.monotonic() - started)
        slurm.ask("scancel", "--user=root", "--full")


def _write_configuration(cluster: Simulated, folder: Path, names: Sequence[str]) -> None:
    nodes = [
        f"NodeName={name} NodeAddr={host.name} CPUs={CORES} RealMemory=4000 State=UNKNOWN"
        for name, host in zip(names, cluster.hosts)
    ]
    address = cluster.hosts[0].name.rpartition(".")[0] + ".254"
    told = {"name": cluster.name, "here": socket.gethostname(), "address": address, "folder": str(folder)}
    (folder / "slurm.conf").write_text(_CONF.format(**told, nodes="\n".join(nodes)), encoding="utf-8")
    (folder / "cgroup.conf").write_text(_CGROUP, encoding="utf-8")
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o600)


def _munged(folder: Path) -> tuple[str, ...]:
    files = {"socket": "munge.sock", "key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
    options = [f"--{name}={folder / file}" for name, file in (files | {"seed-file": "munge.seed"}).items()]
    return ("munged", "--foreground", "--force", "--num-threads=2", *options)


def _first_process(cluster: Simulated, number: int) -> str:
    """Of a host, as this machine numbers it: the child of the process that holds its namespaces."""
    holder = (cluster.folder / "state" / cluster.name / "nodes" / str(number) / "pid").read_text().strip()
    return Path(f"/proc/{holder}/task/{holder}/children").read_text().split()[0]


@contextmanager
def _program(words: Sequence[str], slurm: Slurm | None = None) -> Iterator[None]:
    """It runs until the end, which it may come to by itself, and no longer than the tests."""
    words = ("setpriv", "--pdeathsig", "KILL", *words)
    environ = slurm.environ if slurm else None
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, env=environ, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield
    finally:
        if slurm:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.terminate()
        process.wait(10)


def _forget_groups() -> None:
    """slurmd leaves control groups of its own, empty ones."""
    for path in sorted(Path("/sys/fs/cgroup").glob("*/slurm_*"), reverse=True):
        for folder, _, _ in os.walk(path, topdown=False):
            os.rmdir(folder)


def has_slurm() -> bool:
    return all(shutil.which(name) for name in PROGRAMS)
