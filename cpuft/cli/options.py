"""Make click options from the fields of configuration dataclasses, and their help, YAML files and error messages."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import click
from click.core import ParameterSource

from cpuft.cli.aliases import suggest_options
from cpuft.config.conflicts import ALTERNATIVES, name_alternatives
from cpuft.config.fields import SECTIONS, format_flag, option_names, parse_value
from cpuft.errors import CpuftError, suggest_names
from cpuft.files import read_given_text
from cpuft.serialization import find_control, load, parse_yaml

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

C = TypeVar("C")
_RUN_FILES = ("record.jsonl", "plan.sh")
"""The folder of a run holds at least one of these files."""
_COLUMN = 24
_RARE = "Rare options"
_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)


class _ValueError(click.BadParameter):
    """A wrong value. The message names the option, and stands without click's `Invalid value for`."""

    def format_message(self) -> str:
        return self.message


class _FieldType(click.ParamType[Any]):
    name = "value"

    def __init__(self, field: dataclasses.Field[Any], kind: type) -> None:
        self.field, self.kind = field, kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text; a default is returned as it is."""
        if not isinstance(value, str) or value == self.field.default:
            return value
        try:
            return parse_value(self.field, self.kind, value)
        except CpuftError as error:
            raise _ValueError(str(error), ctx, param) from None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(choice) for choice in self.field.metadata["choices"] if choice.startswith(incomplete)]


class FieldOption(click.Option):
    """An option made from a field of a configuration; `section` is its heading in the help, `takes` its placeholder."""

    def __init__(self, names: list[str], section: str, takes: str, is_rare: bool = False, **attributes: Any) -> None:
        complete = _complete_paths if takes in ("FILE", "FOLDER") else None
        super().__init__(names, metavar=takes, shell_complete=complete, **attributes)
        self.section, self.is_rare = section, is_rare

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return (the flag with its placeholder, the help text with the default in brackets).

        An empty default, or one that the text tells in words, "(default: ...)", is not added. Options without a value
        are --[no-]NAME with [yes] if they are on by default, else --NAME alone.
        """
        flag, text = self.opts[0], str(self.help)
        if self.is_flag:
            return (f"--[no-]{flag[2:]}", f"{text} [yes]") if self.default else (flag, text)
        default = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        is_described = not default or "(default" in text
        return f"{flag} {self.metavar}", text if is_described else f"{text} [{default}]"


def _complete_paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return one item, with which the shell completes paths of files, or of folders if the option takes FOLDER."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir" if param.metavar == "FOLDER" else "file")]


