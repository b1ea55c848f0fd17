"""What a host can tell of its health, as one JSON object; sent as it is to the Python of each host.

Only the standard library, and nothing of ours: the hosts may have no cpuft. All hosts run this at the same moment,
listen on one agreed port, and try to connect to each other there.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.metadata
import os
import re
import resource
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

RUN_FOLDER = r"/cpuft-(\d+/)?[0-9a-f]{12}(\.sent)?"
"""A run's work folder below /var/tmp, or what was sent to its ranks; older versions had no users' folders."""
GOVERNORS = "/sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
PACKAGES = ("cpuft", "torch", "transformers", "datasets", "numpy", "impi-rt", "mpi4py", "oneccl-cpu")
_ARCH_REQ_XCOMP_PERM = 0x1023  # asm/prctl.h
_XFEATURE_XTILEDATA = 18  # asm/fpu/types.h
_SYS_ARCH_PRCTL = 158  # asm/unistd_64.h
_WATCH_SECONDS = 0.25
_MPIRUNS = ("hydra_", "mpiexec", "mpirun", "orted", "prted")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    """The first word that a file of the kernel's says of `name`."""
    return next((line.split()[1] for line in _read(path).splitlines() if line.startswith(f"{name}:")), "")


def read_packages() -> dict[str, str]:
    """Versions of the packages that training depends on, where installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read_mpi(folder: str = os.path.dirname(sys.executable)) -> str:
    """The first line that this environment's mpirun, else in a job of Slurm's srun, says of itself; empty: none."""
    path = next((p for p in (f"{folder}/mpiexec.hydra", f"{folder}/mpirun") if os.access(p, os.X_OK)), "")
    path = path or shutil.which("mpirun") or ("SLURM_JOB_ID" in os.environ and shutil.which("srun")) or ""
    if not path:
        return ""
    try:
        # A busy host takes its time.
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.SubprocessError) as error:
        return f"broken: {error}"
    return (done.stdout.strip().splitlines() or [f"broken: {done.stderr.strip()[-200:]}"])[0]


def find_kernels() -> str:
    """The C++ compiler that builds the fast path's kernels, or a file of kernels from provisioning; empty: neither."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    brought = glob.glob(f"{sysconfig.get_path('purelib')}/cpuft_kernels/*.so")
    return compiler or (brought[0] if brought else "")


def resolve_self() -> str:
    """The address that this host's own name has here; empty when it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def may_use_amx() -> bool:
    """Whether the kernel lets a process use AMX tiles."""
    try:
        return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
    except (AttributeError, OSError):
        return False


def read_memory_available() -> int:
    """Bytes that can be had without swapping."""
    return int(_field("/proc/meminfo", "MemAvailable") or 0) << 10


def read_free(path: str) -> int:
    """Bytes that an ordinary user may still write at `path`; -1 when there is no such file system."""
    try:
        state = os.statvfs(path)
    except OSError:
        return -1
    return state.f_bavail * state.f_frsize


def watch_cpu() -> tuple[float, float]:
    """Over a quarter of a second: cores that were at work, and the share of CPU time that other guests took."""
    before = _read("/proc/stat").split("\n")[0].split()[1:]
    time.sleep(_WATCH_SECONDS)
    after = _read("/proc/stat").split("\n")[0].split()[1:]
    # proc_stat(5): user nice system idle iowait irq softirq steal, in ticks of all cores together.
    spent = [int(b) - int(a) for a, b in zip(before, after)][:8]
    if len(spent) < 8 or not sum(spent):
        return 0.0, 0.0
    return (1 - (spent[3] + spent[4]) / sum(spent)) * (os.cpu_count() or 1), spent[7] / sum(spent)


def read_mtus() -> dict[str, int]:
    """MTU of each interface."""
    paths = glob.glob("/sys/class/net/*/mtu")
    return {path.split("/")[4]: int(_read(path)) for path in paths if _read(path).isdecimal()}


def find_leftovers(root: str = "/var/tmp") -> list[str]:
    """This user's ranks that outlived their run, and what runs left on the disk: "pid 12: cpuft.rank ..." or a path.

    A rank whose mpirun lives is at work; one that has been handed to the first process is left over. So is a run's
    folder that no process names.
    """
    found, said = [], ""
    for path in filter(_is_own, glob.glob("/proc/[0-9]*")):
        words, pid = _read(f"{path}/cmdline").split("\0"), path.split("/")[2]
        said += f"{words} {_read(f'{path}/environ')}"
        ours = any(word in ("cpuft.rank", "cpuft.train", "cpuft.launch.remote") for word in words)
        if ours and _field(f"{path}/status", "PPid") == "1":
            found.append(f"pid {pid}: {' '.join(words)[:80]}")
    folders = [path for path in glob.glob(f"{root}/cpuft-*") + glob.glob(f"{root}/cpuft-*/*") if _is_own(path)]
    runs = [path for path in folders if re.fullmatch(RUN_FOLDER, path.removeprefix(root)) and path not in said]
    return found + [path for path in runs if os.lstat(path).st_mtime < time.time() - 24 * 3600]


def find_listening() -> dict[str, str]:
    """What this user's runs listen at for others than this host: "hydra_pmi_proxy (pid 12), port 40000" -> address.

    A socket that several processes have is told of the first: ranks inherit those of mpirun.
    """
    found = {}
    sockets = [line.split() for line in (_read("/proc/net/tcp") + "\n" + _read("/proc/net/tcp6")).splitlines()]
    # proc_net_tcp of the kernel: sl local_address rem_address st (0A: listens) ... inode, at 9
    open_ones = {f"socket:[{words[9]}]": words[1].split(":") for words in sockets if words[3:4] == ["0A"]}
    for pid in sorted(int(path.split("/")[2]) for path in glob.glob("/proc/[0-9]*") if _is_own(path)):
        name = _read(f"/proc/{pid}/comm")
        if name.startswith(_MPIRUNS) or "CPUFT_WORLD_SIZE=" in _read(f"/proc/{pid}/environ"):
            for link in glob.glob(f"/proc/{pid}/fd/*"):
                address, port = open_ones.pop(os.path.realpath(link).rpartition("/")[2], ("", ""))
                found[f"{name} (pid {pid}), port {int(port or '0', 16)}"] = _read_address(address)
    return {what: address for what, address in found.items() if address not in ("", "::1", "127.0.0.1")}


def _read_address(text: str) -> str:
    """An address of /proc/net/tcp or tcp6: 32-bit words in hexadecimal, each in the host's byte order."""
    words = [int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET6 if words[1:] else socket.AF_INET, b"".join(words)) if words else ""


