"""Every variable the toolkit sets, each with its value and its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from cpuft.errors import counted
from cpuft.hosts.topology import HostFacts, Interface, RankCores, format_mask
from cpuft.plan import Setting
from cpuft.rank.connection_check import CHECK
from cpuft.serialization import load, parse_json

_BY_VALUE = (
    *("CCL_", "FI_", "GLOO_", "I_MPI_", "KMP_", "MALLOC_", "OMP_", "ONEDNN_", "THP_", "TORCH_", "UCX_"),
    *("HF_ASSETS_CACHE", "HF_DATASETS_", "HF_ENDPOINT", "HF_HOME", "HF_HUB_", "HF_MODULES_CACHE", "HF_XET_"),
)
"""How names begin of what the user has set and every rank gets by value, on command lines and in plans."""

_FOR_RANKS = {
    *("ALL_PROXY", "HF_ENDPOINT", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY"),
    *("HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"),
}
"""Of what may be secret, what training itself may need, and so goes to other hosts; a proxy's URL holds a password."""
# UCX_IB_PKEY and its like number a partition of the network.
_SECRET_NAME = re.compile(
    r"(?<!_P)KEY|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|(^|_)(PASS|PAT|PWD)(_|$)|CREDENTIAL|AUTH|COOKIE|PRIVATE", re.I
)
# A token may stand where a URL has its user, without a password.
_SECRET_VALUE = re.compile(r"://[^/\s]*@")
_PLAIN_ENDPOINT = re.compile(r"(https?://)?[\w.-]+(:[0-9]+)?/?", re.ASCII)
_PLACES = {"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY"}
_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_OPERATORS = ("I_MPI_HYDRA_", "I_MPI_PERHOST")
"""How names begin of what an MPIJob's operator tells an mpirun of the launcher's: ours starts on a worker."""
_TIED_TO_A_RUN = "CPUFT_"
_EXPORTED = "CPUFT_EXPORTED"


def shared_settings(
    master: Interface, port: int, hosts: tuple[HostFacts, ...], world_size: int, by_srun: bool = False
) -> tuple[Setting, ...]:
    """Settings that are equal on every host."""
    ranks = ("none", "the backend tells oneCCL its ranks") if by_srun else ("hydra", "oneCCL reads ranks from mpirun")
    return (
        Setting("MASTER_ADDR", master.address, f"the master's address: {master.reason}"),
        Setting("MASTER_PORT", str(port), "a port that is free on the master"),
        Setting("CPUFT_WORLD_SIZE", str(world_size), "ranks asked for: every rank checks that it finds as many"),
        *_fabrics_settings(hosts),
        _choose_provider(hosts),
        Setting("CCL_ATL_TRANSPORT", "ofi", "oneCCL's own transport over libfabric, as in the recipe"),
        Setting("CCL_PROCESS_LAUNCHER", *ranks),
        Setting("CCL_LOG_LEVEL", "error", "oneCCL's warnings would only repeat these settings"),
        Setting("KMP_BLOCKTIME", "1", "idle OpenMP threads yield their core after 1 ms"),
        Setting("KMP_AFFINITY", "granularity=fine,compact,1,0", "one OpenMP thread a core, none moves"),
        Setting("TOKENIZERS_PARALLELISM", "false", "rows are tokenised before ranks start"),
    )


def script_settings(np: int, independent: bool) -> tuple[Setting, ...]:
    """Settings for a script of the user's own on `np` ranks: libraries that look for GPUs first join all ranks.

    Nothing is set for one rank, or for ranks that are meant to be independent.
    """
    if np < 2 or independent:
        return ()
    return (
        Setting(CHECK, "1", "the script is stopped if its ranks are not connected; --independent prevents this check"),
        Setting("ACCELERATE_USE_CPU", "true", "Accelerate and the Hugging Face Trainer join ranks without GPUs"),
        Setting("TORCHELASTIC_RUN_ID", "cpuft", "Lightning takes its rank from RANK and WORLD_SIZE, as under torchrun"),
    )