def complete_runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the folders of runs that begin with what is typed, sorted; if there are none, the shell offers folders."""
    from click.shell_completion import CompletionItem

    begin = glob.escape(incomplete)
    folders = [f"{begin}*", f"{begin}*/*", *(["runs/*/*"] if "runs/".startswith(incomplete) else [])]
    files = [path for name in _RUN_FILES for folder in folders for path in glob.glob(f"{folder}/{name}")]
    runs = sorted({os.path.dirname(path) for path in files})
    return [CompletionItem(run) for run in runs] or [CompletionItem(incomplete, type="dir")]


CONFIG_FILE = FieldOption(
    ["--config"],
    "",
    "FILE",
    help="YAML file with options of this command, one on each line, such as `batch-size: 16`; write `true` or `false` "
    "for options without a value. Options on the command line override the file",
    default="",
)
DRY_RUN = click.Option(
    ["--dry-run"],
    is_flag=True,
    help="Print what would be done, as a shell script, and change nothing, neither here nor on a host",
)


DRY_RUN_HERE = click.Option(
    ["--dry-run"],
    is_flag=True,
    help="Print the command that would be run on this machine, as a shell script, and run nothing",
)


def make_options(
    config: type,
    *without: str,
    only: Collection[str] = (),
    lists: Collection[str] = (),
    texts: Mapping[str, str] | None = None,
) -> list[FieldOption]:
    """Return a click option for each field of a class, in order, but those in `without` or, if given, not in `only`.

    Fields in `lists` accept any text. `texts` are help texts by name, which replace those of the fields.
    """
    types, own = get_type_hints(config), texts or {}
    return [
        _make_option(field, types[field.name], field.name in lists, own.get(field.name, field.metadata["help"]))
        for field in dataclasses.fields(config)
        if field.name not in without and field.name in (only or types)
    ]


def _make_option(field: dataclasses.Field[Any], kind: type, is_list: bool, text: str) -> FieldOption:
    metadata, flag = field.metadata, format_flag(field.name)
    takes = metadata["takes"]
    if takes == "TEXT":
        takes = "|".join(metadata["choices"]) or ("N" if kind in (int, float) else takes)
    names = [f"{flag}/{format_flag(field.name, False)}" if kind is bool else flag, field.name]
    value = bool if kind is bool else click.STRING if is_list else _FieldType(field, kind)
    more = {"default": field.default, "type": value, "help": text}
    return FieldOption(names, metadata["section"], takes, metadata["rare"], **more)


def pick(config: type[C], values: Mapping[str, Any]) -> C:
    """Return the configuration with those of the values that are its fields, and defaults for all other fields."""
    return config(**{name: values[name] for name in option_names(config) if name in values})


def given_options() -> dict[str, ParameterSource]:
    """Return the options and arguments that the user gave, by name, from the command line or the file of --config."""
    context = click.get_current_context()
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: source for name, source in sources.items() if source in _GIVEN}


def refuse_options(config: type, reason: str, *without: str) -> None:
    """Raise CpuftError if an option of this class, but those in `without`, is on the command line: its flag, followed
    by `reason`.
    """
    given = given_options()
    for name in option_names(config):
        if given.get(name) is ParameterSource.COMMANDLINE and name not in without:
            raise CpuftError(f"{format_flag(name)} {reason}")


def _show_help(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    if is_given and not ctx.resilient_parsing:
        ctx.meta[_RARE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_help,
    help="Show this message with the rare options as well, which few runs need, and exit",
)


class CheckedCommand(click.Command):
    """A command that refuses control characters in its options and arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments into `ctx.params`; click.UsageError: an unknown option, or a control character in a value
        whose type is not click.UNPROCESSED.
        """
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            advice = f": {suggest_names(error.option_name, error.possibilities)}" if error.possibilities else ""
            raise click.UsageError(f"there is no option {error.option_name}{advice}", ctx) from None
        for param in self.get_params(ctx) if not ctx.resilient_parsing else ():
            value = ctx.params.get(str(param.name))
            for text in value if isinstance(value, tuple) else (value,):
                control = find_control(text) if isinstance(text, str) and param.type is not click.UNPROCESSED else ""
                if control:
                    name = param.opts[0] if isinstance(param, click.Option) else param.make_metavar(ctx)
                    problem = f"{name} {text[:80]!r} contains the control character {control!r}"
                    raise click.UsageError(f"{problem}: write the value without it", ctx)
        return rest


class Verb(CheckedCommand):
    """A verb with its help in sections, whose options may also come from a YAML file (--config).

    Options of other tools are answered with cpuft's own. Only one of each pair of `alternatives` may be given.
    """

    def __init__(self, *args: Any, alternatives: Sequence[tuple[str, str]] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._alternatives = (*ALTERNATIVES, *alternatives)
        if any(getattr(param, "is_rare", False) for param in self.params):
            self.params.append(_HELP_ALL)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with --config's file for other options; click.UsageError or CpuftError: wrong ones."""
        if ctx.resilient_parsing:  # A shell is completing the line: nothing is refused, and no file is read.
            return super().parse_args(ctx, args)
        own = args[: args.index("--")] if "--" in args else args
        flags = {flag for option in self.get_params(ctx) for flag in (*option.opts, *option.secondary_opts)}
        if suggestion := suggest_options(own, flags, "script" in flags):
            raise click.UsageError(suggestion, ctx)
        for arg, following in zip(own, [*own[1:], ""]):
            path = following if arg == "--config" else arg.partition("=")[2] if arg.startswith("--config=") else ""
            if path:
                known = [str(param.name) for param in self.params if param.expose_value and param.name != "config"]
                ctx.default_map = read_config(path, known)
        try:
            rest = super().parse_args(ctx, args)
        except click.BadParameter as error:
            raise _name_the_file(error, ctx) from None
        given = {
            str(param.name): param.opts[0]
            for param in self.get_params(ctx)
            if ctx.get_parameter_source(str(param.name)) in _GIVEN and ctx.params.get(str(param.name)) is not False
        }
        if why := name_alternatives(given, self._alternatives):
            raise click.UsageError(why, ctx)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections, each in the order of the fields; options without a section come last."""
        records: dict[str, list[tuple[str, str]]] = {section: [] for section in (*SECTIONS, _RARE)}
        shows_rare = ctx.meta.get(_RARE, False)
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            is_rare = getattr(param, "is_rare", False)
            if record and (shows_rare or not is_rare):
                section = _RARE if is_rare else getattr(param, "section", "")
                records.setdefault(section, []).append((record[0].ljust(_COLUMN), record[1]))
        filled = {section: lines for section, lines in records.items() if lines}
        for section, lines in filled.items():
            with formatter.section(section or ("Other options" if len(filled) > 1 else "Options")):
                formatter.write_dl(lines, col_max=_COLUMN)


def _name_the_file(error: click.BadParameter, ctx: click.Context) -> click.UsageError:
    """Return the error, and if the wrong value is from the file of --config, name the file and the key instead."""
    name = error.param.name if error.param else None
    if not name or ctx.get_parameter_source(name) is not ParameterSource.DEFAULT_MAP:
        return error
    flag, message = format_flag(name), error.message
    # Messages of the field's own type begin with the flag or hold it; click's own are about the value only.
    problem = message.replace(flag, flag[2:], 1) if flag in message else f"{flag[2:]}: {message}"
    return click.UsageError(f"--config {ctx.params.get('config')}: {problem}", ctx)


class Verbs(click.Group):
    """A group of verbs whose list shows their first sentences in full."""

    command_class = CheckedCommand

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs; click itself would cut each sentence at the end of its line."""
        verbs = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(1000)) for name, verb in verbs.items() if verb])


