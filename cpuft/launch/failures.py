"""Find out from the logs of the ranks why an attempt failed, and write the last lines that the user sees."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpuft.config import LaunchConfig, ScriptConfig, option_names
from cpuft.errors import AGAIN, CpuftError
from cpuft.launch.resume import read_resumed_run
from cpuft.rank.process import (
    FOREIGN_STORE_ENTRY,
    KILLED_BY_SOMEBODY,
    MARKS,
    OUT_OF_MEMORY,
    parse_failure,
    parse_missing_ranks,
)
from cpuft.record import FILE_NAME, InterruptedLine, parse_lines

_NO_MEMORY = re.compile(r"^(MemoryError\b|RuntimeError: .*can't allocate memory|.*std::bad_alloc)", re.MULTILINE)
"""What Python, torch and C++ say of an allocation that was refused, at the end of a traceback."""
_LESS_MEMORY = "lower --batch-size or --max-length, add --gradient-checkpointing, or start fewer ranks on this host"
_TRACE_LINES = 15
_LIKELY = {
    135: "SIGBUS (is /dev/shm full? look with cpuft doctor)",
    137: f"SIGKILL (was memory short? If so, {_LESS_MEMORY})",
}
_NOT_FOR_USERS = re.compile(
    # Where in the source text of hydra, the mpirun of Intel MPI and MPICH, an error was noticed.
    r"\[(mpiexec|proxy:\d+:\d+)@[^\]]*\] .*\(\S+\.c:\d+\):"
    # A warning of torch on hosts whose addresses have no names; nothing follows from it.
    r"|\[c10d\] The hostname of the client socket cannot be retrieved"
)
"""Lines of mpirun and of ranks that users can do nothing about: the logs keep these lines, the screen does not show
them."""
_WATCH = "cpuft comm: rank "
"""How the last word of the watch over collectives begins."""


@dataclass(frozen=True)
class Failure:
    """A rank that failed, and what it wrote to standard error."""

    rank: int
    host: str
    code: int
    """Exit code; 128 + N for signal N."""
    text: str
    missed: frozenset[int] = frozenset()
    """The ranks that it waited for in vain: theirs is the failure."""

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed it for memory, or an allocation failed in it."""
        return (self.code == 137 and OUT_OF_MEMORY in self.text) or bool(_NO_MEMORY.search(_traceback(self.text)))

    @property
    def lost_its_peer(self) -> bool:
        """Whether it failed only because another one had before, or because another program kept ranks apart."""
        signs = (
            "Connection closed by peer",
            "Connection reset by peer",
            "Broken pipe",
            "recvValue failed",
            FOREIGN_STORE_ENTRY,
        )
        return any(sign in self.text for sign in signs)


def list_error_logs(logs: Path) -> list[Path]:
    """What ranks wrote to standard error: `rank-N.err`, or what Open MPI makes of that, `JOB/rank.N/stderr`."""
    return sorted(logs.glob("rank-*.err")) or sorted(logs.glob("*/rank.*/stderr"))


def _read_errors(logs: Path) -> list[str]:
    """What each rank wrote to standard error, those that fell silent first in front."""
    paths = list_error_logs(logs)
    return [path.read_text(errors="replace") for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)]


def read_failures(logs: Path, hosts: tuple[str, ...]) -> list[Failure]:
    """As `find_failures`, from the logs of the ranks on these hosts."""
    return find_failures(_read_errors(logs), hosts)


def find_failures(errors: list[str], hosts: tuple[str, ...]) -> list[Failure]:
    """Ranks that failed, hosts as the user named them; first whom others missed, last who waited for or lost a peer."""
    failures = []
    for text in errors:
        if found := parse_failure(text):
            own = "\n".join(line for line in text.splitlines() if not line.startswith(MARKS))
            host = hosts[found[0]] if found[0] < len(hosts) else found[1]
            failures.append(Failure(found[0], host, found[2], own, frozenset(parse_missing_ranks(text))))
    missed = _missed(failures)
    return sorted(failures, key=lambda one: (bool(one.missed), one.rank not in missed, one.lost_its_peer))


def _missed(failures: list[Failure]) -> set[int]:
    return {rank for failure in failures for rank in failure.missed}


