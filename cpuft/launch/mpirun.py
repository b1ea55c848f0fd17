"""The command that starts the ranks: mpirun of Intel MPI, MPICH or Open MPI, or srun."""

from __future__ import annotations

from cpuft.errors import CpuftError
from cpuft.hosts.mpi_implementations import MpiImplementation
from cpuft.hosts.rank_counts import Assignment
from cpuft.plans import Setting

KEY = "CPUFT_RUN_KEY"
"""Variable with the secret key by which the ranks of a run recognize each other. It is on no command line: mpirun
passes its environment on by itself, and with several hosts the launcher sends another key over ssh."""
MAKE_KEY = ("sh", "-c", f'export {KEY}="$(od -vAn -N32 -tx1 /dev/urandom | tr -d " \\n")"; exec "$@"', "key")
"""Put before a command, these words run the command with a new random key in its environment."""


RankGroup = tuple[Assignment, tuple[Setting, ...]]
"""The ranks of one host, and its settings."""


def plan_mpirun(
    mpi: MpiImplementation,
    groups: tuple[RankGroup, ...],
    shared: tuple[Setting, ...],
    command: tuple[str, ...],
    logs: str,
    iface: str,
) -> tuple[str, ...]:
    """Return the argv that starts `command` as the ranks of each host, with the `shared` settings and those of its
    group; the head host's group is the first. The output of rank N goes to LOGS/rank-N.out and .err, or with Open MPI
    to LOGS/JOB/rank.N/stdout and stderr. `iface` is a network interface, which srun ignores. Raises CpuftError: Open
    MPI would take a part of `logs`, which has ":" or ",", for options.
    """
    if mpi.name == "srun":
        return _plan_srun(mpi.path, groups, shared, command, logs)
    is_openmpi, folder = mpi.name == "openmpi", logs.replace("%", "%%")  # Hydra replaces %r and %h
    if is_openmpi and {":", ","} & set(logs):
        raise CpuftError(f"Open MPI takes the text after ':' or ',' in {logs} for options: give another --run-dir")
    if is_openmpi:
        argv = ["-x", KEY, "--bind-to", "none", "--map-by", "slot", "--oversubscribe", "--output-filename", logs]
        argv += ["--mca", "oob_tcp_if_include", iface, "--mca", "btl_tcp_if_include", iface]
    else:
        argv = ["-iface", iface, *(["-silent-abort"] if mpi.name == "intel" else [])]
        argv += ["-outfile-pattern", f"{folder}/rank-%r.out", "-errfile-pattern", f"{folder}/rank-%r.err"]
        argv += [word for one in shared for word in ("-genv", one.name, one.value)]
    for index, (group, settings) in enumerate(groups):
        argv += [":"] if index else []
        if is_openmpi:  # env passes the settings: -x is global and drops empty values
            argv += ["--host", f"{group.host.name}:{group.ranks}", "-np", str(group.ranks)]
            argv += ["env", *(f"{one.name}={one.value}" for one in shared + settings)]
        else:
            argv += ["-host", group.host.name, "-n", str(group.ranks)]
            argv += [word for one in settings for word in ("-env", one.name, one.value)]
        argv += command
    return (mpi.path, *argv)


_SELECT_HOST = """until [ "${1:?this host is not in the plan}" = "@$SLURMD_NODENAME" ]; do shift; done; shift
while case $1 in @* | --) false ;; esac; do export "$1"; shift; done
until [ "$1" = -- ]; do shift; done; shift; exec "$@"
"""
"""Shell program of each task of srun, whose tasks all have one environment. Its arguments are the settings of all hosts
as @HOST NAME=VALUE ... -- COMMAND, of which it exports those of its own host."""


