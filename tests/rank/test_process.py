"""What a rank does before and after its worker: cores, limits, leftover shared memory, marks for the launcher."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpuft.errors import CpuftError
from cpuft.rank.process import (
    FAILED_MARK,
    abort_job,
    leave_job,
    parse_cores,
    parse_failure,
    parse_missing_ranks,
    refuse_later_start,
    remove_abandoned_memory,
)
from cpuft.secret_variables import take_secrets


def _segment(folder: Path, name: str, age: float) -> None:
    (folder / name).touch()
    os.utime(folder / name, (time.time() - age,) * 2)


def test_shared_memory_of_ended_processes_is_removed_and_all_other_is_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name, age in ((f"{dead.pid}:0:0", 90), (f"{dead.pid}:1:0", 5), (f"{os.getpid()}:0:0", 90), ("a:b:c", 90)):
        _segment(tmp_path, name, age)
    remove_abandoned_memory(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {f"{dead.pid}:1:0", f"{os.getpid()}:0:0", "a:b:c"}


@pytest.mark.parametrize("text", ["", "[]", '{"owner": 3, "name": "other"}', '{"owner": 2, "name": "run"}', "later"])
@pytest.mark.parametrize("folder", [".", "run"])
def test_a_rank_of_an_earlier_start_does_not_start(text: str, folder: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    later = '{"id": "a", "name": "run", "owner": 3}'
    (tmp_path / folder / "state.json").write_text(later if text == "later" else text)
    environ = {"CPUFT_RUN_DIR": f"{tmp_path}/run", "CPUFT_OWNER": "2"}
    if text == "later":
        with pytest.raises(
            CpuftError, match=r"^start 3 of the run has begun, and this rank is of start 2: let it end$"
        ):
            refuse_later_start(environ)
        environ = {"CPUFT_RUN_DIR": f"{tmp_path}/run"}
    refuse_later_start(environ)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("CPUFT_WORLD_SIZE", "2", "unset RANK"),
        ("CPUFT_HOSTNAME", "elsewhere", "check the names in the hostfile"),
        ("CPUFT_VERSION", "0.0.9", "install the same version on all hosts with cpuft provision"),
    ],
)
def test_a_rank_that_is_not_where_the_plan_put_it_or_has_another_version_ends(
    name: str, value: str, advice: str
) -> None:
    command = [sys.executable, "-m", "cpuft.rank", "true"]
    environ = {key: text for key, text in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env={**environ, name: value}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert value in done.stderr
    assert advice in done.stderr


def test_secret_variables_are_read_once_and_their_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "0-1").write_text('{"HF_TOKEN": "a\\nb"}')
    environ = {"CPUFT_SENT": f"{tmp_path}/0"}
    assert take_secrets(environ, "1") == {"HF_TOKEN": "a\nb"}
    assert list(tmp_path.iterdir()) == []
    assert take_secrets(environ, "1") == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_secret_variables_are_not_read_without_a_path_or_from_a_file_of_another_user(tmp_path: Path) -> None:
    Path("-0").write_text('{"LD_PRELOAD": "x"}')
    assert take_secrets({}, "0") == {}
    theirs = tmp_path / "0-0"
    theirs.write_text('{"LD_PRELOAD": "x"}')
    os.chown(theirs, 65534, 65534)
    assert take_secrets({"CPUFT_SENT": f"{tmp_path}/0"}, "0") == {}
    assert theirs.exists()


@pytest.mark.parametrize("soft, most, allowed", [(64, 65536, 512), (64, 256, 256), (300, 256, 300), (512, 65536, 512)])
def test_the_limit_of_open_files_is_raised_up_to_the_hard_limit(soft: int, most: int, allowed: int) -> None:
    code = (
        f"import resource as r; from cpuft.rank.process import raise_open_files_limit; raise_open_files_limit({most}); "
    )
    code += "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    limit = f'ulimit -Sn {soft}; ulimit -Hn 512; exec "$0" -c "$1"'
    done = subprocess.run(["sh", "-c", limit, sys.executable, code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{allowed} 512\n", done.stderr


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ({}, b"cmd=abort exitcode=7\n"),
        ({"SLURM_STEP_ID": "1", "MPI_LOCALRANKID": "0"}, b"cmd=abort exitcode=7\n"),
        ({"SLURM_STEP_ID": "1"}, b""),
    ],
    ids=("Hydra", "Hydra in a job", "srun"),
)
def test_hydra_is_told_to_abort_and_srun_is_not(launcher: dict[str, str], message: bytes) -> None:
    """srun would take the message for a broken start of PMI, and write that to the rank's log."""
    reading, writing = os.pipe()
    abort_job({"PMI_FD": str(writing), **launcher}, 7)
    os.close(writing)
    with open(reading, "rb") as file:
        assert file.read() == message


@pytest.mark.parametrize(
    ("library", "is_finalized", "message"),
    [
        ("MPICH Version:      5.0.2", True, b"cmd=finalize\n"),
        ("MPICH Version:      5.0.2", False, b""),
        ("MPICH Version:      4.1.2", True, b""),
        ("Intel(R) MPI Library 2021.18", True, b""),
    ],
)
def test_hydra_is_told_that_mpich_is_finalized(library: str, is_finalized: bool, message: bytes) -> None:
    mpi = SimpleNamespace(Is_finalized=lambda: is_finalized, Get_library_version=lambda: library)
    hydra, rank = socket.socketpair()
    with hydra, rank:
        hydra.sendall(b"cmd=finalize_ack rc=0\n")
        leave_job(mpi, {"PMI_FD": str(rank.fileno())})
        rank.setblocking(False)
        assert select.select([rank], [], [], 0)[0] == ([] if message else [rank])  # whether the answer is still there
        rank.shutdown(socket.SHUT_WR)
        assert hydra.recv(100) == message


@pytest.mark.parametrize("text", ["rank {} on a exit code 1", "rank 0 on a exit code {}", "rank 0 on a exit code 1 {}"])
def test_a_script_that_prints_the_mark_with_too_long_numbers_does_no_harm(text: str) -> None:
    line = f"{FAILED_MARK} {text.format('9' * 5000)}\n"
    assert parse_missing_ranks(line) == set()
    parse_failure(line)


@pytest.mark.parametrize("text, rank, cores", [("", 0, ()), ("0,1;2", 0, (0, 1)), ("0,1;2", 1, (2,)), ("0,1;2", 2, ())])
def test_cores_of_a_rank(text: str, rank: int, cores: tuple[int, ...]) -> None:
    assert parse_cores(text, rank) == cores
