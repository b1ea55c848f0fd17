"""What `cpuft estimate` can be asked."""

from __future__ import annotations

from dataclasses import dataclass

from cpuft.config import is_count, option
from cpuft.errors import CpuftError

MOST_HOSTS = 1024


@dataclass(frozen=True)
class EstimateConfig:
    """Hosts that are not there yet."""

    hosts: str = option("1,2,4,8,16,32,64", "numbers of hosts, a rank each", takes="N,N")
    bandwidth: str = option("", "of the link between hosts, e.g. 10gbit or 100mbit", takes="RATE")
    latency: float = option(100.0, "microseconds one way between hosts; doctor --bandwidth tells", least=0.0, most=1e7)
    link: str = option("", "comm.jsonl of cpuft bench comm, instead of --bandwidth", takes="FILE")
    instance: str = option("", "kind of rented host: its cores, link and price", takes="NAME")
    instances: str = option("", "a table of your own for --instance (default: cpuft's)", takes="FILE")
    cores: float = option(0.0, "cores of a host (default: the record's)", least=0.0, most=1e6)
    price: float = option(0.0, "of a host and an hour (default: the instance's)", least=0.0, most=1e6)
    compression: str = option("auto", "gradients travel as", choices=("auto", "none", "bf16", "fp16", "int8"))


def parse_hosts(text: str) -> list[int]:
    """Numbers of hosts, ascending, each once. Raises CpuftError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(is_count(word, most=MOST_HOSTS) for word in words):
        raise CpuftError(f"--hosts {text[:60]!r} is no list of whole numbers up to {MOST_HOSTS}: write e.g. 1,2,4,8")
    return sorted(set(map(int, words)))
