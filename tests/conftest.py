"""What all tests share: golden files, facts of hosts that are not here, and a check that nothing is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import inspect
import itertools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as trials

from cpuft.cli import main
from cpuft.files import cache_path
from cpuft.hosts.topology import HostFacts
from tests.provision.simulated import needs_root

DATA = Path(__file__).parent / "data"
GLUE = Path(__file__).parents[2] / "shared" / "data" / "glue"
TEXTS = GLUE.with_name("text")
PEERS = Path(__file__).parents[2] / "shared" / "peers"
COMPILE_ONCE = str(Path(__file__).with_name("compile-once"))
"""g++, which remembers what it has compiled: kernels take 20 s of a core for each class of CPUs."""

REAL_NAMES = {"run_cpuft", "mpirun", "fork_ranks", "spawn", "Popen", "executable", "simulate", "cluster", "world"}
"""Whatever a test mentions, or takes as a fixture, that starts cpuft, ranks, another Python or a cluster."""
NAMES_OF_MARKS = {"clusters": ("needs_root", "mark.clusters"), "alone": ("mark.alone",), "proof": ("mark.proof",)}
"""What a file of tests with a mark contains."""
REAL_FOLDERS = ("train/fast/",)
"""Whose tests train, or compile what trains."""

needs_texts = pytest.mark.skipif(not TEXTS.is_dir(), reason=f"no books beside the checkout ({TEXTS})")
needs_glue = pytest.mark.skipif(not GLUE.is_dir(), reason=f"no GLUE download beside the checkout ({GLUE})")
Golden = Callable[[str, str], None]


FOREIGN = (
    "PMI_",
    "MPI_LOCAL",
    "OMPI_",
    "SLURM_",
    "CPUFT_",
    "OMP_",
    "CCL_",
    "FI_",
    "GLOO_",
    "I_MPI_",
    "KMP_",
    "GLIBC_TUNABLES",
    "MALLOC_",
    "HF_",
)
FOREIGN_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONIOENCODING",
)
"""What a launcher or a user has set where the tests are started is nothing to them."""

ASLEEP = {"OMP_WAIT_POLICY": "passive"}
"""OpenMP's threads sleep while they wait. They spin otherwise, and beside a program that has the core of one of them, a
tiny model takes a hundred times as long."""

trials.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
trials.load_profile("any machine")


def pytest_configure() -> None:
    for name in [name for name in os.environ if name.startswith(FOREIGN) or name in FOREIGN_NAMES]:
        del os.environ[name]
    _load_openmp()


def _load_openmp() -> None:
    """Let threads of this process sleep while they wait, and leave it to each test for others."""
    spec = importlib.util.find_spec("torch")
    os.environ |= ASLEEP
    for path in Path(spec.origin).parent.glob("lib/libgomp*.so*") if spec and spec.origin else ():
        ctypes.CDLL(str(path))
    for name in ASLEEP:
        del os.environ[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="write golden files anew instead of comparing")


@functools.cache
def _names(path: Path, mark: str) -> bool:
    return any(word in path.read_text(encoding="utf-8") for word in NAMES_OF_MARKS[mark])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files that do not name the mark with which `-m` begins: importing all files takes 20 s."""
    mark = str(config.option.markexpr).partition(" ")[0]
    is_test = mark in NAMES_OF_MARKS and collection_path.match("test_*.py")
    return True if is_test and not _names(collection_path, mark) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `real` what scripts/test quick leaves out, which is whatever asks for root, cores or data, and as
    `clusters` what makes simulated hosts: only one of these runs at a time.
    """
    for item in items:
        if needs_root.mark in item.iter_markers():
            item.add_marker("clusters")
        for mark in NAMES_OF_MARKS:
            if item.get_closest_marker(mark) and not _names(item.path, mark):
                raise pytest.UsageError(f"{item.path} must name the mark {mark} of {item.name}")
        if isinstance(item, pytest.Function) and (
            item.path.relative_to(Path(__file__).parent).as_posix().startswith(REAL_FOLDERS)
            or item.get_closest_marker("skipif")
            or REAL_NAMES & {*item.fixturenames, *names_used(inspect.unwrap(item.function))}
        ):
            item.add_marker("real")


@functools.cache
def names_used(function: FunctionType) -> frozenset[str]:
    """All names in the code of a function, and of the functions of tests/ that it calls."""
    names, functions = set[str](), [function]
    for one in functions:
        codes = [one.__code__]
        for code in codes:
            codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
            for name in {*code.co_names, *code.co_freevars} - names:
                names.add(name)
                used = one.__globals__.get(name)
                if isinstance(used, FunctionType) and used.__module__.startswith(("tests", "scripts")):
                    functions.append(used)
    return frozenset(names)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with the file of that name in tests/data; the file must exist."""

    def check(name: str, text: str) -> None:
        path = DATA / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text

    return check


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[None]:
    """The cache folder is in the test's own. It has the kernels of the user's, so that ranks compile none."""
    own = tmp_path / "cpuft"
    own.mkdir(mode=0o700)
    for kernels in cache_path(os.environ).glob("kernels-*.so"):
        (own / kernels.name).symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield


