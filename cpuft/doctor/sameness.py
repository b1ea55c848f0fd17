"""Checks that all hosts are alike: the slowest and the oddest one decide for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from cpuft.doctor.finding import Finding, check, warning
from cpuft.doctor.state import ClusterState, Health, HostState
from cpuft.errors import install_command
from cpuft.hardware import bf16_hardware
from cpuft.hosts.topology import HostFacts

V = TypeVar("V")
_SKEW_SECONDS = 2.0


def _odd(state: ClusterState, value: Callable[[HostFacts, Health], V]) -> Iterator[tuple[HostState, V, V]]:
    """Hosts whose value is not the most common one (the master's, where none is), with both values."""
    values = [value(facts, health) for _, facts, health in state.answering]
    if not values:
        return
    common = max(values, key=values.count)
    for (one, _, _), own in zip(state.answering, values):
        if own != common:
            yield one, own, common


@check("CPUFT-011", "two lines of the hostfile are one host.")
def _check_same_host(state: ClusterState) -> Iterator[Finding]:
    """two names or addresses of one machine: its ranks would share cores that the plan counts twice
    next: keep one line in the hostfile, and say slots=N for several ranks"""
    seen: dict[tuple[object, ...], HostState] = {}
    for one, facts, _ in state.answering:
        identity = (facts.boot_id, facts.hostname, tuple(sorted(facts.interfaces.items())))
        if identity in seen:
            yield Finding(one.name, f"it is the same host as {seen[identity].name}")
        seen.setdefault(identity, one)


@check("CPUFT-012", "a clock is off.")
def _check_clocks(state: ClusterState) -> Iterator[Finding]:
    """no time service runs there: logs cannot be compared, certificates and time limits go wrong
    next: start one: timedatectl set-ntp true"""
    for one, _, _ in state.answering:
        if abs(one.skew) > _SKEW_SECONDS:
            yield warning(
                one.name,
                f"its clock is {abs(one.skew):.0f} s {'ahead of' if one.skew > 0 else 'behind'} this machine's",
            )


@check("CPUFT-013", "the training environment's Python is missing, too old, or another one than elsewhere.")
def _check_python(state: ClusterState) -> Iterator[Finding]:
    """the training environment is not at the same path on every host, or was made with an old Python
    next: cpuft provision hosts installs it; cpuft needs Python 3.10 or newer"""
    for one, facts, health in state.answering:
        version = tuple(int(part) for part in facts.python.split(".")[:2])
        missing = bool(state.python) and health.executable != state.python
        if missing or version < (3, 10):
            seen = f"{health.executable} {facts.python}" + (f" instead of {state.python}" if missing else "")
            yield Finding(one.name, f"Python there is {seen}")
    for one, own, common in _odd(state, lambda facts, _: facts.python.rsplit(".", 1)[0]):
        yield Finding(
            one.name,
            f"Python {own}, most hosts have {common}",
            cause="environments made one by one",
            next_move="make them from the same pins: cpuft provision hosts",
        )


@check("CPUFT-014", "package versions differ between hosts.")
def _check_packages(state: ClusterState) -> Iterator[Finding]:
    """environments drift apart when they are updated one by one; ranks then compute or talk differently
    next: install the same pins on all: cpuft provision hosts"""
    for one, own, common in _odd(state, lambda _, health: health.packages):
        names = sorted(name for name in {*own, *common} if own.get(name) != common.get(name))
        told = ", ".join(f"{name} {own.get(name, 'missing')} (most: {common.get(name, 'missing')})" for name in names)
        yield Finding(one.name, told)


@check("CPUFT-015", "no mpirun, a broken one, or another than elsewhere.")
def _check_mpi(state: ClusterState) -> Iterator[Finding]:
    """no MPI beside the training environment's Python nor in PATH
    next: cpuft provision hosts installs Intel MPI"""
    for one, _, health in state.answering:
        if not health.mpi or health.mpi.startswith("broken"):
            yield Finding(
                one.name,
                f"mpirun is {health.mpi or 'missing'}",
                next_move="cpuft provision hosts installs Intel MPI on other hosts, and on this machine "
                f"{install_command('train', 'mpi', 'demo')}",
            )
    for one, own, common in _odd(state, lambda _, health: health.mpi):
        if own and not own.startswith("broken") and common:
            yield Finding(
                one.name,
                f"its mpirun is {own!r}, most have {common!r}",
                cause="MPIs of different makers or versions do not understand each other",
                next_move="use one MPI on all hosts: cpuft provision hosts",
            )


@check("CPUFT-016", "another CPU than elsewhere.")
def _check_cpu(state: ClusterState) -> Iterator[Finding]:
    """synchronous training waits for the slowest rank at every step
    next: use hosts of one kind, or leave this one out"""
    for one, own, common in _odd(state, lambda facts, _: (facts.cpu_model, len(facts.seen_cores))):
        yield warning(one.name, f"{own[0]} with {own[1]} cores, most are {common[0]} with {common[1]}")


@check("CPUFT-017", "some hosts multiply bf16 in hardware and some do not.")
def _check_bf16_alike(state: ClusterState) -> Iterator[Finding]:
    """CPUs of different generations, or a hypervisor that hides flags: all ranks then train in fp32
    next: use hosts of one kind, or say --precision fp32 to make it plain"""
    for one, own, common in _odd(state, lambda facts, _: bool(bf16_hardware(facts.cpu_flags))):
        yield warning(
            one.name, f"bf16 in hardware: {'yes' if own else 'no'}, on most hosts: {'yes' if common else 'no'}"
        )


@check("CPUFT-018", "another kernel than elsewhere.")
def _check_kernel(state: ClusterState) -> Iterator[Finding]:
    """updated or restarted at different times: figures of the hosts are hard to compare
    next: update and restart all hosts alike"""
    for one, own, common in _odd(state, lambda facts, _: facts.kernel):
        yield warning(one.name, f"kernel {own}, most have {common}")
