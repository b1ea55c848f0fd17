"""What the doctor runs on each host: a look at its health, and measurements of its links to the other hosts.

The source of this file is sent to the Python of each host, which may have no cpuft, so it imports only the standard
library. All hosts run it at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.metadata
import os
import re
import select
import shutil
import socket
import statistics
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

UNFETCHED = " (with checkpoints or results that were not fetched)"
"""Follows the path of a directory of a run that must not be removed without a decision of the user."""
RUN_FOLDER = r"/cpuft-\d+/[0-9a-f]{12}(\.sent)?"
"""The work directories of runs below /var/tmp, and files that were sent to ranks."""
GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
PACKAGES = ("cpuft", "torch", "transformers", "datasets", "numpy", "impi-rt", "mpich", "mpi4py", "oneccl-cpu")
"""Distribution names of the packages that training depends on."""
_ARCH_REQ_XCOMP_PERM = 0x1023  # asm/prctl.h
_XFEATURE_XTILEDATA = 18  # asm/fpu/types.h
_SYS_ARCH_PRCTL = 158  # asm/unistd_64.h
RUN_MODULES = ("cpuft.rank", "cpuft.train", "cpuft.launch.attempt")
"""Modules that the processes of a run execute."""
_CPU_SAMPLE_SECONDS = 0.25
_BLOCK = 1 << 20
_ROUND_TRIPS = 200
_LINK_TIMEOUT_SECONDS = 8.0
_CALL_SECONDS = 3.0
"""How long a host waits for peers that it has reached itself: those with several addresses call from another one."""
LOGINS = 16
"""Most hosts to which this one logs in at the same time."""
LOGIN_SECONDS = 20.0
"""Time limit of a login to another host."""


def examine(order: dict[str, Any]) -> dict[str, Any]:
    """Examine this host and return the values of all fields of `cpuft.doctor.checks.Health`, by their names.

    `order` has `port`, `peers` and `seconds` for `try_ports`, `ssh_options` and `ssh_peers` for `try_ssh`,
    and `kernels`: whether to find out which build of the kernels training uses.
    """
    import resource  # which Windows does not have

    now = time.time()
    busy_cores, steal = sample_cpu()  # first, so that it does not measure the work of this probe itself
    with ThreadPoolExecutor(max_workers=2) as pool:
        login = partial(pool.submit, try_ssh, order["ssh_options"], order["ssh_peers"])
        # Logins to many hosts wait until the probes there have started: while these start, hosts answer late.
        ssh = login() if len(order["ssh_peers"]) <= LOGINS else None
        ports = try_ports(order["port"], order["peers"], order["seconds"])
        ssh = ssh or login()
        memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        governors = {_read(path) for path in glob.glob(GOVERNORS)}
        return {
            "time": now,
            "executable": sys.executable,
            "packages": read_packages(),
            "mpi": read_mpi(),
            "kernels": find_kernels(),
            "kernel_build": describe_kernels() if order["kernels"] else "",
            "own_address": _resolve_own_name(),
            "amx_usable": _can_use_amx(),
            "memory_available": int(_read_field("/proc/meminfo", "MemAvailable") or 0) << 10,
            "shm_free": read_free_bytes("/dev/shm"),
            "disk_free": read_free_bytes("/var/tmp"),
            "mtus": read_mtus(),
            "governors": sorted(governors - {""}),
            "page_size": resource.getpagesize(),
            "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
            # The load average alone would count a run that has just ended, and the sample alone a short burst.
            "load": min(busy_cores, os.getloadavg()[0]),
            "memlock": -1 if memlock == resource.RLIM_INFINITY else memlock,
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            "leftovers": find_leftovers(),
            "steal": steal,
            "ssh": ssh.result(),
            **ports,
        }


def gather_facts(order: dict[str, Any]) -> dict[str, Any] | None:
    """Run the source text order["facts_source"], and return its `gather(order["targets"])`; None for the text ""."""
    facts: dict[str, Any] = {"__name__": "facts"}
    exec(order["facts_source"], facts)
    found: dict[str, Any] | None = facts["gather"](order["targets"]) if order["facts_source"] else None
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _read_field(path: str, name: str) -> str:
    return next((line.split()[1] for line in _read(path).splitlines() if line.startswith(f"{name}:")), "")


def read_packages() -> dict[str, str]:
    """Return the versions by name of those of PACKAGES that are installed, such as {"torch": "2.4.0+cpu"}."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def read_mpi(folder: str = os.path.dirname(sys.executable)) -> str:
    """Return the first line of `mpirun --version`, or in a Slurm job without mpirun that of `srun --version`.

    mpirun is that of `folder`, else of PATH. "" if neither is there; "broken: " and why if it fails or prints nothing.
    """
    path = next((p for p in (f"{folder}/mpiexec.hydra", f"{folder}/mpirun") if os.access(p, os.X_OK)), "")
    path = path or shutil.which("mpirun") or ("SLURM_JOB_ID" in os.environ and shutil.which("srun")) or ""
    if not path:
        return ""
    try:
        # On a busy host, mpirun takes several seconds to start.
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.SubprocessError) as error:
        return f"broken: {error}"
    return (done.stdout.strip().splitlines() or [f"broken: {done.stderr.strip()[-200:]}"])[0]


