"""What a rank clears away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from cpuft.rank.process import remove_abandoned_memory


def _segment(folder: Path, name: str, age: float) -> None:
    (folder / name).touch()
    os.utime(folder / name, (time.time() - age,) * 2)


def test_memory_of_the_dead_goes_that_of_the_living_and_of_others_stays(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name, age in ((f"{dead.pid}:0:0", 90), (f"{dead.pid}:1:0", 5), (f"{os.getpid()}:0:0", 90), ("a:b:c", 90)):
        _segment(tmp_path, name, age)
    remove_abandoned_memory(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {f"{dead.pid}:1:0", f"{os.getpid()}:0:0", "a:b:c"}
