"""The Optuna study of a sweep: which configuration is trained next, and which one is pruned."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cpuft.config.fields import option_names, parse_arguments
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, install_command
from cpuft.launch.active_runs import lock_run
from cpuft.report.sweep import DONE, FAILED, PRUNED, SEED, SearchSettings, Sweep, Trial
from cpuft.sweep.search import (
    MOST_DRAWS,
    Assignment,
    Space,
    Values,
    apply_assignment,
    draw_configuration,
    estimate_length,
    format_number,
    is_logarithmic,
    is_whole_range,
    parse_values,
    repeat_seeds,
)

_ALTERNATIVE = "alternative"
"""Parameter of a study with several spaces: the number of the space."""
_TOKEN, _NUMBER = "cpuft_sweep", "cpuft_trial"
"""Attributes of a study, with the token of its sweep, and of its trials, with their number in the sweep."""
_MOST_ASKS = 20
"""How often Optuna is asked for a configuration until it is a new one; then one is drawn at random."""


@contextmanager
def lock_study(storage: str, study: str) -> Iterator[None]:
    """Keep other sweeps of this user on this machine out of a study in a storage, inside the `with` block."""
    is_file = storage.startswith("sqlite:///")
    place = os.path.abspath(storage.removeprefix("sqlite:///")) if is_file else f"/{storage}"
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_run(f"{place}#{study}"))
        except CpuftError:
            raise CpuftError(
                f"another cpuft sweep works on the study {study} in --storage: wait until it has ended, or give "
                "another storage"
            ) from None
        yield


class OptunaSearch:
    """Chooses the configurations of a sweep one after another, from the results of those before.

    The journal of the sweep decides what has been trained: `restore` brings the study to that state. What Optuna
    chooses depends on nothing but the results and the seed, so that a continued sweep chooses what it would have chosen
    without a stop.

    `storage` is the URL of an Optuna storage that holds the study; empty for a study in memory. `is_new` says whether
    the sweep begins now, which changes the advice if the study exists already.
    """

    def __init__(self, settings: SearchSettings, is_maximized: bool, storage: str = "", is_new: bool = False) -> None:
        self._optuna = _import_optuna()
        self._settings, self._storage = settings, storage
        self._spaces = [{name: parse_values(name, text) for name, text in space.items()} for space in settings.spaces]
        self._names = name_parameters(self._spaces)
        self._pruner = self._optuna.pruners.MedianPruner() if settings.pruner == "median" else None
        self._open = dict[int, Any]()
        """Number of a configuration -> its trial in the study, while its runs train."""
        self._reported = dict[int, int]()
        """Number of a configuration -> number of evaluations that its trial has got."""
        self._has_begun = False
        self._study = self._open_study("maximize" if is_maximized else "minimize", is_new)

    def _open_study(self, direction: str, is_new: bool) -> Any:
        optuna, name = self._optuna, self._settings.study
        if not self._storage:
            return optuna.create_study(direction=direction)
        try:
            with self._explain():
                study = optuna.create_study(
                    storage=self._storage, study_name=name, direction=direction, load_if_exists=True
                )
                token = study.user_attrs.get(_TOKEN)
                is_other = token != self._settings.token if token or study.trials else False
                if not is_other:
                    study.set_user_attr(_TOKEN, self._settings.token)
        except (ImportError, ValueError) as error:
            raise self._make_failure(error) from None
        if is_other:
            advice = "--run-dir, by which the study is named" if is_new else "storage, or leave out --storage"
            raise CpuftError(f"the study {name} in --storage belongs to another sweep: give another {advice}")
        return study

    @contextmanager
    def _explain(self) -> Iterator[None]:
        """Raise CpuftError in place of an error of the storage; any other error is one of the program."""
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (self._optuna.exceptions.OptunaError, SQLAlchemyError) as error:
            raise self._make_failure(error) from None

    def _make_failure(self, error: Exception) -> CpuftError:
        """Return the error of a storage that cannot be used, with the first line of the reason, and without the URL."""
        text = str(getattr(error, "orig", None) or error.__cause__ or error).strip()
        reason = text.splitlines()[0] if text else type(error).__name__
        advice = "give the URL of a database that no other program locks, such as sqlite:///trials.db"
        if self._has_begun:
            advice = "end other programs that lock the database, and continue with cpuft sweep --resume"
        failure = CpuftError(f"--storage cannot be used ({reason:.200}): {advice}")
        failure.exit_code = 1 if self._has_begun else 2
        return failure

    def restore(self, sweep: Sweep, retried: Collection[int] = ()) -> None:
        """Bring the study to the state of a sweep: add trials that it does not have, and end those that were stopped.

        `retried` has the numbers of runs that have failed and are tried again.
        """
        states = self._optuna.trial.TrialState
        with self._explain():
            while self._study.get_trials(deepcopy=False, states=(states.WAITING,)):
                self._study.ask()
            for trial in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
                self._study.tell(trial.number, state=states.FAIL)
            ended = self._study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
            known = {trial.user_attrs.get(_NUMBER) for trial in ended}
            for one in sweep.trials:
                if one.number not in known:
                    self._open[one.number] = self._repeat(one)
                    self.finish(sweep, one.number, retried)
        self._has_begun = True

    def _repeat(self, trial: Trial) -> Any:
        """Add a trial with the parameters of a configuration of the journal to the study, and return it."""
        found = self._add(trial.number, self._read_params(trial.params))
        _, assignment = self._suggest(found)
        seedless = [{name: text for name, text in run.items() if name != SEED} for run in trial.runs]
        if any(one != assignment for one in seedless):
            raise _make_mismatch(trial.params)
        return found

    def _add(self, number: int, params: Mapping[str, Any]) -> Any:
        self._study.enqueue_trial(dict(params))
        trial = self._study.ask()
        trial.set_user_attr(_NUMBER, number)
        return trial

    def _read_params(self, params: Mapping[str, str]) -> dict[str, Any]:
        try:
            number = int(params.get(_ALTERNATIVE, "1"))
            space, names = self._spaces[number - 1], self._names[number - 1]
            found = {parameter: _read_value(space[name], params[parameter]) for name, parameter in names.items()}
        except (ValueError, KeyError, IndexError):
            raise _make_mismatch(params) from None
        return found | ({_ALTERNATIVE: number} if _ALTERNATIVE in params else {})

    def propose(self, sweep: Sweep) -> Trial:
        """Return the configuration that is to be trained next, which is none of those that the sweep has."""
        with self._explain():
            number, fail = len(sweep.trials) + 1, self._optuna.trial.TrialState.FAIL
            known = {_make_key(trial.runs[0]) for trial in sweep.trials}
            for draw in range(_MOST_ASKS):
                seed = random.Random(f"{self._settings.seed}:{number}:{draw}").getrandbits(32)
                self._study.sampler = self._make_sampler(seed)
                trial = self._study.ask()
                index, assignment = self._suggest(trial)
                if _make_key(assignment) not in known:
                    trial.set_user_attr(_NUMBER, number)
                    break
                self._study.tell(trial, state=fail)
            else:
                index, assignment = self._draw_new(number, known)
                names = self._names[index].items()
                drawn = {name: _read_value(self._spaces[index][option], assignment[option]) for option, name in names}
                trial = self._add(number, drawn | ({_ALTERNATIVE: index + 1} if len(self._spaces) > 1 else {}))
                self._suggest(trial)
            self._open[number] = trial
            params = {name: str(value) for name, value in trial.params.items()}
        runs, base = repeat_seeds(self._spaces[index], assignment), _make_base_config(sweep.header.options)
        return Trial(number, params, runs, [estimate_length(apply_assignment(base, run)) for run in runs])

    def _make_sampler(self, seed: int) -> Any:
        samplers = self._optuna.samplers
        if self._settings.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant_liar is called experimental before Optuna 5
            return samplers.TPESampler(seed=seed, constant_liar=True)

    def _draw_new(self, number: int, known: Collection[tuple[tuple[str, str], ...]]) -> tuple[int, Assignment]:
        generator = random.Random(f"{self._settings.seed}:{number}")
        for _ in range(MOST_DRAWS):
            index, assignment = draw_configuration(self._spaces, generator)
            if _make_key(assignment) not in known:
                return index, assignment
        error = CpuftError(
            f"hardly any configuration is left after {number - 1} of --trials {self._settings.trials}: see the results "
            "with cpuft report, or start a sweep with other values"
        )
        error.exit_code = 1
        raise error

    def _suggest(self, trial: Any) -> tuple[int, Assignment]:
        """Return (index of a space, values of its options without the seed) that Optuna suggests for a trial."""
        numbers = list(range(1, len(self._spaces) + 1))
        index = trial.suggest_categorical(_ALTERNATIVE, numbers) - 1 if len(numbers) > 1 else 0
        names, assignment = self._names[index], Assignment()
        for name, values in self._spaces[index].items():
            if name in names:
                assignment[name] = _suggest_value(trial, names[name], values)
            elif name != SEED:
                assignment[name] = values.texts[0]
        return index, assignment

    def is_pruned(self, sweep: Sweep, run: int) -> bool:
        """Return whether the pruner ends the configuration of a run after the last evaluation of the run.

        The mean over those runs of the configuration that have got so far is compared with what the finished
        configurations had reached after the same share of their training. The study gets the evaluation as soon as all
        runs of the configuration have got so far.
        """
        number, last = sweep.find_trial(run), sweep.count_evaluations(run)
        if number not in self._open or self._pruner is None or not last:
            return False
        curve = sweep.average_curve(number)[:last]
        with self._explain():
            self._report(number, curve[: min(map(sweep.count_evaluations, sweep.list_runs(number)))])
        base, states = _make_base_config(sweep.header.options), self._optuna.trial.TrialState
        create_trial = self._optuna.trial.create_trial
        progress = curve[-1][0] * _progress_per_update(base, sweep.trials[number - 1])
        finished = self._optuna.create_study(direction=self._study.direction)
        for other in sweep.trials:
            status, result = judge_trial(sweep, other.number)
            if status == DONE:
                limit = progress / _progress_per_update(base, other)
                reached = [value for update, value in sweep.average_curve(other.number) if update <= limit + 1e-6]
                values = {last: reached[-1]} if reached else {}
                finished.add_trial(create_trial(state=states.COMPLETE, value=result, intermediate_values=values))
        values = {at: value for at, (_, value) in enumerate(curve, start=1)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns of evaluations that are all NaN, which are pruned
            return bool(self._pruner.prune(finished, create_trial(state=states.RUNNING, intermediate_values=values)))

    def _report(self, number: int, curve: Sequence[tuple[int, float]]) -> None:
        """Give the study the evaluations that it does not have: it stores one value for each, for good."""
        trial, begin = self._open[number], self._reported.get(number, 0)
        for update, value in curve[begin:]:
            trial.report(value, update)
        self._reported[number] = max(begin, len(curve))

    def finish(self, sweep: Sweep, number: int, retried: Collection[int] = ()) -> None:
        """Tell the study the result of a configuration once all runs have ended; runs in `retried` have not."""
        status, value = judge_trial(sweep, number, retried)
        if number not in self._open or not status:
            return
        states = self._optuna.trial.TrialState
        with self._explain():
            self._report(number, sweep.average_curve(number))
            trial = self._open.pop(number)
            if status == DONE:
                self._study.tell(trial, value)
            else:
                self._study.tell(trial, state=states.PRUNED if status == PRUNED else states.FAIL)


def judge_trial(sweep: Sweep, number: int, retried: Collection[int] = ()) -> tuple[str, float]:
    """Return how a configuration of Optuna has ended (DONE, FAILED, PRUNED, or empty for not yet), and its metric.

    The metric is the mean over its runs, without those that failed; 0 unless the configuration is DONE.
    """
    runs = sweep.list_runs(number)
    if {*runs} & {*sweep.list_with_status(PRUNED)}:
        return PRUNED, 0.0
    if not {*runs} <= {*sweep.list_with_status(DONE, FAILED)} - {*retried}:
        return "", 0.0
    ends = [end.metrics for run in runs if (end := sweep.find_end(run))]
    metrics = [found[sweep.metric] for found in ends if sweep.metric in found]
    value = sum(metrics) / len(metrics) if metrics else float("nan")
    return (DONE, value) if value == value else (FAILED, 0.0)  # Optuna accepts no NaN


def _progress_per_update(base: TrainConfig, trial: Trial) -> float:
    """Return the share of its training that a run makes with one update, up to a factor of the whole sweep."""
    config = apply_assignment(base, trial.runs[0])
    return config.batch_size * config.gradient_accumulation / trial.lengths[0]


def name_parameters(spaces: Sequence[Space]) -> list[dict[str, str]]:
    """Return for each space the options with several values, and the parameters of the study that stand for them.

    An option whose values differ between spaces has a parameter for each, because a parameter of Optuna has the same
    choices in all trials.
    """
    made = []
    for number, space in enumerate(spaces, start=1):
        varied = [name for name, values in space.items() if name != SEED and len(values.texts) != 1]
        shared = {name for name in varied if all(other.get(name) == space[name] for other in spaces)}
        made.append({name: name if name in shared else f"{name} ({number})" for name in varied})
    return made


def _make_base_config(options: Sequence[str]) -> TrainConfig:
    """Return the training options of the arguments that all runs of a sweep have, without those that are no texts."""
    names = option_names(TrainConfig)
    pairs = [option for option in options if "=" in option]
    return parse_arguments(TrainConfig, [one for one in pairs if one[2:].partition("=")[0].replace("-", "_") in names])


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise CpuftError(f"--search optuna needs Optuna, which is not installed: {install_command('optuna')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _make_mismatch(params: Mapping[str, str]) -> CpuftError:
    return CpuftError(
        f"the journal holds a configuration that its search cannot have chosen ({dict(params)!r:.200}): start the "
        "sweep anew"
    )


def _make_key(assignment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, text) for name, text in assignment.items() if name != SEED))


def _suggest_value(trial: Any, name: str, values: Values) -> str:
    if is_whole_range(values):
        return str(trial.suggest_int(name, int(values.texts[0]), int(values.texts[-1])))
    if values.texts:
        return str(trial.suggest_categorical(name, list(values.texts)))
    number = trial.suggest_float(name, values.low, values.high, log=is_logarithmic(values))
    return format_number(values, number)


def _read_value(values: Values, text: str) -> int | float | str:
    """Return a value of an option with the type that Optuna has for it. Raises ValueError if it is none of them."""
    if values.texts:
        if text not in values.texts:
            raise ValueError(text)
        return int(text) if is_whole_range(values) else text
    number = float(text)
    if not values.low <= number <= values.high:
        raise ValueError(text)
    return number
