"""Hugging Face's Trainer and Accelerator use an existing process group of any backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comm.ranks import mpirun


@pytest.mark.proof
@pytest.mark.parametrize("backend", ("ccl", "mpi"))
def test_trainer_and_accelerator_train_over_a_backend(backend: str, tmp_path: Path) -> None:
    run = mpirun(2, "tests.comm.trainers", backend, str(tmp_path), seconds=90)
    assert run.returncode == 0, run.stdout[-3000:]
    assert run.stdout.count("passed") == 2
