"""The queue of a sweep: fills hosts with runs, the longest first, and survives lost hosts, failures and its own end."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cpuft import execute
from cpuft.argv import module_command
from cpuft.config.fields import format_flag, format_options
from cpuft.config.train import TRAINING_INPUTS
from cpuft.errors import IO_ERROR, RESUMABLE, CpuftError, Interrupted, counted
from cpuft.launch.fetched_checkpoints import check_copy
from cpuft.launch.resume import has_begun
from cpuft.launch.run_locks import lock_run
from cpuft.launch.run_state import FINISHED, read_state
from cpuft.launch.stop_request import TRAINING_STOP_SECONDS
from cpuft.record import FILE_NAME as RECORD_NAME
from cpuft.record import read_record
from cpuft.sweep.places import REFUSES, Place, find_lost_hosts
from cpuft.sweep.pruning import MedianPruner
from cpuft.sweep.results import list_results
from cpuft.sweep.search_space import describe_values
from cpuft.sweep.study import DONE, FAILED, LOST, PRUNED, RUNNING, STOPPED, Attempt, Configuration, Run, Sweep

_FILE_OPTIONS = tuple(map(format_flag, TRAINING_INPUTS))
_POLL_SECONDS = 0.2
_STOP_SECONDS = TRAINING_STOP_SECONDS + 30.0
"""How long launches have to end after a signal, before they are killed."""
_RETURN_SECONDS = 600.0
"""How long a sweep waits for lost hosts if no other hosts are left."""
_ASK_SECONDS = 10.0
"""Pause between two questions to lost hosts."""
_LAST_BYTES = 1 << 16
"""How much of the end of a log is searched for the reason of a failure."""
_ERROR = "cpuft: error: "
_FAILED_RANK = re.compile(r"cpuft: rank \d+ on .* failed \(")
_MOST_ATTEMPTS = 6
"""Most attempts at a run that was interrupted or ended without an update, apart from those that its sweep ended."""
_MOST_FAILURES = 2
"""A place on which so many launches in a row have ended without an update gets no more runs."""
_UNLOCK_SECONDS = 300.0
"""How long a continued sweep waits for launches that still end, because the sweep was killed."""

Say = Callable[[str], None]


@dataclass
class _ActiveRun:
    run: Run
    place: Place
    process: execute.Process
    begun: float
    """time.monotonic() at its start."""
    is_resumed: bool
    log_bytes: int
    """Size of its log when it started."""
    pruned_at: float = 0.0
    """time.monotonic() when it was pruned; 0 if it was not."""


class SweepQueue:
    """Carries out the runs of a sweep, also those that failed in an earlier session: each is a `cpuft launch`.

    `options` are for all launches: how hosts are reached. The sweep ends after `stop_after` failures (0: never).
    """

    def __init__(
        self, sweep: Sweep, options: Sequence[str], places: Sequence[Place], stop_after: int, say: Say
    ) -> None:
        self.sweep, self._options, self._places, self._stop_after = sweep, options, list(places), stop_after
        self._say, self._active = say, list[_ActiveRun]()
        self._pruner = MedianPruner(sweep) if sweep.settings.pruner != "none" else None
        self._host_share = 1 / len(places) if places and places[0].prefix else 1.0  # places that divide this machine
        self._failed_before = {*sweep.list_runs(FAILED)}
        """Runs that failed in an earlier session, and have not been started in this one."""
        self._checked = set[str]()
        """Names of places on whose hosts a run has trained, which need no short check of the doctor any more."""
        self._lost = list[Place]()
        """Places that get no more runs because their hosts do not answer."""
        self._failures = dict[str, int]()
        """Name of a place -> number of launches there in a row that ended without an update."""
        self._waits_until = time.monotonic() + _UNLOCK_SECONDS
        """Until when launches that still end after an earlier session was killed keep their runs from starting."""

    def run(self, watch: Callable[[], None] = lambda: None) -> int:
        """Start runs until all have ended; return the number of those that failed. Raises CpuftError: no place is left,
        `stop_after` runs failed, or runs have other metrics. Before any error or signal is raised, all active runs are
        ended, so that they can be resumed. `watch` is called several times per second, unless lost hosts are awaited.
        """
        with execute.signals_raise():
            try:
                for one in self.sweep.configurations:  # which may have ended when the sweep was killed
                    self._conclude(one)
                while self._active or self._has_more() or self._list_open():
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
        return len(self.sweep.list_runs(FAILED))

    def _wait_for_hosts(self) -> bool:
        """Wait up to ten minutes until a lost host answers again: it is often this machine's network that was away."""
        end = time.monotonic() + _RETURN_SECONDS
        if self._lost:
            self._say(f"no host answers any more: waiting up to {_RETURN_SECONDS / 60:.0f} min for one")
        while self._lost and time.monotonic() < end:
            self._places = [place for place in self._lost if not find_lost_hosts(place, self._options)]
            self._lost = [place for place in self._lost if place not in self._places]
            if self._places:
                return True
            time.sleep(_ASK_SECONDS)
        return False

    def _list_open(self) -> list[Run]:
        active = {one.run for one in self._active}
        found = (run for run in self.sweep.runs if run not in active and not self._has_ended(run))
        return sorted(found, key=lambda run: -run.length)

    def _has_ended(self, run: Run) -> bool:
        """Return whether a run is not started again in this session."""
        is_tried_again = run in self._failed_before and not run.configuration.pruned
        return run.status in (DONE, FAILED, PRUNED) and not is_tried_again

    def _has_more(self) -> bool:
        return len(self.sweep.configurations) < self.sweep.settings.trials

    def _fill(self) -> None:
        """Start a run on each free place: one that can be resumed there, else the longest one, else a new one."""
        used = {one.place.name for one in self._active}
        for place in [place for place in self._places if place.name not in used]:
            waiting = [run for run in self._list_open() if not self._is_still_ending(run)]
            names = {other.name for other in self._places}
            # The checkpoint of a run may be on the disk of its host.
            here = [run for run in waiting if _find_place(run, STOPPED, RUNNING) == place.name]
            others = [run for run in waiting if _find_place(run, STOPPED, RUNNING) not in names]
            if len(names) > 1:
                # A run that ended without an update is tried on another host.
                others = [run for run in others if _find_place(run, LOST) != place.name]
            if chosen := [*here, *others]:
                self._start(chosen[0], place)
            elif self._has_more():
                try:
                    chosen = self.sweep.choose_next().runs
                except CpuftError as error:
                    if self._active:  # the runs that train now end first
                        return
                    raise _make_failure(str(error)) from None
                self._start(chosen[0], place)

    def _is_still_ending(self, run: Run) -> bool:
        """Return whether a launch of an earlier session still works in the folder of a run."""
        if not run.last or run.last.status or time.monotonic() > self._waits_until:
            return False
        try:
            with lock_run(str(Path(self.sweep.folder, run.last.folder))):
                return False
        except CpuftError:
            return True

    def _start(self, run: Run, place: Place) -> None:
        """Start a run, or resume the last attempt at it if that was stopped and has begun to train."""
        earlier = run.last
        if earlier and run.status in (RUNNING, STOPPED) and (found := self._read_finished(earlier.folder)):
            # It has finished, and the sweep was killed before it could note this.
            seconds = max(0.0, Path(self.sweep.folder, earlier.folder, RECORD_NAME).stat().st_mtime - earlier.time)
            end = replace(earlier, status=DONE, seconds=earlier.seconds or seconds, metrics=found, reason="")
            self._note_end(run, end)
            return
        folder, arguments, reason = plan_trial(self.sweep, run, place.name)
        is_resumed = "--resume" in arguments
        self._failed_before.discard(run)
        command = [*place.prefix, *module_command(sys.executable, "cpuft"), "launch", *self._options, *place.options]
        command += arguments
        if place.hosts and not {"--copy-checkpoints", "--no-copy-checkpoints"}.intersection(self._options):
            command.append("--copy-checkpoints")
        if place.name in self._checked and "--no-check" not in command:
            command.append("--no-check")
        self.sweep.note(run, Attempt(place.name, folder, time.time(), self._host_share))
        log = self.sweep.find_log(folder)
        log.parent.mkdir(exist_ok=True)
        log_bytes = log.stat().st_size if log.exists() else 0
        environ = os.environ | name_in_trackers(self.sweep, os.environ)
        process = execute.start_with_log(command, environ, str(log), self.sweep.settings.working_folder or None)
        self._active.append(_ActiveRun(run, place, process, time.monotonic(), is_resumed, log_bytes))
        begins = f"{'continues' if is_resumed else 'starts'} on {place.name}{reason}"
        self._say(f"run {run.number} of {self.sweep.total} {begins}: {describe_values(run.values)}")

    def _note_end(self, run: Run, end: Attempt) -> None:
        self.sweep.note(run, end)
        self._conclude(run.configuration)

    def _conclude(self, one: Configuration) -> None:
        is_active = any(active.run.configuration is one for active in self._active)
        if not one.is_told and not is_active and all(map(self._has_ended, one.runs)):
            if self._pruner:
                self._pruner.finish(one)
            self.sweep.conclude(one)

    def _prune(self) -> None:
        """Ask all active runs of a configuration to end at once, if an evaluation of one of them says so."""
        if self._pruner is None:
            return
        for active in self._active:
            one = active.run.configuration
            if active.pruned_at:
                if time.monotonic() - active.pruned_at > _STOP_SECONDS:
                    execute.stop_processes([active.process])
            elif reason := self._pruner.find_reason(active.run):
                self.sweep.prune(one, reason)
                for other in self._active:
                    if other.run.configuration is one:
                        other.pruned_at = time.monotonic()
                        other.process.send_signal(signal.SIGTERM)

    def _has_trained(self, active: _ActiveRun) -> bool:
        """Return whether an attempt has made an update, as its log says: the record may be on another host."""
        with suppress(OSError), self.sweep.find_log(active.run.folder).open("rb") as file:
            file.seek(active.log_bytes)
            return any(line.startswith(b"step ") for line in file)
        return False

    def _read_metrics(self, folder: str) -> dict[str, float]:
        with suppress(CpuftError):
            record = read_record(str(Path(self.sweep.folder, folder)))
            return dict(record.metrics) if record.footer else {}
        return {}

    def _read_finished(self, folder: str) -> dict[str, float]:
        """Return the metrics of a run whose launch was stopped; empty if it has to train or to fetch results yet."""
        with suppress(CpuftError):
            state = read_state(str(Path(self.sweep.folder, folder)))
            if state is None or state.phase == FINISHED:
                return self._read_metrics(folder)
        return {}

    def _finish(self, active: _ActiveRun) -> None:
        self._active.remove(active)
        if self._pruner:
            self._pruner.read(active.run)
        run, place, end = active.run, active.place, self._make_end(active)
        told, has_trained = "", self._has_trained(active)
        if end.status == DONE:
            self._failures.pop(place.name, None)
            self._checked.add(place.name)
        elif end.status == PRUNED:
            self._failures.pop(place.name, None)
        elif gone := find_lost_hosts(place, self._options):
            update, problem = check_copy(str(Path(self.sweep.folder, end.folder)))
            end = replace(end, status=STOPPED if update else LOST)
            told = f"it starts again from the beginning on another host, because {problem}"
            if update:
                told = f"it continues on another host after update {update}, from the copy of its checkpoint"
            if REFUSES not in gone.values():  # programs such as fail2ban lock out who asks again
                self._lost.append(place)
            self._retire(place, ", ".join(f"{name} {what}" for name, what in gone.items()))
        else:
            # Those that ended with the sweep say nothing about the run, and have no reason.
            number = 1 + sum(one.reason != "" for one in run.attempts)
            if end.exit_code in (RESUMABLE, IO_ERROR) and number < _MOST_ATTEMPTS:
                end, told = replace(end, status=STOPPED), f"it will continue ({end.reason})"
            elif not has_trained and number < _MOST_ATTEMPTS and (active.is_resumed or number == 1):
                # A host with a fault of its own would take one run after another, and each would fail.
                told = f"it starts again, because it ended without an update ({end.reason})"
                end = replace(end, status=LOST)
            # A disk that is full stays full for the next run.
            self._note_failure(place, has_trained and end.exit_code != IO_ERROR)
        self._note_end(run, end)
        self._say(self._describe_end(run, end, told))
        self._check_progress(end)

    def _make_end(self, active: _ActiveRun) -> Attempt:
        start, code = active.run.attempts[-1], execute.exit_code_of(active.process)
        metrics = {} if code else self._read_metrics(start.folder)
        end = replace(start, exit_code=code, seconds=time.monotonic() - active.begun, metrics=metrics)
        if metrics:
            return replace(end, status=DONE)
        if active.pruned_at:
            return replace(end, status=PRUNED, reason=active.run.configuration.pruned)
        return replace(end, status=FAILED, reason=find_reason(self.sweep.find_log(start.folder), active.log_bytes))

    def _note_failure(self, place: Place, has_trained: bool) -> None:
        """Retire a place on which several launches in a row have ended without an update, or because of its disk."""
        self._failures[place.name] = 0 if has_trained else self._failures.get(place.name, 0) + 1
        if self._failures[place.name] >= _MOST_FAILURES:
            self._retire(place, f"{_MOST_FAILURES} launches in a row have failed there")

    def _retire(self, place: Place, reason: str) -> None:
        self._places = [other for other in self._places if other.name != place.name]
        self._say(f"{place.name} gets no more runs, because {reason}")

    def _describe_end(self, run: Run, end: Attempt, told: str) -> str:
        sweep, which = self.sweep, f"run {run.number} of {self.sweep.total}"
        if end.status == PRUNED:
            return f"{which} was pruned after {end.seconds:.0f} s: {end.reason}"
        if end.status == FAILED:
            return f"{which} failed after {end.seconds:.0f} s: {end.reason}"
        if told:
            return f"{which} was interrupted after {end.seconds:.0f} s: {told}"
        told = f"{which} ended after {end.seconds:.0f} s"
        if sweep.metric not in end.metrics:
            return told
        best = list_results(sweep)[0].best_run
        where = "the best until now" if best is run else f"the best until now is run {best.number}"
        return f"{told}: {sweep.metric} {end.metrics[sweep.metric]:.4f} ({where})"

    def _check_progress(self, end: Attempt) -> None:
        sweep = self.sweep
        if end.status == DONE and not list_results(sweep):
            known = ", ".join(end.metrics)
            raise CpuftError(f"the runs do not report --metric {sweep.metric}: start a new sweep with one of {known}")
        failed = len({*sweep.list_runs(FAILED)} - self._failed_before)
        if end.status == FAILED and self._stop_after and failed >= self._stop_after:
            raise _make_failure(
                f"{counted(failed, 'run')} failed, and --stop-after-failures is {self._stop_after}: correct the reason "
                f"({end.reason}), and continue with cpuft sweep --resume {sweep.folder}, or start a new sweep"
            )

    def _stop(self) -> None:
        """Let active runs save a checkpoint and end, and note how; another signal ends them at once."""
        active = [one for one in self._active if one.process.poll() is None]
        if active:
            runs = counted(len(active), "run")
            self._say(
                f"waiting up to {_STOP_SECONDS:.0f} s for checkpoints of {runs}; press Ctrl-C again to end at once"
            )
        end = time.monotonic() + _STOP_SECONDS
        with suppress(Interrupted), execute.signals_raise():
            for one in active:
                execute.ask_to_end(one.process)
            for one in active:
                execute.wait_for_exit(one.process, max(0.0, end - time.monotonic()))
        execute.stop_processes([one.process for one in self._active])
        for one in self._active:
            found = self._make_end(one)
            if found.status == FAILED:
                # A signal that comes after the last update changes the exit code, too.
                metrics = self._read_finished(found.folder)
                found = replace(found, status=DONE if metrics else STOPPED, metrics=metrics, reason="")
            self.sweep.note(one.run, found)
        self._active.clear()