def _choose_provider(hosts: tuple[HostFacts, ...]) -> Setting:
    """What libfabric, and by it MPI and oneCCL, sends with between hosts."""
    if len(hosts) > 1 and all(facts.efa for facts in hosts):
        return Setting("FI_PROVIDER", "efa", "every host has an EFA adapter, its driver and its library")
    reason = "works on every network; set it to efa, verbs or psm3 where the hosts have that"
    return Setting("FI_PROVIDER", "tcp", reason)


def _fabrics_settings(hosts: tuple[HostFacts, ...]) -> tuple[Setting, ...]:
    """Whether ranks may meet in shared memory: what Intel MPI is told, and what oneCCL is."""
    if len(hosts) == 1:
        fabrics, shared, reason = "shm", "1", "one host: ranks meet in shared memory"
    elif len({facts.boot_id for facts in hosts}) < len(hosts):
        fabrics, shared, reason = "ofi", "0", "some hosts are one machine: shared memory would bypass the network"
    else:
        fabrics, shared, reason = "shm:ofi", "1", "shared memory inside a host, the network between hosts"
    return Setting("I_MPI_FABRICS", fabrics, reason), Setting("CCL_ATL_SHM", shared, reason)


def host_settings(
    facts: HostFacts, interface: Interface, ranks: tuple[RankCores, ...], pinned_by_mpi: bool, comm_reason: str
) -> tuple[Setting, ...]:
    """Settings of one host, from its own topology, for all ranks on it."""
    threads = min(len(rank.compute) for rank in ranks)
    domains = ",".join(format_mask(rank.compute) for rank in ranks)
    cores = ";".join(",".join(map(str, rank.compute)) for rank in ranks)
    left_out = ", comm workers' cores left out" if ranks[0].comm else ""
    pinning = (
        (Setting("I_MPI_PIN_DOMAIN", f"[{domains}]", f"each rank on cores of its own{left_out}"),)
        if pinned_by_mpi
        else (
            Setting("I_MPI_PIN", "off", "mpirun does not pin here: cpuft.rank is the one owner"),
            Setting("CPUFT_PIN", "rank", "cpuft.rank pins each rank to its CPUFT_CORES"),
        )
    )
    return (
        Setting("CPUFT_HOSTNAME", facts.hostname, "every rank checks that it is where the plan put it"),
        Setting("CPUFT_CORES", cores, "hardware threads of each rank of this host, in turn"),
        Setting("OMP_NUM_THREADS", str(threads), f"one OpenMP thread a core: a rank has {counted(threads, 'core')}"),
        *pinning,
        *_comm_settings(ranks, comm_reason),
        Setting("GLOO_SOCKET_IFNAME", interface.name, interface.reason),
        Setting("FI_TCP_IFACE", interface.name, interface.reason),
        Setting("CCL_KVS_IFACE", interface.name, interface.reason),
        # torch's c10/core/alignment.h and c10/core/impl/alloc_cpu.cpp: blocks of 2 MiB and more ask for huge pages.
        Setting("THP_MEM_ALLOC_ENABLE", "1", "huge pages for big tensors: the kernel copies them between ranks faster"),
        *_memory_settings(facts.libraries),
    )


def _comm_settings(ranks: tuple[RankCores, ...], reason: str) -> tuple[Setting, ...]:
    """oneCCL's workers: on the cores kept for them, else one on each rank's last core."""
    workers = [rank.comm or rank.compute[-1:] for rank in ranks]
    affinity = ",".join(str(cpu) for cpus in workers for cpu in cpus)
    where = "on cores that compute leaves free" if ranks[0].comm else "on each rank's last core, shared with compute"
    return (
        Setting("CCL_WORKER_COUNT", str(len(workers[0])), reason),
        Setting("CCL_WORKER_AFFINITY", affinity, f"oneCCL's workers {where}"),
    )


