"""A user's script runs as Python runs it, and ends without hanging."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from cpuft.argv import module_command
from cpuft.rank.script import restrict_stores, wait_for_listener


def run(
    folder: Path, text: str, *words: str, module: str = "cpuft.rank.script", **settings: str
) -> tuple[str, str, int]:
    """Return the standard output, standard error and exit code of a script."""
    (folder / "beside.py").write_text("NAME = 'beside'\n")
    (folder / "script.py").write_text(text)
    python = module_command(sys.executable, module) if module else (sys.executable,)
    command = [*python, str(folder / "script.py"), *words]
    environ = dict(os.environ) | settings
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
    return done.stdout, done.stderr, done.returncode


@pytest.mark.parametrize(
    "text",
    [
        "import sys, beside; print(__name__, __file__, sys.argv, sys.path, beside.NAME)",
        "raise SystemExit",
        "raise SystemExit(7)",
        "import sys; sys.exit('no data')",
        "def f():\n    raise ValueError('boom')\nf()",
        "def f(:",
        "import sys; sys.stderr.write('x'); sys.stdout.write('no newline')",
        "import atexit, threading, time\natexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()",
        "import atexit, sys\natexit.register(lambda: print(type(sys.last_value)))\nraise ValueError",
        "import ctypes; ctypes.CDLL(None).puts(b'from C')",
        "import multiprocessing\ndef f(x): return x + 1\n"
        "if __name__ == '__main__':\n    print(multiprocessing.get_context('spawn').Pool(1).map(f, [1]))",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
        "def f(rate: float): pass\nprint(f.__annotations__)",
        "__builtins__.count = 3\nprint(count)",
    ],
    ids=[
        *("names", "exit", "code", "words", "traceback", "syntax", "buffers", "ends", "failed", "C", "spawn", "pickle"),
        *("annotations", "builtins"),
    ],
)
def test_a_script_runs_as_python_runs_it(tmp_path: Path, text: str) -> None:
    assert run(tmp_path, text, "--lr", "1") == run(tmp_path, text, "--lr", "1", module="")


def test_a_link_to_a_script_finds_the_modules_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    run(tmp_path / "code", "import beside; print(beside.NAME, __file__)")
    (tmp_path / "link.py").symlink_to("code/script.py")
    command = [*module_command(sys.executable, "cpuft.rank.script"), str(tmp_path / "link.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"beside {tmp_path}/link.py\n", done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nfrom . import inner\nprint(__name__, __file__, __package__, sys.argv, sys.path, inner.NAME)",
        "raise SystemExit(7)",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
    ],
)
def test_a_module_runs_as_python_runs_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "inner.py").write_text("NAME = 'inner'\n")
    (tmp_path / "package" / "train.py").write_text(text)
    results = []
    for python in ((sys.executable,), module_command(sys.executable, "cpuft.rank.script")):
        command = [*python, "-m", "package.train", "--lr", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
        results.append((done.stdout, done.stderr, done.returncode))
    assert results[0] == results[1]


def test_the_interpreter_is_not_finalized(tmp_path: Path) -> None:
    # Destructors of modules would run while gloo's threads still need the interpreter.
    text = "class A:\n    def __del__(self): print('gone', flush=True)\nkept = A()\n"
    assert run(tmp_path, text, module="")[0] == "gone\n"
    assert run(tmp_path, text)[0] == ""


LEAVES_A_FUNCTION = """
import torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel

def main():
    {start}
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.randn(1, 2)).sum().backward()
    dist.destroy_process_group()

def is_gloos(task):
    try:
        return "gloo_runloop" in (task / "comm").read_text()
    except OSError:  # ended meanwhile
        return False

def count_threads():
    return sum(map(is_gloos, Path("/proc/self/task").iterdir()))

