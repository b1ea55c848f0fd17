"""The queue of a sweep: fills hosts with runs, the longest first, and survives lost hosts, failures and its own end."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from cpuft import execute
from cpuft.argv import module_command
from cpuft.config.fields import format_flag, parse_arguments
from cpuft.config.launch import LaunchConfig
from cpuft.errors import RESUMABLE, CpuftError, Interrupted, counted
from cpuft.hosts.cluster import LOCAL, find_access, read_hosts
from cpuft.hosts.hostfile import Host
from cpuft.hosts.transport import LOGIN_REFUSED, HostError
from cpuft.launch.active_runs import lock_run
from cpuft.launch.checkpoint_copies import check_copy
from cpuft.launch.inputs import TRAINING_INPUTS
from cpuft.launch.resume import has_begun
from cpuft.launch.supervise import TRAINING_STOP_SECONDS
from cpuft.rank.progress import FINAL_EVALUATION_MARK, parse_evaluation
from cpuft.record import FILE_NAME as RECORD_NAME
from cpuft.record import read_record
from cpuft.report.sweep import (
    DONE,
    FAILED,
    FILE_NAME,
    LOST,
    PRUNED,
    STOPPED,
    AttemptEnd,
    AttemptStart,
    Evaluation,
    JournalLine,
    Sweep,
    SweepHeader,
    describe_values,
    find_folder,
    format_journal_line,
    list_configurations,
    parse_journal,
)
from cpuft.sweep.search import format_assignment
from cpuft.sweep.study import OptunaSearch

_FILE_OPTIONS = tuple(map(format_flag, TRAINING_INPUTS))
_POLL_SECONDS = 0.2
_STOP_SECONDS = TRAINING_STOP_SECONDS + 30.0
"""How long launches have to end after a signal, before they are killed."""
_RETURN_SECONDS = 600.0
"""How long a sweep waits for lost hosts if no other hosts are left."""
_ANSWER_SECONDS = 15.0
"""A host that does not answer for so long after a failed run is lost."""
_LEAST_PAUSE, _MOST_PAUSE = 1.0, 60.0
"""Seconds between two questions to a lost host: each pause is twice as long as the one before."""
_REFUSED_PAUSE = 300.0
"""Pause after a refused login: programs such as fail2ban lock out who is refused five times in ten minutes."""
_SILENT, _REFUSES = "does not answer", "refuses the login"
_LAST_BYTES = 1 << 16
"""How much of the end of a log is searched for the reason of a failure."""
_ERROR = "cpuft: error: "
_FAILED_RANK = re.compile(r"cpuft: rank \d+ on .* failed \(")
_MOST_ATTEMPTS = 6
"""Most attempts at a run that has been interrupted, or has ended without an update."""
_MOST_FAILURES = 2
"""A place on which so many launches in a row have ended without an update gets no more runs."""
_UNLOCK_SECONDS = 300.0
"""How long a continued sweep waits for launches that still end, because the sweep was killed."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where one run at a time trains: one or more hosts, or some cores of this machine."""

    name: str
    options: tuple[str, ...] = ()
    """Options of `cpuft launch` that choose these hosts."""
    prefix: tuple[str, ...] = ()
    """Command before that of the launch, which limits it to some cores."""
    hosts: tuple[Host, ...] = ()
    """Hosts that can be lost; empty for this machine."""


