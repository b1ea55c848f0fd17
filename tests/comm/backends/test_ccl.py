"""The backend ccl, without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.comm.backends import ccl
from cpuft.errors import CpuftError


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
            {"PMI_RANK": "0", "MPI_LOCALNRANKS": "2", "CCL_WORKER_AFFINITY": "8,1-2"},
            {2, 3},
            {"CCL_WORKER_AFFINITY": "3,2", "CCL_YIELD": "sleep"},
        ),
        (
            {"PMI_RANK": "0", "CCL_WORKER_AFFINITY": "0-1,\u00b2"},
            {2, 3},
            {"CCL_WORKER_AFFINITY": "3"},
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
        "a range of cores",
        "a range of others",
        "two workers",
        "srun",
        "mpirun in Slurm",
        "no mpirun",
    ),
)
def test_what_oneccl_is_told(environment: dict[str, str], cores: set[int], expected: dict[str, str]) -> None:
    always = {"CCL_WORKER_OFFLOAD": "1", "CCL_ATL_TRANSPORT": "ofi", "CCL_ATL_SHM": "1"}
    assert ccl.worker_settings(environment, cores) == always | expected


@pytest.mark.parametrize("count", ["0", "two", "-1", "\u0662", "9" * 20])
def test_a_wrong_number_of_workers_is_refused(count: str) -> None:
    with pytest.raises(CpuftError, match=r"^CCL_WORKER_COUNT is .*: set it to 1 to 64, or unset it$"):
        ccl.worker_settings({"CCL_WORKER_COUNT": count}, {0, 1})


def test_a_missing_shim_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ccl, "__file__", str(tmp_path / "ccl.py"))
    ccl.load.cache_clear()
    with pytest.raises(CpuftError, match=r"headers for the second one: .*\[train,ccl\]"):
        ccl.load()
