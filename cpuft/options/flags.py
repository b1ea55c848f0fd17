"""Configurations <-> command lines (click): flags made from dataclass fields, a YAML file's values under them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import click
from click.core import ParameterSource

from cpuft.config import ONE_OF, option_names
from cpuft.errors import CpuftError, near_names
from cpuft.loader import find_control, load, parse_yaml
from cpuft.options.foreign import describe_unknown_value, translate
from cpuft.options.help import FieldOption, Sectioned

C = TypeVar("C")
_TOLD = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)

CONFIG_FILE = FieldOption(["--config"], "", "FILE", help="YAML file with option values; flags win", default="")
DRY_RUN = click.Option(["--dry-run"], is_flag=True, help="print what would be done, as a script; do nothing")


class Verb(Sectioned):
    """A verb whose options may also come from the YAML file of --config."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click, with the file's values for what the words do not say; other launchers' options are answered."""
        words = args[: args.index("--")] if "--" in args else args
        if ctx.resilient_parsing:  # A shell completes the line: nothing is refused, and no file read.
            return super().parse_args(ctx, args)
        flags = {flag for option in self.get_params(ctx) for flag in (*option.opts, *option.secondary_opts)}
        answer = translate(words, flags, "script" in flags)
        if answer:
            raise click.UsageError(answer, ctx)
        for word, following in zip(words, [*words[1:], ""]):
            path = following if word == "--config" else word.partition("=")[2] if word.startswith("--config=") else ""
            if path:
                ctx.default_map = read_config(path, [str(p.name) for p in self.params if p.name != "config"])
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            raise _name_the_file(error, ctx) from None
        for pair in ONE_OF:
            if all(name in ctx.params and ctx.get_parameter_source(name) in _TOLD for name in pair):
                one, other = (f"--{name.replace('_', '-')}" for name in pair)
                raise click.UsageError(f"{one} and {other} both say what is trained: leave one of them out", ctx)
        return rest


def _name_the_file(error: click.BadParameter, ctx: click.Context) -> click.UsageError:
    """Return the error that also names the file and the key of a wrong value, where the value is from --config."""
    name = error.param.name if error.param else None
    if not name or ctx.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP:
        return error
    return click.UsageError(
        f"--config {ctx.params.get('config')}: the key '{name.replace('_', '-')}' has a wrong value: {error.message}",
        ctx,
    )


class _UnknownNameError(click.BadParameter):
    """A value that is none of an option's names; its message stands alone, without click's `Invalid value for`."""

    def format_message(self) -> str:
        return self.message


class _Name(click.Choice[str]):
    """One of a few names; a wrong one is answered with those most like it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            name = param.opts[0] if param else "this option"
            raise _UnknownNameError(describe_unknown_value(name, str(value), self.choices), ctx, param)
        return str(value)


class _Number(click.FloatRange):
    """A number that can be reckoned with: neither nan, which every comparison lets through, nor infinite."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        _refuse_other_digits(self, value, param, ctx)
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a number", param, ctx)


class _Whole(click.IntRange):
    """A whole number."""

    name = "whole number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        _refuse_other_digits(self, value, param, ctx)
        return int(super().convert(value, param, ctx))


