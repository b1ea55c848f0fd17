"""Watches a run from its start to its end: shows rank 0, keeps the logs, says why a rank failed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.mpi import parse_exit_codes, worst_exit_code
from cpuft.plan import Plan, Step, format_plan

_TRACE_LINES = 15
_CHECK_FAILED = 2
"""Exit code of a step that refused its input with one line."""


@dataclass
class Tail:
    """Copies what is appended to a file onto a stream of ours."""

    path: Path
    stream: IO[str]
    position: int = 0

    def copy(self) -> None:
        """Copy what has come since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                new = file.read()
        except FileNotFoundError:
            return
        self.position += len(new)
        if new:
            self.stream.write(new.decode(errors="replace"))
            self.stream.flush()


def run_plan(plan: Plan, run_dir: str, hosts: tuple[str, ...], environ: Mapping[str, str], seconds: float) -> int:
    """Run a launch's plan to its end; the exit code of its worst rank.

    `hosts` names each rank's host. The plan is kept as `plan.sh` in the run directory.

    Raises
    ------
    CpuftError: a step before the ranks refused the input; the run directory is taken away again.
    Interrupted: a signal came; all ranks are gone, and the record up to then is kept.
    """
    *before, last = [step for stage in plan.stages for step in stage]
    try:
        for step in before:
            _run_before(step, environ)
        _write(Path(run_dir) / "plan.sh", format_plan(plan))
    except BaseException:
        shutil.rmtree(run_dir, ignore_errors=True)
        raise
    return _run_ranks(last, Path(run_dir) / "logs", hosts, environ, seconds)


def _write(path: Path, text: str) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    beside.rename(path)


def _run_before(step: Step, environ: Mapping[str, str]) -> None:
    with tempfile.TemporaryFile() as output:
        code = execute.run_step(step, environ, output, lambda: None)
        output.seek(0)
        said = output.read().decode(errors="replace").strip()
    if code == _CHECK_FAILED:
        line = next((line for line in said.splitlines() if line.startswith("cpuft: error: ")), said)
        raise CpuftError(line.removeprefix("cpuft: error: "))
    if code:
        raise RuntimeError(f"{step.why}: exit code {code}\n{said}")


def _run_ranks(step: Step, logs: Path, hosts: tuple[str, ...], environ: Mapping[str, str], seconds: float) -> int:
    tails = [Tail(logs / "rank-0.out", sys.stdout), Tail(logs / "rank-0.err", sys.stderr)]

    def copy_tails() -> None:
        for tail in tails:
            tail.copy()

    with (logs / "mpirun.log").open("wb") as output:
        try:
            code = execute.run_step(step, environ, output, copy_tails, seconds)
        except TimeoutError as error:
            raise CpuftError(f"the run was stopped: {error}: raise --time-limit, or train for less") from None
    if not code:
        return 0
    said = (logs / "mpirun.log").read_text(errors="replace")
    codes = parse_exit_codes(said)
    print(describe_failure(codes, hosts, read_errors(logs, len(hosts)), said), file=sys.stderr, flush=True)
    return worst_exit_code(codes, code)


def read_errors(logs: Path, ranks: int) -> dict[int, str]:
    """What each rank wrote to standard error, those that fell silent first in front: the first cause is there."""
    files = [
        (path.stat().st_mtime_ns, rank, path) for rank in range(ranks) if (path := logs / f"rank-{rank}.err").exists()
    ]
    return {rank: path.read_text(errors="replace") for _, rank, path in sorted(files)}


def describe_failure(codes: Mapping[int, int], hosts: tuple[str, ...], errors: Mapping[int, str], mpirun: str) -> str:
    """The last lines a user sees: which rank on which host failed first, and the end of its traceback.

    Of several failed ranks the one that raised by itself is shown rather than those that lost their peer, and of
    those the one that fell silent first.
    """
    failed = [rank for rank in errors if codes.get(rank)] or [
        rank for rank, text in errors.items() if "Traceback" in text
    ]
    failed += [rank for rank, code in codes.items() if code and rank not in failed]
    if not failed:
        return f"cpuft: mpirun failed before any rank did:\n{_last_lines(mpirun)}"
    first = min(failed, key=lambda rank: _is_secondary(errors.get(rank, "")))
    where = f"rank {first} on {hosts[first] if first < len(hosts) else 'unknown host'}"
    others = f" (after it: rank {', '.join(str(r) for r in sorted(failed) if r != first)})" if len(failed) > 1 else ""
    lines = _last_lines(_traceback(errors.get(first, "")))
    return f"\ncpuft: {where} failed, {describe_exit(codes.get(first, 1))}{others}:\n{lines}\ncpuft: {where} failed"


def _is_secondary(text: str) -> bool:
    """Whether a rank only lost the connection to one that failed before it."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recvValue failed")
    return any(sign in text for sign in signs) or ("Traceback" not in text and "cpuft: error:" not in text)


def describe_exit(code: int) -> str:
    """An exit code in words; 137 is most often the kernel out of memory."""
    if code == 137:
        return "killed by SIGKILL (out of memory? lower --batch-size)"
    return f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"


def _traceback(text: str) -> str:
    """From the last traceback on; the whole text where there is none."""
    start = text.rfind("Traceback (most recent call last)")
    return text[max(start, 0) :]


def _last_lines(text: str) -> str:
    lines = [line for line in text.rstrip().splitlines() if line.strip()]
    return os.linesep.join(lines[-_TRACE_LINES:]) or "(it said nothing)"
