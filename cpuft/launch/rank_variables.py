"""The environment variables of ranks: each one that cpuft sets, with its reason, and the user's that ranks get."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from cpuft import __version__
from cpuft.config.launch import LaunchConfig
from cpuft.errors import counted
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.topology import (
    HostFacts,
    Interface,
    RankCores,
    choose_comm_cores,
    choose_interface,
    format_mask,
    plan_placement,
    spread_cores,
)
from cpuft.plans import Setting
from cpuft.rank.world import CHECK_VARIABLE
from cpuft.secret_variables import OWN_PREFIX, may_be_secret
from cpuft.serialization import load, parse_json

_BY_VALUE = (
    "ATEN_CPU_CAPABILITY",
    *("CCL_", "FI_", "GLIBC_TUNABLES", "GLOO_", "I_MPI_", "KMP_", "MALLOC_", "OMP_", "ONEDNN_", "THP_", "TORCH_"),
    *("MPICH_", "MPIR_CVAR_", "UCX_"),
    *("HF_ASSETS_CACHE", "HF_DATASETS_", "HF_ENDPOINT", "HF_HOME", "HF_HUB_", "HF_MODULES_CACHE", "HF_XET_"),
    *("MLFLOW_", "TRACKIO_", "WANDB_"),
)
"""Prefixes of the user's variables that every rank gets. Their values are visible on command lines and in plans."""

_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_SET_BY_OPERATOR = ("I_MPI_HYDRA_", "I_MPI_PERHOST")
"""Prefixes of variables that the operator of an MPIJob sets for an mpirun on the launcher. Ours starts on a worker."""
_EXPORTED = "CPUFT_EXPORTED"
_ONLY_LINUX = ("CCL_", "CPUFT_PIN", "GLIBC_", "I_MPI_", "KMP_", "LD_PRELOAD", "MALLOC_", "THP_")
"""Beginnings of the names of settings that macOS cannot use."""


def plan_settings(
    cluster: Cluster, config: LaunchConfig, backend: str, environ: Mapping[str, str]
) -> tuple[tuple[Setting, ...], tuple[tuple[Setting, ...], ...]]:
    """Return the environment variables of the ranks: those that all hosts share, with the user's own in `environ` for
    MPI, oneCCL and OpenMP, and further ones of each host, in the order of the hosts. The user's values win. `backend`
    determines the cores for communication. CpuftError: a host lacks an interface to the others, or a rank gets no core.
    """
    environ = user_variables(environ)
    placements, reason = _plan_placements(cluster, config, backend)
    interfaces = plan_interfaces(cluster, config.iface)
    port = config.master_port or cluster.facts[0].free_port
    by_srun = cluster.mpi.name == "srun"
    shared = keep_user_values(shared_settings(interfaces[0], port, cluster.facts, config.np, by_srun), environ)
    hosts = []
    for facts, interface, ranks in zip(cluster.facts, interfaces, placements):
        disjoint = sum(len(set(rank.compute)) for rank in ranks) == len({c for rank in ranks for c in rank.compute})
        pinned_by_mpi = cluster.mpi.name == "intel" and disjoint
        settings = keep_user_values(host_settings(facts, interface, ranks, pinned_by_mpi, reason), environ)
        if any(one.from_user and one.name == "I_MPI_PIN_DOMAIN" for one in settings):
            # The user pins the ranks, so they must not check that they are on the planned cores.
            settings = tuple(setting for setting in settings if setting.name != "CPUFT_CORES")
        hosts.append(settings)
    shared += forwarded_settings(environ, shared + hosts[0])
    return shared, tuple(hosts)


def _plan_placements(
    cluster: Cluster, config: LaunchConfig, backend: str
) -> tuple[tuple[tuple[RankCores, ...], ...], str]:
    comm_cores, reason = choose_comm_cores(cluster.cores_per_rank, config.np, backend)
    if config.comm_cores >= 0:
        comm_cores, reason = config.comm_cores, "as you set with --comm-cores"
    hosts = zip([one.ranks for one in cluster.assignments], spread_cores(cluster.facts))
    most = cluster.most_cores
    return tuple(plan_placement(cores[: ranks * most or None], ranks, comm_cores) for ranks, cores in hosts), reason


