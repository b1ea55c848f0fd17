"""What memory a run's ranks have on its hosts, for the preparation, which refuses what cannot fit."""

from __future__ import annotations

from collections.abc import Mapping

from cpuft.config import Room, Rooms, TrainConfig, format_rooms
from cpuft.hardware import choose_precision, effective_flags
from cpuft.hosts.cluster import Cluster


def describe_rooms(cluster: Cluster, train: TrainConfig, environ: Mapping[str, str], apart: bool) -> tuple[str, ...]:
    """The preparation's word for it; none where a host does not know."""
    hosts = []
    for assignment, facts in zip(cluster.assignments, cluster.facts):
        free = min(facts.memory_free, facts.memory_left) if facts.memory_left >= 0 else facts.memory_free
        hosts.append(Room(assignment.host.name, assignment.ranks, free, facts.boot_id, facts.memory_free))
    flags = effective_flags(cluster.facts[0].cpu_flags, environ.get("ONEDNN_MAX_CPU_ISA", ""))
    return format_rooms(Rooms(tuple(hosts), choose_precision(train.precision, train.emulate_bf16, flags).name, apart))
