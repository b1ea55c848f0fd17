"""A program that reports the facts of the host on which it runs, as one JSON object on standard output.

The launcher sends this file to the Python of hosts that may not have cpuft, so it imports only the standard library.
Its arguments are addresses of other hosts.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import random
import shutil
import socket
import struct
import subprocess
import sys

_SIOCGIFADDR = 0x8915  # linux/sockios.h: get an interface's IPv4 address
PORTS = range(20000, 32000)
"""TCP ports for torch's store and the doctor; the kernel usually gives clients higher ones."""
_PRELOADS = ("tcmalloc", "tcmalloc_minimal", "jemalloc", "iomp5")


def read_interfaces() -> dict[str, str]:
    """Return {"lo": "127.0.0.1", ...}, interfaces that have an IPv4 address; on macOS only lo0, on Windows {}."""
    if sys.platform == "darwin":
        return {name: "127.0.0.1" for _, name in socket.if_nameindex() if name.startswith("lo")}
    if sys.platform != "linux":
        return {}
    import fcntl

    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def _read_route(target: str) -> str:
    """Return the local IPv4 address from which `target` (name or address) is reached; "" without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # of UDP: this only asks the kernel, and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def _find_library(name: str) -> str:
    """Return the path of a shared library, in this Python's environment or else the system's; empty for none."""
    # Of a virtual environment, sys.prefix is not known without the module site.
    prefix = os.path.dirname(os.path.dirname(sys.executable or "/"))
    found = sorted(glob.glob(os.path.join(prefix, "lib", f"lib{name}.so*")))
    for folder in ("/usr/lib64", f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/local/lib", "/usr/lib"):
        found += sorted(glob.glob(os.path.join(folder, f"lib{name}.so*")))
    return found[0] if found else ""


def has_efa(devices: str, library: str) -> bool:
    """Return whether the folder `devices` has an Elastic Fabric Adapter, and `library`, libefa's path, is not empty."""
    drivers = [os.path.basename(os.path.realpath(path)) for path in glob.glob(f"{devices}/*/device/driver")]
    return "efa" in drivers and bool(library)


def _lscpu() -> str:
    command = shutil.which("lscpu") or "/usr/bin/lscpu"
    try:
        return subprocess.run(
            [command, "-p=CPU,CORE,SOCKET,NODE"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_quota() -> float:
    if share := os.environ.get("CPUFT_CPU_QUOTA"):  # the part of a run that shares this machine with others
        return float(share)
    quota, _, period = _read_text("/sys/fs/cgroup/cpu.max").partition(" ")
    if not quota:
        quota = _read_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        period = _read_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else 0.0


def read_free_memory(root: str = "") -> int:
    """Return the bytes that processes of this machine can still get, with swap; 0 if not known. `root` is for tests."""
    memory = _read_numbers(f"{root}/proc/meminfo")
    return memory.get("MemAvailable", 0) + memory.get("SwapFree", 0) << 10


def read_memory_left(root: str = "") -> int:
    """Return the bytes that control groups' limits leave (cached files are free); -1: no limit. `root` is for tests."""
    found = []
    for line in _read_text(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        # In a container the path may be the host's while the mounted file system is the container's own.
        folder = f"{root}/sys/fs/cgroup{'/memory' if controllers else ''}"
        for part in ("", *path.strip("/").split("/")) if not controllers or "memory" in controllers.split(",") else ():
            folder += f"/{part}"
            limit = _read_text(f"{folder}/memory.max") or _read_text(f"{folder}/memory.limit_in_bytes")
            used = _read_text(f"{folder}/memory.current") or _read_text(f"{folder}/memory.usage_in_bytes")
            values = _read_numbers(f"{folder}/memory.stat")
            # In v1 only the values that begin with total_ include the groups below, as the usage does.
            cache = sum(values.get(f"total_{name}", values.get(name, 0)) for name in ("active_file", "inactive_file"))
            found += [int(limit) - int(used) + cache] if limit.isdecimal() and used.isdecimal() else []
    return max(0, min(found)) if found else -1


def _read_numbers(path: str) -> dict[str, int]:
    lines = [line.split() for line in _read_text(path).splitlines()]
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def find_free_port() -> int:
    """Return a random one of PORTS that nothing uses now, or if they are in use, any such port. It is not reserved."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        for port in random.SystemRandom().sample(PORTS, 100):
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                return port
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def gather(targets: list[str]) -> dict[str, object]:
    """Return the facts of this host for `cpuft.hosts.topology.parse_facts`; `targets` are the keys of `routes`."""
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "boot_id": _read_text("/proc/sys/kernel/random/boot_id"),
        "machine": platform.machine(),
        "system": sys.platform,
        "cpuinfo": _read_text("/proc/cpuinfo").partition("\n\n")[0],
        "lscpu": _lscpu(),
        "allowed_cpus": sorted(os.sched_getaffinity(0))
        if sys.platform == "linux"
        else list(range(os.cpu_count() or 1)),
        "cpu_quota": _cpu_quota(),
        "memory_free": read_free_memory(),
        "memory_left": read_memory_left(),
        "interfaces": read_interfaces(),
        "routes": {target: _read_route(target) for target in targets},
        "free_port": find_free_port(),
        "libraries": {name: path for name in _PRELOADS if (path := _find_library(name))},
        "uid": os.geteuid(),
        "efa": has_efa("/sys/class/infiniband", _find_library("efa")),
    }


if __name__ == "__main__":
    print(json.dumps(gather(sys.argv[1:])))
