"""A rank or a host is lost while others wait for it: the run ends in time, and says who it was."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import run_cpuft

STOPPED = """
import datetime, os, signal, torch, torch.distributed as dist
from cpuft import comm
comm.start("gloo")
group = dist.new_group(timeout=datetime.timedelta(seconds=3))
dist.barrier()
dist.get_rank() == 1 and os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1), group=group)
"""


def test_a_stopped_rank_is_named_and_nobody_else() -> None:
    Path("stopped.py").write_text(STOPPED, encoding="utf-8")
    done = run_cpuft("launch", "--np", "2", "--run-dir", "run", "--", "stopped.py", seconds=60)
    assert done.returncode == 75
    lines = done.stderr.rstrip().splitlines()
    assert lines[-1] == "cpuft: rank 1 on localhost did not answer the others: is it stopped? look at it there"
    assert "cpuft: rank 0 waited in vain:" in lines
    assert "rank 0 on localhost" not in done.stderr
    assert "before any rank did" not in done.stderr