def _find_place(run: Run, *statuses: str) -> str:
    return run.last.place if run.last and run.status in statuses else ""


def plan_trial(sweep: Sweep, run: Run, place: str) -> tuple[str, list[str], str]:
    """Return (folder of the next attempt in the sweep's, such as "run-3-attempt-2"; arguments of its launch; reason).

    The last attempt is resumed in its own folder if it was stopped or killed and has begun to train, on a host of
    `place` or with a whole copy of its checkpoint. Without that copy, the reason is " from the beginning, because ...",
    otherwise "".
    """
    earlier, number, reason = run.last, len(run.attempts) + 1, ""
    training = [*sweep.settings.options, *format_options(run.values)]
    if earlier and run.status in (STOPPED, RUNNING):
        path = str(Path(sweep.folder, earlier.folder))
        resumes = has_begun(path)
        if resumes and not {*earlier.place.split(",")} & {*place.split(",")}:
            update, problem = check_copy(path)
            resumes, reason = update > 0, f" from the beginning, because {problem}" if problem else ""
        if resumes:
            # Another host may not have the files with which the run was started.
            files = [option for option in training if option.partition("=")[0] in _FILE_OPTIONS]
            return earlier.folder, [*files, "--resume", path], ""
    folder = f"run-{run.number:0{len(str(sweep.total))}}" + (f"-attempt-{number}" if number > 1 else "")
    return folder, [*training, "--run-dir", str(Path(sweep.folder, folder))], reason


