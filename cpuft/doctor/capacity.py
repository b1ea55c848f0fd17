"""Checks that a host has what a run needs, and that nothing slows it down."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cpuft.doctor.finding import Finding, check, warning
from cpuft.doctor.probe import GOVERNORS, RUN_FOLDER
from cpuft.doctor.state import ClusterState
from cpuft.hardware import bf16_hardware

_MIB = 1 << 20
_LEAST_MEMORY = 2048 * _MIB
"""A rank with a small encoder, torch and its data; BERT-base takes about twice as much."""
_LEAST_SHM = 24 * _MIB
"""Intel MPI 2021.18 takes 18.1 MB for two local ranks, with messages of up to 134 MB, and less for three to eight;
where it cannot, a rank dies of SIGBUS. oneCCL would take 24 MB a rank, and does without."""
_FILES, _FILES_OF_A_RANK = 320, 6
"""oneCCL's key server polls 300 places at once (client_count_increase in its source), and poll(2) takes no more than a
process may open. With all backends open, a rank of two has 81 files, one of four 91."""
_LEAST_DISK = 1024 * _MIB
"""A run directory with a trained encoder, its logs, and rows."""
_MOST_STEAL = 0.05


@check("CPUFT-019", "no host multiplies bf16 in hardware.")
def _check_bf16(state: ClusterState) -> Iterator[Finding]:
    """bf16 came with Cooper Lake and AMX with Sapphire Rapids; training is 3 to 8 times faster there
    next: use newer hosts (AWS: m7i, c7i or later), or go on in fp32"""
    flags = [bf16_hardware(facts.cpu_flags) for _, facts, _ in state.answering]
    if flags and not any(flags):
        one, facts, _ = state.answering[0]
        yield warning(one.name, f"{facts.cpu_model} has neither AMX nor AVX512_BF16")


@check("CPUFT-020", "the CPU has AMX, and the kernel does not let a process use it.")
def _check_amx(state: ClusterState) -> Iterator[Finding]:
    """Linux 5.16 brought the permission; some hypervisors and sandboxes refuse it
    next: use a newer kernel, or another type of instance"""
    for one, facts, health in state.answering:
        if "amx_tile" in facts.cpu_flags and not health.amx_usable:
            yield warning(one.name, f"AMX is there, and kernel {facts.kernel} refuses its tiles")


@check("CPUFT-021", "too little memory for the ranks planned.")
def _check_memory(state: ClusterState) -> Iterator[Finding]:
    """the kernel would end a rank, and its peers would wait for it
    next: end what else runs there, lower --ppn, or add memory"""
    for one, _, health in state.answering:
        ranks = max(1, state.ranks.get(one.host.name, 1))
        if health.memory_available < ranks * _LEAST_MEMORY:
            yield Finding(
                one.name,
                f"{health.memory_available // _MIB} MB are free for {ranks} ranks, which take 2048 MB each and more",
            )


@check("CPUFT-022", "/dev/shm is too small.")
def _check_shared_memory(state: ClusterState) -> Iterator[Finding]:
    """a small container (docker run --shm-size), or earlier runs left files there
    next: enlarge it: mount -o remount,size=1g /dev/shm"""
    for one, _, health in state.answering:
        if health.shm_free < _LEAST_SHM and state.ranks.get(one.host.name) != 1:
            yield Finding(
                one.name, f"{max(0, health.shm_free) // _MIB} MB are free in /dev/shm, ranks of one host need 24 MB"
            )


@check("CPUFT-034", "a process may open too few files.")
def _check_open_files(state: ClusterState) -> Iterator[Finding]:
    """ranks are connected with each other, and libraries wait for ever where they cannot be"""
    ranks = sum(state.ranks.values()) or sum(one.host.slots or len(facts.cores) for one, facts, _ in state.answering)
    need = _FILES + _FILES_OF_A_RANK * ranks
    for one, _, health in state.answering:
        if ranks > 1 and 0 <= health.open_files < need:
            yield Finding(
                one.name,
                f"a process may open {health.open_files} files, a rank of {ranks} needs {need}",
                next_move=f"allow more: ulimit -n {need}, or for good nofile in /etc/security/limits.conf",
            )


@check("CPUFT-023", "the disk is full.")
def _check_disk(state: ClusterState) -> Iterator[Finding]:
    """data, models and records of runs are kept there while they run
    next: make room there: du -xh / | sort -h | tail"""
    for one, _, health in state.answering:
        if health.disk_free < _LEAST_DISK:
            yield Finding(one.name, f"{max(0, health.disk_free) // _MIB} MB are free in /var/tmp, a run needs 1024 MB")


@check("CPUFT-024", "more ranks than cores.")
def _check_slots(state: ClusterState) -> Iterator[Finding]:
    """ranks that share a core wait for each other: several times slower, not just shared
    next: lower slots=N in the hostfile, or --ppn"""
    for one, facts, _ in state.answering:
        wanted = state.ranks.get(one.host.name, one.host.slots)
        if wanted > len(facts.cores):
            yield warning(one.name, f"{wanted} ranks on {len(facts.cores)} cores")


@check("CPUFT-025", "a control group allows less CPU time than the cores that are seen.")
def _check_quota(state: ClusterState) -> Iterator[Finding]:
    """a container's or provision local's CPU limit: ranks use no more cores than it feeds
    next: raise the limit (docker run --cpus), or count on less speed"""
    for one, facts, _ in state.answering:
        if 0 < facts.cpu_quota < len(facts.seen_cores):
            yield warning(one.name, f"{facts.cpu_quota:g} cores are allowed, {len(facts.seen_cores)} are seen")


@check("CPUFT-026", "something else computes there.")
def _check_load(state: ClusterState) -> Iterator[Finding]:
    """another job, or ranks left over: two jobs on the same cores are far slower than half
    next: look with top, and end or await it"""
    for one, facts, health in state.answering:
        if health.load > max(1.0, 0.75 * len(facts.seen_cores)):
            yield warning(
                one.name, f"{health.load:.1f} of {len(facts.seen_cores)} cores are at work before the run has started"
            )


@check("CPUFT-027", "the hypervisor gives CPU time to others.")
def _check_steal(state: ClusterState) -> Iterator[Finding]:
    """an overbooked hypervisor, or a burstable instance that has used up its credit
    next: use instances with cores of their own"""
    for one, _, health in state.answering:
        if health.steal > _MOST_STEAL:
            yield warning(one.name, f"{health.steal:.0%} of CPU time is stolen")


@check("CPUFT-028", "cores save energy.")
def _check_governor(state: ClusterState) -> Iterator[Finding]:
    """cores clock down while they wait for the network, and come back late
    next: set it to performance"""
    for one, _, health in state.answering:
        slow = [name for name in health.governors if name not in ("performance", "schedutil")]
        if slow:
            yield warning(
                one.name,
                f"frequency governor {', '.join(slow)}",
                fix=("sh", "-c", f"for f in {GOVERNORS}; do echo performance >$f; done"),
            )


@check("CPUFT-029", "no transparent huge pages.")
def _check_huge_pages(state: ClusterState) -> Iterator[Finding]:
    """large tensors then cost many page faults and TLB misses
    next: echo madvise >/sys/kernel/mm/transparent_hugepage/enabled"""
    for one, _, health in state.answering:
        if "[never]" in health.huge_pages:
            yield warning(
                one.name,
                f"transparent huge pages: {health.huge_pages}",
                fix=("sh", "-c", "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled"),
            )


@check("CPUFT-030", "no allocator to preload.")
def _check_allocator(state: ClusterState) -> Iterator[Finding]:
    """glibc maps each block above 32 MB anew: without the fast path, some 6 % of a step's time
    next: apt-get install libtcmalloc-minimal4"""
    for one, facts, _ in state.answering:
        if not {"tcmalloc", "tcmalloc_minimal", "jemalloc"} & set(facts.libraries):
            yield warning(one.name, "neither tcmalloc nor jemalloc is installed")


@check("CPUFT-031", "fast fabrics cannot lock memory.")
def _check_memlock(state: ClusterState) -> Iterator[Finding]:
    """verbs, psm3 and efa register buffers, which locks them
    next: write '* - memlock unlimited' into /etc/security/limits.conf"""
    for one, facts, health in state.answering:
        fast = [name for name in facts.interfaces if name.startswith(("ib", "hsn", "efa"))]
        if fast and 0 <= health.memlock < 64 * _MIB:
            yield warning(
                one.name,
                f"a process may lock {health.memlock >> 10} kB, and there is a fast fabric ({', '.join(fast)})",
            )


@check("CPUFT-032", "ranks or files of earlier runs.")
def _check_leftovers(state: ClusterState) -> Iterator[Finding]:
    """a launch that was killed outright, or lost its connection"""
    for one, _, health in state.answering:
        if health.leftovers:
            pids = [match[1] for text in health.leftovers if (match := re.match(r"pid (\d+): ", text))]
            # They become part of a command: a host says what it likes, and anyone may make folders in /var/tmp.
            paths = [text for text in health.leftovers if re.fullmatch(f"/var/tmp{RUN_FOLDER}", text)]
            kill = f"for pid in {' '.join(pids)}; do ! grep -qs cpuft /proc/$pid/cmdline || kill -KILL $pid; done"
            remove = f"rm -rf --one-file-system {' '.join(paths)}"
            script = "; ".join([kill] * bool(pids) + [remove] * bool(paths))
            yield Finding(
                one.name,
                f"{len(health.leftovers)} left of earlier runs: {health.leftovers[0]}",
                next_move=f"on that host: {script}",
                severe=bool(pids),
                fix=("sh", "-c", script),
            )


@check("CPUFT-037", "no compiled kernels, and no C++ compiler to build them.")
def _check_kernels(state: ClusterState) -> Iterator[Finding]:
    """the fast path then runs in plain torch, and training is 2 to 3 times slower; all ranks wait for the slowest host
    next: install a compiler (Debian: apt-get install g++), or provision again from a machine that has one"""
    for one, _, health in state.answering:
        if not health.kernels:
            yield warning(one.name, "there is neither a C++ compiler (g++, c++) nor a folder cpuft_kernels")
