"""How a launch ends that may be gone on with: its exit code, and the last line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from cpuft.config import LaunchConfig, ScriptConfig, option_names
from cpuft.errors import AGAIN, CpuftError
from cpuft.launch.failures import ended_to_go_on, read_failures
from cpuft.launch.resume import read_resumed
from cpuft.record import FILE_NAME, InterruptedLine, parse_lines


def describe_ending(
    code: int,
    run_dir: str,
    hosts: tuple[str, ...],
    config: LaunchConfig,
    script: Sequence[str],
    own: ScriptConfig | None = None,
) -> tuple[int, str]:
    """The exit code of a launch whose ranks on `hosts` gave `code`, and its last line, if all went as it was to go.

    75 is kept for what can be resumed; a run that has not come to its first step cannot.
    """
    if code != AGAIN:
        return code, "" if code else f"run: {run_dir}"
    try:
        read_resumed(run_dir, bool(script))
    except CpuftError:
        return 1, ""
    if not ended_to_go_on(read_failures(Path(run_dir, "logs"), hosts)):
        return code, ""
    record, how = Path(run_dir, FILE_NAME), "ranks ended with 75"
    for line in parse_lines(record.read_text(encoding="utf-8"), str(record))[-1:] if not script else ():
        if isinstance(line, InterruptedLine):
            how = f"interrupted by {line.by} after update {line.step} of {line.updates}"
    where = [f"--{name}={value}" for name in ("cluster", "hostfile") if (value := getattr(config, name))]
    where += [f"--{name}" for name in option_names(ScriptConfig) if script and own and getattr(own, name)]
    words = ["cpuft", "launch", "--resume", run_dir, *where, *(["--", *script] if script else [])]
    return code, f"cpuft: {how}: go on with {shlex.join(words)}"