main()  # something of torch holds the first group that a model was made for
before = count_threads()
main()
print(count_threads() > before)
"""


@pytest.mark.parametrize(
    "start",
    [
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "from cpuft.comm import start; start('gloo', 60, dist.HashStore(), 0, 1)",
    ],
    ids=["torch", "cpuft"],
)
def test_the_group_of_all_ranks_is_never_destroyed(tmp_path: Path, start: str) -> None:
    # Its destructor and a thread of gloo could wait for each other: with one core per rank, two runs of a hundred did.
    output, complaints, code = run(tmp_path, LEAVES_A_FUNCTION.format(start=start))
    assert (output, code) == ("True\n", 0), complaints


def test_without_cpuft_the_group_of_all_ranks_is_destroyed(tmp_path: Path) -> None:
    text = LEAVES_A_FUNCTION.format(
        start="dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
    )
    try:
        output, complaints, code = run(tmp_path, text + "\nimport os, sys; sys.stdout.flush(); os._exit(0)", module="")
    except subprocess.TimeoutExpired:
        return  # The hang that cpuft avoids. It is rare, and shows as well that the group was destroyed.
    assert (output, code) == ("False\n", 0), complaints


STORE = """
import os, sys, torch.distributed as dist
{start}
lines = [line.split() for name in ("tcp", "tcp6") for line in open("/proc/net/" + name)]
here = [words[1].split(":") for words in lines if words[3] == "0A"]
print([address for address, port in here if int(port, 16) == int(os.environ["MASTER_PORT"])])
dist.destroy_process_group()
"""
BY_ENVIRONMENT = "dist.init_process_group('gloo')"
BY_ADDRESS = "dist.init_process_group('gloo', f'tcp://127.0.0.1:{os.environ[\"MASTER_PORT\"]}', rank=0, world_size=1)"
TWICE = f"{BY_ENVIRONMENT}; dist.destroy_process_group(); {BY_ENVIRONMENT}"
LOOPBACK, ALL = "0100007F", "0" * 32


@pytest.mark.parametrize(
    ("start", "master", "module", "address"),
    [
        (BY_ADDRESS, "127.0.0.1", "cpuft.rank.script", LOOPBACK),
        (TWICE, "127.0.0.1", "cpuft.rank.script", LOOPBACK),
        ("from cpuft.comm import start; start('gloo')", "127.0.0.1", "cpuft.rank.script", LOOPBACK),
        ("from cpuft.comm import start; start('gloo')", "127.0.0.1", "", LOOPBACK),
        # A name may mean loopback on its own host, and another address elsewhere.
        (BY_ENVIRONMENT, "localhost", "cpuft.rank.script", ALL),
        (BY_ENVIRONMENT, "127.0.0.1", "", ALL),
    ],
)
def test_the_store_listens_on_the_address_of_rank_0_only(
    tmp_path: Path, start: str, master: str, module: str, address: str
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": master, "MASTER_PORT": str(port)}
    text = STORE.format(start=start)
    output, complaints, code = run(tmp_path, text, module=module, **world)
    assert (output, code) == (f"['{address}']\n", 0), complaints


def test_ranks_that_start_before_rank_0_wait_for_its_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    listening: list[socket.socket] = []
    rendezvous = types.SimpleNamespace(TCPStore=lambda **place: len(listening))
    restrict_stores(rendezvous)
    master = threading.Timer(0.3, lambda: listening.append(socket.create_server(("127.0.0.1", port))))
    master.start()
    try:
        assert rendezvous.TCPStore(host_name="127.0.0.1", port=port, is_master=False) == 1
    finally:
        master.join()
        listening[0].close()


def test_torch_reports_a_rank_0_that_never_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    wait_for_listener("127.0.0.1", port, 0.05)
    wait_for_listener("no.such.host.invalid", port)


FINALIZES = """
import atexit, sys, types
mpi = sys.modules["cpuft.comm.backends.mpi"] = types.ModuleType("mpi")
mpi._finalize = lambda: print("waits for all ranks")
atexit.register(mpi._finalize)
from cpuft.rank.script import end_process
end_process(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code, said", [(0, "waits for all ranks\n"), (2, "")])
def test_a_rank_that_has_failed_does_not_wait_for_the_others_to_finalize_mpi(code: int, said: str) -> None:
    command = [sys.executable, "-c", FINALIZES, str(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (code, said)
