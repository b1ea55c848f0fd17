"""Find out from the logs of the ranks why an attempt failed, and write the last lines that the user sees."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpuft.errors import NO_MORE_PROCESSES, RESUMABLE, CpuftError, counted, escape_controls
from cpuft.launch.resume import read_resumed_run
from cpuft.plans import RunPlan
from cpuft.rank.process import (
    FOREIGN_STORE_ENTRY,
    KILLED_BY_SOMEBODY,
    MARKS,
    OUT_OF_MEMORY,
    RAISED_MARK,
    parse_failure,
    parse_missing_ranks,
    parse_steps,
)
from cpuft.rank.progress import PROGRESS_MARK
from cpuft.record import FILE_NAME, InterruptedLine, parse_lines

_NO_MEMORY = re.compile(r"^(MemoryError\b|RuntimeError: .*can't allocate memory|.*std::bad_alloc)", re.MULTILINE)
"""How Python, PyTorch and C++ report a refused allocation at the end of a traceback."""
_NO_PROCESS = re.compile(
    r"can't start new thread|BlockingIOError: \[Errno 11\]|(fork|[Tt]hread).*Resource temporarily unavailable"
)
"""How Python, shells, OpenMP and OpenBLAS report that the user may have no more processes or threads."""
_LESS_MEMORY = "lower --batch-size or --max-length, add --gradient-checkpointing, or start fewer ranks on this host"
_TRACE_LINES = 15
_LAST_SIGNAL = 64
"""SIGRTMAX of Linux, which all hosts have."""
_SIGNAL_CAUSES = {
    135: ("killed by SIGBUS", "/dev/shm may be full: check it with cpuft doctor"),
    137: ("killed by SIGKILL", f"if memory ran out, {_LESS_MEMORY}"),
}
_NOT_FOR_USERS = re.compile(
    # Source locations in Hydra, the mpirun of Intel MPI and MPICH, where it noticed an error.
    r"\[(mpiexec|proxy:\d+:\d+)@[^\]]*\] .*\(\S+\.c:\d+\):"
    # A harmless warning of PyTorch on hosts whose addresses have no names.
    r"|\[c10d\] The hostname of the client socket cannot be retrieved"
)
"""Lines of mpirun and of ranks that help no user. They stay in the logs and are not shown on the terminal."""
_DIFFERENT_SIZES = re.compile(
    r"Received data size doesn't match expected size|Truncation error\(-265\)|MPI_ERR_TRUNCATE|Message truncated;"
)
"""What gloo, oneCCL and MPI print when ranks pass different sizes to an operation."""
_SAME_SIZES = (
    "pass tensors of the same shape and type on all ranks; with TORCH_DISTRIBUTED_DEBUG=DETAIL in your shell, "
    "torch's gloo names the operation and the shapes"
)
_COMM_ERROR = "cpuft comm: rank "
"""Start of the line with which cpuft.comm reports a collective that did not finish."""
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "recvValue failed",
    FOREIGN_STORE_ENTRY,
)


@dataclass(frozen=True)
class Failure:
    """A rank that failed, and its standard error."""

    rank: int
    host: str
    """Name of the rank's host, as the hostfile has it."""
    code: int
    """Exit code; 128 + N for signal N."""
    text: str
    """Standard error without the lines that are for the launcher."""
    missed: frozenset[int] = frozenset()
    """The ranks that this rank waited for in vain. They are the cause, and this failure is a consequence."""
    steps: int | None = None
    """Number of optimizer steps of its script; None if they are not counted."""
    ended: tuple[tuple[int, str, int], ...] = ()
    """Rank, host and number of optimizer steps of ranks whose script ended normally."""
    raised: bool = False
    """Whether a function ended with an exception, which its caller gets, too."""

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel killed the rank for lack of memory, or its last traceback reports a refused allocation."""
        return (self.code == 137 and OUT_OF_MEMORY in self.text) or bool(_NO_MEMORY.search(_last_error(self.text)))

    @property
    def lost_its_peer(self) -> bool:
        """Whether the text says that a connection to another rank closed or torch's store was disturbed."""
        return any(message in self.text for message in _LOST_PEER)


def list_error_logs(logs: Path) -> list[Path]:
    """Return the ranks' standard error files, sorted: rank-N.err, or if there are none JOB/rank.N/stderr (Open MPI)."""
    return sorted(logs.glob("rank-*.err")) or sorted(logs.glob("*/rank.*/stderr"))


def read_failures(logs: Path, hosts: tuple[str, ...]) -> list[Failure]:
    """Return what `find_failures` returns for the error logs in the folder `logs`, sorted by their last change; []
    without a log. `hosts` has the host of each rank.
    """
    oldest_first = sorted(list_error_logs(logs), key=lambda path: path.stat().st_mtime_ns)
    return find_failures([path.read_text(errors="replace") for path in oldest_first], hosts)


