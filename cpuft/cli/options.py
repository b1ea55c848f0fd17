"""Make command-line options (click) from the fields of configurations, and answer the options of other tools.

A YAML file given by --config may hold the same options. The table of the options of other launchers and trainers is
aliases.txt, beside this file.
"""

from __future__ import annotations

import dataclasses
import glob
import itertools
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import click
from click.core import ParameterSource

from cpuft.cli.aliases import suggest_options
from cpuft.config import (
    OLD_NAMES,
    ONE_OF,
    SECTIONS,
    describe_unknown_value,
    find_new_name,
    format_flag,
    option_names,
    rename_old_options,
)
from cpuft.errors import CpuftError, near_names
from cpuft.serialization import find_control, load, parse_yaml

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_RUN_FILES = ("record.jsonl", "plan.sh")
"""A folder that holds one of them is a run's."""
_COLUMN = 24
"""Width of the first column, the same in all sections."""


class CheckedCommand(click.Command):
    """A command that refuses control characters in its options and arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does.

        Raises click.UsageError when a value contains a control character. Arguments of type UNPROCESSED, which are the
        user's own command, are passed on as they are.
        """
        rest = super().parse_args(ctx, self.rename_old_flags(ctx, args))
        for param in self.get_params(ctx) if not ctx.resilient_parsing else ():
            value = ctx.params.get(str(param.name))
            for text in value if isinstance(value, tuple) else (value,):
                odd = find_control(text) if isinstance(text, str) and param.type is not click.UNPROCESSED else ""
                if odd:
                    name = param.opts[0] if isinstance(param, click.Option) else param.make_metavar(ctx)
                    said = f"{name} {text[:80]!r} contains the control character {odd!r}: write the value without it"
                    raise click.UsageError(said, ctx)
        return rest

    def rename_old_flags(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the arguments with today's flags in place of those of earlier versions (`cpuft.config.OLD_NAMES`).

        One line on standard error names the new flags, unless a shell completes the command line.
        """
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        names = {str(option.name) for option in options}
        with_value = {flag for option in options if not option.is_flag for flag in option.opts}
        renamed: list[str] = []
        changes: dict[str, None] = {}
        rest = iter(args)
        for arg in rest:
            if arg == "--":
                renamed += [arg, *rest]
                break
            flag, equals, value = arg.partition("=")
            new = _find_new_flag(flag, names) if arg.startswith("--") else flag
            if new != flag:
                changes[f"{new} instead of {flag}"] = None
            renamed.append(new + equals + value)
            if new in with_value and not equals:
                renamed += itertools.islice(rest, 1)
        if changes and not ctx.resilient_parsing:
            click.echo(f"cpuft: write {', '.join(changes)}: {_OLD_NAMES_END}", err=True)
        return renamed


_OLD_NAMES_END = "the old name still works, and will be removed in a later version"


def _find_new_flag(flag: str, names: Collection[str]) -> str:
    """Return today's flag for one of an earlier version, where an option of these names has it; else the same flag."""
    is_off = flag.startswith("--no-")
    name = flag.removeprefix("--no-" if is_off else "--").replace("-", "_")
    new, is_negated = find_new_name(name, names)
    return flag if new == name else format_flag(new, is_off == is_negated)


class FieldOption(click.Option):
    """An option made from a field of a configuration. Shells complete those that take a FILE or a FOLDER."""

    def __init__(self, names: list[str], section: str, takes: str, **told: Any) -> None:
        complete = complete_paths if takes in ("FILE", "FOLDER") else None
        super().__init__(names, metavar=takes, shell_complete=complete, **told)
        self.section = section

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Flag and text; a default in brackets, where there is one and the text does not say it."""
        flag, text = self.opts[0], str(self.help)
        if self.is_flag:
            return (f"--[no-]{flag[2:]}", f"{text} [yes]") if self.default else (flag, text)
        default = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        told = not default or "(default" in text
        return f"{flag} {self.metavar}", text if told else f"{text} [{default}]"


def complete_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave it to the shell, which completes what lies on the disk."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir" if param.metavar == "FOLDER" else "file")]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the runs below what is typed, those of comparisons too; without any, leave folders to the shell."""
    from click.shell_completion import CompletionItem

    begin = glob.escape(incomplete)
    folders = [f"{begin}*", f"{begin}*/*", *(["runs/*/*"] if "runs/".startswith(incomplete) else [])]
    files = [path for name in _RUN_FILES for folder in folders for path in glob.glob(f"{folder}/{name}")]
    runs = sorted({os.path.dirname(path) for path in files})
    return [CompletionItem(run) for run in runs] or [CompletionItem(incomplete, type="dir")]


class Sectioned(CheckedCommand):
    """A command whose help lists options by subject, each subject's in the order of their fields."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options that are no fields come last."""
        rows: dict[str, list[tuple[str, str]]] = {section: [] for section in SECTIONS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record:
                rows.setdefault(getattr(param, "section", ""), []).append((record[0].ljust(_COLUMN), record[1]))
        told = {section: records for section, records in rows.items() if records}
        for section, records in told.items():
            with formatter.section(section or ("Also" if len(told) > 1 else "Options")):
                formatter.write_dl(records, col_max=_COLUMN)


class Verbs(click.Group):
    """A group that lists its verbs with their first sentences whole."""

    command_class = CheckedCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click, which would cut each sentence off at the end of its line."""
        verbs = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(1000)) for name, verb in verbs.items() if verb])


C = TypeVar("C")
_TOLD = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)

CONFIG_FILE = FieldOption(["--config"], "", "FILE", help="YAML file with option values; flags win", default="")
DRY_RUN = click.Option(["--dry-run"], is_flag=True, help="print what would be done, as a script; do nothing")


class Verb(Sectioned):
    """A verb whose options may also come from the YAML file of --config."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click, with the file's values for what the words do not say; other launchers' options are answered."""
        args = self.rename_old_flags(ctx, args)
        words = args[: args.index("--")] if "--" in args else args
        if ctx.resilient_parsing:  # A shell completes the line: nothing is refused, and no file read.
            return super().parse_args(ctx, args)
        flags = {flag for option in self.get_params(ctx) for flag in (*option.opts, *option.secondary_opts)}
        answer = suggest_options(words, flags, "script" in flags)
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
    flags = {f"--{name}" for name in known} | {format_flag(name) for name in known}
    old = {name: find_new_name(name.replace("-", "_"), known)[0] for name in values or {}}
    answer = suggest_options([f"--{name}" for name, key in old.items() if key == name.replace("-", "_")], flags)
    if answer:
        raise CpuftError(f"--config {path}: {answer.replace('--', '')}")
    options: dict[str, str] = {}
    changes: list[str] = []
    for name, value in (values or {}).items():
        key = old[name]
        if key != name.replace("-", "_") and value is not None:
            ((key, value),) = rename_old_options({name.replace("-", "_"): value}, known).items()
            value_too = f": {value}" if OLD_NAMES[name.replace("-", "_")] != key else ""
            changes.append(f"{key.replace('_', '-')}{value_too} instead of {name}")
        if key not in known:
            raise CpuftError(f"--config {path}: no option {key!r}: {near_names(key, known)}")
        if value is None:
            raise CpuftError(f"--config {path}: {key!r} has no value: give it one, or leave the line out")
        if key in options:
            raise CpuftError(f"--config {path}: {key!r} is there twice: keep one of the lines")
        options[key] = _as_option(value, f"--config {path}: {key!r}")
    if changes:
        click.echo(f"cpuft: --config {path}: write {', '.join(changes)}: {_OLD_NAMES_END}", err=True)
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