def describe_absent(failures: list[Failure], hosts: tuple[str, ...], silent: set[str]) -> list[str]:
    """A line for each host that does not answer, and for each rank elsewhere that others waited for in vain.

    A rank that has failed itself is left out: it tells its own story, or waited, too.
    """
    lines = []
    for name in sorted(silent):
        lost = _ranks(rank for rank, host in enumerate(hosts) if host == name)
        lines.append(f"host {name} does not answer, {lost} was lost with it: look at it with cpuft doctor")
    for rank in sorted(_missed(failures) - {failure.rank for failure in failures}):
        if rank < len(hosts) and hosts[rank] not in silent:
            lines.append(f"rank {rank} on {hosts[rank]} did not answer the others: is it stopped? look at it there")
    return lines


def _ranks(numbers: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(numbers)))}"


def describe_failures(failures: list[Failure], mpirun: str, absent: Sequence[str] = ()) -> str:
    """The last lines a user sees: which rank on which host failed first, and the end of its traceback.

    `absent` comes from `describe_absent`: who is to blame rather than those who waited for them.
    """
    blame, how, text = "", "cpuft: mpirun failed before any rank did", mpirun
    if failures:
        first, *others = failures
        blame, text = f"rank {first.rank} on {first.host} failed", _traceback(first.text)
        after = f" (after it: {_ranks(f.rank for f in others)})" if others else ""
        how = f"{blame}, {describe_exit(first.code, first.text)}{after}"
        if first.missed and absent:
            how = f"{_ranks(f.rank for f in failures)} waited in vain"
        how = f"\ncpuft: {how}"
    lines = _last_lines(text)
    said = [] if not (failures or lines) and absent else [f"{how}:", lines or "(it said nothing)"]
    return "\n".join([*said, *(f"cpuft: {line}" for line in absent or [blame] if line)])


def ended_to_be_resumed(failures: list[Failure]) -> bool:
    """Whether ranks ended by their own will with 75, and not because they had waited in vain."""
    own = [one for one in failures if one.code < 128]
    return bool(own) and all(one.code == AGAIN and not one.missed and _WATCH not in one.text for one in own)


def worst_exit_code(failures: list[Failure], fallback: int) -> int:
    """The exit code of the run. What a rank chose itself outweighs signals that then ended others, and who waited."""
    codes = [one.code for one in failures if not one.missed] or [one.code for one in failures]
    own = [code for code in codes if 0 < code < 128]
    return max(own or codes, default=0) or fallback


def describe_exit(code: int, said: str = "") -> str:
    """An exit code in words, with what is behind it by what the rank `said`, or is most often."""
    if code == 137 and OUT_OF_MEMORY in said:
        return f"killed by the kernel because it was out of memory ({_LESS_MEMORY})"
    if _NO_MEMORY.search(_traceback(said)):
        return f"out of memory ({_LESS_MEMORY})"
    if code == 137 and KILLED_BY_SOMEBODY in said:
        return "killed by signal 9"
    if code in _LIKELY:
        return f"killed by {_LIKELY[code]}"
    return f"killed by signal {code - 128}" if code > 128 else f"exit code {code}"


def _traceback(text: str) -> str:
    """From the last traceback, or the last word of the watch, on; the whole text where there is none."""
    start = max(text.rfind(sign) for sign in ("Traceback (most recent call last)", _WATCH))
    return text[max(start, 0) :]


def is_for_users(line: str) -> bool:
    """Whether a line that mpirun or a rank has written says something that a user can act on."""
    return not _NOT_FOR_USERS.search(line)


def _last_lines(text: str) -> str:
    lines = [line for line in text.rstrip().splitlines() if line.strip() and is_for_users(line)]
    return os.linesep.join(lines[-_TRACE_LINES:])


def describe_end(
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
        read_resumed_run(run_dir, bool(script))
    except CpuftError:
        return 1, ""
    if not ended_to_be_resumed(read_failures(Path(run_dir, "logs"), hosts)):
        return code, ""
    record, how = Path(run_dir, FILE_NAME), "ranks ended with 75"
    for line in parse_lines(record.read_text(encoding="utf-8"), str(record))[-1:] if not script else ():
        if isinstance(line, InterruptedLine):
            how = f"interrupted by {line.by} after update {line.step} of {line.updates}"
    where = [f"--{name}={value}" for name in ("cluster", "hostfile") if (value := getattr(config, name))]
    where += [f"--{name}" for name in option_names(ScriptConfig) if script and own and getattr(own, name)]
    words = ["cpuft", "launch", "--resume", run_dir, *where, *(["--", *script] if script else [])]
    return code, f"cpuft: {how}: go on with {shlex.join(words)}"