def plan_interfaces(cluster: Cluster, wanted: str) -> tuple[Interface, ...]:
    """Return each host's interface: `wanted` (a name such as "eth0"), or if that is "" the one to the other hosts, or
    "lo" for a single host. Raises CpuftError: a host has no such interface with an IPv4 address.
    """
    if len(cluster.facts) == 1 and not wanted:
        name = next((name for name, address in cluster.facts[0].interfaces.items() if address == "127.0.0.1"), "lo")
        return (Interface(name, "127.0.0.1", "all ranks are on one host"),)
    return tuple(choose_interface(f, next(iter(f.routes)), wanted) for f in cluster.facts)


def shared_settings(
    head: Interface, port: int, hosts: tuple[HostFacts, ...], world_size: int, by_srun: bool = False
) -> tuple[Setting, ...]:
    """Return the environment variables of ranks that are equal on every host, such as MASTER_ADDR; `head` is the
    interface of the head host to the others, and with `by_srun` srun starts the ranks. The user's values do not count.
    """
    hydra = ("hydra", "oneCCL reads the rank numbers that mpirun provides")
    ranks = ("none", "the backend passes the rank numbers to oneCCL") if by_srun else hydra
    settings = (
        Setting("MASTER_ADDR", head.address, f"address of the head host: {head.reason}"),
        Setting("MASTER_PORT", str(port), "a free port on the head host"),
        Setting("CPUFT_WORLD_SIZE", str(world_size), "number of ranks; every rank checks that it finds as many"),
        Setting("CPUFT_VERSION", __version__, "every rank checks that its host has this version of cpuft"),
        *_fabrics_settings(hosts),
        _choose_provider(hosts),
        Setting("CCL_ATL_TRANSPORT", "ofi", "oneCCL communicates over libfabric by itself, not over MPI"),
        Setting("CCL_PROCESS_LAUNCHER", *ranks),
        Setting("CCL_LOG_LEVEL", "error", "no warnings of oneCCL, which would only repeat these settings"),
        Setting("KMP_BLOCKTIME", "1", "idle OpenMP threads release their core after 1 ms"),
        Setting(
            "KMP_AFFINITY", "granularity=fine,compact,1,0", "one OpenMP thread per core, and threads do not migrate"
        ),
        Setting("TOKENIZERS_PARALLELISM", "false", "examples are tokenized before the ranks start"),
    )
    return _keep_usable(settings, hosts[0])


def _keep_usable(settings: tuple[Setting, ...], facts: HostFacts) -> tuple[Setting, ...]:
    """Return the settings without those of libraries that the host's system lacks: macOS has no Intel MPI and no
    oneCCL, pins nothing, and has another allocator.
    """
    return tuple(one for one in settings if facts.system == "linux" or not one.name.startswith(_ONLY_LINUX))


def script_settings(np: int, independent: bool) -> tuple[Setting, ...]:
    """Return settings that make a script connect its `np` ranks without GPUs; () for one rank or `independent` ones."""
    if np < 2 or independent:
        return ()
    return (
        Setting(
            CHECK_VARIABLE,
            "1",
            "the script is stopped if its ranks are not connected; --independent turns this check off",
        ),
        Setting("ACCELERATE_USE_CPU", "true", "Accelerate and the Hugging Face Trainer connect ranks without GPUs"),
        Setting("TORCHELASTIC_RUN_ID", "cpuft", "Lightning reads RANK and WORLD_SIZE, as under torchrun"),
    )


def _choose_provider(hosts: tuple[HostFacts, ...]) -> Setting:
    if len(hosts) > 1 and all(facts.efa for facts in hosts):
        return Setting("FI_PROVIDER", "efa", "every host has an EFA adapter, its driver and its library")
    reason = "works on every network; set it to efa, verbs or psm3 if the hosts support that"
    return Setting("FI_PROVIDER", "tcp", reason)


