"""The parameters of a sweep's Optuna study: how they stand for options, and which values Optuna chooses next."""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cpuft.errors import CpuftError
from cpuft.sweep.search_space import (
    SEED,
    Key,
    OptionValues,
    Space,
    Values,
    format_number,
    is_logarithmic,
    is_whole_range,
    make_key,
    parse_values,
)

_ALTERNATIVE = "alternative"
"""Parameter of a study with several spaces: the number of the space."""
_MOST_ASKS = 20
"""How often Optuna is asked for a configuration until it is a new one; then it enumerates those that are left."""


class Parameters:
    """The parameters of a study whose configurations come from some alternatives, as `SweepSettings` has them."""

    def __init__(self, spaces: Sequence[Mapping[str, str]]) -> None:
        self._spaces = [{name: parse_values(name, text) for name, text in space.items()} for space in spaces]
        self._names = name_parameters(self._spaces)
        self._numbers = list(range(1, len(spaces) + 1))

    def choose(
        self, study: Any, search: str, seed: int, number: int, known: Collection[Key]
    ) -> tuple[Any, list[OptionValues]]:
        """Return (trial, options of one run for each seed) of a configuration whose key is not among `known`.

        The choice depends on nothing but the results in the study, `search` ("random" or "tpe"), `seed` and `number`,
        that of the configuration, so that a continued sweep chooses the same. Raises CpuftError: no other was found.
        """
        import optuna

        samplers, fail = optuna.samplers, optuna.trial.TrialState.FAIL
        # BruteForceSampler cannot list the values of a range with fractions.
        is_listed = all(values.texts for space in self._spaces for values in space.values())
        for draw in range(_MOST_ASKS + is_listed):
            drawn = random.Random(f"{seed}:{number}:{draw}").getrandbits(32)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Optuna calls some of this experimental
                study.sampler = samplers.RandomSampler(seed=drawn)
                if draw == _MOST_ASKS:
                    study.sampler = samplers.BruteForceSampler(seed=drawn)
                elif search == "tpe":
                    study.sampler = samplers.TPESampler(seed=drawn, constant_liar=True)
            trial = study.ask()
            index, assignment = self._suggest(trial)
            study.sampler = samplers.RandomSampler()  # because BruteForceSampler ends a study with its last trial
            if make_key(assignment) not in known:
                seeds = self._spaces[index].get(SEED, Values()).texts
                return trial, [assignment | {SEED: one} for one in seeds] or [assignment]
            study.tell(trial, state=fail)
        raise CpuftError(
            f"hardly any configuration is left after {number - 1}: see the results with cpuft report, or start a sweep "
            "with other values or fewer --trials"
        )

    def _suggest(self, trial: Any) -> tuple[int, OptionValues]:
        """Return (index of a space, values of its options without the seed) that Optuna suggests for a trial."""
        index = trial.suggest_categorical(_ALTERNATIVE, self._numbers) - 1 if len(self._numbers) > 1 else 0
        names, assignment = self._names[index], OptionValues()
        for name, values in self._spaces[index].items():
            if name in names:
                assignment[name] = _suggest_value(trial, names[name], values)
            elif name != SEED:
                assignment[name] = values.texts[0]
        return index, assignment


def name_parameters(spaces: Sequence[Space]) -> list[dict[str, str]]:
    """Return for each space option -> parameter of the study, for options with several values apart from the seed.

    A parameter of Optuna has the same choices in all trials. It has the name of the option if all spaces have these
    values; otherwise, in the second space, it is "learning_rate (2)".
    """
    made = []
    for number, space in enumerate(spaces, start=1):
        varied = [name for name, values in space.items() if name != SEED and len(values.texts) != 1]
        shared = {name for name in varied if all(other.get(name) == space[name] for other in spaces)}
        made.append({name: name if name in shared else f"{name} ({number})" for name in varied})
    return made


def _suggest_value(trial: Any, name: str, values: Values) -> str:
    if is_whole_range(values):
        return str(trial.suggest_int(name, int(values.texts[0]), int(values.texts[-1])))
    if values.texts:
        return str(trial.suggest_categorical(name, list(values.texts)))
    return format_number(values, trial.suggest_float(name, values.low, values.high, log=is_logarithmic(values)))


def make_distributions(runs: Sequence[OptionValues]) -> dict[str, Any]:
    """Return Optuna's distribution by option of a grid, without the seed: numbers from least to most, else choices."""
    # Each trial stores them, and the choices of a thousand numbers would fill the disk.
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    texts: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, text in run.items():
            texts.setdefault(name, {})[text] = None
    texts.pop(SEED, None)
    found: dict[str, Any] = {name: CategoricalDistribution([*known]) for name, known in texts.items()}
    for name, known in texts.items():
        with suppress(ValueError):
            numbers = Values(low=min(map(float, known)), high=max(map(float, known)))
            found[name] = FloatDistribution(numbers.low, numbers.high, log=is_logarithmic(numbers))
    return found