def plan_places(
    config: LaunchConfig, hosts_per_run: int, parallel: int, cores: Sequence[tuple[int, ...]], quota: float = 0.0
) -> list[Place]:
    """Return the places of a sweep's runs: groups of hosts, or parts of this machine.

    `parallel` is 0 for as many places as there are groups, or one on this machine. `cores` has the hardware threads of
    each core of this machine; they are divided if it is the only host, and so is `quota`, the number of cores that its
    control group allows (0: no limit).
    """
    hosts = read_hosts(config)
    if hosts == (LOCAL,):
        if hosts_per_run > 1:
            raise CpuftError(
                f"--hosts-per-run {hosts_per_run} needs more hosts than this machine: name them with --hostfile or "
                "--cluster"
            )
        return _divide_machine(max(1, parallel), cores, quota)
    groups = [hosts[i : i + hosts_per_run] for i in range(0, len(hosts) - hosts_per_run + 1, hosts_per_run)]
    if not groups:
        raise CpuftError(
            f"--hosts-per-run {hosts_per_run} is more than the {counted(len(hosts), 'host')} that there are: give a "
            "smaller number, or more hosts"
        )
    if parallel > len(groups):
        raise CpuftError(
            f"--parallel {parallel} is more than the {counted(len(groups), 'group')} of {hosts_per_run} that the hosts "
            "make: give a smaller number (several runs at a time on one host are only possible on this machine)"
        )
    transport, made = find_access(config).transport, list[Place]()
    for group in groups:
        name = ",".join(host.name for host in group)
        far = tuple(host for host in group if not transport.is_here(host))
        made.append(Place(name, (f"--only-hosts={name}",), hosts=far))
    return made[: parallel or len(made)]


def find_host_share(places: Sequence[Place]) -> float:
    """Return the share of a host that a run at one of these places has: less than 1 if this machine is divided."""
    return 1 / len(places) if places and places[0].prefix else 1.0


