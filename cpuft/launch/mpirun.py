"""The command line of what starts ranks: mpirun, each flavour of it, or srun."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.errors import CpuftError
from cpuft.hosts.mpi_implementations import Flavour
from cpuft.plan import Setting

KEY = "CPUFT_RUN_KEY"
"""The run's key, by which ranks know each other. mpirun hands its own environment on over connections of its own, so
that this one is on no command line; ranks of several hosts get another over ssh, unless a printed plan starts them."""
MAKE_KEY = ("sh", "-c", f'export {KEY}="$(od -vAn -N32 -tx1 /dev/urandom | tr -d " \\n")"; exec "$@"', "key")
"""Words before a command that runs it with a new key."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of one host: how many, and the settings of that host."""

    host: str
    ranks: int
    settings: tuple[Setting, ...]


def plan_mpirun(
    flavour: Flavour,
    groups: tuple[RankGroup, ...],
    shared: tuple[Setting, ...],
    command: tuple[str, ...],
    logs: str,
    iface: str,
) -> tuple[str, ...]:
    """The command line: one argument set a host, so that the number of ranks on each is explicit.

    `logs` is the directory that gets each rank's output in files of its own; `iface` the interface that mpirun's
    own connections use.
    """
    if flavour.name == "srun":
        return _plan_srun(flavour, groups, shared, command, logs)
    is_openmpi = flavour.name == "openmpi"
    words = [flavour.path, *(_openmpi_options(logs, iface) if is_openmpi else _hydra_options(flavour, logs, iface))]
    words += [] if is_openmpi else [word for one in shared for word in ("-genv", one.name, one.value)]
    for index, group in enumerate(groups):
        words += [":"] if index else []
        words += _openmpi_group(group, shared) if is_openmpi else _hydra_group(group)
        words += command
    return tuple(words)


def _hydra_options(flavour: Flavour, logs: str, iface: str) -> list[str]:
    folder = logs.replace("%", "%%")  # %r and %h are Hydra's own
    patterns = ["-outfile-pattern", f"{folder}/rank-%r.out", "-errfile-pattern", f"{folder}/rank-%r.err"]
    return ["-iface", iface, *(["-silent-abort"] if flavour.name == "intel" else []), *patterns]


def _hydra_group(group: RankGroup) -> list[str]:
    settings = [word for one in group.settings for word in ("-env", one.name, one.value)]
    return ["-host", group.host, "-n", str(group.ranks), *settings]


def _openmpi_options(logs: str, iface: str) -> list[str]:
    if {":", ","} & set(logs):
        raise CpuftError(f"Open MPI takes what follows ':' or ',' in {logs} for options: name another --run-dir")
    words = ["-x", KEY, "--bind-to", "none", "--map-by", "slot", "--oversubscribe", "--output-filename", logs]
    return [*words, "--mca", "oob_tcp_if_include", iface, "--mca", "btl_tcp_if_include", iface]


def _openmpi_group(group: RankGroup, shared: tuple[Setting, ...]) -> list[str]:
    """Settings travel as `env NAME=value`: Open MPI's -x is one for all argument sets, and drops empty values."""
    settings = [f"{setting.name}={setting.value}" for setting in shared + group.settings]
    return ["--host", f"{group.host}:{group.ranks}", "-np", str(group.ranks), "env", *settings]


_PICK = """until [ "${1:?this host is in no plan}" = "@$SLURMD_NODENAME" ]; do shift; done; shift
while case $1 in @* | --) false ;; esac; do export "$1"; shift; done
until [ "$1" = -- ]; do shift; done; shift; exec "$@"
"""
"""srun has one environment for all tasks: each exports those of its own host, @HOST NAME=VALUE ... -- COMMAND."""


def _plan_srun(
    flavour: Flavour, groups: tuple[RankGroup, ...], shared: tuple[Setting, ...], command: tuple[str, ...], logs: str
) -> tuple[str, ...]:
    """One step on the cores that the job has, all of them: cpuft.rank pins. --cpus-per-task would give it fewer."""
    tasks = [group.host for group in groups for _ in range(group.ranks)]
    folder = logs.replace("%", "%%")  # %t is srun's own
    words = [flavour.path, "--quiet", "--mpi=pmi2", "--kill-on-bad-exit=1", "--wait=0", "--export=ALL", "--input=none"]
    words += ["--overlap", "--overcommit", "--cpu-bind=none", f"--output={folder}/rank-%t.out"]
    words += [f"--error={folder}/rank-%t.err", f"--nodes={len(groups)}", f"--ntasks={len(tasks)}"]
    words += ["--distribution=arbitrary", f"--nodelist={','.join(tasks)}"]
    words += ["env", *(f"{one.name}={one.value}" for one in shared), "sh", "-c", _PICK, "pick"]
    for group in groups:
        words += [f"@{group.host}", *(f"{one.name}={one.value}" for one in group.settings)]
    return (*words, "--", *command)


_PLACES = Setting("I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "0", "ranks go where the plan says, not where Slurm would")
_BY_SRUN = "srun starts mpirun's proxies: no host needs ssh"
_SLURM = {
    "intel": (Setting("I_MPI_HYDRA_BOOTSTRAP", "slurm", _BY_SRUN), _PLACES),
    "mpich": (Setting("HYDRA_LAUNCHER", "slurm", _BY_SRUN),),
    "openmpi": (Setting("OMPI_MCA_plm", "slurm", _BY_SRUN),),
}


def step_settings(
    flavour: Flavour, ssh_options: tuple[str, ...], as_root: bool, bootstrap: str = ""
) -> tuple[Setting, ...]:
    """What mpirun itself needs in its environment: how it reaches the other hosts, and leave to run as root."""
    names = {
        "intel": "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",
        "mpich": "HYDRA_LAUNCHER_EXTRA_ARGS",
        "openmpi": "OMPI_MCA_plm_rsh_args",
    }
    settings: tuple[Setting, ...] = ()
    if bootstrap == "slurm" and flavour.name in _SLURM:
        settings += (
            *_SLURM[flavour.name],
            Setting("SLURM_OVERLAP", "1", "what an mpirun before had is not waited for"),
            Setting("SLURM_CPU_BIND", "none", "ranks are pinned by the plan"),
        )
    if ssh_options:
        settings += (Setting(names[flavour.name], " ".join(ssh_options), "how mpirun's ssh reaches the other hosts"),)
    if flavour.name == "openmpi" and as_root:
        settings += (Setting("OMPI_ALLOW_RUN_AS_ROOT", "1", "you run cpuft as root"),)
        settings += (Setting("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", "Open MPI wants to hear it twice"),)
    return settings
