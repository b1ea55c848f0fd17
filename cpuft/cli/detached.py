"""What the verbs of detached runs share: the options that name their hosts, and `--detach` itself."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from cpuft.cli.common import say
from cpuft.cli.options import FieldOption, complete_runs, given_options, make_options, pick
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TRAINING_INPUTS, TrainConfig
from cpuft.errors import CpuftError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from cpuft.hosts.cluster import Cluster
    from cpuft.plans import Plan

_PLACE = ("cluster", "hostfile", "ssh_config")
_OF_RUN = "those with which the run was started, if that was on this machine"


def place_options(default: str = _OF_RUN, **more: str) -> list[FieldOption]:
    """Return --cluster, --hostfile (without it, hosts are `default`) and --ssh-config, and the options of the other
    fields of LaunchConfig to which `more` has help texts.
    """
    texts = {
        "hostfile": f"Hostfile with the hosts to ask (default: {default})",
        "ssh_config": "With --hostfile or --cluster, configuration file of the ssh client (default: that of --cluster, "
        "else your own ~/.ssh/config)",
        **more,
    }
    return make_options(LaunchConfig, only=(*_PLACE, *more), texts=texts)


def run_argument() -> click.Argument:
    """Return the argument that names a detached run."""
    return click.Argument(["run"], metavar="RUN", shell_complete=_complete_detached)


def _complete_detached(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the ids and the folders of the detached runs that this machine knows, else folders of other runs."""
    from click.shell_completion import CompletionItem

    from cpuft.launch.inputs import list_detached

    names = [name for note in list_detached(os.environ) for name in (note.id, os.path.relpath(note.run_dir))]
    items = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return items or complete_runs(ctx, param, incomplete)


def refuse_detaching(config: LaunchConfig, resume: str = "") -> None:
    """Raise CpuftError for --detach on the hosts of a scheduler's job or on this machine if it is a Mac, with
    --copy-checkpoints, or with `resume`.
    """
    from cpuft.hosts.cluster import find_access, read_hosts
    from cpuft.launch.detached import refuse_jobs

    refuse_jobs(config, os.environ)
    if sys.platform != "linux":
        find_access(config).transport.refuse_here(read_hosts(config)[0], "--detach on this machine")
    if resume:
        raise CpuftError("--detach is for new runs: leave it out with --resume, which continues the run from here")
    if config.copy_checkpoints:
        raise CpuftError("--detach moves the launcher, to which --copy-checkpoints copies: leave out one of them")


def move(
    verb: str,
    values: dict[str, Any],
    script: tuple[str, ...],
    cluster: Cluster,
    run_dir: str,
    there: Plan,
    dry_run: bool,
    packages: Sequence[str] = (),
) -> int:
    """Move a planned command to its head host, or print the plan of that (`dry_run`); return the exit code.

    `values` are those of all options of the verb, `there` is what the command does on the head host, whose Python must
    have `packages` besides cpuft. The exit code is 0 if the run has begun or with `dry_run`, 130 after Ctrl-C, which
    does not end the run, and else that of the command, which has ended before. Raises CpuftError, also with `dry_run`:
    the head host cannot run the command.
    """
    from cpuft.launch.detached import (
        Detached,
        Head,
        examine_python,
        list_place_options,
        plan_move,
        plan_start,
        start_detached,
    )
    from cpuft.launch.inputs import list_input_paths, make_note
    from cpuft.plans import format_comment, format_plan
    from cpuft.secret_variables import secrets_for_ranks

    config = pick(LaunchConfig, values)
    given = {name: values[name] for name in ("np", *given_options()) if name in values}
    head = Head(cluster.assignments[0].host, cluster.access, list_place_options(config))
    examine_python(head, packages)
    order, bundles = plan_move(verb, given, script, cluster, run_dir, os.environ)
    plan = plan_start(head, order, bundles, cluster, run_dir, {} if dry_run else secrets_for_ranks(os.environ))
    if dry_run:
        command = shlex.join(("cpuft", *order.arguments))
        text = format_comment(f"What {command} then does on {cluster.head}:\n{format_plan(there)}")
        click.echo(format_plan(plan, os.getcwd()) + text)
        return 0
    named = {name: value for name, value in given.items() if name in TRAINING_INPUTS}
    note = make_note(config, list_input_paths(TrainConfig(**named), named))
    run = Detached(head, order, run_dir)
    try:
        code = start_detached(run, plan, note, os.environ, say)
    except KeyboardInterrupt:
        say(f"cpuft: run {run.order.id} goes on without this machine. {run.describe_commands()}")
        return 130
    if not code:
        click.echo(f"detached: {run.order.id}")
    return code
