"""`cpuft provision`: makes, describes and removes clusters. Imports neither torch nor paramiko."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, Verbs, make_options, pick, refuse_options
from cpuft.errors import CpuftError
from cpuft.hosts.registry import list_names, state_root
from cpuft.plans import Plan, format_plan
from cpuft.provision.aws.options import AwsConfig
from cpuft.provision.base import PROVIDERS, find_cluster, load_cluster, load_provider
from cpuft.provision.options import ImageConfig, LocalConfig

if TYPE_CHECKING:
    from cpuft.provision.aws.ami import AmiBuilder
    from cpuft.provision.base import Provider


@click.group(cls=Verbs)
def provision() -> None:
    """Make clusters from servers, rented instances or simulated hosts, and remove them."""


def _say(text: str) -> None:
    click.echo(f"  {text}", err=True)


def _ask(question: str) -> bool:
    return sys.stdin.isatty() and click.confirm(question, err=True)


def _print_or_execute(dry_run: bool, plan: Callable[[], Plan], execute: Callable[[], str]) -> None:
    if dry_run:
        click.echo(format_plan(plan()), nl=False)
    else:
        click.echo(execute())


def _make(provider: Provider[Any, Any] | AmiBuilder, dry_run: bool) -> None:
    _print_or_execute(dry_run, provider.show, lambda: provider.make(_say, _ask))


_FAULT = (
    click.Argument(["fault"], required=False, type=click.Choice(("kill", "pause", "resume", "cut", "join"))),
    click.Argument(["node"], required=False),
)


@provision.command(params=[*make_options(LocalConfig), DRY_RUN, *_FAULT])
def local(fault: str | None, node: str | None, dry_run: bool, **values: Any) -> None:
    """Simulate a cluster on this machine with network namespaces (needs root), or inject a fault into one.

    With a fault and NODE, inject the fault: `kill 2` crashes the second host, `pause` freezes it, `resume` lets it
    continue, `cut` disconnects it from the network and `join` connects it again. NODE is the number, name or address of
    a host, and --name names its cluster. Without a fault, the command makes the cluster, or repairs every host of an
    existing one.
    """
    from cpuft.provision.base import run_plan
    from cpuft.provision.simulated import SimulatedCluster, plan_fault

    config = pick(LocalConfig, values)
    if not fault:
        _make(load_provider("local")(config, os.environ), dry_run)
        return
    if not node:
        raise click.UsageError(f"{fault}: which host? Give its number, name or address, such as `{fault} 2`")
    refuse_options(LocalConfig, f"is for making a cluster, and {fault} changes one that is there: leave it out", "name")
    cluster = load_cluster(config.name, os.environ)
    if not isinstance(cluster, SimulatedCluster):
        raise CpuftError(f"{config.name} is a cluster of kind {cluster.kind}: {fault} is for simulated hosts only")
    plan = plan_fault(cluster.config, cluster.gather(), fault, node)
    if dry_run:
        click.echo(format_plan(plan), nl=False)
    else:
        run_plan(plan, _say)


_POLICY = click.Option(["--policy"], is_flag=True, help="Print the IAM policy that your AWS credentials need, and exit")


@provision.command(cls=Verb, params=[*make_options(AwsConfig), _POLICY, DRY_RUN, CONFIG_FILE])
def aws(dry_run: bool, policy: bool, **values: Any) -> None:
    """Rent instances from AWS and make a cluster of them. They terminate themselves when their lease ends.

    Before anything is rented, the command shows the price and asks. Run it again with the same options to repair a
    cluster: it rents and installs what is missing, and does nothing if nothing is.
    """
    from cpuft.provision.aws.client import POLICY

    if policy:
        click.echo(POLICY.read_text(encoding="utf-8"), nl=False)
    else:
        _make(load_provider("aws")(pick(AwsConfig, values), os.environ), dry_run)


def make_verb(kind: str) -> Verb:
    """Return the verb that makes clusters of a kind; the docstring of the kind's options class is its help."""
    options = PROVIDERS[kind].options

    def make(dry_run: bool, **values: Any) -> None:
        _make(load_provider(kind)(pick(options, values), os.environ), dry_run)

    return Verb(kind, callback=make, params=[*make_options(options), DRY_RUN, CONFIG_FILE], help=options.__doc__)


for _kind in PROVIDERS:
    if _kind not in provision.commands:
        provision.add_command(make_verb(_kind))


def _make_region(text: str) -> click.Option:
    return click.Option(["--region"], default="", metavar="NAME", help=f"AWS region, such as us-east-1, {text}")


_LEASE = click.Option(
    ["--lease"],
    default="4h",
    metavar="TIME",
    help="Time from now until the instances terminate themselves: 10m to 30d, such as 90m, 4h or 2d [4h]",
)


@provision.command(params=[click.Argument(["name"]), _LEASE, DRY_RUN])
def extend(name: str, lease: str, dry_run: bool) -> None:
    """Change the end of the lease of the rented cluster NAME, at which its instances terminate themselves.

    The new end may be earlier than the present one, or later than --lease-limit. Run the command on the machine that
    made the cluster, because it logs in to the instances.
    """
    from cpuft.provision.aws.provider import Aws

    provider = load_cluster(name, os.environ)
    if not isinstance(provider, Aws):
        raise CpuftError(f"cluster {name} is of kind {provider.kind}: only rented clusters have a lease")
    _print_or_execute(dry_run, lambda: provider.plan_extension(lease), lambda: provider.extend(lease, _say))


