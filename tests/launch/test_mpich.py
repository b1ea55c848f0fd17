"""Launches with MPICH, which takes the place of Intel MPI on Arm, here on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import cpuft

pytestmark = pytest.mark.proof
LATE = """
import atexit, os, sys, time
def last():
    if os.environ["RANK"] == "0":
        time.sleep(3)
        open(os.path.join(os.environ["CPUFT_RUN_DIR"], "written"), "w").close()
if sys.argv[1] == "cpuft":
    atexit.register(last)  # runs after MPI has been finalized
    import torch.distributed as dist
    from cpuft import comm
    comm.start("mpi", timeout_seconds=60)
    dist.destroy_process_group()
else:
    from mpi4py import MPI
    import torch.distributed as dist
    from cpuft import comm
    comm.start("gloo")
    dist.destroy_process_group()
    MPI.Finalize()
    last()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with all packages of this one, but another MPI."""
    folder = tmp_path_factory.mktemp("mpich")
    venv.create(folder, with_pip=True)
    pins = Path(cpuft.__file__).with_name("constraints.txt").read_text()
    chosen = re.findall(r"^(?:mpich|mpi4py)==[\d.]+", pins, re.MULTILINE)
    own = str(folder / "bin/python")
    subprocess.run([own, "-m", "pip", "install", "--quiet", *chosen], check=True, timeout=300)
    places = (sysconfig.get_paths()["purelib"], Path(cpuft.__file__).parents[1])
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (folder / "lib" / version / "site-packages/others.pth").write_text("".join(f"{place}\n" for place in places))
    return own


@pytest.mark.parametrize("who", ["cpuft", "script"])
def test_a_rank_that_ends_late_is_not_killed(python: str, who: str, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    environ = os.environ | {"CPUFT_STATE": str(tmp_path / "state")}
    words = ("launch", "--np", "2", "--no-check", "--run-dir", "run", "--", "late.py", who)
    done = subprocess.run(
        [python, "-m", "cpuft", *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, (tmp_path / "run/written").exists()) == (0, True), done.stderr
    assert "start 2 ranks with mpich" in (tmp_path / "run/plan.sh").read_text()
