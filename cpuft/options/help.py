"""Help that can be scanned (click): options by subject, a line each where it fits; groups with whole sentences."""

from __future__ import annotations

import glob
import os
from typing import TYPE_CHECKING, Any

import click

from cpuft.config import SECTIONS
from cpuft.loader import find_control

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
        rest = super().parse_args(ctx, args)
        for param in self.get_params(ctx) if not ctx.resilient_parsing else ():
            value = ctx.params.get(str(param.name))
            for text in value if isinstance(value, tuple) else (value,):
                odd = find_control(text) if isinstance(text, str) and param.type is not click.UNPROCESSED else ""
                if odd:
                    name = param.opts[0] if isinstance(param, click.Option) else param.make_metavar(ctx)
                    said = f"{name} {text[:80]!r} contains the control character {odd!r}: write the value without it"
                    raise click.UsageError(said, ctx)
        return rest


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