def find_kernels() -> str:
    """Return the path of a C++ compiler for the kernels, else of a precompiled library in site-packages, or ""."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    folders = ("cpuft/train/fast/compiled", "cpuft_kernels")
    precompiled = [path for name in folders for path in glob.glob(f"{sysconfig.get_path('purelib')}/{name}/*.so")]
    return compiler or (precompiled[0] if precompiled else "")


def describe_kernels() -> str:
    """Return which kernels this Python's cpuft uses, such as "from the wheel, for AVX2"; "" if it has no cpuft."""
    try:
        from cpuft.compiler import describe_build  # the only import of cpuft: a host may have none, or an older one

        return describe_build(os.environ)
    except (ImportError, OSError):
        return ""


def _resolve_own_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _can_use_amx() -> bool:
    """Ask the kernel for permission to use AMX tiles, which this process then keeps; return whether it was granted."""
    try:
        return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
    except (AttributeError, OSError):
        return False


def read_free_bytes(path: str) -> int:
    """Return the bytes that an unprivileged user can still write below `path`, or -1 if it cannot be examined."""
    try:
        state = os.statvfs(path)
    except OSError:
        return -1
    return state.f_bavail * state.f_frsize


def sample_cpu() -> tuple[float, float]:
    """Return (busy cores, share of CPU time from 0 to 1 that other guests took) during 0.25 s; (0, 0) if unknown."""
    before = _read("/proc/stat").split("\n")[0].split()[1:]
    time.sleep(_CPU_SAMPLE_SECONDS)
    after = _read("/proc/stat").split("\n")[0].split()[1:]
    # proc_stat(5): user nice system idle iowait irq softirq steal, in ticks of all cores together.
    spent = [int(b) - int(a) for a, b in zip(before, after)][:8]
    if len(spent) < 8 or not sum(spent):
        return 0.0, 0.0
    return (1 - (spent[3] + spent[4]) / sum(spent)) * (os.cpu_count() or 1), spent[7] / sum(spent)


def read_mtus() -> dict[str, int]:
    """Return the MTU of each network interface in bytes, by its name, such as eth0 or lo."""
    paths = glob.glob("/sys/class/net/*/mtu")
    return {path.split("/")[4]: int(_read(path)) for path in paths if _read(path).isdecimal()}


def find_leftovers(root: str = "/var/tmp") -> list[str]:
    """Return what earlier runs of this user left behind: "pid 12: cpuft.rank ..." for a process, or a directory's path.

    A process is left over when process 1 is its parent, because its mpirun is gone; but not if process 1 is a Python,
    which in a container may be the launcher. A run's directory below `root` is left over when it is a day old and no
    process of this user names it; " (with checkpoints or results that were not fetched)" follows its path if it has
    checkpoints or the state of a run.
    """
    found, mentioned = [], ""
    has_init = "python" not in os.path.basename(_read("/proc/1/cmdline").split("\0")[0])
    for path in filter(_is_own, glob.glob("/proc/[0-9]*")):
        argv, pid = _read(f"{path}/cmdline").split("\0"), path.split("/")[2]
        mentioned += f"{argv} {_read(f'{path}/environ')}"
        place = next((place for place, argument in enumerate(argv) if argument in RUN_MODULES), None)
        if has_init and place is not None and _read_field(f"{path}/status", "PPid") == "1":
            found.append(f"pid {pid}: {' '.join(argv[place:]).strip()[:80]}")
    for path in filter(_is_own, glob.glob(f"{root}/cpuft-*/*")):
        if path in mentioned or not re.fullmatch(RUN_FOLDER, path.removeprefix(root)):
            continue
        with contextlib.suppress(FileNotFoundError):  # a run that has just ended removes its folder
            if os.lstat(path).st_mtime < time.time() - 24 * 3600:
                patterns = (f"{path}/*/checkpoints/[0-9]*.[0-9]*", f"{path}/*/state.json")
                found.append(path + UNFETCHED * any(map(glob.glob, patterns)))
    return found


