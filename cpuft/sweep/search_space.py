"""Which runs a sweep makes: lists and ranges of option values, their combinations, and random draws from them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from cpuft.config.conflicts import name_alternatives, refuse_conflicts
from cpuft.config.fields import format_flag, option_names, parse_arguments, parse_value
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, suggest_names
from cpuft.files import read_given_text
from cpuft.serialization import load, parse_yaml

SEED = "seed"
_TYPES = get_type_hints(TrainConfig)
_FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
_RANGE = ".."
_TEXTS = ("task", "model", "from_config")
"""Options without numbers or choices that may vary. Others may hold commas themselves, or only say where files are."""
_MOST_DIGITS = 4
"""Significant digits of numbers that are drawn from a range, so that the options of a run can be read."""
_MOST_CHECKS = 1000
"""How many configurations are checked before a search whose configurations are not known yet."""
_LOGARITHMIC_RATIO = 10.0
"""A range of positive numbers whose end is so many times its beginning is drawn evenly by its logarithm."""


@dataclass(frozen=True)
class Values:
    """The possible values of one option: some texts, or, if there are none, any number from `low` to `high`."""

    texts: tuple[str, ...] = ()
    """In the order given, those of "1..3" are 1, 2 and 3; empty for a range of numbers with fractions."""
    low: float = 0.0
    high: float = 0.0
    text: str = dataclasses.field(default="", compare=False)
    """All values as the command line has them."""


Space = dict[str, Values]
"""Option -> its possible values."""
OptionValues = dict[str, str]
"""Option -> its value as the command line takes it, of all options that a sweep varies."""
Key = tuple[tuple[str, str], ...]
"""A configuration as `make_key` returns it."""


def list_variable_options() -> tuple[str, ...]:
    """Return the fields of TrainConfig that a sweep may vary: numbers, those with choices, task, model, from_config."""
    return tuple(
        name
        for name, field in _FIELDS.items()
        if _TYPES[name] in (int, float) or field.metadata["choices"] or name in _TEXTS
    )


def parse_values(name: str, text: str) -> Values:
    """Return the values that a text such as "1e-5,3e-5", "1..5" or "1e-5..1e-3" has for the option `name`.

    Raises CpuftError: a value is wrong, empty or there twice, a range is empty or has over a million numbers, or the
    option has no value, such as "fast_path", or cannot vary and the text has a comma. KeyError: `name` is no option.
    """
    flag = format_flag(name)
    field, kind = _FIELDS[name], _TYPES[name]
    if name not in list_variable_options():
        if "," in text or kind is bool:
            raise CpuftError(f"{flag} cannot vary in a sweep: give it one value on the command line")
        parse_value(field, kind, text)
        return Values((text,), text=text)
    if kind in (int, float) and _RANGE in text:
        return _parse_range(flag, field, kind, text)
    texts, values = tuple(part.strip() for part in text.split(",")), list[Any]()
    for part in texts:
        if not part:
            raise CpuftError(f"{flag} {text[:60]!r} has an empty value: write values with commas between them")
        value = parse_value(field, kind, part)
        if value in values:
            raise CpuftError(f"{flag} {text[:60]!r} has {part!r:.60} twice: leave out one of them")
        values.append(value)
    return Values(texts, text=text)


def _parse_range(flag: str, field: dataclasses.Field[Any], kind: type, text: str) -> Values:
    begin, _, end = (part.strip() for part in text.partition(_RANGE))
    if not begin or not end:
        raise CpuftError(f"{flag} {text[:60]!r} is not a range: write its first and its last number, such as 1..5")
    low, high = parse_value(field, kind, begin), parse_value(field, kind, end)
    if low >= high:
        raise CpuftError(f"{flag} {text[:60]!r} is an empty range: write the smaller number first")
    if kind is int:
        if high - low >= 10**6:
            raise CpuftError(f"{flag} {text[:60]!r} has more than a million numbers: give a shorter range")
        return Values(tuple(map(str, range(low, high + 1))), text=text)
    return Values(low=low, high=high, text=text)


def read_conditions(path: str) -> list[Space]:
    """Return the alternatives of a YAML file, values by option (with _ for -). CpuftError: bad file, option or value.

    A sweep combines each alternative with the options of the command line, so that options can depend on each other:

        - lora-rank: 0
          learning-rate: 2e-5,5e-5
        - lora-rank: 8,16
          learning-rate: 1e-4,3e-4
    """
    where = f"--conditions {path}"
    try:
        alternatives = parse_yaml(read_given_text(path, "--conditions", "give a YAML file"))
    except ValueError as error:
        raise CpuftError(f"{where} is not YAML ({error}): write a list of mappings of options") from None
    if not isinstance(alternatives, list) or not alternatives or not all(isinstance(one, dict) for one in alternatives):
        raise CpuftError(f"{where} is not a list of mappings: begin each alternative with a dash, as in `- seed: 1..3`")
    known, spaces = option_names(TrainConfig), list[Space]()
    for alternative in alternatives:
        space: Space = {}
        for key, value in alternative.items():
            name = str(key).replace("-", "_")
            if name not in known:
                raise CpuftError(f"{where}: there is no training option {key!r:.60}: {suggest_names(name, known)}")
            try:
                text = ",".join(load(list[str], value if isinstance(value, list) else [value], name))
            except ValueError as error:
                raise CpuftError(f"{where}: {error}: write what the option takes, or a list of that") from None
            space[name] = parse_values(name, text)
        spaces.append(space)
    return spaces


def plan_grid(spaces: Sequence[Space], most: float = math.inf) -> list[OptionValues]:
    """Return up to `most` different combinations, the last option fastest. CpuftError: a range with fractions."""
    for space in spaces:
        for name, values in space.items():
            if not values.texts:
                raise CpuftError(
                    f"{format_flag(name)} {values.low:g}{_RANGE}{values.high:g} is a range of numbers with fractions, "
                    "which has no grid: give a list, or --search random with --trials"
                )
    found: dict[frozenset[tuple[str, str]], OptionValues] = {}
    for space in spaces:
        for texts in itertools.product(*(values.texts for values in space.values())):
            one = dict(zip(space, texts, strict=True))
            found.setdefault(frozenset(one.items()), one)
            if len(found) == most:
                return [*found.values()]
    return [*found.values()]


def make_key(assignment: OptionValues) -> Key:
    """Return the pairs (option, value) of a configuration without its seed, sorted by the name of the option."""
    return tuple(sorted((name, text) for name, text in assignment.items() if name != SEED))


def is_logarithmic(values: Values) -> bool:
    """Return whether numbers of a range are drawn evenly by their logarithm: if 0 < 10 * `low` <= `high`."""
    return values.low > 0 and values.high >= _LOGARITHMIC_RATIO * values.low


def format_number(values: Values, number: float) -> str:
    """Return a number of a range with four significant digits, or with all if the rounded one is outside the range."""
    text = f"{number:.{_MOST_DIGITS}g}"
    return text if values.low <= float(text) <= values.high else repr(number)


def is_whole_range(values: Values) -> bool:
    """Return whether the values are two or more whole numbers, each one more than the one before."""
    texts = values.texts
    if len(texts) < 2 or not texts[0].lstrip("-").isdecimal():
        return False
    return texts == tuple(str(int(texts[0]) + number) for number in range(len(texts)))


def count_configurations(spaces: Sequence[Space], most: int) -> int:
    """Return the number of configurations, apart from the seed; `most` if there are more, or a range with fractions."""
    own = [{name: values for name, values in space.items() if name != SEED} for space in spaces]
    has_range = not all(values.texts for space in own for values in space.values())
    return most if has_range else len(plan_grid(own, most))


def sample_configurations(spaces: Sequence[Space]) -> list[OptionValues]:
    """Return combinations of all listed values and the ends of ranges (of whole numbers the first three and the last).

    If there are over 1,000, the same 1,000 random ones are returned in each call.
    """
    ends = [{name: Values(_list_ends(values)) for name, values in space.items()} for space in spaces]
    found = plan_grid(ends, _MOST_CHECKS + 1)
    if len(found) <= _MOST_CHECKS:
        return found
    generator = random.Random(0)
    drawn = (generator.choice(ends) for _ in range(_MOST_CHECKS))
    return [{name: generator.choice(values.texts) for name, values in one.items()} for one in drawn]


def _list_ends(values: Values) -> tuple[str, ...]:
    """Return the ends of a range and values that may differ from both: -1, 0 and 1 have meanings of their own."""
    if not values.texts:
        return repr(values.low), repr(values.high)
    return tuple(dict.fromkeys((*values.texts[:3], values.texts[-1]))) if is_whole_range(values) else values.texts


def check_assignments(base: TrainConfig, assignments: Sequence[OptionValues], given: Collection[str] = ()) -> None:
    """Raise CpuftError if options of a run exclude each other or have no effect, or the runs have several tasks.

    `given` has the names of the options that the command line gives to all runs.
    """
    configs = [apply_assignment(base, assignment) for assignment in assignments]
    if len(tasks := list(dict.fromkeys(config.task for config in configs))) > 1:
        raise CpuftError(
            f"--task {','.join(tasks)}: metrics of different tasks cannot be compared: start a sweep for each task"
        )
    for assignment, config in zip(assignments, configs, strict=True):
        try:
            refuse_conflicts(config)
            if why := name_alternatives({name: format_flag(name) for name in (*given, *assignment)}):
                raise CpuftError(why)
        except CpuftError as error:
            raise CpuftError(f"{describe_values(assignment)}: {error}") from None


def apply_assignment(base: TrainConfig, assignment: Mapping[str, str]) -> TrainConfig:
    """Return `base` with the values of a run. Raises CpuftError: a value is wrong; KeyError: an unknown option."""
    values = {name: parse_value(_FIELDS[name], _TYPES[name], text) for name, text in assignment.items()}
    return dataclasses.replace(base, **values)


def make_base_config(options: Sequence[str]) -> TrainConfig:
    """Return the training options in arguments like "--task=rte"; others are ignored. CpuftError: a wrong value."""
    names = {*map(format_flag, option_names(TrainConfig))}
    return parse_arguments(TrainConfig, [one for one in options if "=" in one and one.partition("=")[0] in names])


def describe_values(values: Mapping[str, str]) -> str:
    """Return the values of a run for people: "learning-rate 1e-5, seed 2", or "the only configuration" for none."""
    return ", ".join(f"{format_flag(name)[2:]} {text}" for name, text in values.items()) or "the only configuration"


def estimate_length(config: TrainConfig) -> float:
    """Return the examples of `max_steps` updates on one rank, else of all epochs, at least 1; unlimited data count as a
    million.
    """
    if config.max_steps:
        return float(config.max_steps * config.batch_size * config.gradient_accumulation)
    return max(1.0, config.epochs * (config.max_train_samples or 10**6))
