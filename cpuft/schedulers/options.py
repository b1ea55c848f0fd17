"""What `cpuft submit` can be asked for: what a site calls its hosts, and who pays for them."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config import option


@dataclass(frozen=True)
class JobConfig:
    """A job of a scheduler's; each takes some of these."""

    name: str = option("", "name of the job, and of its run (default: a new one)")
    nodes: int = option(0, "hosts (default: as --ppn has it, else one for each rank)", least=0, most=100_000)
    retries: int = option(9, "goes on so often after it was interrupted", least=0, most=10_000)
    partition: str = option("", "partition (default: the site's)", takes="NAME")
    account: str = option("", "account that pays", takes="NAME")
    constraint: str = option("", "features that hosts must have, e.g. amx", takes="LIST")
    time: str = option("", "time limit, e.g. 8:00:00 (default: the partition's)", takes="TIME")
    array: str = option("", "several jobs, numbered in $SLURM_ARRAY_TASK_ID, e.g. 0-3", takes="LIST")
    extra: str = option("", "more options of sbatch, e.g. '--qos=high --mem=0'", takes="WORDS")
    image: str = option("", "container image that has cpuft and sshd", takes="NAME")
    cores: int = option(4, "cores of a host, as the scheduler counts them", least=1, most=10_000)
    memory: int = option(16, "GiB of a host, a quarter of it for /dev/shm", least=1, most=100_000)
    seconds: int = option(0, "seconds the job may take (default: no limit)", least=0, most=10**8)
    namespace: str = option("", "namespace (default: kubectl's own)", takes="NAME")
    claim: str = option("", "volume claim that keeps runs (default: they go with the job)", takes="NAME")
    queue: str = option("", "job queue", takes="NAME")
    region: str = option("", "region of AWS (default: your AWS settings')", takes="NAME")
    secret: str = option("", "secret of Secrets Manager by which nodes know each other", takes="ARN")
    role: str = option("", "execution role that may read the secret", takes="ARN")
    efs: str = option("", "file system of EFS that keeps runs (default: they go with the job)", takes="ID")


_ALL, _POD = ("name", "nodes", "retries"), ("image", "cores", "memory", "seconds")
KINDS = {
    "slurm": (*_ALL, "partition", "account", "constraint", "time", "array", "extra"),
    "kubernetes": (*_ALL, *_POD, "namespace", "claim"),
    "batch": (*_ALL, *_POD, "queue", "region", "secret", "role", "efs"),
}
"""Who takes what."""
