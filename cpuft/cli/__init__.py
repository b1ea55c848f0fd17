"""The command line: one module per verb, imported when the verb is called. Importing this package imports no torch."""

from __future__ import annotations

import getpass
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import click

from cpuft import __version__
from cpuft.errors import (
    NO_MORE_PROCESSES,
    CpuftError,
    Interrupted,
    explain_os_error,
    suggest_names,
)
from cpuft.terminal import check_stdout, protect_streams

VERBS = {
    "attach": "Show what a detached run prints, and fetch its results when it ends.",
    "bench": "Measure the communication between ranks.",
    "compare": "Train on several numbers of ranks, one after another, and report the speedup.",
    "data": "Look at the data of a training before it starts.",
    "doctor": "Check all hosts of a cluster for problems that would stop, hang or slow down a run.",
    "env": "Print the environment variables that cpuft sets for its ranks, as export lines.",
    "errors": "List the validation examples that a run gets most wrong, and labels that may be wrong.",
    "estimate": "Estimate time, speed, efficiency and price on 1 to 64 hosts before you rent them.",
    "export": "Export the model of a finished run to ONNX or OpenVINO.",
    "launch": "Train a model on the ranks of one or more hosts, or run your own script on them.",
    "logs": "Print what a detached run has printed until now.",
    "mine": "Find hard negatives: for each anchor, similar documents that do not belong to it.",
    "predict": "Predict with the model of a finished run, or compute embeddings.",
    "provision": "Make clusters from servers, rented instances or simulated hosts, and remove them.",
    "push": "Upload the model of a finished run to the Hugging Face hub.",
    "quickstart": "Train the built-in task with one rank and with two ranks on this machine, and report the speedup.",
    "report": "Show recorded runs side by side, as a table or an HTML page.",
    "runs": "List detached runs and their states.",
    "stacks": "Show what every rank of an active run is doing, and which rank the others wait for.",
    "stop": "Ask a detached run to save a checkpoint and end.",
    "sweep": "Train with many combinations of options, on all hosts at the same time, and compare the results.",
    "submit": "Submit a launch to Slurm, Kubernetes or a cloud, as a job that resumes after interruptions.",
}
"""Each verb's first sentence of help, so that `cpuft --help` imports no verb. NAME is in the module cpuft.cli.NAME."""


class _LazyGroup(click.Group):
    """The root group, which imports a verb when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return cast(click.Command, getattr(importlib.import_module(f"cpuft.cli.{cmd_name}"), cmd_name))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in VERBS and not ctx.resilient_parsing:
            raise click.UsageError(f"there is no command cpuft {args[0][:60]}: {suggest_names(args[0], VERBS)}", ctx)
        if sys.platform == "win32":
            # Windows would run an ssh or a scheduler's client that is in the working folder rather than that of PATH.
            os.environ["NODEFAULTCURRENTDIRECTORYINEXEPATH"] = "1"
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(VERBS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cpuft")
def cli() -> None:
    """Fine-tune transformers on one CPU host or several, and show honestly how much faster N hosts are than one."""


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the verb that the arguments name, and exit with its exit code.

    Bad input exits with 2, a full disk with 74, signal N with 128 + N. Any other exception is a bug and is raised.
    """
    protect_streams()
    try:
        getpass.getuser()
    except (ImportError, KeyError, OSError):  # a container may run as a user without a name, for which torch asks
        os.environ["LOGNAME"] = "cpuft"
    exit_code = 2
    try:
        code = _run_verb(args)
        check_stdout()
        sys.exit(code)
    except (CpuftError, OSError) as error:
        explained = explain_os_error(error) if isinstance(error, OSError) else error
        if not explained:
            raise
        message, exit_code = str(explained), explained.exit_code
    except click.ClickException as error:
        message = _format_click_error(error)
    except click.exceptions.Abort:
        sys.exit(130)
    except Interrupted as stopped:
        click.echo(f"cpuft: stopped by {stopped}: run the same command again to continue", err=True)
        sys.exit(stopped.exit_code)
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        message = NO_MORE_PROCESSES
    click.echo(f"cpuft: error: {message}", err=True)
    sys.exit(exit_code)


def _run_verb(args: Sequence[str] | None) -> Any:
    try:
        return cli.main(args=args, prog_name="cpuft", standalone_mode=False) or 0
    except SystemExit as exit_request:
        return exit_request.code


def _format_click_error(error: click.ClickException) -> str:
    """Return click's message as one line, followed by the command that shows the help."""
    context = getattr(error, "ctx", None)
    name = shlex.join(context.command_path.split()) if context else "cpuft"
    return str(CpuftError(f"{' '.join(error.format_message().split())} (see {name} --help)"))
