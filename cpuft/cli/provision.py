"""`cpuft provision`: one short function a verb. Imports neither torch nor paramiko."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from cpuft.errors import CpuftError
from cpuft.hosts.registry import list_names, state_root
from cpuft.options import CONFIG_FILE, DRY_RUN, Verb, Verbs, make_options, pick
from cpuft.plan import Plan, Step, format_plan
from cpuft.provision.options import AwsConfig, HostsConfig, ImageConfig, LocalConfig

if TYPE_CHECKING:
    from cpuft.provision.aws.builder import Builder
    from cpuft.provision.provider import Provider

_dry_run = click.option("--dry-run", is_flag=True, help=DRY_RUN.help)


@click.group(cls=Verbs)
def provision() -> None:
    """Make machines into a cluster that trains: hosts over ssh, rented ones, or hosts simulated on this machine."""


def _say(text: str) -> None:
    click.echo(f"  {text}", err=True)


def _ask(question: str) -> bool:
    return sys.stdin.isatty() and click.confirm(question)


def _do(dry_run: bool, plan: Callable[[], Plan], act: Callable[[], str]) -> None:
    """Print a plan, or act and say what came of it."""
    if dry_run:
        click.echo(format_plan(plan()), nl=False)
    else:
        click.echo(act())


def _make(provider: Provider[Any, Any] | Builder, dry_run: bool) -> None:
    _do(dry_run, provider.show, lambda: provider.make(_say, _ask))


_FAULT = (
    click.Argument(["fault"], required=False, type=click.Choice(("kill", "pause", "resume", "cut", "join"))),
    click.Argument(["node"], required=False),
)


@provision.command(params=[*make_options(LocalConfig), DRY_RUN, *_FAULT])
def local(fault: str | None, node: str | None, dry_run: bool, **values: Any) -> None:
    """Make a cluster of network namespaces on this machine (root), or a fault in it.

    With a word and a host: `kill 2` crashes the second host, `pause` freezes it, `resume` lets it go on, `cut` pulls
    its cable, `join` plugs it in. Running it without a word again repairs all of them.
    """
    from cpuft.provision.kinds import recall
    from cpuft.provision.reconcile import run_stages
    from cpuft.provision.simulated import Local, Plain

    config = pick(LocalConfig, values)
    if not fault:
        _make((Plain if config.without_root else Local)(config, os.environ), dry_run)
        return
    if not node:
        raise click.UsageError(f"{fault} which host? give its number, name or address")
    provider = recall(config.name, os.environ)
    if not isinstance(provider, Local):
        raise CpuftError(f"{config.name} is a cluster of kind {provider.kind}: {fault} is for simulated hosts only")
    plan = provider.plan_fault(fault, node)
    if dry_run:
        click.echo(format_plan(plan), nl=False)
    else:
        run_stages(plan, _say)


@provision.command(cls=Verb, params=[*make_options(HostsConfig), DRY_RUN, CONFIG_FILE])
def hosts(dry_run: bool, **values: Any) -> None:
    """Make servers a cluster over ssh: one environment from exact pins, passwordless ssh from the master to all.

    Running it again repairs what is missing, and does nothing when nothing is.
    """
    from cpuft.provision.servers import Servers

    _make(Servers(pick(HostsConfig, values), os.environ), dry_run)


_POLICY = click.Option(["--policy"], is_flag=True, help="print the IAM policy that renting needs; do nothing")
_region = click.option("--region", default="", help="region of AWS of a cluster that is not remembered here")


@provision.command(cls=Verb, params=[*make_options(AwsConfig), _POLICY, DRY_RUN, CONFIG_FILE])
def aws(dry_run: bool, policy: bool, **values: Any) -> None:
    """Rent instances from AWS and make them a cluster; they end themselves with their lease.

    Running it again repairs what is missing, and does nothing when nothing is.
    """
    from cpuft.provision.aws.doing import Aws
    from cpuft.provision.aws.policy import format_policy

    if policy and dry_run:
        step = Step("print the IAM policy that renting needs", ("printf", "%s", format_policy()))
        click.echo(format_plan(Plan(((step,),))), nl=False)
    elif policy:
        click.echo(format_policy(), nl=False)
    else:
        _make(Aws(pick(AwsConfig, values), os.environ), dry_run)


@provision.command()
@click.argument("name")
@click.option("--lease", default="4h", help="from now: 90m, 4h, 2d")
@_region
@_dry_run
def extend(name: str, lease: str, region: str, dry_run: bool) -> None:
    """Move the end of the lease of rented cluster NAME."""
    from cpuft.provision.aws.doing import Aws
    from cpuft.provision.kinds import recall_left

    provider = recall_left(name, os.environ, region)
    if not isinstance(provider, Aws):
        raise CpuftError(f"{name} is a cluster of kind {provider.kind}: only rented ones have a lease")
    _do(dry_run, lambda: provider.plan_extension(lease), lambda: provider.extend(lease, _say))


@provision.command()
@click.argument("name")
@_region
@_dry_run
def down(name: str, region: str, dry_run: bool) -> None:
    """Take away what cpuft put there for cluster NAME: processes, links, keys, environment, hostfile, instances."""
    from cpuft.provision.kinds import recall_left

    provider = recall_left(name, os.environ, region)
    _do(dry_run, provider.show_down, lambda: provider.down(_say))


@provision.command()
@click.argument("name", required=False)
@_region
def status(name: str | None, region: str) -> None:
    """What each host of cluster NAME is doing now; all clusters without NAME, or all that a region's tags tell of."""
    from cpuft.provision.kinds import recall, recall_left

    if region:
        from cpuft.provision.aws.doing import describe_region

        click.echo(recall_left(name, os.environ, region).describe() if name else describe_region(region), nl=False)
        return
    if name:
        click.echo(recall(name, os.environ).describe(), nl=False)
        return
    names = list_names(state_root(os.environ))
    for one in names:
        try:
            click.echo(recall(one, os.environ).describe(), nl=False)
        except CpuftError as error:
            click.echo(f"cluster {one} cannot be asked: {error}")
    if not names:
        click.echo("no clusters: make one with cpuft provision local")


