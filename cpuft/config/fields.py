"""An option as a field of a dataclass: how it is declared, parsed and formatted.

The field's name is the key in YAML files and records, and with dashes it is the command-line flag. `cpuft.cli.options`
makes the flags and the help from the fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, get_type_hints

from cpuft.errors import CpuftError, suggest_names
from cpuft.serialization import is_count

SECTIONS = (
    "Hosts and ranks",
    "Task, model and data",
    "Training recipe",
    "Evaluation while training",
    "Speed and memory",
    "Communication",
    "Output, checkpoints and restarts",
)
"""Headings of the help of `launch` and its relatives, in this order."""

C = TypeVar("C")


def option(
    default: Any,
    help: str,
    *,
    section: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    takes: str = "TEXT",
    rare: bool = False,
) -> Any:
    """Return a dataclass field that is an option; its metadata has the other parameters by their names.

    Parameters
    ----------
    help: a phrase that can be understood alone, without a period at its end. It names the unit, what 0 means, and the
        default as "(default: ...)" if that is not the value `default`.
    section: the heading in the help, one of SECTIONS, or empty for the last one.
    choices: the only texts that are accepted; empty for any text.
    least, most: inclusive limits of a number. A `least` of -1 stands for a default that depends on other options:
        messages call 0 the smallest number.
    takes: placeholder for the value in the help; shells complete FILE and FOLDER. TEXT stands for the choices, if there
        are any, and for N if the value is a number.
    rare: whether only --help-all shows the option.
    """
    metadata = {"help": help, "section": section, "choices": choices, "least": least, "most": most}
    metadata |= {"takes": takes, "rare": rare}
    return dataclasses.field(default=default, metadata=metadata)


hosts_option, data_option, recipe_option, evaluation_option, speed_option, communication_option, output_option = (
    partial(option, section=section) for section in SECTIONS
)


def option_names(config: type) -> list[str]:
    """Return the field names of a configuration class, in their order, with underscores."""
    return [field.name for field in dataclasses.fields(config)]


def format_flag(name: str, value: object = True) -> str:
    """Return the command-line flag of an option: `--batch-size`, or `--no-fast-path` if `value` is False."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def format_options(values: Mapping[str, Any]) -> list[str]:
    """Return values or texts of options as arguments, such as "--learning-rate=2e-05"; "--no-save-model" for False."""
    return [
        format_flag(name, value) if isinstance(value, bool) else f"{format_flag(name)}={value}"
        for name, value in values.items()
    ]


def format_arguments(config: Any) -> list[str]:
    """Return an argument for each option that differs from its default: ["--task=mrpc", "--fast-path=False"]."""
    fields = [field for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    return [f"{format_flag(field.name)}={getattr(config, field.name)}" for field in fields]


def split_arguments(config: type, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the `--name=value` arguments that are options of the class `config`, the others), each in their order."""
    names = option_names(config)
    is_own = {arg: arg.partition("=")[0][2:].replace("-", "_") in names for arg in arguments}
    return [arg for arg in arguments if is_own[arg]], [arg for arg in arguments if not is_own[arg]]


def parse_arguments(config: type[C], arguments: Sequence[str]) -> C:
    """Return a configuration from `--name=value`; of equal names, the last one counts. CpuftError: a bad option."""
    fields = {field.name: field for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    types, texts = get_type_hints(config), dict[str, str]()
    for argument in arguments:
        flag, equals, text = argument.partition("=")
        name = flag[2:].replace("-", "_")
        if not equals or flag[:2] != "--" or name not in fields:
            raise CpuftError(f"{flag[:80]!r} is no option here: {suggest_names(flag, map(format_flag, fields))}")
        texts[name] = text
    return config(**{name: parse_value(fields[name], types[name], text) for name, text in texts.items()})


def parse_value(field: dataclasses.Field[Any], kind: type, text: str) -> Any:
    """Return an option's text as a `kind` (bool: true or false, in any case); CpuftError: the field refuses it."""
    flag, choices = format_flag(field.name), field.metadata["choices"]
    if choices and text not in choices:
        raise CpuftError(describe_unknown_value(flag, text, choices))
    if kind is str:
        return text
    least, most = field.metadata["least"], field.metadata["most"]
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        # Python accepts digits of any script, other programs do not; nan and infinity are of no use.
        if text.isascii() and math.isfinite(value) and low <= value <= high:
            return value
    except (KeyError, ValueError, OverflowError):
        pass
    digits = "" if text.isascii() else ", in the digits 0 to 9"
    raise CpuftError(f"{flag} {text[:80]!r} is not valid: give {_describe_values(kind, least, most)}{digits}")


def _describe_values(kind: type, least: float | None, most: float | None) -> str:
    if kind is bool:
        return "True or False"
    noun = "a whole number" if kind is int else "a number"
    # -1 as the smallest number stands for a default that depends on other options.
    limits = max(least or 0, 0), most or 0
    low, high = (str(int(limit)) if limit == int(limit) else f"{limit:g}" for limit in limits)
    if least is None:
        return noun if most is None else f"{noun} of {high} or less"
    return f"{noun} of {low} or more" if most is None else f"{noun} from {low} to {high}"


def describe_unknown_value(option: str, value: str, choices: Collection[str]) -> str:
    """Return "'VALUE' is not a value of OPTION: did you mean A?", or without similar ones "...: choose one of A, B"."""
    return f"{value!r} is not a value of {option}: {suggest_names(value, choices)}"


def parse_numbers(text: str, flag: str, most: int = 10**6) -> tuple[int, ...]:
    """Return the numbers in a text such as "4,1,2" in ascending order: (1, 2, 4). Raises CpuftError, about `flag`: a
    word is no whole number from 1 to `most`, or a number is there twice.
    """
    words = [word.strip() for word in text.split(",")]
    for place, word in enumerate(words):
        if not is_count(word, most=most):
            problem = f"{word[:60]!r} is not a whole number from 1 to {most}"
        elif int(word) in map(int, words[:place]):
            problem = f"the number {word[:60]} is there twice"
        else:
            continue
        raise CpuftError(f"{flag} {text[:60]}: {problem}: give numbers with commas between them, for example 1,2,4")
    return tuple(sorted(map(int, words)))
