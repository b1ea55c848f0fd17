"""Watches a run from its start to its end: shows rank 0, keeps the logs, says why a rank failed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.files import remove_command, write_text
from cpuft.plan import RunPlan, Step, format_plan
from cpuft.rank.process import FAILURE, parse_failure

_TRACE_LINES = 15
_CHECK_FAILED = 2
"""Exit code of a step that refused its input with one line."""
_END_SECONDS = 30.0
"""How long ranks may take to end once one has failed: those that save something have time, a lost host has not."""
_REMOVE_SECONDS = 60.0
_UNSAID = (FAILURE, "|CCL_WARN| value of CCL_LOG_LEVEL changed")
"""Lines of rank 0 that only its log keeps: the mark for this supervisor; oneCCL's word on our own setting."""


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
            self.stream.write("".join(line for line in _lines(new) if not any(mark in line for mark in _UNSAID)))
            self.stream.flush()


class StuckError(Exception):
    """A rank has failed, and mpirun waits all the same."""


@dataclass
class Ending:
    """Watches for the end of a run in which a rank has failed: mpirun waits without limit for a host that is lost."""

    logs: Path
    failed_at: float = 0.0
    looked_at: float = 0.0

    def check(self) -> None:
        """Look at most once a second. Raises StuckError when a rank failed longer than `_END_SECONDS` ago."""
        now = time.monotonic()
        if now - self.looked_at < 1:
            return
        self.looked_at = now
        if not self.failed_at and any(_has_failed(path) for path in self.logs.glob("rank-*.err")):
            self.failed_at = now
        if self.failed_at and now - self.failed_at > _END_SECONDS:
            raise StuckError(
                f"mpirun did not end within {_END_SECONDS:.0f} s of a rank's failure, so it was ended: "
                f"a host may not answer, look with cpuft doctor"
            )


def _has_failed(log: Path) -> bool:
    """Whether a rank's log ends with the mark of its failure."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        return FAILURE.encode() in file.read()


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="replace").splitlines(keepends=True)


def run_plan(plan: RunPlan, run_dir: str, hosts: tuple[str, ...], environ: Mapping[str, str], seconds: float) -> int:
    """Run a launch's plan to its end; the exit code of its worst rank.

    `hosts` names each rank's host. The plan is kept as `plan.sh` in the run directory.

    Raises
    ------
    CpuftError: a step before the ranks refused the input; the run directory is taken away again. Or it existed.
    Interrupted: a signal came; all ranks are gone, and the record up to then is kept.
    """
    here = plan.whole.here
    for step in (step for stage in plan.make for step in stage):
        _make_run_dir(here(step), environ)
    try:
        for step in (step for stage in plan.prepare for step in stage):
            _run_before(here(step), environ)
        write_plan(plan, run_dir)
    except BaseException:
        execute.run_quietly(remove_command(os.path.dirname(run_dir), run_dir), _REMOVE_SECONDS)
        raise
    ((ranks,),) = plan.ranks
    return _run_ranks(here(ranks), Path(run_dir) / "logs", hosts, environ, seconds)


def write_plan(plan: RunPlan, run_dir: str) -> None:
    """Keep the plan beside what came of it."""
    write_text(Path(run_dir) / "plan.sh", format_plan(plan.whole, os.getcwd()))


def _make_run_dir(step: Step, environ: Mapping[str, str]) -> None:
    try:
        _run_before(step, environ)
    except RuntimeError as error:
        said = str(error).splitlines()[-1]
        raise CpuftError(f"there is no room for this run ({said}): name a new place with --run-dir") from None


def _run_before(step: Step, environ: Mapping[str, str]) -> None:
    with execute.open_memory() as output:
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

    ending = Ending(logs)

    def watch() -> None:
        for tail in tails:
            tail.copy()
        ending.check()

    with (logs / "mpirun.log").open("wb") as output:
        try:
            code = execute.run_step(step, environ, output, watch, seconds)
        except StuckError as error:
            print(f"cpuft: {error}", file=sys.stderr)
            code = 1
        except TimeoutError as error:
            raise CpuftError(f"the run was stopped: {error}: raise --time-limit, or train for less") from None
    if not code:
        return 0
    failures = find_failures(read_errors(logs, len(hosts)), hosts)
    print(describe_failures(failures, (logs / "mpirun.log").read_text(errors="replace")), file=sys.stderr, flush=True)
    return worst_exit_code([failure.code for failure in failures], code)


@dataclass(frozen=True)
class Failure:
    """A rank that failed, and what it wrote to standard error."""

    rank: int
    host: str
    code: int
    """Exit code; 128 + N for signal N."""
    text: str

    @property
    def lost_its_peer(self) -> bool:
        """Whether it failed only because another one had before."""
        signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recvValue failed")
        return any(sign in self.text for sign in signs)


def read_errors(logs: Path, ranks: int) -> list[str]:
    """What each rank wrote to standard error, those that fell silent first in front."""
    paths = [path for rank in range(ranks) if (path := logs / f"rank-{rank}.err").exists()]
    return [path.read_text(errors="replace") for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]


def find_failures(errors: list[str], hosts: tuple[str, ...]) -> list[Failure]:
    """Ranks that failed, those that only lost their peer last; hosts under the names that the user gave them."""
    parsed = [(parse_failure(text), text) for text in errors]
    failures = [
        Failure(found[0], hosts[found[0]] if found[0] < len(hosts) else found[1], found[2], _without_mark(text))
        for found, text in parsed
        if found
    ]
    return sorted(failures, key=lambda failure: failure.lost_its_peer)


def _without_mark(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(FAILURE))


def describe_failures(failures: list[Failure], mpirun: str) -> str:
    """The last lines a user sees: which rank on which host failed first, and the end of its traceback."""
    if not failures:
        return f"cpuft: mpirun failed before any rank did:\n{_last_lines(mpirun)}"
    first, *others = failures
    where = f"rank {first.rank} on {first.host}"
    after = f" (after it: rank {', '.join(str(rank) for rank in sorted(f.rank for f in others))})" if others else ""
    lines = _last_lines(_traceback(first.text))
    return f"\ncpuft: {where} failed, {describe_exit(first.code)}{after}:\n{lines}\ncpuft: {where} failed"


def worst_exit_code(codes: list[int], fallback: int) -> int:
    """The exit code of the run. What a rank chose itself outweighs the signals that then ended the others."""
    own = [code for code in codes if 0 < code < 128]
    return max(own or codes, default=0) or fallback


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
