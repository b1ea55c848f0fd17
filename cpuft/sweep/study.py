"""A sweep on the disk: an Optuna study whose trials are its configurations, with all attempts at their runs."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpuft.config.fields import format_flag, option_names
from cpuft.config.launch import LaunchConfig
from cpuft.config.sweep import SWEEP_PRUNERS, SWEEP_SEARCHES
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, requires
from cpuft.files import write_folder_atomically, write_text
from cpuft.launch.run_locks import lock_run
from cpuft.serialization import load
from cpuft.sweep.sampler import Parameters, make_distributions
from cpuft.sweep.search_space import (
    SEED,
    Key,
    OptionValues,
    apply_assignment,
    estimate_length,
    make_base_config,
    make_key,
)
from cpuft.transfer import lock_file

FILE_NAME = "sweep.jsonl"
_STUDY, _SETTINGS, _RUNS, _PRUNED = "sweep", "settings", "runs", "pruned"
"""Name of the study, an attribute of the study, and two of its trials. Attempts at run 3 are the attribute run-3."""
NOT_STORED = ("mpirun", "ssh_config", "run_dir", "only_hosts")
"""Options of LaunchConfig that are not in a sweep's file, so that no program is started because a file names it."""
_STATUS_SECONDS = 2.0
_FOLDER = re.compile(r"run-[0-9]{1,9}(-attempt-[0-9]{1,9})?")
DONE, FAILED, LOST, STOPPED, PRUNED = "done", "failed", "lost", "stopped", "pruned"
"""How an attempt at a run ended: with a metric; by an error of its own; because a host was lost, or before its first
update, so that the run starts again; interrupted, so that the run can be resumed; by the pruner, for good."""
RUNNING = "running"
"""Status of a run whose last attempt has not ended, or whose sweep was killed before it could note the end."""


@dataclass(frozen=True)
class SweepSettings:
    """What a sweep does."""

    options: list[str]
    """Arguments of all runs, such as "--task=mrpc"."""
    trials: int
    """Number of configurations. With --search tpe, Optuna chooses one after another while the sweep runs."""
    metric: str = ""
    """Name of the metric that is compared; empty for the first one that the runs report."""
    hosts_per_run: int = 1
    price: float = 0.0
    """Price of one host for one hour; 0 if it is not known."""
    search: str = "grid"
    search_seed: int = 0
    pruner: str = "none"
    seeds: int = 1
    """Largest number of runs of a configuration, one for each value of --seed."""
    spaces: list[dict[str, str]] = field(default_factory=list)
    """Alternatives, each with the values of its options as the command line takes them, such as "1e-5..1e-3"."""
    launch: list[str] = field(default_factory=list)
    """Arguments of all launches that say where and how they run, such as "--cluster=office", without `NOT_STORED`."""
    working_folder: str = ""
    """Folder in which the launches start, because options may have relative paths."""
    parallel: int = 0
    """Largest number of runs at the same time; 0 for one on each group of hosts, or one on this machine."""


