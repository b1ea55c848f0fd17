"""All checks, in the order of their codes. A code is never given to another check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cpuft.doctor import capacity, reach, sameness
from cpuft.doctor.finding import Finding
from cpuft.doctor.state import ClusterState


@dataclass(frozen=True)
class Check:
    """One check: a pure function of what was found on the hosts."""

    code: str
    find: Callable[[ClusterState], Iterator[Finding]]

    @property
    def title(self) -> str:
        """What it looks for, from its function's first line."""
        return (self.find.__doc__ or "").split(": ", 1)[1].splitlines()[0]


_FUNCTIONS: tuple[Callable[[ClusterState], Iterator[Finding]], ...] = (
    reach.check_names,
    reach.check_reachable,
    reach.check_host_keys,
    reach.check_login,
    reach.check_ssh_between,
    reach.check_own_name,
    reach.check_ports,
    reach.check_outside,
    reach.check_interfaces,
    reach.check_mtu,
    sameness.check_same_host,
    sameness.check_clocks,
    sameness.check_python,
    sameness.check_packages,
    sameness.check_mpi,
    sameness.check_cpu,
    sameness.check_bf16_alike,
    sameness.check_kernel,
    capacity.check_bf16,
    capacity.check_amx,
    capacity.check_memory,
    capacity.check_shared_memory,
    capacity.check_disk,
    capacity.check_slots,
    capacity.check_quota,
    capacity.check_load,
    capacity.check_steal,
    capacity.check_governor,
    capacity.check_huge_pages,
    capacity.check_allocator,
    capacity.check_memlock,
    capacity.check_leftovers,
    reach.check_links,
    capacity.check_open_files,
    reach.check_listening,
)

CHECKS = tuple(Check(f"CPUFT-{number:03}", find) for number, find in enumerate(_FUNCTIONS, start=1))


def find_all(state: ClusterState) -> list[Finding]:
    """What every check finds, in the order of codes."""
    return [replace(finding, code=check.code) for check in CHECKS for finding in check.find(state)]