def _divide_machine(parallel: int, cores: Sequence[tuple[int, ...]], quota: float) -> list[Place]:
    if parallel == 1:
        return [Place("this machine")]
    threads = [(cpu,) for core in cores for cpu in core]
    if len(cores) < parallel <= len(threads):
        cores = threads  # two runs then share a core, which is better than nothing where a core is all that there is
    if parallel > len(cores):
        raise CpuftError(
            f"--parallel {parallel} is more than the {counted(len(cores), 'core')} of this machine: give a smaller "
            "number"
        )
    ends = [number * len(cores) // parallel for number in range(parallel + 1)]
    parts = [sorted(cpu for core in cores[begin:end] for cpu in core) for begin, end in pairwise(ends)]
    places = list[Place]()
    for (begin, end), part in zip(pairwise(ends), parts, strict=True):
        name = ",".join(map(str, part))
        # A run that took the whole quota for its own would record a wrong number of cores.
        share = ("env", f"CPUFT_CPU_QUOTA={quota * (end - begin) / len(cores)!r}") if quota else ()
        places.append(Place(f"CPUs {name}", prefix=(*share, "taskset", "--cpu-list", name)))
    return places


@contextmanager
def open_journal(folder: str, header: SweepHeader) -> Iterator[Journal]:
    """Create the journal of a new sweep, and its folder; the journal is locked inside the `with` block."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder, FILE_NAME), "x", encoding="utf-8") as file:
        _lock_journal(file, folder)
        journal = Journal(file, Sweep(folder, header))
        journal.write(header)
        yield journal


@contextmanager
def continue_journal(folder: str) -> Iterator[Journal]:
    """Open the journal of a sweep that was stopped, without a last line that was cut off, inside the `with` block.

    The journal is locked there, so that no two sweeps write to it, also from different hosts on a shared file system.
    """
    path = Path(folder, FILE_NAME)
    if not path.is_file():
        parse_journal("", folder)
    # NFS version 4 gives an exclusive lock only to a file that is open for writing.
    with open(path, "r+", encoding="utf-8") as file:
        _lock_journal(file, folder)
        text = file.read()  # after the lock, because the former owner may have added lines until then
        sweep = parse_journal(text, folder)
        whole = text[: text.rfind("\n") + 1]
        file.truncate(len(whole.encode()))
        file.seek(0, os.SEEK_END)
        yield Journal(file, sweep)


def _lock_journal(file: IO[str], folder: str) -> None:
    """Lock the journal of the sweep in `folder` until `file` is closed; do nothing if its file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CpuftError(
            f"another cpuft sweep is working on {folder}, here or on another host: wait until it has ended, or stop "
            "it, and try again"
        ) from None
    except OSError:
        pass


def has_locked_journal(folder: str) -> bool:
    """Return whether a `cpuft sweep` on any host works on the sweep in a folder; False without locks."""
    try:
        # A shared lock also fails while a sweep has the exclusive one, and needs no permission to write.
        with open(Path(folder, FILE_NAME), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


class Journal:
    """The journal of a sweep while it runs: each line is on the disk before the next step."""

    def __init__(self, file: IO[str], sweep: Sweep) -> None:
        self._file, self.sweep = file, sweep

    def write(self, line: JournalLine) -> None:
        """Add a line. Raises OSError if the disk does not store it."""
        self._file.write(format_journal_line(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if not isinstance(line, SweepHeader):
            self.sweep = self.sweep.add(line)


@dataclass
class _ActiveRun:
    start: AttemptStart
    place: Place
    process: execute.Process
    begun: float
    """time.monotonic() at its start."""
    is_resumed: bool
    log_bytes: int
    """Size of its log when it started."""
    read_bytes: int
    """How much of its log has been read for evaluations."""
    makes_updates: bool = True
    """False once the evaluations in its log are no longer those while training."""
    pruned_because: str = ""
    """Empty if it is not pruned."""
    pruned_at: float = 0.0
    """time.monotonic() when it was pruned."""


class SweepQueue:
    """Carries out the runs of a sweep: each is a `cpuft launch` in a process of its own.

    Runs that failed in an earlier session of the sweep are tried again. `options` of all launches say how they reach
    their hosts. After `stop_after` failed runs, the sweep ends (0: any number may fail). `search` chooses further
    runs, and prunes them.
    """

    def __init__(
        self,
        journal: Journal,
        options: Sequence[str],
        places: Sequence[Place],
        stop_after: int,
        say: Say,
        search: OptunaSearch | None = None,
    ) -> None:
        self._journal, self._options, self._places, self._stop_after = journal, options, list(places), stop_after
        self._say, self._active, self._search = say, list[_ActiveRun](), search
        self._host_share = find_host_share(places)
        self._failed_before = {*self.sweep.list_with_status(FAILED)}
        """Runs that failed in an earlier session, and have not been started in this one."""
        if search:
            search.restore(self.sweep, self._failed_before)
        self._checked = set[str]()
        """Names of places on whose hosts a run has trained, which need no short check of the doctor any more."""
        self._lost = list[Place]()
        """Places that get no more runs because their hosts do not answer."""
        self._pauses = dict[str, tuple[float, float]]()
        """Name of a place -> (pause in seconds, time.monotonic() at its end) before its hosts are asked again."""
        self._failures = dict[str, int]()
        """Name of a place -> number of launches there in a row that ended without an update."""
        self._waits_until = time.monotonic() + _UNLOCK_SECONDS
        """Until when launches that still end after an earlier session was killed keep their runs from starting."""

    @property
    def sweep(self) -> Sweep:
        """What has happened until now."""
        return self._journal.sweep

    def run(self, watch: Callable[[], None] = lambda: None) -> int:
        """Start runs until all have ended; return the number of those that failed.

        `watch` is called several times per second, but not while the sweep waits for lost hosts. If this raises, for
        example because a signal has come, all active runs are ended first, so that they can be resumed.
        """
        with execute.signals_raise(lambda signal_number: False):
            try:
                while self._list_open() or self._active or self._has_more():
                    if not self._places and not self._active and not self._wait_for_hosts():
                        raise _make_failure(
                            "no host of the sweep can be used any more: repair them, and continue with cpuft sweep "
                            f"--resume {self.sweep.folder}",
                            RESUMABLE if self._lost else 1,  # a job's next start may have other hosts
                        )
                    self._fill()
                    self._prune()
                    for active in [one for one in self._active if one.process.poll() is not None]:
                        self._finish(active)
                    watch()
                    time.sleep(_POLL_SECONDS)
            except BaseException:
                self._stop()
                raise
        return len(self.sweep.list_with_status(FAILED))

    def _wait_for_hosts(self) -> bool:
        """Wait until a lost host answers again, for at most ten minutes; return whether one does.

        If all hosts are lost at once, it is often the network of this machine that was interrupted.
        """
        end = time.monotonic() + _RETURN_SECONDS
        if self._lost:
            self._say(f"no host answers any more: waiting up to {_RETURN_SECONDS / 60:.0f} min for one")
        while self._lost and time.monotonic() < end:
            due = [place for place in self._lost if self._pauses.get(place.name, (0.0, 0.0))[1] <= time.monotonic()]
            if back := [place for place in due if not self._find_lost(place)]:
                self._places, self._lost = back, [place for place in self._lost if place not in back]
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _find_lost(self, place: Place) -> dict[str, str]:
        """Return what `find_lost_hosts` does, and note when the place may be asked again."""
        lost = find_lost_hosts(place, self._options)
        pause = min(2 * self._pauses.get(place.name, (_LEAST_PAUSE / 2, 0.0))[0], _MOST_PAUSE)
        pause = _REFUSED_PAUSE if _REFUSES in lost.values() else pause
        self._pauses[place.name] = pause, time.monotonic() + pause
        if not lost:
            del self._pauses[place.name]
        return lost

    def _list_open(self) -> list[int]:
        """Return the runs that still have to be started, the longest first."""
        ended = {*self.sweep.list_with_status(DONE, FAILED)} - self._failed_before
        ended |= {one.start.run for one in self._active}
        over = [*self.sweep.list_with_status(PRUNED), *(one.start.run for one in self._active if one.pruned_because)]
        pruned = {*map(self.sweep.find_trial, over)} - {0}
        runs = [run for run in self.sweep.numbers if run not in ended and self.sweep.find_trial(run) not in pruned]
        return sorted(runs, key=lambda run: -self.sweep.header.lengths[run - 1])

    def _has_more(self) -> bool:
        return self._search is not None and len(self.sweep.trials) < self.sweep.header.search.trials

    def _choose_next(self) -> list[int]:
        """Let the search choose another configuration, and return its first run; empty if it has chosen all."""
        if self._search is None or not self._has_more():
            return []
        trial = self._search.propose(self.sweep)
        self._journal.write(trial)
        return [*self.sweep.list_runs(trial.number)[:1]]

    def _fill(self) -> None:
        """Start a run on each free place: one that can be resumed there, else the longest one, else a new one."""
        used = {one.place.name for one in self._active}
        for place in [place for place in self._places if place.name not in used]:
            waiting = [run for run in self._list_open() if not self._is_still_ending(run)]
            names = {other.name for other in self._places}
            # The checkpoint of a run may be on the disk of its host.
            here = [run for run in waiting if self._find_stopped_place(run) == place.name]
            others = [run for run in waiting if self._find_stopped_place(run) not in names]
            if len(names) > 1:
                # A run that ended without an update is tried on another host.
                others = [run for run in others if self._find_lost_place(run) != place.name]
            if chosen := (here or others)[:1] or self._choose_next():
                self._start(chosen[0], place)

    def _find_stopped_place(self, run: int) -> str:
        """Return the name of the place where a run has been stopped; empty if it cannot be resumed."""
        start, end = self.sweep.find_start(run), self.sweep.find_end(run)
        return start.place if start and (end is None or end.status == STOPPED) else ""

    def _find_lost_place(self, run: int) -> str:
        """Return the name of the place where the last attempt at a run ended without an update, or empty."""
        start, end = self.sweep.find_start(run), self.sweep.find_end(run)
        return start.place if start and end and end.status == LOST else ""

    def _is_still_ending(self, run: int) -> bool:
        """Return whether a launch of an earlier session still works in the folder of a run."""
        start = self.sweep.find_start(run)
        if start is None or self.sweep.find_end(run) or time.monotonic() > self._waits_until:
            return False
        try:
            with lock_run(str(Path(self.sweep.folder, start.folder))):
                return False
        except CpuftError:
            return True

    def _start(self, run: int, place: Place) -> None:
        """Start a run, or resume the last attempt at it if that was stopped and has begun to train."""
        earlier = self.sweep.find_start(run)
        number = earlier.attempt + 1 if earlier else 1
        is_stopped = earlier is not None and bool(self._find_stopped_place(run))
        if is_stopped and earlier and not self.sweep.find_end(run) and (found := self._read_metrics(earlier.folder)):
            # It has finished, and the sweep was killed before it could note this.
            seconds = max(0.0, Path(self.sweep.folder, earlier.folder, RECORD_NAME).stat().st_mtime - earlier.time)
            self._write_end(AttemptEnd(run, earlier.attempt, DONE, 0, seconds, found))
            return
        resumes = earlier is not None and is_stopped and has_begun(str(Path(self.sweep.folder, earlier.folder)))
        resumes, reason = resumes and number <= _MOST_ATTEMPTS, ""
        if resumes and earlier and not {*earlier.place.split(",")} & {*place.name.split(",")}:
            update, problem = check_copy(str(Path(self.sweep.folder, earlier.folder)))
            resumes, reason = update > 0, f" from the beginning, because {problem}" if problem else ""
        self._failed_before.discard(run)
        folder = name_folder(run, self.sweep.total, number)
        folder = earlier.folder if resumes and earlier else folder
        values = self.sweep.header.runs[run - 1]
        command = [*place.prefix, *module_command(sys.executable, "cpuft"), "launch", *self._options, *place.options]
        path = str(Path(self.sweep.folder, folder))
        training = [*self.sweep.header.options, *format_assignment(values)]
        if resumes:
            # Another host may not have the files with which the run was started.
            files = [option for option in training if option.partition("=")[0] in _FILE_OPTIONS]
            command += [*files, "--resume", path]
        else:
            command += [*training, "--run-dir", path]
        if place.hosts and not {"--copy-checkpoints", "--no-copy-checkpoints"}.intersection(self._options):
            command.append("--copy-checkpoints")
        if place.name in self._checked and "--no-check" not in command:
            command.append("--no-check")
        start = AttemptStart(run, number, place.name, folder, time.time(), self._host_share)
        self._journal.write(start)
        log = Path(self.sweep.folder, "logs", f"{folder}.log")
        log.parent.mkdir(exist_ok=True)
        log_bytes = log.stat().st_size if log.exists() else 0
        environ = os.environ | name_in_trackers(self.sweep.header, self.sweep.folder, os.environ)
        process = execute.start_with_log(command, environ, str(log), self.sweep.header.working_folder or None)
        self._active.append(_ActiveRun(start, place, process, time.monotonic(), resumes, log_bytes, log_bytes))
        verb = "continues" if resumes else "starts"
        total = self.sweep.total
        self._say(f"run {run} of {total} {verb} on {place.name}{reason}: {describe_values(values)}")

    def _write_end(self, end: AttemptEnd) -> None:
        self._journal.write(end)
        if self._search and (trial := self.sweep.find_trial(end.run)):
            self._search.finish(self.sweep, trial, self._failed_before)

    def _prune(self) -> None:
        for active in self._active:
            if active.pruned_because:
                if time.monotonic() - active.pruned_at > _STOP_SECONDS:
                    execute.stop_processes([active.process])
            else:
                self._read_evaluations(active, prunes=True)

    def _end_pruned(self, run: int) -> None:
        """Ask all active runs of a run's configuration to end at once, because of the last evaluation of this run."""
        number, last = self.sweep.find_trial(run), self.sweep.count_evaluations(run)
        update, value = self.sweep.average_curve(number)[last - 1]
        reason = (
            f"{self.sweep.metric} {value:.4f} after {update} updates, and no evaluation up to this one was as good as "
            "the median of the finished configurations after the same share of their training"
        )
        for active in self._active:
            if active.start.run in self.sweep.list_runs(number):
                active.pruned_because, active.pruned_at = reason, time.monotonic()
                active.process.send_signal(signal.SIGTERM)

    def _read_evaluations(self, active: _ActiveRun, prunes: bool = False) -> None:
        """Write the new evaluations of an attempt while training to the journal, and with `prunes` prune it.

        They are read from its log, because its record may be on another host. Without a pruner, nothing is read.
        """
        if self._search is None or self.sweep.header.search.pruner == "none":
            return
        try:
            with Path(self.sweep.folder, "logs", f"{active.start.folder}.log").open("rb") as file:
                file.seek(active.read_bytes)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        active.read_bytes += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            active.makes_updates = active.makes_updates and not line.startswith(FINAL_EVALUATION_MARK)
            if active.makes_updates and (evaluation := parse_evaluation(line)):
                self._journal.write(Evaluation(active.start.run, active.start.attempt, *evaluation))
                run = active.start.run
                if prunes and not active.pruned_because and self._search.is_pruned(self.sweep, run):
                    self._end_pruned(run)

    def _has_trained(self, active: _ActiveRun) -> bool:
        """Return whether an attempt has made an update, as its log says: the record may be on another host."""
        try:
            with Path(self.sweep.folder, "logs", f"{active.start.folder}.log").open("rb") as file:
                file.seek(active.log_bytes)
                return any(line.startswith(b"step ") for line in file)
        except OSError:
            return False

    def _read_metrics(self, folder: str) -> dict[str, float]:
        try:
            record = read_record(str(Path(self.sweep.folder, folder)))
        except CpuftError:
            return {}
        return dict(record.metrics) if record.footer else {}

    def _finish(self, active: _ActiveRun) -> None:
        self._active.remove(active)
        self._read_evaluations(active)
        start, place, code = active.start, active.place, execute.exit_code_of(active.process)
        metrics = {} if code else self._read_metrics(start.folder)
        has_trained = self._has_trained(active)
        status, reason, told = DONE, "", ""
        if not metrics:
            status, reason = FAILED, find_reason(Path(self.sweep.folder, "logs", f"{start.folder}.log"))
            gone = {} if active.pruned_because else self._find_lost(place)
            if active.pruned_because:
                status, reason = PRUNED, active.pruned_because
                self._failures.pop(place.name, None)
            elif gone:
                status, told = self._decide_after_loss(start)
                self._lost.append(place)
                self._retire(place, ", ".join(f"{name} {what}" for name, what in gone.items()))
            elif code == RESUMABLE and start.attempt < _MOST_ATTEMPTS:
                status, told = STOPPED, f"it will continue ({reason})"
                self._note_failure(place, has_trained)
            elif not has_trained and start.attempt < _MOST_ATTEMPTS and (active.is_resumed or start.attempt == 1):
                # A host with a fault of its own would take one run after another, and each would fail.
                status, told = LOST, f"it starts again, because it ended without an update ({reason})"
                self._note_failure(place, has_trained)
            else:
                self._note_failure(place, has_trained)
        else:
            self._failures.pop(place.name, None)
            self._checked.add(place.name)
        seconds = time.monotonic() - active.begun
        end = AttemptEnd(start.run, start.attempt, status, code, seconds, metrics, reason)
        self._write_end(end)
        self._say(self._describe_end(end, told))
        self._check_progress(end)

    def _decide_after_loss(self, start: AttemptStart) -> tuple[str, str]:
        """Return (status of an attempt whose host was lost, what the user is told about the next attempt)."""
        update, problem = check_copy(str(Path(self.sweep.folder, start.folder)))
        if update:
            return STOPPED, f"it continues on another host after update {update}, from the copy of its checkpoint"
        return LOST, f"it starts again from the beginning on another host, because {problem}"

    def _note_failure(self, place: Place, has_trained: bool) -> None:
        """Retire a place on which several launches in a row have ended without an update."""
        self._failures[place.name] = 0 if has_trained else self._failures.get(place.name, 0) + 1
        if self._failures[place.name] >= _MOST_FAILURES:
            self._retire(place, f"{_MOST_FAILURES} launches in a row have ended there without an update")

    def _retire(self, place: Place, reason: str) -> None:
        self._places = [other for other in self._places if other.name != place.name]
        self._say(f"{place.name} gets no more runs, because {reason}")

    def _describe_end(self, end: AttemptEnd, told: str) -> str:
        sweep, which = self.sweep, f"run {end.run} of {self.sweep.total}"
        if end.status == PRUNED:
            return f"{which} was pruned after {end.seconds:.0f} s: {end.reason}"
        if end.status == FAILED:
            return f"{which} failed after {end.seconds:.0f} s: {end.reason}"
        if told:
            return f"{which} was interrupted after {end.seconds:.0f} s: {told}"
        told = f"{which} ended after {end.seconds:.0f} s"
        if sweep.metric not in end.metrics:
            return told
        best = list_configurations(sweep)[0]
        where = "the best until now" if best.best_run == end.run else f"the best until now is run {best.best_run}"
        return f"{told}: {sweep.metric} {end.metrics[sweep.metric]:.4f} ({where})"

    def _check_progress(self, end: AttemptEnd) -> None:
        """Raise CpuftError if this end of a run is a reason to end the sweep."""
        sweep = self.sweep
        if end.status == DONE and not any(sweep.metric in one.metrics for one in sweep.ends):
            raise CpuftError(
                f"the runs do not report --metric {sweep.metric}: start a new sweep with one of "
                f"{', '.join(end.metrics)}"
            )
        failed = len({*sweep.list_with_status(FAILED)} - self._failed_before)
        if end.status == FAILED and self._stop_after and failed >= self._stop_after:
            raise _make_failure(
                f"{counted(failed, 'run')} failed, and --stop-after-failures is {self._stop_after}: correct the reason "
                f"({end.reason}), and continue with cpuft sweep --resume {sweep.folder}, or start a new sweep"
            )

    def _stop(self) -> None:
        """Let active runs save a checkpoint and end, and note how; another signal ends them at once."""
        active = [one for one in self._active if one.process.poll() is None]
        if active:
            self._say(
                f"waiting up to {_STOP_SECONDS:.0f} s for the checkpoints of {counted(len(active), 'run')}; press "
                "Ctrl-C again to end at once"
            )
        with suppress(Interrupted), execute.signals_raise(lambda signal_number: False):
            for one in active:
                one.process.send_signal(signal.SIGINT)
            end = time.monotonic() + _STOP_SECONDS
            for one in active:
                execute.wait_for_exit(one.process, max(0.0, end - time.monotonic()))
        execute.stop_processes([one.process for one in self._active])
        for one in self._active:
            self._read_evaluations(one)
            start, code = one.start, execute.exit_code_of(one.process)
            metrics = {} if code else self._read_metrics(start.folder)
            seconds = time.monotonic() - one.begun
            status = DONE if metrics else PRUNED if one.pruned_because else STOPPED
            reason = "" if metrics else one.pruned_because
            self._journal.write(AttemptEnd(start.run, start.attempt, status, code, seconds, metrics, reason))
        self._active.clear()


def name_folder(run: int, runs: int, attempt: int) -> str:
    """Return the name of the folder of a run in that of the sweep: run-07, or run-07-attempt-2."""
    return f"run-{run:0{len(str(runs))}}" + (f"-attempt-{attempt}" if attempt > 1 else "")


def name_in_trackers(header: SweepHeader, folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that group the runs of a sweep in trackers, except those that the user has set."""
    is_tracked = any(option.startswith("--report-to=") for option in header.options)
    is_tracked |= any("report_to" in values for values in header.runs)
    variables = ("WANDB_RUN_GROUP", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT")
    return {name: Path(folder).name for name in variables if is_tracked and not environ.get(name)}


def find_reason(log: Path) -> str:
    """Return the line of a launch's log that says why it failed: its last error, a rank that failed, or its end."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    ranks = [line.removeprefix("cpuft: ") for line in lines if _FAILED_RANK.match(line)]
    return (errors or ranks or lines or ["without a message"])[-1]


def _make_failure(message: str, exit_code: int = 1) -> CpuftError:
    """Return an error that ends the command with another exit code than 2, because no option was wrong."""
    error = CpuftError(message)
    error.exit_code = exit_code
    return error


def find_lost_hosts(place: Place, options: Sequence[str]) -> dict[str, str]:
    """Return the hosts of a place that cannot be used, each with the reason; `options` say how to reach them."""
    if not place.hosts:
        return {}
    access, lost = find_access(make_launch_config(options)), dict[str, str]()
    for host in place.hosts:
        try:
            if access.transport.run(host, ("true",), seconds=_ANSWER_SECONDS).exit_code:
                lost[host.name] = _SILENT
        except CpuftError as error:
            is_refused = isinstance(error, HostError) and error.kind == LOGIN_REFUSED
            lost[host.name] = _REFUSES if is_refused else _SILENT
    return lost


def make_launch_config(options: Sequence[str]) -> LaunchConfig:
    """Return the configuration of a launch's options, without those that have no value, such as --no-check."""
    return parse_arguments(LaunchConfig, [option for option in options if option.startswith("--") and "=" in option])


def format_status(sweep: Sweep, places: int, now: float, is_running: bool = True) -> str:
    """Return a few lines: runs by status, the best until now, the time left, active runs.

    `places` is 0 if it is not known. If no `cpuft sweep` works on the runs now, those that have not ended are queued.
    """
    done, failed = sweep.list_with_status(DONE), sweep.list_with_status(FAILED)
    begun = [start for run in sweep.numbers if (start := sweep.find_start(run)) and sweep.find_end(run) is None]
    active = begun if is_running else []
    pruned = sweep.list_with_status(PRUNED)
    queued = sweep.total - len(done) - len(failed) - len(pruned) - len(active)
    counts = f"{len(done)} done, {len(active)} running, {queued} queued, {len(failed)} failed"
    counts += f", {len(pruned)} pruned" if pruned else ""
    lines = [f"{counted(sweep.total, 'run')}: {counts}"]
    if not is_running and queued:
        lines.append(f"no cpuft sweep works on these runs now: continue with cpuft sweep --resume {sweep.folder}")
    if places > len(active):
        lines[0] += f", {counted(places - len(active), 'place')} idle"
    if configurations := list_configurations(sweep):
        best = configurations[0]
        values = describe_values(dict(best.values)) if best.values else find_folder(sweep, best.best_run)
        lines.append(f"best {sweep.metric} until now: {best.mean:.4f} ({values})")
    passed = {start.run: now - start.time for start in active}
    seconds = estimate_seconds_left(sweep, passed, places or max(1, len(active)))
    if seconds is not None and (active or queued):
        lines.append(f"about {max(1, round(seconds / 60))} min left")
    for start in active:
        values = describe_values(sweep.header.runs[start.run - 1])
        lines.append(f"  run {start.run} on {start.place} for {max(0.0, now - start.time) / 60:.1f} min: {values}")
    return "\n".join(lines)


def estimate_seconds_left(sweep: Sweep, active_seconds: Mapping[int, float], places: int) -> float | None:
    """Return the seconds until all runs have ended, by the relative lengths of runs; None before the first end."""
    lengths, done = sweep.header.lengths, sweep.list_with_status(DONE)
    spent = sum(sweep.count_seconds(run) for run in done)
    if not done or not spent:
        return None
    scale = spent / sum(lengths[run - 1] for run in done)
    ended = {*done, *sweep.list_with_status(FAILED, PRUNED)}
    left = [
        max(0.0, scale * lengths[run - 1] - active_seconds.get(run, 0.0)) for run in sweep.numbers if run not in ended
    ]
    left += [scale * sum(lengths) / len(lengths)] * (sweep.total - len(lengths))
    return max(sum(left) / places, *left, 0.0)