@provision.command()
@click.argument("name")
def diff(name: str) -> None:
    """What has drifted in cluster NAME from what was asked for; exit code 1 when anything has."""
    from cpuft.provision.kinds import recall

    lines = recall(name, os.environ).drift()
    for line in lines or [f"cluster {name} is as it was asked for"]:
        click.echo(line)
    sys.exit(1 if lines else 0)


@provision.command(cls=Verb, params=[*make_options(ImageConfig), DRY_RUN, CONFIG_FILE])
def image(dry_run: bool, **values: Any) -> None:
    """Build a golden image from a recipe, and prove that it trains; an image that is there already stays as it is.

    With --output it is a root filesystem, for provision local --image (root, Debian). With --aws it is an AMI, and
    provision aws starts its instances from that.
    """
    config = pick(ImageConfig, values)
    if config.aws or config.list or config.delete:
        _make_ami(config, dry_run)
    elif config.output:
        _make_root(config, dry_run)
    else:
        raise CpuftError("where to? name --output, a new directory of a root filesystem, or say --aws for an AMI")


def _make_root(config: ImageConfig, dry_run: bool) -> None:
    from cpuft.provision.image import gather_image, make_image, plan_image, read_recipe

    recipe, target = read_recipe(config.recipe), os.path.abspath(config.output)
    _do(
        dry_run,
        lambda: plan_image(recipe, target, gather_image(recipe, target, config.wheels, os.environ)),
        lambda: make_image(recipe, target, config.wheels, os.environ, os.geteuid() == 0, _say),
    )


def _make_ami(config: ImageConfig, dry_run: bool) -> None:
    from cpuft.provision.aws.builder import Builder, delete_image, list_images

    if config.list:
        click.echo(list_images(config.region), nl=False)
    elif config.delete:
        plan = delete_image(config.delete, config.region, dry_run, _say)
        click.echo(format_plan(plan) if dry_run else f"image {config.delete} is gone", nl=not dry_run)
    else:
        _make(Builder(config, os.environ), dry_run)


@provision.command("recipe")
@click.argument("path", default="ami/recipe.yaml")
@click.option("--container", is_flag=True, help="print the container file that it makes, for podman and docker")
def print_install(path: str, container: bool) -> None:
    """Print the install script that a recipe makes."""
    from cpuft.provision.image import format_container, format_install, read_recipe

    click.echo((format_container if container else format_install)(read_recipe(path)), nl=False)