def list_children() -> set[str]:
    """Command lines of all processes that cpuft or mpirun started and that still run."""
    found, own = set(), f"TEST_OF={os.getpid()}\0".encode()
    for name in filter(str.isdecimal, os.listdir("/proc")):  # without Path: this is done after each test
        try:
            with open(f"/proc/{name}/environ", "rb", buffering=0) as file:
                if own not in file.read():
                    continue
            words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        # multiprocessing keeps one tracker of its own as long as this process lives.
        if int(name) != os.getpid() and words and "multiprocessing.resource_tracker" not in words:
            found.add(f"{name} {words}")
    return found


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No process of a test outlives it, and its working directory is its own."""
    before = dict(os.environ)
    monkeypatch.setenv("TEST_OF", str(os.getpid()))
    monkeypatch.chdir(tmp_path)
    yield
    # One that was killed with its parent needs a moment on a busy machine. A host looks every two seconds whether files
    # that were sent to it are still there (launch/sent.sh).
    began = time.monotonic()
    while left := list_children():
        if time.monotonic() - began > (4.0 if all("sleep 2 " in line for line in left) else 1.0):
            break
        time.sleep(0.1)
    for line in left:
        # Else every later test fails for it, and pytest waits for it at its end.
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    assert left == set()
    monkeypatch.undo()  # a variable of the user's shell that a test removes for itself, such as a proxy, is set again
    changed = {name for name in before.keys() ^ os.environ.keys() if name != "PYTEST_CURRENT_TEST"}
    assert changed <= {"KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"}


def wait_until(holds: Callable[[], Any], what: str = "", seconds: float = 120.0, pause: float = 0.05) -> None:
    """Wait until something holds. The limit is for what never comes: a busy machine needs long for what it does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(pause)


def run_cpuft(
    *words: str, seconds: float = 300, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does."""
    command = [sys.executable, "-m", "cpuft", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=os.environ | ASLEEP | dict(settings or {}),
        check=False,
    )


def call_cpuft(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit code, the output and the errors of a command line that runs in this process: imports take most of
    the time of a process of its own.
    """
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capfd.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def find_arguments(script: str, module: str) -> list[str]:
    """The arguments with which a script of --dry-run starts a module."""
    words = shlex.split(script.replace("\\\n", ""), comments=True)
    return list(itertools.takewhile(lambda word: word.startswith("--"), words[words.index(module) + 1 :]))


def run_shell(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `python` and `cpuft` are this environment's. It mounts for itself alone."""
    functions = (
        f'python() {{ {shlex.quote(sys.executable)} "$@"; }}; cpuft() {{ python -m cpuft "$@"; }}; set -o pipefail; '
    )
    apart = ["unshare", "--mount"] if "mount " in script else []
    return subprocess.run(
        [*apart, "bash", "-c", functions + script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | ASLEEP | variables,
        check=False,
    )


def make_lscpu(sockets: int, cores: int, threads: int = 2, numa_per_socket: int = 1) -> str:
    """What lscpu prints for a machine of Intel's numbering: all first hardware threads, then all second ones."""
    lines = ["# CPU,Core,Socket,Node"]
    for thread in range(threads):
        for core in range(sockets * cores):
            socket = core // cores
            node = socket * numa_per_socket + (core % cores) * numa_per_socket // cores
            lines.append(f"{thread * sockets * cores + core},{core},{socket},{node}")
    return "\n".join(lines) + "\n"


def make_facts(number: int = 1, sockets: int = 2, cores: int = 16, target: str = "10.0.0.2") -> HostFacts:
    """Facts of host `number` of a cluster of Xeon servers on 10.0.0.0/24, docker installed."""
    return HostFacts(
        hostname=f"node{number}",
        python="3.11.7",
        kernel="6.1.0",
        boot_id=f"boot-{number}",
        cpu_model="Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz",
        cpu_flags=("avx2", "avx512f", "avx512_vnni"),
        lscpu=make_lscpu(sockets, cores),
        allowed_cpus=tuple(range(sockets * cores * 2)),
        cpu_quota=0.0,
        interfaces={"lo": "127.0.0.1", "docker0": "172.17.0.1", "ens5": f"10.0.0.{number}"},
        routes={target: f"10.0.0.{number}"},
        free_port=40000 + number,
        libraries={"tcmalloc": "/usr/lib64/libtcmalloc.so.4", "iomp5": "/opt/env/lib/libiomp5.so"},
        uid=0,
    )
