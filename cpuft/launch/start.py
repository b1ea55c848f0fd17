"""One start of a run, wherever its master is; and what is said when it is stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from cpuft.errors import Interrupted
from cpuft.hosts.cluster import Cluster
from cpuft.launch.remote import run_anywhere
from cpuft.plan import RunPlan


def start_run(
    plan: RunPlan, run_dir: str, cluster: Cluster, seconds: float, say: Callable[[str], None], grace: float | None
) -> int:
    """As `run_anywhere`; when a signal stops the run, what is left of it is said, and this program ends."""
    try:
        return run_anywhere(plan, run_dir, cluster, os.environ, seconds, say, grace)
    except Interrupted as stopped:
        recorded = (Path(run_dir) / "record.jsonl").exists()
        what = "what it recorded" if recorded else "nothing was recorded yet; what ranks said"
        kept = f"{what} is in {run_dir}" if Path(run_dir).exists() else "nothing had started"
        say(f"cpuft: stopped by {stopped}: all ranks are gone, {kept}")
        sys.exit(stopped.exit_code)