def find_failures(errors: list[str], hosts: tuple[str, ...]) -> list[Failure]:
    """Return the failed ranks, those whose error log (`errors` are texts) has a failure line of `cpuft.rank`, the most
    likely cause first. `hosts` has the host of each rank.

    Ranks that others waited for come first, then failures in the order of `errors` (put the rank that became silent
    first at the beginning), then ranks that lost a connection, and last those that waited in vain.
    """
    failures = []
    counts = [steps for text in errors if (steps := parse_steps(text))]
    ended = [(rank, hosts[rank], count) for rank, has_ended, count in counts if has_ended and rank < len(hosts)]
    for text in errors:
        if found := parse_failure(text):
            lines = [line.removeprefix(RAISED_MARK) for line in text.splitlines()]
            own = "\n".join(line for line in lines if not line.startswith((*MARKS, PROGRESS_MARK)))
            host = hosts[found[0]] if found[0] < len(hosts) else found[1]
            others = tuple(one for one in sorted(ended) if one[0] != found[0])
            count = next((count for rank, _, count in counts if rank == found[0]), None)
            waited_for = frozenset(parse_missing_ranks(text))
            failures.append(Failure(found[0], host, found[2], own, waited_for, count, others, RAISED_MARK in text))
    missed = _list_missed(failures)
    return sorted(failures, key=lambda one: (bool(one.missed), one.rank not in missed, one.lost_its_peer))


def _list_missed(failures: list[Failure]) -> set[int]:
    return {rank for failure in failures for rank in failure.missed}


def _describe_early_end(failures: list[Failure]) -> str:
    """Return the line about a rank whose script ended normally while others waited; "" if that is not the cause."""
    if not failures or not failures[0].ended or not all(one.missed or one.lost_its_peer for one in failures):
        return ""
    (rank, host, steps), waiting = failures[0].ended[0], failures[0]
    after = f" after {counted(steps, 'optimizer step')}" if steps else ""
    where = f", in its step {waiting.steps + 1}" if waiting.steps else ""
    advice = (
        "give all ranks the same number of batches, as DistributedSampler does, or train inside the model's join()"
        if steps or waiting.steps
        else "let all ranks call the same collective operations"
    )
    return (
        f"the script of rank {rank} on {host} ended normally{after}, and rank {waiting.rank} on {waiting.host} waited "
        f"for it{where}: {advice}"
    )


def describe_lost(failures: list[Failure], hosts: tuple[str, ...], unreachable: set[str]) -> list[str]:
    """Return one line for each unreachable host, by name, "host b does not answer, so rank 1 was lost: ...", and then
    one for each rank on another host that others waited for in vain, unless this rank has itself failed: its own error
    output explains more. `hosts` has the host of each rank.
    """
    lines = []
    for name in sorted(unreachable):
        lost = [rank for rank, host in enumerate(hosts) if host == name]
        were = "were" if len(lost) > 1 else "was"
        lines.append(f"host {name} does not answer, so {_ranks(lost)} {were} lost: check the host with cpuft doctor")
    for rank in sorted(_list_missed(failures) - {failure.rank for failure in failures}):
        if rank < len(hosts) and hosts[rank] not in unreachable:
            lines.append(
                f"rank {rank} on {hosts[rank]} did not answer the other ranks: log in to {hosts[rank]} and check "
                "whether its process is stopped"
            )
    return lines


def _ranks(numbers: Iterable[int]) -> str:
    ranks = sorted(numbers)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def describe_failures(failures: list[Failure], mpirun: str, causes: Sequence[str] = ()) -> str:
    """Return why `failures[0]` failed, the end of its standard error (without failures, of `mpirun`, mpirun's output),
    and last the causes: `causes`, from `describe_lost`, or a rank whose script ended too early, else "rank N on HOST
    failed". If there are no such causes and the caller gets the exception (`raised`), only the first line is returned.
    """
    blame, text, summary = "", mpirun, "cpuft: mpirun failed, and no rank reported an error. Last lines of mpirun"
    if (early_end := _describe_early_end(failures)) and not any(line.startswith("host ") for line in causes):
        causes = [early_end]
    if failures:
        first, *others = failures
        blame, text = f"rank {first.rank} on {first.host} failed", _last_error(first.text)
        cause, advice = explain_exit(first.code, first.text)
        what = f"{blame} ({cause})"
        what += f"; {_ranks(failure.rank for failure in others)} failed after it" if others else ""
        what += f". {advice[0].upper()}{advice[1:]}" if advice else ""
        if first.missed and causes:
            what = f"{_ranks(failure.rank for failure in failures)} waited in vain for other ranks"
        if first.raised and not causes:
            return f"cpuft: {what}"
        summary = f"\ncpuft: {what}. Last lines of rank {first.rank}"
    output = _last_lines(text)
    shown = [] if not (failures or output) and causes else [f"{summary}:", output or "(it printed nothing)"]
    return "\n".join([*shown, *(f"cpuft: {line}" for line in causes or [blame] if line)])


