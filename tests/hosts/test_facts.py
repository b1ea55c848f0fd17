"""What a host says of itself, read from made-up kernels' files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cpuft.hosts import facts
from cpuft.hosts.cluster import LOCAL, Access, gather_facts
from cpuft.hosts.facts import read_free_memory, read_memory_left

MEMORY = {"proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:  800 kB\nSwapFree:  100 kB\nHugePages_Total:  0\n"}
V2 = {"proc/self/cgroup": "0::/job/one\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n3:memory:/job\n0::/\n"}
KIB = 1 << 10


def group(path: str, limit: str, used: int, cache: str = "") -> dict[str, str]:
    names = ("limit_in_bytes", "usage_in_bytes") if path.startswith("memory") else ("max", "current")
    folder = f"sys/fs/cgroup/{path}/memory."
    return {f"{folder}{names[0]}": limit, f"{folder}{names[1]}": str(used), f"{folder}stat": cache}


@pytest.mark.parametrize(
    ("files", "free", "left"),
    [
        ({}, 0, -1),
        (MEMORY, 900 * KIB, -1),
        (MEMORY | V2, 900 * KIB, -1),
        (MEMORY | V2 | group("job/one", "max", 0), 900 * KIB, -1),
        (V2 | group("job/one", "500000", 200000, "inactive_file 50000\nactive_file 1000\n"), 0, 351000),
        (V2 | group("job", "400000", 200000) | group("job/one", "max", 200000), 0, 200000),
        (V2 | group("", "300000", 200000), 0, 100000),  # a container's own, which the host tells by another path
        (V2 | group("job", "300000", 300001), 0, 0),
        (V1 | group("memory/job", "300000", 9000, "inactive_file 1\ntotal_inactive_file 4000\n"), 0, 295000),
        (V1 | group("memory", "300000", 9000), 0, 291000),
        (V1 | group("memory", "9000", 900) | group("memory/job", "9223372036854771712", 5), 0, 8100),
        ({"proc/self/cgroup": "nonsense\n3:memory\n"}, 0, -1),
        ({"proc/meminfo": "MemAvailable: much\n"} | V2 | group("job", "much", 3), 0, -1),
    ],
)
def test_free_memory_is_the_kernel_s_and_what_all_groups_leave(
    files: dict[str, str], free: int, left: int, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (read_free_memory(str(tmp_path)), read_memory_left(str(tmp_path))) == (free, left)


def test_this_host_has_some() -> None:
    assert read_free_memory() > 1 << 20


def test_a_run_of_a_sweep_sees_its_share_of_the_quota() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPUFT_CPU_QUOTA", "0.75")
        assert gather_facts((LOCAL,), Access())[0].cpu_quota == 0.75


def test_a_library_of_the_environment_is_found_without_the_module_site(tmp_path: Path) -> None:
    """As programs run on hosts; sys.prefix is then that of the Python from which the environment was made."""
    python, library = tmp_path / "bin/python", tmp_path / "lib/libjemalloc.so.2"
    for path in (python, library):
        path.parent.mkdir()
    python.symlink_to(sys.executable)
    library.touch()
    done = subprocess.run([python, "-IS", facts.__file__], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["libraries"]["jemalloc"] == str(library)