def _refuse_other_digits(
    kind: click.IntRange | click.FloatRange, value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    """Refuse digits of other scripts: Python takes them for digits, but a shell or another program does not."""
    if isinstance(value, str) and not value.isascii():
        kind.fail(f"{value!r} is not a {kind.name}: write it with the digits 0 to 9 only", param, ctx)


def make_options(config: type, *without: str) -> list[FieldOption]:
    """A click option for each field of a configuration class but those named."""
    types = get_type_hints(config)
    return [_make_option(field, types[field.name]) for field in dataclasses.fields(config) if field.name not in without]


def _make_option(field: dataclasses.Field[Any], kind: type) -> FieldOption:
    flag = "--" + field.name.replace("_", "-")
    meta = field.metadata
    click_type: Any = kind
    takes = meta["takes"]
    if meta["choices"]:
        click_type, takes = _Name(meta["choices"]), "|".join(meta["choices"])
    elif kind in (int, float):
        kinds = _Whole if kind is int else _Number
        click_type, takes = kinds(min=meta["least"], max=meta["most"]), "N"
    names = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    return FieldOption(
        [*names, field.name], meta["section"], takes, default=field.default, type=click_type, help=meta["help"]
    )


def pick(config: type[C], values: dict[str, Any]) -> C:
    """The configuration whose fields are among `values`; those that are not have their defaults."""
    return config(**{name: values[name] for name in option_names(config) if name in values})


def given_options() -> dict[str, ParameterSource]:
    """Names of the options of the running verb that the command line or --config gave, and which of them it was."""
    context = click.get_current_context()
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: source for name, source in sources.items() if source in _TOLD}


def refuse_options(config: type, why: str) -> None:
    """Raises CpuftError when the command line gave an option of this class: it says nothing to what is asked for."""
    given = given_options()
    for name in option_names(config):
        if given.get(name) is ParameterSource.COMMANDLINE:
            raise CpuftError(f"--{name.replace('_', '-')} {why}")


def parse_arguments(config: type[C], words: Sequence[str]) -> C:
    """What `cpuft.config.format_arguments` wrote. Raises CpuftError for anything else."""
    command = click.Command("worker", params=list(_value_options(config)))
    try:
        with command.make_context("worker", list(words)) as context:
            return pick(config, context.params)
    except click.ClickException as error:
        raise CpuftError(f"worker arguments: {error.format_message()}") from None


def _value_options(config: type) -> list[click.Option]:
    """The same options, where a boolean takes a value as `format_arguments` writes it."""
    options: list[click.Option] = []
    option: click.Option
    for option in make_options(config):
        if option.is_flag:
            flag = "--" + str(option.name).replace("_", "-")
            option = click.Option([flag, str(option.name)], type=bool, default=option.default)
        options.append(option)
    return options


def read_config(path: str, known: Sequence[str]) -> dict[str, str]:
    """Option values from a YAML file, for click's default_map. Dashes and underscores are one in its keys.

    Raises CpuftError: no such file, no YAML, no mapping, a key that is no option or there twice, or a value no flag can
    have.
    """
    try:
        values = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}, which --config names: name a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CpuftError(f"--config {path} cannot be read ({error}): name a YAML file") from None
    except ValueError as error:
        raise CpuftError(f"--config {path} is no YAML ({error}): write `option: value`") from None
    if not isinstance(values or {}, dict):
        raise CpuftError(f"--config {path} holds no mapping: write `option: value` lines")
    flags = {f"--{name}" for name in known} | {f"--{name.replace('_', '-')}" for name in known}
    answer = translate([f"--{key}" for key in values or {}], flags).replace("--", "")
    if answer:
        raise CpuftError(f"--config {path}: {answer}")
    options: dict[str, str] = {}
    for name, value in (values or {}).items():
        key = name.replace("-", "_")
        if key not in known:
            raise CpuftError(f"--config {path}: no option {key!r}: {near_names(key, known)}")
        if value is None:
            raise CpuftError(f"--config {path}: {key!r} has no value: give it one, or leave the line out")
        if key in options:
            raise CpuftError(f"--config {path}: {key!r} is there twice: keep one of the lines")
        options[key] = _as_option(value, f"--config {path}: {key!r}")
    return options


def _as_option(value: Any, where: str) -> str:
    """What a flag would have taken: a list of ranks is written with commas there."""
    try:
        text = ",".join(load(list[str], value if isinstance(value, list) else [value], where))
        if odd := find_control(text):
            raise ValueError(f"{where} contains the control character {odd!r}")
        return text
    except ValueError as error:
        raise CpuftError(f"{error}: write what its flag takes, or a list of that") from None