@dataclass(frozen=True)
class Attempt:
    """A launch of a run."""

    place: str
    """Names of its hosts, or the cores of this machine."""
    folder: str
    """Folder of the run, in the folder of the sweep."""
    time: float
    """Seconds since 1970 when it started."""
    host_share: float = 1.0
    status: str = ""
    """DONE, FAILED, LOST, STOPPED or PRUNED; empty while it has not ended."""
    exit_code: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why it failed (the last line of its log) or was pruned."""


@dataclass(eq=False)
class Run:
    """A run of a sweep. Runs are numbered from 1, those of one configuration one after another."""

    number: int
    values: OptionValues
    length: float
    """Expected length, relative to other runs."""
    configuration: Configuration = field(repr=False)
    attempts: list[Attempt]

    @property
    def last(self) -> Attempt | None:
        """The last attempt; None before the first."""
        return self.attempts[-1] if self.attempts else None

    @property
    def status(self) -> str:
        """How the last attempt has ended, "running" until then, or "" before one; but "pruned" if the configuration is,
        unless the attempt is "done" or "failed".
        """
        own = (self.last.status or RUNNING) if self.last else ""
        return PRUNED if self.configuration.pruned and own not in (DONE, FAILED) else own

    @property
    def folder(self) -> str:
        """Folder of the last attempt, relative to that of the sweep; empty before the first one."""
        return self.last.folder if self.last else ""

    @property
    def seconds(self) -> float:
        """Seconds of all attempts that have ended and trained in the folder of the last one; 0 before the first."""
        return sum(one.seconds for one in self.attempts if self.last and one.folder == self.last.folder)


@dataclass(eq=False)
class Configuration:
    """Runs that have the same options apart from the seed: a trial of the study."""

    trial: int
    """Number of the trial. If a run is tried again after all have ended, the configuration gets another trial."""
    runs: list[Run]
    pruned: str
    """Why it was pruned; empty if it was not."""
    curve: dict[int, float]
    """Number of updates -> mean of the metric over the runs, at each evaluation while training."""
    value: float | None
    """Mean of the metric at the end, once all runs have ended."""
    is_told: bool
    """Whether Optuna knows how it has ended."""
    share: float = 0.0
    """Share of its training that one update is, up to a factor of the whole sweep."""

    @property
    def values(self) -> OptionValues:
        """The options that vary in the sweep and their values, without the seed."""
        return {name: text for name, text in self.runs[0].values.items() if name != SEED}


class Sweep:
    """What has happened in a sweep; `metric` is "" while it is not known. What is added is stored at once."""

    def __init__(self, backend: Any, folder: str) -> None:
        self._optuna, self.backend, self.folder = import_optuna(), backend, folder
        self._states, self._create = self._optuna.trial.TrialState, self._optuna.trial.create_trial
        self._storage = self._optuna.storages.JournalStorage(backend)
        self.study = self._optuna.load_study(study_name=_STUDY, storage=self._storage)
        self._study_id = self._storage.get_study_id_from_name(_STUDY)
        self.settings = load(SweepSettings, self.study.user_attrs[_SETTINGS])
        self.metric = self.settings.metric
        self.is_maximized = self.study.direction == self._optuna.study.StudyDirection.MAXIMIZE
        self._parameters = Parameters(self.settings.spaces)
        self._base = make_base_config(self.settings.options)
        found: dict[int, Configuration] = {}
        for trial in self.study.get_trials(deepcopy=False):
            if one := self._read(trial):
                found[one.runs[0].number] = one
        self.configurations = list(found.values())
        self.runs = [run for one in self.configurations for run in one.runs]
        self._known = {make_key(one.values) for one in self.configurations}
        self._find_metric()
        self._refuse_foreign()

    def _read(self, trial: Any) -> Configuration | None:
        """Return the configuration of a trial; None if Optuna had chosen one that was there already."""
        told = trial.user_attrs
        value = load(float, trial.value) if trial.state == self._states.COMPLETE else None
        curve = {load(int, update): load(float, reached) for update, reached in trial.intermediate_values.items()}
        pruned = load(str, told.get(_PRUNED, ""))
        one = Configuration(trial.number, [], pruned, curve, value, trial.state.is_finished())
        for number, values in load(dict[str, OptionValues], told.get(_RUNS, {})).items():
            attempts = load(list[Attempt], told.get(f"run-{number}", []))
            config = apply_assignment(self._base, values)
            length = estimate_length(config)
            one.share = config.batch_size * config.gradient_accumulation / length
            one.runs.append(Run(int(number), values, length, one, attempts))
        return one if one.runs else None

    def _refuse_foreign(self) -> None:
        """Raise CpuftError if the file holds what no sweep writes: its values become arguments of `cpuft launch`."""
        told, training = self.settings, {*option_names(TrainConfig), "np", "ppn"}
        launch = {*option_names(LaunchConfig)} - {*NOT_STORED}
        found = [one for one in told.options if _name_of(one) not in training]
        found += [one for one in told.launch if _name_of(one) not in launch]
        values = (*(run.values for run in self.runs), *told.spaces)
        found += [name for one in values for name in one if name not in training]
        found += [one.folder for run in self.runs for one in run.attempts if not _FOLDER.fullmatch(one.folder)]
        if found:
            advice = "give a folder that cpuft sweep has made"
            raise CpuftError(f"{self.folder}/{FILE_NAME} holds {found[0]!r:.80}, which no sweep writes: {advice}")
        is_whole = [run.number for run in self.runs] == [*range(1, len(self.runs) + 1)]
        is_known = told.search in SWEEP_SEARCHES and told.pruner in SWEEP_PRUNERS and 0 < told.seeds <= 10**6
        has_hosts = told.hosts_per_run > 0 and told.parallel >= 0
        if not is_whole or not is_known or not has_hosts or not len(self.configurations) <= told.trials <= 10**6:
            raise ValueError("its configurations do not fit together")

    @property
    def total(self) -> int:
        """Number of all runs, including those of configurations that Optuna has not chosen yet."""
        return len(self.runs) + (self.settings.trials - len(self.configurations)) * self.settings.seeds

    @property
    def host_hours(self) -> float:
        """Hours of all attempts that have ended, times the hosts, or the share of a host, that each had."""
        seconds = sum(one.seconds * one.host_share for run in self.runs for one in run.attempts)
        return seconds * self.settings.hosts_per_run / 3600

    def find_log(self, folder: str) -> Path:
        """Return the log of the launches of the run in `folder`, such as SWEEP/logs/run-03.log for "run-03"."""
        return Path(self.folder, "logs", f"{folder}.log")

    def list_runs(self, *statuses: str) -> list[Run]:
        """Return the runs with one of these statuses, in the order of their numbers; "" is that of unstarted ones."""
        return [run for run in self.runs if run.status in statuses]

    def plan_grid(self, runs: Sequence[OptionValues]) -> None:
        """Add the configurations of a grid, whose runs differ only in the seed; no run is started."""
        distributions, groups = make_distributions(runs), dict[Key, list[OptionValues]]()
        for run in runs:
            groups.setdefault(make_key(run), []).append(run)
        is_text = self._optuna.distributions.CategoricalDistribution
        for key, group in groups.items():
            used = {name: distributions[name] for name, _ in key}
            params = {name: text if isinstance(used[name], is_text) else float(text) for name, text in key}
            told = {"params": params, "distributions": used, "user_attrs": {_RUNS: self._number(group)}}
            self.study.add_trial(self._create(state=self._states.WAITING, **told))
            self._add(len(self.configurations))

    def choose_next(self) -> Configuration:
        """Add another configuration, which Optuna chooses, and return it. Raises CpuftError: none was found."""
        told, number = self.settings, len(self.configurations) + 1
        trial, runs = self._parameters.choose(self.study, told.search, told.search_seed, number, self._known)
        trial.set_user_attr(_RUNS, self._number(runs))
        return self._add(trial.number)

    def forget_proposals(self) -> None:
        """End trials that Optuna has begun, but whose runs were not stored before the sweep was killed."""
        for trial in self.study.get_trials(deepcopy=False, states=(self._states.RUNNING,)):
            if _RUNS not in trial.user_attrs:
                self.study.tell(trial.number, state=self._states.FAIL)

    def _number(self, runs: Sequence[OptionValues]) -> dict[str, OptionValues]:
        return {str(number): values for number, values in enumerate(runs, start=len(self.runs) + 1)}

    def _find_trial(self, number: int) -> int:
        return int(self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number))

    def _add(self, trial: int) -> Configuration:
        """Add the configuration of the trial with this number, which is new."""
        one = self._read(self._storage.get_trial(self._find_trial(trial)))
        assert one is not None
        self.configurations.append(one)
        self.runs += one.runs
        self._known.add(make_key(one.values))
        return one

    def note(self, run: Run, attempt: Attempt) -> None:
        """Store an attempt at a run: a new one, or, if it has a status, the end of the last one, which it replaces."""
        run.attempts = [*(run.attempts[:-1] if attempt.status else run.attempts), attempt]
        told = [asdict(one) for one in run.attempts]
        self._storage.set_trial_user_attr(self._open_trial(run.configuration), f"run-{run.number}", told)
        self._find_metric()

    def _find_metric(self) -> None:
        found = (name for run in self.runs for one in run.attempts for name in one.metrics)
        self.metric = self.metric or next(found, "")

    def note_evaluation(self, configuration: Configuration, update: int, value: float) -> None:
        """Store the mean of the metric that the runs of a configuration have reached after a number of updates."""
        configuration.curve[update] = value
        self._storage.set_trial_intermediate_value(self._open_trial(configuration), update, value)

    def prune(self, configuration: Configuration, reason: str) -> None:
        """Store that a configuration is not trained any more; `conclude` follows when its launches have ended."""
        configuration.pruned = reason
        self._storage.set_trial_user_attr(self._open_trial(configuration), _PRUNED, reason)

    def _open_trial(self, one: Configuration) -> int:
        """Return the identifier of a running trial of a configuration.

        One that has ended cannot be changed: a run that is tried again makes another, as RetryFailedTrialCallback does.
        """
        trial = self._storage.get_trial(self._find_trial(one.trial))
        if trial.state.is_finished():
            kept = ("params", "distributions", "user_attrs", "intermediate_values")
            told = {name: getattr(trial, name) for name in kept}
            self.study.add_trial(self._create(state=self._states.RUNNING, **told))
            one.trial, one.value, one.is_told = self._storage.get_n_trials(self._study_id) - 1, None, False
        found = self._find_trial(one.trial)
        if trial.state == self._states.WAITING:
            self._storage.set_trial_state_values(found, self._states.RUNNING)
        return found

    def conclude(self, one: Configuration) -> None:
        """Tell Optuna that a configuration was pruned, else the mean of the runs that have the metric, which becomes
        its `value`, or if none has it or the mean is NaN, that it failed.
        """
        self._open_trial(one)
        found = [run.last.metrics[self.metric] for run in one.runs if run.last and self.metric in run.last.metrics]
        value = statistics.fmean(found) if found else math.nan
        if one.pruned:
            self.study.tell(one.trial, state=self._states.PRUNED)
        elif math.isnan(value):  # Optuna accepts no NaN.
            self.study.tell(one.trial, state=self._states.FAIL)
        else:
            one.value = value
            self.study.tell(one.trial, value)
        one.is_told = True


def import_optuna() -> Any:
    """Return the module optuna after turning off its warnings; CpuftError, with an install command: it is missing."""
    with requires("sweep", "sweeps are stored by Optuna, which is not installed"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class _Lines:
    """The lines of a new sweep in memory, as a backend of Optuna's JournalStorage."""

    def __init__(self) -> None:
        self.lines = list[str]()

    def read_logs(self, log_number_from: int) -> list[Any]:
        """Return the objects of the lines from this one on."""
        return [json.loads(line) for line in self.lines[log_number_from:]]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Add lines."""
        self.lines += [json.dumps(log, separators=(",", ":")) + "\n" for log in logs]


class _Repair:
    """Cuts off what a full disk has left of a line. Optuna's backend of a file calls this in place of a lock: its own
    would wait half a minute for a process that was killed, and `open_sweep` keeps other processes out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def acquire(self) -> bool:
        """Return True: nobody else writes."""
        return True

    def release(self) -> None:
        """Cut off a line that was not written whole."""
        _cut_off_damage(self._path)