def _is_own(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def try_ports(port: int, peers: list[str], seconds: float) -> dict[str, Any]:
    """Listen on `port`, and connect to the same port of every peer, for at most about `seconds`.

    The result has `listens` (False if the port was not free; then nothing is tried), `tried` (the peers) and
    `connected` (the peers that were reached).
    """
    end = time.monotonic() + seconds
    callers: set[str] = set()
    try:
        server = socket.create_server(("", port), backlog=len(peers) + 8)
    except OSError:
        return {"listens": False, "tried": peers, "connected": []}
    with server, ThreadPoolExecutor(max_workers=max(1, len(peers))) as pool:
        tries = {peer: pool.submit(_can_connect, peer, port, end) for peer in peers}
        until = end
        while time.monotonic() < until:
            if all(trial.done() for trial in tries.values()):  # all peers listen, so their calls come soon
                if callers >= set(peers):
                    break
                until = min(until, time.monotonic() + _CALL_SECONDS)
            if select.select([server], [], [], 0.05)[0]:
                connection, (address, _) = server.accept()
                callers.add(address)
                connection.close()
        connected = [peer for peer, trial in tries.items() if trial.result()]
    return {"listens": True, "tried": peers, "connected": connected}


def _can_connect(peer: str, port: int, end: float) -> bool:
    while (left := end - time.monotonic()) > 0:
        try:
            socket.create_connection((peer, port), timeout=max(0.05, min(1.0, left))).close()
            return True
        except OSError:
            time.sleep(0.1)
    return False


def try_ssh(options: list[str], peers: list[str]) -> dict[str, str]:
    """Log in to all peers by ssh without a password; return the error by peer, ssh's last line; "" if it worked.

    A login may take 20 s. At most 16 run at the same time, because each takes more than a tenth of a second of a core.
    """

    def attempt(peer: str) -> str:
        command = ["ssh", *options, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", peer, "true"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LOGIN_SECONDS, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[-1].strip() if done.returncode else ""

    with ThreadPoolExecutor(max_workers=max(1, min(LOGINS, len(peers)))) as pool:
        return dict(zip(peers, pool.map(attempt, peers)))


def measure_links(order: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure the links to other hosts, one after another, over one TCP connection each.

    All hosts call this at once. `order` has `port` (free on all hosts), `peers` (pairs of address and whether this host
    opens the connection, in an order in which no host is busy with two peers) and `seconds` (for sending in each
    direction). The result has a dict for each peer, in order: its address as `peer`, and either `error` or
    `bits_per_second` as received here; if this host opened the connection, also `latency_us`, half a round trip of one
    byte, the median of 200. Raises OSError: the port is not free here.
    """
    results: list[dict[str, Any]] = []
    with socket.create_server(("", order["port"]), backlog=64) as server:
        accepted: dict[str, socket.socket] = {}
        for peer, opens in order["peers"]:
            try:
                end = time.monotonic() + _LINK_TIMEOUT_SECONDS
                connection = _connect(peer, order["port"], end) if opens else _accept_from(server, peer, accepted, end)
                with connection:
                    connection.settimeout(_LINK_TIMEOUT_SECONDS)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    run = _measure_as_client if opens else _measure_as_server
                    results.append({"peer": peer} | run(connection, order["seconds"]))
            except OSError as error:
                results.append({"peer": peer, "error": str(error) or type(error).__name__})
        for connection in accepted.values():
            connection.close()
    return results


def _connect(peer: str, port: int, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((peer, port), timeout=1.0)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _accept_from(server: socket.socket, peer: str, accepted: dict[str, socket.socket], end: float) -> socket.socket:
    """Return the connection that `peer` opens. Those of other peers wait in `accepted` for their turn."""
    while peer not in accepted:
        server.settimeout(max(0.01, end - time.monotonic()))
        connection, (address, _) = server.accept()
        accepted[address] = connection
    return accepted.pop(peer)


def _measure_as_client(connection: socket.socket, seconds: float) -> dict[str, Any]:
    trips = []
    for _ in range(_ROUND_TRIPS):
        start = time.perf_counter()
        connection.sendall(b"p")
        if not connection.recv(1):
            raise OSError("the peer closed the connection")
        trips.append(time.perf_counter() - start)
    _send(connection, seconds)
    return {"latency_us": statistics.median(trips) / 2 * 1e6, "bits_per_second": _receive(connection)}


def _measure_as_server(connection: socket.socket, seconds: float) -> dict[str, Any]:
    for _ in range(_ROUND_TRIPS):
        connection.sendall(connection.recv(1))
    rate = _receive(connection)
    _send(connection, seconds)
    return {"bits_per_second": rate}


def _send(connection: socket.socket, seconds: float) -> None:
    block = bytes(_BLOCK)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket) -> float:
    """Receive until the peer stops sending; return the bits per second from the first byte to the last."""
    total, start, buffer = 0, 0.0, bytearray(_BLOCK)
    while count := connection.recv_into(buffer):
        start = start or time.perf_counter()
        total += count
    return total * 8 / max(1e-9, time.perf_counter() - start) if total else 0.0