def name_in_trackers(sweep: Sweep, environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of WANDB_RUN_GROUP, MLFLOW_EXPERIMENT_NAME and TRACKIO_PROJECT that are unset or empty in `environ`,
    with the name of the sweep's folder as value; {} if no run has --report-to.
    """
    is_tracked = any(option.startswith("--report-to=") for option in sweep.settings.options)
    is_tracked |= any("report_to" in run.values for run in sweep.runs)
    variables = ("WANDB_RUN_GROUP", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT")
    return {name: Path(sweep.folder).name for name in variables if is_tracked and not environ.get(name)}


def find_reason(log: Path, begin: int) -> str:
    """Return the last line of a log from byte `begin` on that starts with "cpuft: error: ", without that; else the last
    one about a failed rank, else the last one, else "without a message".
    """
    lines = list[str]()
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - _LAST_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    ranks = [line.removeprefix("cpuft: ") for line in lines if _FAILED_RANK.match(line)]
    return (errors or ranks or lines or ["without a message"])[-1]


def _make_failure(message: str, exit_code: int = 1) -> CpuftError:
    """Return an error that ends the command with another exit code than 2, because no option was wrong."""
    error = CpuftError(message)
    error.exit_code = exit_code
    return error


def format_status(sweep: Sweep, places: int, now: float, is_running: bool = True) -> str:
    """Return lines, the last one without a newline: "9 runs: 4 done, 2 running, 3 queued, 0 failed", the best until
    now, "about 12 min left", and one for each active run; what is not known is left out.

    `now` is time.time(), `places` 0 if unknown: as many as runs are active, at least one. Unless a sweep `is_running`,
    runs that have not ended count as queued, and a line says how to continue.
    """
    active = sweep.list_runs(RUNNING) if is_running else []
    ended = {status: len(sweep.list_runs(status)) for status in (DONE, FAILED, PRUNED)}
    queued = sweep.total - sum(ended.values()) - len(active)
    counts = f"{ended[DONE]} done, {len(active)} running, {queued} queued, {ended[FAILED]} failed"
    counts += f", {ended[PRUNED]} pruned" if ended[PRUNED] else ""
    lines = [f"{counted(sweep.total, 'run')}: {counts}"]
    if not is_running and queued:
        lines.append(f"no cpuft sweep works on these runs now: continue with cpuft sweep --resume {sweep.folder}")
    if places > len(active):
        lines[0] += f", {counted(places - len(active), 'place')} idle"
    if found := list_results(sweep):
        values = describe_values(found[0].values) if found[0].values else found[0].best_run.folder
        lines.append(f"best {sweep.metric} until now: {found[0].mean:.4f} ({values})")
    seconds = estimate_seconds_left(sweep, now if is_running else 0.0, places or max(1, len(active)))
    if seconds is not None and (active or queued):
        lines.append(f"about {max(1, round(seconds / 60))} min left")
    for run in active:
        begun = run.attempts[-1]
        passed = max(0.0, now - begun.time) / 60
        lines.append(f"  run {run.number} on {begun.place} for {passed:.1f} min: {describe_values(run.values)}")
    return "\n".join(lines)


def estimate_seconds_left(sweep: Sweep, now: float, places: int) -> float | None:
    """Return the seconds until all runs, `places` at a time, have ended, by their lengths; None before one is done."""
    done, known = sweep.list_runs(DONE), [run.length for run in sweep.runs]
    spent = sum(run.seconds for run in done)
    if not spent:
        return None
    scale = spent / sum(run.length for run in done)
    left = [scale * sum(known) / len(known)] * (sweep.total - len(known))
    for run in sweep.runs:
        if run.status not in (DONE, FAILED, PRUNED):
            passed = now - run.last.time if run.last and run.status == RUNNING else 0.0
            left.append(max(0.0, scale * run.length - max(0.0, passed)))
    return max(sum(left) / places, *left, 0.0)