def _plan_srun(
    srun: str, groups: tuple[RankGroup, ...], shared: tuple[Setting, ...], command: tuple[str, ...], logs: str
) -> tuple[str, ...]:
    """Start one job step on all cores of the job; `cpuft.rank` pins the ranks. --cpus-per-task would give it fewer."""
    tasks = [group.host.name for group, _ in groups for _ in range(group.ranks)]
    folder = logs.replace("%", "%%")  # srun replaces %t
    argv = [srun, "--quiet", "--mpi=pmi2", "--kill-on-bad-exit=1", "--wait=0", "--export=ALL", "--input=none"]
    argv += ["--overlap", "--overcommit", "--cpu-bind=none", f"--output={folder}/rank-%t.out"]
    argv += [f"--error={folder}/rank-%t.err", f"--nodes={len(groups)}", f"--ntasks={len(tasks)}"]
    argv += ["--distribution=arbitrary", f"--nodelist={','.join(tasks)}"]
    argv += ["env", *(f"{one.name}={one.value}" for one in shared), "sh", "-c", _SELECT_HOST, "select_host"]
    for group, settings in groups:
        argv += [f"@{group.host.name}", *(f"{one.name}={one.value}" for one in settings)]
    return (*argv, "--", *command)


_PLACED_BY_PLAN = Setting("I_MPI_JOB_RESPECT_PROCESS_PLACEMENT", "0", "ranks are placed by the plan, not by Slurm")
_BY_SRUN = "srun starts mpirun's proxies, so that no host needs ssh"
_OF_ALL = (
    Setting("SLURM_OVERLAP", "1", "do not wait for the job step of an earlier mpirun"),
    Setting("SLURM_CPU_BIND", "none", "ranks are pinned by the plan"),
)
_SLURM = {
    "intel": (Setting("I_MPI_HYDRA_BOOTSTRAP", "slurm", _BY_SRUN), _PLACED_BY_PLAN, *_OF_ALL),
    "mpich": (Setting("HYDRA_LAUNCHER", "slurm", _BY_SRUN), *_OF_ALL),
    "openmpi": (Setting("OMPI_MCA_plm", "slurm", _BY_SRUN), *_OF_ALL),
}
_SSH_OPTIONS = {
    "intel": "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS",
    "mpich": "HYDRA_LAUNCHER_EXTRA_ARGS",
    "openmpi": "OMPI_MCA_plm_rsh_args",
}
_NO_TREE = "OMPI_MCA_plm_rsh_no_tree_spawn", "1"
_DIRECT_LOGINS = {"intel": 16, "openmpi": 64}
"""Most hosts to which mpirun logs in itself. With more, other hosts log in to the rest, which often only the head host
can do. Intel MPI's number was seen with 2021.18, Open MPI's is the radix of its routing tree; MPICH has no limit."""


def mpirun_settings(
    mpi: MpiImplementation, ssh_options: tuple[str, ...], as_root: bool, bootstrap: str = "", hosts: int = 1
) -> tuple[Setting, ...]:
    """Return the environment of mpirun itself: how it reaches the other hosts, and for Open MPI the permission to run
    as root. `bootstrap` is "slurm" if srun starts mpirun's proxies, "" for ssh with `ssh_options`; `hosts` is the
    number of hosts. Raises CpuftError: one of `ssh_options` contains white space, and there are several hosts.
    """
    settings = _SLURM.get(mpi.name, ()) if bootstrap == "slurm" else ()
    if ssh_options:
        if hosts > 1 and any(len(word.split()) != 1 for word in ssh_options):
            raise CpuftError(
                f"ssh's configuration {ssh_options[-1]!r} contains white space, which mpirun cannot pass to ssh: give "
                "--ssh-config a path without it, such as that of a symbolic link to the file"
            )
        reason = "options with which mpirun's ssh reaches the other hosts"
        settings += (Setting(_SSH_OPTIONS[mpi.name], " ".join(ssh_options), reason),)
    if not bootstrap and hosts > _DIRECT_LOGINS.get(mpi.name, hosts):
        name, value = ("I_MPI_HYDRA_BRANCH_COUNT", str(hosts)) if mpi.name == "intel" else _NO_TREE
        settings += (Setting(name, value, "only the head host has to be able to log in to the other hosts"),)
    if mpi.name == "openmpi" and as_root:
        settings += (Setting("OMPI_ALLOW_RUN_AS_ROOT", "1", "you are root on the head host"),)
        settings += (Setting("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", "Open MPI requires both variables"),)
    return settings
