"""What the backends ask of their libraries, without ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cpuft.comm.backends import ccl
from cpuft.comm.backends.mpi import half_precision_handles
from cpuft.comm.selection import count_repetitions, limit_repetitions
from cpuft.errors import CpuftError, install_command
from cpuft.record import bus_factor


@pytest.mark.parametrize(
    "library, handles",
    (
        ("Intel(R) MPI Library 2021.18.1", {torch.bfloat16: 0x4C000247, torch.float16: 0x4C000246}),
        ("MPICH Version: 4.3.0", {torch.bfloat16: 0x4C00024C}),
        ("Open MPI v5.0.8", {}),
    ),
)
def test_handles_of_16_bit_floats_belong_to_a_library(library: str, handles: dict[torch.dtype, int]) -> None:
    assert half_precision_handles(library) == handles


@pytest.mark.parametrize(
    "environment, cores, expected",
    (
        (
            {"PMI_RANK": "0", "MPI_LOCALNRANKS": "2"},
            {0, 1, 2, 3},
            {"CCL_WORKER_AFFINITY": "3,2", "CCL_YIELD": "sleep"},
        ),
        (
            {"PMI_RANK": "0", "MPI_LOCALNRANKS": "2", "CCL_WORKER_AFFINITY": "0,1"},
            {2, 3},
            {"CCL_WORKER_AFFINITY": "3,2"},
        ),
        (
            {"PMI_RANK": "0", "CCL_WORKER_COUNT": "2"},
            {4, 5, 6, 7},
            {"CCL_WORKER_AFFINITY": "7,6", "CCL_YIELD": "sleep"},
        ),
        (
            {"PMI_RANK": "1", "SLURM_STEP_ID": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            {0, 1, 2, 3},
            {
                "CCL_WORKER_AFFINITY": "3,2",
                "CCL_YIELD": "sleep",
                "CCL_PROCESS_LAUNCHER": "none",
                "CCL_LOCAL_RANK": "1",
                "CCL_LOCAL_SIZE": "2",
            },
        ),
        (
            {"PMI_RANK": "1", "SLURM_STEP_ID": "0", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            {0, 1, 2, 3},
            {"CCL_WORKER_AFFINITY": "3,2", "CCL_YIELD": "sleep"},
        ),
        (
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            {0, 1, 2, 3},
            {
                "CCL_WORKER_AFFINITY": "3,2",
                "CCL_YIELD": "sleep",
                "CCL_PROCESS_LAUNCHER": "none",
                "CCL_LOCAL_RANK": "1",
                "CCL_LOCAL_SIZE": "2",
            },
        ),
    ),
    ids=(
        "workers on the last cores",
        "workers on cores of their own",
        "two workers",
        "srun",
        "mpirun in Slurm",
        "no mpirun",
    ),
)
def test_what_oneccl_is_told(environment: dict[str, str], cores: set[int], expected: dict[str, str]) -> None:
    always = {"CCL_WORKER_OFFLOAD": "1", "CCL_ATL_TRANSPORT": "ofi", "CCL_ATL_SHM": "1"}
    assert ccl.worker_settings(environment, cores) == always | expected


def test_a_missing_shim_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ccl, "__file__", str(tmp_path / "ccl.py"))
    ccl.load.cache_clear()
    with pytest.raises(CpuftError, match=r"headers that the second one compiles with: .*\[train,ccl\]"):
        ccl.load()


def test_importing_needs_neither_library() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import cpuft.comm as c; print(c.BACKENDS['mpi'].find_problem())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert install_command("train", "mpi") in run.stdout


@pytest.mark.parametrize(
    "operation, ranks, factor",
    (("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("broadcast", 4, 1.0)),
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, ranks: int, factor: float) -> None:
    assert bus_factor(operation, ranks) == factor


@pytest.mark.parametrize("nbytes, times", ((1, 50), (25 * 2**20, 20), (2**30, 5)))
def test_large_messages_are_repeated_less(nbytes: int, times: int) -> None:
    assert count_repetitions(nbytes) == times


@pytest.mark.parametrize(
    "wanted, seconds, times", ((50, 0.0, 50), (50, 0.01, 50), (50, 0.126, 23), (50, 2.5, 5), (3, 2.5, 3))
)
def test_what_a_slow_link_delays_is_repeated_less(wanted: int, seconds: float, times: int) -> None:
    assert limit_repetitions(wanted, seconds) == times
