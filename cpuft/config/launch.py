"""The options of `cpuft launch` besides those of the training: hosts, ranks, restarts, the user's own script."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config.fields import communication_option, hosts_option, output_option, speed_option
from cpuft.serialization import LAST_PORT


@dataclass(frozen=True)
class LaunchConfig:
    """Where the ranks run, how they are started, and when they are stopped or started again."""

    np: int = hosts_option(
        0,
        "Number of ranks on all hosts together (default: with --ppn, that many on each host, else one for each NUMA "
        "node of each host, but no more than slots=N of the hostfile allow)",
        least=1,
    )
    ppn: int = hosts_option(
        0,
        "Number of ranks on each host, in order, until all --np ranks have a place; a host with a smaller slots=N, or "
        "without slots and with fewer cores, is an error (default: as even as possible; if a host is too small for an "
        "even share, hosts are filled in order)",
        least=0,
    )
    hostfile: str = hosts_option(
        "",
        "File with one host per line, the head host first, which starts the ranks on the others; optionally with "
        "slots=N (the largest number of ranks there) or user=NAME (default: in a job of Slurm, an MPIJob or AWS Batch, "
        "the hosts of the job, else this machine)",
        takes="FILE",
    )
    cluster: str = hosts_option("", "Name of a cluster made by cpuft provision, instead of --hostfile", takes="NAME")
    only_hosts: str = hosts_option(
        "", "Use only these of the hosts, separated by commas, in this order (default: all)", takes="NAMES", rare=True
    )
    iface: str = hosts_option(
        "",
        "Network interface that the ranks use, such as eth0 (default: the one whose route leads to the other hosts)",
        takes="NAME",
        rare=True,
    )
    ssh_config: str = hosts_option(
        "",
        "Configuration file of the ssh client (default: that of --cluster, else your own ~/.ssh/config)",
        takes="FILE",
    )
    mpirun: str = hosts_option(
        "",
        "Path of the mpirun or srun that starts the ranks (default: the mpirun of cpuft's Python environment, then "
        "of PATH; then, in a Slurm job, srun)",
        takes="FILE",
        rare=True,
    )
    master_port: int = hosts_option(
        0, "TCP port of rank 0's torch store (MASTER_PORT); 0 takes a free port", least=0, most=LAST_PORT, rare=True
    )
    check: bool = hosts_option(
        True,
        "Run a short form of cpuft doctor before the launch; an error ends the launch, a warning does not",
        rare=True,
    )
    comm_cores: int = communication_option(
        -1,
        "Cores of each rank that only communication threads use (default: an eighth of the rank's cores, rounded "
        "down, at most 4, also with --backend auto; 0 with --backend gloo, with one rank and for your own script)",
        least=-1,
        rare=True,
    )
    run_dir: str = output_option(
        "",
        "Folder for the record, the logs, the checkpoints and the model; it must not exist yet (default: a new "
        "folder in runs/)",
        takes="FOLDER",
    )
    time_limit: float = output_option(
        0.0,
        "Largest number of seconds of a run, from the first start of its ranks; evaluation and restarts count. A run "
        "that takes longer is ended without a new checkpoint: after cpuft launch, --resume continues it; cpuft "
        "compare ends without its other runs and its report. 0 is no limit",
        least=0.0,
    )
    max_restarts: int = output_option(
        -1,
        "Restarts allowed after the loss of a host or a rank, after an interruption notice, or after an error that "
        "may be temporary (default: 3 with several hosts, else 0)",
        least=-1,
    )
    min_np: int = output_option(
        1, "Minimum number of ranks for a restart; with fewer, the run ends", least=1, rare=True
    )
    interruption_notice: str = output_option(
        "",
        "File that appears on a host, or URL that answers with HTTP status 200, when that host will be taken away. "
        "Then the run saves a checkpoint (your own script only if it asks cpuft.interrupted) and restarts on the "
        "other hosts; without other hosts it exits with code 75 (default: clusters of spot instances made by cpuft "
        "provision aws watch the URL of EC2)",
        takes="FILE|URL",
    )
    copy_checkpoints: bool = output_option(
        False,
        "While the run trains on hosts with disks of their own, copy each new checkpoint from the head host to the run "
        "folder on this machine, where --resume finds it for other hosts if the head host is lost",
        rare=True,
    )
    grace_period: float = output_option(
        0.0,
        "Seconds that a run has to save a checkpoint after cpuft launch receives SIGTERM; then the ranks are "
        "killed. Your own script saves one only if it asks cpuft.interrupted. 0 kills the ranks at once",
        least=0.0,
    )


PLACE_OPTIONS = ("ppn", "hostfile", "cluster", "iface", "ssh_config", "mpirun", "check", "run_dir")
"""Options of LaunchConfig that cpuft predict has as well, beside --np: where ranks run, and how they are started."""
LAUNCH_ONLY = ("interruption_notice", "copy_checkpoints", "grace_period", "max_restarts", "min_np")
"""Options of LaunchConfig that only `cpuft launch` has."""


@dataclass(frozen=True)
class ScriptConfig:
    """How `cpuft launch` runs the user's own script."""

    wrap: bool = speed_option(
        False,
        "Use the fast path in the Hugging Face Trainer of your script, without changing the script; on CPUs with "
        "AMX or AVX512_BF16 it multiplies in bf16, whatever the script asks for",
    )
    independent: bool = communication_option(
        False,
        "Start ranks of a script that are meant to be independent, and do not check that they form one process group",
        rare=True,
    )


@dataclass(frozen=True)
class ResumeConfig:
    """Which run `cpuft launch` resumes."""

    resume: str = output_option(
        "",
        "Resume the run in this folder from its last checkpoint, with its training options and number of ranks; "
        "--np, and options that decide how the hosts train, such as --backend or --gradient-checkpointing, may "
        "change. The hosts are those of --cluster, or of --hostfile and --ssh-config, with which the run was started, "
        "unless you name others; give the other options of the launch again, such as --grace-period. Give your own "
        "script again, too: it starts anew, and loads what it has saved with cpuft.save_state",
        takes="FOLDER",
    )


@dataclass(frozen=True)
class DetachConfig:
    """Whether the command stays on this machine."""

    detach: bool = hosts_option(
        False,
        "Move the command to the head host and return when it has started there, before it reads the data. The run "
        "goes on when you log out or this machine is off; cpuft attach shows it, with its errors, and fetches its "
        "results. Not with --resume",
    )
