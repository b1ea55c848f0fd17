"""`cpuft provision`: one short function a verb. Imports neither torch nor paramiko."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from cpuft.errors import CpuftError
from cpuft.hosts.registry import Entry, list_names, recall, state_root
from cpuft.options.clusters import HostsConfig, LocalConfig
from cpuft.options.flags import CONFIG_FILE, DRY_RUN, Verb, make_options, pick
from cpuft.options.help import Verbs

_FAULTS = ("kill", "pause", "resume", "cut", "join")


@click.group(cls=Verbs)
def provision() -> None:
    """Make machines into a cluster that trains: hosts over ssh, or hosts simulated on this machine."""


def _find(name: str) -> Entry | None:
    return recall(state_root(os.environ), name)


def _say(text: str) -> None:
    click.echo(f"  {text}", err=True)


def _local(fault: str | None, node: str | None, dry_run: bool, **values: Any) -> None:
    """Make a cluster of network namespaces on this machine (root), or a fault in it.

    With a word and a host: `kill 2` crashes the second host, `pause` freezes it, `resume` lets it go on, `cut` pulls
    its cable, `join` plugs it in. Running it without a word again repairs all of them.
    """
    from cpuft.provision.local import doing as simulate

    config = pick(LocalConfig, values)
    if fault:
        if not node:
            raise click.UsageError(f"{fault} which host? give its number, name or address")
        simulate.make_fault(config.name, fault, node, os.environ, _say)
    elif config.without_root:
        click.echo(simulate.write_plain(config, os.environ))
    else:
        simulate.check(config)
        if dry_run:
            click.echo(simulate.show(config, os.environ), nl=False)
        else:
            click.echo(simulate.make(config, os.environ, _say))


provision.add_command(
    click.Command(
        "local",
        callback=_local,
        params=[
            *make_options(LocalConfig),
            DRY_RUN,
            click.Argument(["fault"], required=False, type=click.Choice(_FAULTS)),
            click.Argument(["node"], required=False),
        ],
        help=_local.__doc__,
    )
)


def _hosts(dry_run: bool, **values: Any) -> None:
    """Make servers a cluster over ssh: one environment from exact pins, passwordless ssh from the master to all.

    Running it again repairs what is missing, and does nothing when nothing is.
    """
    from cpuft.provision.servers import doing as servers

    config = pick(HostsConfig, values)

    def ask(question: str) -> bool:
        return config.accept_host_keys or (sys.stdin.isatty() and click.confirm(question))

    if dry_run:
        click.echo(servers.show(config, os.environ, ask), nl=False)
    else:
        click.echo(servers.make(config, os.environ, ask, _say))


provision.add_command(
    Verb("hosts", callback=_hosts, params=[*make_options(HostsConfig), DRY_RUN, CONFIG_FILE], help=_hosts.__doc__)
)


@provision.command()
@click.argument("name")
@click.option("--dry-run", is_flag=True, help="print what would be done, as a shell script, and do nothing")
def down(name: str, dry_run: bool) -> None:
    """Take away what cpuft put there for cluster NAME: processes, links, keys, environment, hostfile."""
    from cpuft.provision.local import doing as simulate
    from cpuft.provision.servers import doing as servers

    entry = _find(name)
    if entry and entry.kind == "inside":
        raise CpuftError(f"this host is one of cluster {name}: take it down where it was made")
    of_servers = entry if entry and entry.kind == "hosts" else None
    if dry_run:
        plan = servers.show_down(of_servers, os.environ) if of_servers else simulate.show_down(name, os.environ)
        click.echo(plan, nl=False)
        return
    if of_servers:
        servers.take_down(of_servers, os.environ, _say)
    else:
        simulate.take_down(name, os.environ, _say)
    click.echo(f"cluster {name} is gone")


@provision.command()
@click.argument("name", required=False)
def status(name: str | None) -> None:
    """What each host of cluster NAME is doing now; all clusters without NAME."""
    from cpuft.provision.local import doing as simulate
    from cpuft.provision.servers import doing as servers

    names = [name] if name else list_names(state_root(os.environ))
    if not names:
        click.echo("no clusters: make one with cpuft provision local")
    for one in names:
        entry = _find(one)
        room = servers if entry and entry.kind == "hosts" else simulate
        click.echo(room.describe(one, os.environ), nl=False)


@provision.command()
@click.argument("name")
def diff(name: str) -> None:
    """What has drifted in cluster NAME from what was asked for; exit code 1 when anything has."""
    from cpuft.provision.local import doing as simulate
    from cpuft.provision.servers import doing as servers

    entry = _find(name)
    if entry and entry.kind == "hosts":
        lines = servers.list_drift(entry, os.environ)
    else:
        lines = simulate.list_drift(name, os.environ)
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo(f"cluster {name} is as it was asked for")
    sys.exit(1 if lines else 0)


@provision.command()
@click.option("--recipe", "recipe_path", default="ami/recipe.yaml", help="what is in it [ami/recipe.yaml]")
@click.option("--output", required=True, help="directory of the image, made new")
@click.option("--wheels", default="", help="directory of wheels (default: downloaded by exact pins)")
@click.option("--dry-run", is_flag=True, help="print what would be done, as a shell script, and do nothing")
def image(recipe_path: str, output: str, wheels: str, dry_run: bool) -> None:
    """Build a golden root filesystem from a recipe (root, Debian), and prove that it trains; for local --image."""
    from cpuft.plan import format_plan
    from cpuft.provision.image.build import build, find_mirror, find_wheels, plan_image
    from cpuft.provision.image.recipe import read_recipe

    recipe = read_recipe(recipe_path)
    if dry_run:
        found = find_wheels(recipe, wheels, os.environ, _say)
        plan = plan_image(recipe, os.path.abspath(output), "debootstrap", find_mirror(recipe), found)
        click.echo(format_plan(plan), nl=False)
    else:
        click.echo(build(recipe, output, wheels, os.geteuid() == 0, os.environ, _say))


@provision.command("recipe")
@click.argument("path", default="ami/recipe.yaml")
def print_install(path: str) -> None:
    """Print the install script that a recipe makes."""
    from cpuft.provision.image.recipe import format_install, read_recipe

    click.echo(format_install(read_recipe(path)), nl=False)