def _fabrics_settings(hosts: tuple[HostFacts, ...]) -> tuple[Setting, ...]:
    if len(hosts) == 1:
        fabrics, shared, reason = "shm", "1", "one host: ranks communicate through shared memory"
    elif len({facts.boot_id for facts in hosts}) < len(hosts):
        fabrics, shared, reason = (
            "ofi",
            "0",
            "some hosts are on one machine, and shared memory would bypass the network between them",
        )
    else:
        fabrics, shared, reason = "shm:ofi", "1", "shared memory within a host, the network between hosts"
    return Setting("I_MPI_FABRICS", fabrics, reason), Setting("CCL_ATL_SHM", shared, reason)


def host_settings(
    facts: HostFacts, interface: Interface, ranks: tuple[RankCores, ...], pinned_by_mpi: bool, comm_reason: str
) -> tuple[Setting, ...]:
    """Return the settings for all ranks of one host, such as OMP_NUM_THREADS, which the rank with the fewest compute
    cores sets. Without `pinned_by_mpi`, cpuft.rank pins the ranks. `comm_reason`: why communication gets as many cores.
    """
    threads = min(len(rank.compute) for rank in ranks)
    domains = ",".join(format_mask(rank.compute) for rank in ranks)
    cores = ";".join(",".join(map(str, rank.compute)) for rank in ranks)
    left_out = ", without those of communication workers" if ranks[0].comm else ""
    pinning = (
        (Setting("I_MPI_PIN_DOMAIN", f"[{domains}]", f"each rank runs on cores of its own{left_out}"),)
        if pinned_by_mpi
        else (
            Setting("I_MPI_PIN", "off", "mpirun does not pin ranks here, because cpuft.rank does"),
            Setting("CPUFT_PIN", "rank", "cpuft.rank pins each rank to its CPUFT_CORES"),
        )
    )
    settings = (
        Setting("CPUFT_HOSTNAME", facts.hostname, "every rank checks that it runs on the planned host"),
        Setting("CPUFT_CORES", cores, "hardware threads of each rank on this host, in the order of local ranks"),
        Setting("OMP_NUM_THREADS", str(threads), f"one OpenMP thread per core: a rank has {counted(threads, 'core')}"),
        *pinning,
        *_comm_settings(ranks, comm_reason),
        Setting("GLOO_SOCKET_IFNAME", interface.name, interface.reason),
        Setting("FI_TCP_IFACE", interface.name, interface.reason),
        Setting("CCL_KVS_IFACE", interface.name, interface.reason),
        *memory_settings(facts.libraries),
    )
    return _keep_usable(settings, facts)


def _comm_settings(ranks: tuple[RankCores, ...], reason: str) -> tuple[Setting, ...]:
    """Place oneCCL's workers on the cores reserved for them, or one worker on each rank's last core."""
    workers = [rank.comm or rank.compute[-1:] for rank in ranks]
    affinity = ",".join(str(cpu) for cpus in workers for cpu in cpus)
    where = (
        "run on cores without compute threads" if ranks[0].comm else "share each rank's last core with compute threads"
    )
    return (
        Setting("CCL_WORKER_COUNT", str(len(workers[0])), reason),
        Setting("CCL_WORKER_AFFINITY", affinity, f"oneCCL's workers {where}"),
    )


_JOIN_FREED_BLOCKS = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""glibc cuts a tensor's aligned block out of a larger one and puts the ends into lists of small blocks, where they are
not joined with what is freed beside them, so that a later tensor of the same size does not fit where the first one was.
Without these lists, four layers of Gemma-3-270M's sizes with gradient checkpointing at 4,096 tokens took 0.6 GB for
activations instead of 1.0, and a step of MiniLM took as long as before (three turns)."""


_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""glibc 2.35 and newer then asks for pages of 2 MB for all that malloc returns, if Linux allows that (madvise(2)). A
step touches more pages of 4 KB than a CPU remembers, and a virtual machine looks up each other page in two tables."""