def _is_own(path: str) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def try_ports(port: int, peers: list[str], seconds: float, greeting: str = "") -> dict[str, Any]:
    """Listen on `port` and connect to it on every peer until all is done or `seconds` have passed.

    With a `greeting`, somebody who is no peer is waited for, too. Everybody who connects is sent the greeting, by which
    they know that they reached this port.

    Returns `listens` (whether the port could be had) and `connected` (milliseconds to each peer reached).
    """
    end = time.monotonic() + seconds
    connected: dict[str, float] = {}
    came: set[str] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return {"listens": False, "connected": connected}
        server.listen(len(peers) + 8)
        with ThreadPoolExecutor(max_workers=max(1, len(peers))) as pool:
            tries = [pool.submit(_try_connect, peer, port, end) for peer in peers]
            awaited = len(peers) + bool(greeting)
            while time.monotonic() < end and not (
                all(t.done() for t in tries) and came >= set(peers) and len(came) >= awaited
            ):
                if select.select([server], [], [], 0.05)[0]:
                    connection, (address, _) = server.accept()
                    came.add(address)
                    with connection, contextlib.suppress(OSError):
                        connection.send(greeting.encode())
        connected = {peer: ms for peer, ms in zip(peers, (t.result() for t in tries)) if ms >= 0}
    return {"listens": True, "connected": connected}


def _try_connect(peer: str, port: int, end: float) -> float:
    while time.monotonic() < end:
        start = time.monotonic()
        try:
            with socket.create_connection((peer, port), timeout=max(0.05, min(1.0, end - start))):
                return (time.monotonic() - start) * 1000
        except OSError:
            time.sleep(0.1)
    return -1.0


def try_ssh(options: list[str], peers: list[str]) -> dict[str, str]:
    """What ssh from here to each peer complained of; empty for a login that worked."""

    def attempt(peer: str) -> str:
        command = ["ssh", *options, "-o", "BatchMode=yes", "-o", "ConnectTimeout=4", peer, "true"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=8, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return lines[-1].strip() if done.returncode else ""

    with ThreadPoolExecutor(max_workers=max(1, len(peers))) as pool:
        return dict(zip(peers, pool.map(attempt, peers)))


def examine(order: dict[str, Any]) -> dict[str, Any]:
    """All of it; the keys are the fields of `cpuft.doctor.state.Health`.

    `order` holds: port, peers (addresses), seconds (for the ports), greeting, ssh_options, ssh_peers.
    """
    now = time.time()
    working, steal = watch_cpu()  # before anything else, so that it does not see this probe itself at work
    with ThreadPoolExecutor(max_workers=2) as pool:
        ssh = pool.submit(try_ssh, order["ssh_options"], order["ssh_peers"])
        ports = try_ports(order["port"], order["peers"], order["seconds"], order.get("greeting", ""))
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        governors = {_read(path) for path in glob.glob(GOVERNORS)}
        return {
            "time": now,
            "executable": sys.executable,
            "packages": read_packages(),
            "mpi": read_mpi(),
            "kernels": find_kernels(),
            "own_address": resolve_self(),
            "amx_usable": may_use_amx(),
            "memory_available": read_memory_available(),
            "shm_free": read_free("/dev/shm"),
            "disk_free": read_free("/var/tmp"),
            "mtus": read_mtus(),
            "governors": sorted(governors - {""}),
            "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
            # The average alone remembers a run that has just ended; a moment alone sees what soon passes.
            "load": min(working, os.getloadavg()[0]),
            "memlock": -1 if soft == resource.RLIM_INFINITY else soft,
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            "leftovers": find_leftovers(),
            "listening": find_listening(),
            "steal": steal,
            "ssh": ssh.result(),
            **ports,
        }