def _cut_off_damage(path: Path) -> None:
    """Remove what stands behind the last whole line of a file."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def make_sweep(folder: str, settings: SweepSettings, is_maximized: bool, runs: Sequence[OptionValues] = ()) -> Sweep:
    """Make a sweep in memory, with the configurations of `runs` (a grid), or all of a random search; none of tpe.
    Raises CpuftError: Optuna is not installed, or there are fewer configurations than a random search has trials.
    """
    optuna, backend, direction = import_optuna(), _Lines(), "maximize" if is_maximized else "minimize"
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name=_STUDY, direction=direction)
    study.set_user_attr(_SETTINGS, asdict(settings))
    sweep = Sweep(backend, folder)
    sweep.plan_grid(runs)
    while settings.search == "random" and len(sweep.configurations) < settings.trials:
        sweep.choose_next()
    return sweep


def create_sweep(folder: str, settings: SweepSettings, is_maximized: bool, runs: Sequence[OptionValues] = ()) -> None:
    """Write the sweep of `make_sweep` into a new folder, wholly or not at all. Raises CpuftError: the folder exists."""
    text = "".join(make_sweep(folder, settings, is_maximized, runs).backend.lines)
    if os.path.lexists(folder):
        raise CpuftError(
            f"something else has made the folder {folder} meanwhile: if it is another cpuft sweep, continue it with "
            f"cpuft sweep --resume {folder}; else give another --run-dir"
        )
    with write_folder_atomically(Path(folder)) as beside:
        write_text(beside / FILE_NAME, text)


def read_sweep(folder: str) -> Sweep:
    """Return the sweep in a folder, without a line cut off at the end. CpuftError: its file is missing or damaged."""
    path = Path(folder, FILE_NAME)
    if not path.is_file():
        raise CpuftError(f"there is no {FILE_NAME} in {folder}: give the folder that cpuft sweep named")
    try:
        backend = import_optuna().storages.journal.JournalFileBackend(str(path), _Repair(path))
        return Sweep(backend, folder)
    except OSError as error:
        raise CpuftError(f"{path} cannot be read ({error}): check its permissions") from None
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CpuftError(
            f"{path} is not a sweep of this version of cpuft ({type(error).__name__}: {error!s:.200}): start "
            "the sweep anew, or continue it with the version that began it"
        ) from None


@contextmanager
def open_sweep(folder: str) -> Iterator[Sweep]:
    """Yield the sweep in a folder, locked for this process. CpuftError: it is missing, damaged, or locked for 2 s."""
    read_sweep(folder)
    end = time.monotonic() + _STATUS_SECONDS
    while is_active(folder) and time.monotonic() < end:  # `cpuft sweep status` has the lock for a moment
        time.sleep(0.1)
    with _lock(folder, "r+b"):
        _cut_off_damage(Path(folder, FILE_NAME))
        sweep = read_sweep(folder)  # after the lock, because the former owner may have added lines until then
        sweep.forget_proposals()
        yield sweep


def is_active(folder: str) -> bool:
    """Return whether a process has the lock of a sweep's folder, also a status that reads it just now; without locks
    of the file system, only this user's on this machine are seen. OSError: no sweep.
    """
    try:
        with _lock(folder, "rb"):
            return False
    except CpuftError:
        return True


@contextmanager
def _lock(folder: str, mode: str) -> Iterator[None]:
    """Open and lock the file of a sweep inside the `with` block; with `mode` "rb" for readers, who may be many.

    On a file system without locks, `lock_run` still keeps out processes of this user on this machine.
    """
    busy = CpuftError(
        f"another cpuft sweep is working on {folder}, here or on another host: wait until it has ended, or stop it, "
        "and try again"
    )
    with ExitStack() as stack:
        # NFS version 4 gives an exclusive lock only to a file that is open for writing.
        file = stack.enter_context(open(Path(folder, FILE_NAME), mode))
        try:
            stack.enter_context(lock_run(os.path.abspath(folder)))
            lock_file(file, is_shared=mode == "rb")
        except (BlockingIOError, CpuftError):
            raise busy from None
        except OSError:
            pass
        yield


def _name_of(argument: str) -> str:
    """Return the name of the option of an argument such as "--batch-size=8" or "--no-check"; empty for another text."""
    flag = argument.partition("=")[0]
    name = flag.removeprefix("--no-" if flag.startswith("--no-") else "--").replace("-", "_")
    return name if flag in (format_flag(name), format_flag(name, False)) else ""