def ended_to_be_resumed(failures: list[Failure]) -> bool:
    """Return whether some ranks ended with a code below 128, each of these with 75 and none after waiting in vain."""
    own = [one for one in failures if one.code < 128]
    return bool(own) and all(one.code == RESUMABLE and not one.missed and _COMM_ERROR not in one.text for one in own)


def worst_exit_code(failures: list[Failure], fallback: int) -> int:
    """Return the largest exit code below 128, which a rank chose itself, else the largest of a signal; `fallback`
    without failures. Ranks that waited in vain for others count only if all did.
    """
    codes = [one.code for one in failures if not one.missed] or [one.code for one in failures]
    own = [code for code in codes if 0 < code < 128]
    return max(own or codes, default=0) or fallback


def explain_exit(code: int, text: str = "") -> tuple[str, str]:
    """Return how a rank ended, such as "exit code 1", "killed by signal 11" or "out of memory", and what to do, or ""
    if that is not known. `code` is 128 + N for signal N, and `text` is the rank's standard error.
    """
    is_signal = 128 < code <= 128 + _LAST_SIGNAL  # a program may end itself with a code above, such as 255
    ended = f"killed by signal {code - 128}" if is_signal else f"exit code {code}"
    different, error = f"{ended}, because ranks passed different sizes to a collective operation", _last_error(text)
    causes = (
        (code == 137 and OUT_OF_MEMORY in text, "killed by the kernel because memory ran out", _LESS_MEMORY),
        (_NO_MEMORY.search(error), "out of memory", _LESS_MEMORY),
        (_NO_PROCESS.search(error), ended, NO_MORE_PROCESSES),
        (_DIFFERENT_SIZES.search(error), different, _SAME_SIZES),
        (code == 137 and KILLED_BY_SOMEBODY in text, "killed by signal 9", ""),
        (True, *_SIGNAL_CAUSES.get(code, (ended, ""))),
    )
    return next((what, advice) for applies, what, advice in causes if applies)


def _last_error(text: str) -> str:
    start = max(text.rfind(beginning) for beginning in ("Traceback (most recent call last)", _COMM_ERROR))
    return text[max(start, 0) :]


def is_for_users(line: str) -> bool:
    """Return whether a user may need a line of mpirun or of a rank: False for known noise, True for any other line."""
    return not _NOT_FOR_USERS.search(line)


def _last_lines(text: str) -> str:
    """Return the last lines for users. A program on a host must not control the terminal, so escape what could."""
    lines = [line for line in text.rstrip().splitlines() if line.strip() and is_for_users(line)]
    return os.linesep.join(escape_controls(line, kept="\t") for line in lines[-_TRACE_LINES:])


def find_interruption(run_dir: str) -> InterruptedLine | None:
    """Return the last line of a run's record if it is an interruption; None otherwise, or without a usable record."""
    with suppress(OSError, LookupError, ValueError, CpuftError):
        line = parse_lines(Path(run_dir, FILE_NAME).read_text(encoding="utf-8"), FILE_NAME)[-1]
        return line if isinstance(line, InterruptedLine) else None
    return None


def describe_end(code: int, run_dir: str, hosts: tuple[str, ...], plan: RunPlan) -> tuple[int, str]:
    """Return the exit code of a launch and its closing message: "run: RUN_DIR" after 0, "" after a failure. `hosts` has
    the host of each rank.

    After code 75, the message has the command that resumes the run if the ranks ended by themselves with 75, else "". A
    code of 75 becomes 1 (with "") if the run cannot be resumed, for example because it ended before its record began.
    """
    if code != RESUMABLE:
        return code, "" if code else f"run: {run_dir}"
    try:
        read_resumed_run(run_dir, bool(plan.script_words))
    except CpuftError:
        return 1, ""
    if not ended_to_be_resumed(read_failures(Path(run_dir, "logs"), hosts)):
        return code, ""
    what = "the ranks ended with exit code 75"
    if line := find_interruption(run_dir):
        what = f"the run was interrupted by {line.by} after update {line.step} of {line.updates}"
    return code, f"cpuft: {what}: continue with {plan.format_resume(run_dir)}"
