"""The registration of backends with torch."""

from __future__ import annotations

import subprocess
import sys

from cpuft.errors import install_command


def test_importing_needs_neither_library() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import cpuft.comm as c; print(c.BACKENDS['mpi'].find_problem())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert install_command("train", "mpi") in run.stdout