def _memory_settings(libraries: Mapping[str, str]) -> tuple[Setting, ...]:
    """Preloaded allocator and OpenMP runtime where found; else glibc told to keep what it has freed."""
    allocator = next((name for name in ("tcmalloc", "tcmalloc_minimal", "jemalloc") if name in libraries), "")
    preload = [libraries[name] for name in (allocator, "iomp5") if name in libraries]
    settings: tuple[Setting, ...] = ()
    if preload:
        names = " and ".join(name for name in (allocator, "iomp5") if name in libraries)
        settings += (Setting("LD_PRELOAD", ":".join(preload), f"{names}: found on this host"),)
    reason = f"{allocator or 'glibc'} keeps freed blocks instead of faulting them in again at each step"
    if allocator == "jemalloc":
        settings += (Setting("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1", reason),)  # jemalloc(3)
    if not allocator:
        # glibc's own upper limit of the threshold is 32 MiB (mallopt(3), M_MMAP_THRESHOLD).
        settings += (Setting("MALLOC_MMAP_THRESHOLD_", str(32 << 20), reason),)
        settings += (Setting("MALLOC_TRIM_THRESHOLD_", str(1 << 40), reason),)
    return settings


def export_settings(settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """What `cpuft env` exports: `settings` without those of a run, and a list of them for `user_variables`."""
    exported = tuple(setting for setting in settings if not setting.name.startswith(_TIED_TO_A_RUN))
    listed = json.dumps({setting.name: setting.value for setting in exported})
    return (*exported, Setting(_EXPORTED, listed, "so that cpuft launch in this shell still chooses for itself"))


def user_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what `cpuft env` exported into it and the user has not changed since; in an MPIJob also without
    what its operator tells mpirun."""
    try:
        exported = load(dict[str, str], parse_json(environ.get(_EXPORTED, "{}")))
    except ValueError:
        exported = {}
    given = _OPERATORS if "K_MPI_JOB_ROLE" in environ else ()
    return {n: value for n, value in environ.items() if exported.get(n) != value and not n.startswith(given)}


def keep_user_values(settings: tuple[Setting, ...], environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """The same settings, with the user's value and a word about it wherever the user has set the variable."""
    return tuple(_keep(setting, environ) for setting in settings)


def _keep(setting: Setting, environ: Mapping[str, str]) -> Setting:
    theirs = environ.get(setting.name)
    if theirs is None or theirs == setting.value or setting.name.startswith(_TIED_TO_A_RUN):
        return setting
    return Setting(setting.name, theirs, f"kept as you set it; cpuft would say {setting.value}", kept=True)


def forwarded_settings(environ: Mapping[str, str], ours: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """What the user has set of the names that travel by value, beyond our own settings."""
    known = {setting.name for setting in ours}
    return tuple(
        Setting(name, value, "passed on as you set it")
        for name, value in sorted(environ.items())
        if name.startswith(_BY_VALUE) and _SHELL_NAME.fullmatch(name) and not may_be_secret(name, value)
        if name not in known
    )


def unexportable_names(environ: Mapping[str, str]) -> list[str]:
    """Names that would travel by value, but that no shell can set: quoted, for a person to read."""
    return sorted(ascii(name) for name in environ if name.startswith(_BY_VALUE) and not _SHELL_NAME.fullmatch(name))


def may_be_secret(name: str, value: str) -> bool:
    """Whether a variable must not be seen: by its name, or a password in its value, a URL."""
    if name in _PLACES or name.startswith(_TIED_TO_A_RUN):
        return False
    if name == "HF_ENDPOINT" and not _PLAIN_ENDPOINT.fullmatch(value):
        return True  # mirrors take a token as a part of the path, too
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def secrets_for_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Of what may be secret, what ranks on other hosts get all the same."""
    return {name: value for name, value in environ.items() if name.upper() in _FOR_RANKS and may_be_secret(name, value)}


def user_set_names(settings: tuple[Setting, ...]) -> list[str]:
    """Names of the settings whose value is the user's."""
    return [setting.name for setting in settings if setting.kept]