def memory_settings(libraries: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return settings: preload the first allocator that `libraries` (name -> path) has of tcmalloc, tcmalloc_minimal
    and jemalloc, and Intel's OpenMP (iomp5) if it is there; keep freed memory, and ask for huge pages.
    """
    allocator = next((name for name in ("tcmalloc", "tcmalloc_minimal", "jemalloc") if name in libraries), "")
    preload = [libraries[name] for name in (allocator, "iomp5") if name in libraries]
    # PyTorch's c10/core/alignment.h and c10/core/impl/alloc_cpu.cpp: for blocks of 2 MiB and more.
    reason = "huge pages for large tensors, which the kernel copies faster between ranks"
    settings: tuple[Setting, ...] = (Setting("THP_MEM_ALLOC_ENABLE", "1", reason),)
    if preload:
        names = " and ".join(name for name in (allocator, "iomp5") if name in libraries)
        settings += (Setting("LD_PRELOAD", ":".join(preload), f"{names}: found on this host"),)
    reason = f"{allocator or 'glibc'} keeps freed memory, which avoids page faults in each step"
    if allocator == "jemalloc":
        settings += (Setting("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1", reason),)  # jemalloc(3)
    if not allocator:
        # 32 MiB is the largest threshold that glibc accepts (mallopt(3), M_MMAP_THRESHOLD).
        settings += (Setting("MALLOC_MMAP_THRESHOLD_", str(32 << 20), reason),)
        settings += (Setting("MALLOC_TRIM_THRESHOLD_", str(1 << 40), reason),)
        reason = "glibc joins freed memory, so that the next tensors fit in it, and asks for large pages"
        settings += (Setting("GLIBC_TUNABLES", f"{_JOIN_FREED_BLOCKS}:{_HUGE_PAGES}", reason),)
    return settings


def export_settings(settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """Return what `cpuft env` exports: all settings but CPUFT_*, and CPUFT_EXPORTED, a JSON for `user_variables`."""
    exported = tuple(setting for setting in settings if not setting.name.startswith(OWN_PREFIX))
    listed = json.dumps({setting.name: setting.value for setting in exported})
    return (
        *exported,
        Setting(_EXPORTED, listed, "so that cpuft launch in this shell does not take these values for yours"),
    )


def user_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environ` without values that `cpuft env` exported, unless the user has changed them since, and
    without the variables that an MPIJob's operator (K_MPI_JOB_ROLE is set) sets for its own mpirun.
    """
    try:
        exported = load(dict[str, str], parse_json(environ.get(_EXPORTED, "{}")))
    except ValueError:
        exported = {}
    left_out = _SET_BY_OPERATOR if "K_MPI_JOB_ROLE" in environ else ()
    return {n: value for n, value in environ.items() if exported.get(n) != value and not n.startswith(left_out)}


def keep_user_values(settings: tuple[Setting, ...], environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the settings, with the user's value (`from_user`) where `environ` has another one; CPUFT_* stay."""
    kept = []
    for one in settings:
        value = environ.get(one.name, one.value)
        if value != one.value and not one.name.startswith(OWN_PREFIX):
            one = Setting(one.name, value, f"kept as you set it; cpuft would set {one.value}", from_user=True)
        kept.append(one)
    return tuple(kept)


def forwarded_settings(environ: Mapping[str, str], ours: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """Return, sorted by name, the variables of `environ` that ranks get besides `ours`: those with prefixes of MPI and
    its networks, oneCCL, Gloo, OpenMP, oneDNN, torch, malloc, Hugging Face and trackers, such as OMP_. Those that may
    be secret are left out, because the values are visible on command lines, and names that no shell can set.
    """
    known = {setting.name for setting in ours}
    return tuple(
        Setting(name, value, "passed on as you set it")
        for name, value in sorted(environ.items())
        if name.startswith(_BY_VALUE) and _SHELL_NAME.fullmatch(name) and not may_be_secret(name, value)
        if name not in known
    )