_RENTED_IN = _make_region("of a cluster that another machine has rented (default: this machine's record says it)")


@provision.command(params=[click.Argument(["name"]), _RENTED_IN, DRY_RUN])
def down(name: str, region: str, dry_run: bool) -> None:
    """Remove the cluster NAME: its instances or simulated hosts, and all that cpuft installed on servers.

    There is a question first only if a detached run is active on the cluster, or if results of one are there that
    nobody has fetched; --dry-run shows what would be removed.
    """
    from cpuft.launch.find_runs import list_needed

    provider = find_cluster(name, os.environ, region)
    active, unfetched = ([], []) if dry_run else list_needed(name)
    for runs, question, problem in (
        (active, "End the active run", "is active on the cluster: end it with cpuft stop"),
        (unfetched, "Remove the unfetched results of run", "has results there: fetch them with cpuft attach"),
    ):
        if runs and not _ask(f"{question} {', '.join(runs)}?"):
            raise CpuftError(f"the detached run {', '.join(runs)} {problem}")
    _print_or_execute(dry_run, provider.show_down, lambda: provider.down(_say))


_SHOWN = _make_region("of which to show what any machine has rented (default: only what this machine has recorded)")


@provision.command(params=[click.Argument(["name"], required=False), _SHOWN])
def status(name: str | None, region: str) -> None:
    """Show what each host of the cluster NAME is doing now.

    Without NAME, show all clusters that this machine has made, or with --region all that are rented in that region. A
    host that does not answer has a line that says so.
    """
    if name:
        cluster = find_cluster(name, os.environ, region) if region else load_cluster(name, os.environ)
        click.echo(cluster.describe(), nl=False)
        return
    if region:
        from cpuft.provision.aws.provider import describe_region

        click.echo(describe_region(region), nl=False)
        return
    names = list_names(state_root(os.environ))
    for one in names:
        try:
            click.echo(load_cluster(one, os.environ).describe(), nl=False)
        except CpuftError as error:
            click.echo(f"cluster {one} cannot be queried: {error}")
    if not names:
        click.echo("There is no cluster. Make one with `cpuft provision local`, `hosts` or `aws`.")


@provision.command()
@click.argument("name")
def diff(name: str) -> None:
    """Show how the cluster NAME differs from what was asked for; the exit code is 1 when it differs.

    Each line names a host, or "here" for this machine, and a step that would repair the cluster. Nothing is changed.
    """
    lines = load_cluster(name, os.environ).drift()
    for line in lines or [f"cluster {name} is as it was asked for"]:
        click.echo(line)
    sys.exit(1 if lines else 0)


@provision.command(
    cls=Verb,
    params=[*make_options(ImageConfig), DRY_RUN, CONFIG_FILE],
    alternatives=(("list", "delete"), ("output", "aws"), ("output", "list"), ("output", "delete")),
)
def image(dry_run: bool, **values: Any) -> None:
    """Build a golden image from a recipe and test that it can train. An image that exists already is left as it is.

    With --output, the image is a root filesystem for `cpuft provision local --image` (needs root and Debian). With
    --aws, it is an AMI, from which `cpuft provision aws` starts its instances.
    """
    config = pick(ImageConfig, values)
    kinds = ("output", "aws", "list", "delete")
    if config.output:
        refuse_options(ImageConfig, "is for AMIs: leave it out with --output", *kinds, "recipe", "wheels")
    if config.list or config.delete:
        refuse_options(ImageConfig, "is for a new image: leave it out", *kinds, "region", "yes")
    if config.aws or config.list or config.delete:
        _make_ami(config, dry_run)
    elif config.output:
        _make_root(config, dry_run)
    else:
        raise CpuftError("give --output with a new directory to make a root filesystem, or --aws to make an AMI")


def _make_root(config: ImageConfig, dry_run: bool) -> None:
    from cpuft.provision.image import gather_image, make_image, plan_image, read_recipe

    recipe, target = read_recipe(config.recipe), os.path.abspath(config.output)
    _print_or_execute(
        dry_run,
        lambda: plan_image(recipe, target, gather_image(recipe, target, config.wheels, os.environ)),
        lambda: make_image(recipe, target, config.wheels, os.environ, os.geteuid() == 0, _say),
    )


def _make_ami(config: ImageConfig, dry_run: bool) -> None:
    from cpuft.provision.aws.ami import AmiBuilder, delete_image, list_images

    if config.list:
        click.echo(list_images(config.region), nl=False)
    elif config.delete:
        plan = delete_image(config.delete, config.region, dry_run, _say)
        click.echo(format_plan(plan) if dry_run else f"AMI {config.delete} was deleted", nl=not dry_run)
    else:
        _make(AmiBuilder(config, os.environ), dry_run)


@provision.command("recipe")
@click.argument("path", default="ami/recipe.yaml")
def print_install(path: str) -> None:
    """Print a shell script that installs what a recipe describes on a Debian host, or in a container.

    PATH is the recipe, a YAML file. Without PATH, it is ami/recipe.yaml, or cpuft's own if there is no such file.
    """
    from cpuft.provision.image import format_install, read_recipe

    click.echo(format_install(read_recipe(path)), nl=False)