def read_config(path: str, known: Sequence[str]) -> dict[str, str]:
    """Return the options in a YAML file by name, with _ for -, as unchecked texts; a list has commas between its parts.
    Raises CpuftError: a bad file, an unknown name, or one that is there twice or has no value.
    """
    values = _read_mapping(path)
    flags = {flag for name in known for flag in (f"--{name}", format_flag(name), format_flag(name, False))}
    if suggestion := suggest_options([f"--{key}" for key in values], flags):
        raise CpuftError(f"--config {path}: {suggestion.replace('--', '')}")
    options: dict[str, str] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if value is None:
            raise CpuftError(f"--config {path}: {name!r} has no value: give it one, or leave out the line")
        if name not in known:
            raise CpuftError(f"--config {path}: there is no option {name!r}: {suggest_names(name, known)}")
        if name in options:
            raise CpuftError(f"--config {path}: {name!r} is there twice: keep one of the lines")
        options[name] = _format_value(value, f"--config {path}: {name!r}")
    return options


def _read_mapping(path: str) -> dict[str, Any]:
    try:
        values = parse_yaml(read_given_text(path, "--config", "give a YAML file")) or {}
    except ValueError as error:
        raise CpuftError(f"--config {path} is not YAML ({error}): write lines of the form `option: value`") from None
    if not isinstance(values, dict):
        raise CpuftError(f"--config {path} is not a mapping: write lines of the form `option: value`")
    return values


def _format_value(value: Any, where: str) -> str:
    try:
        return ",".join(load(list[str], value if isinstance(value, list) else [value], where))
    except ValueError as error:
        raise CpuftError(f"{error}: write what its flag takes, or a list of that") from None
