"""`cpuft bench`: measurements of the links between hosts, and of what they cost a training."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from cpuft.cli.common import check_hosts, print_plans, say
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, Verbs, complete_runs, make_options, pick
from cpuft.config import LAUNCH_ONLY, BenchConfig, LaunchConfig, ScalingConfig
from cpuft.errors import CpuftError


@click.group(cls=Verbs)
def bench() -> None:
    """Measure the communication between ranks, and what it costs a training."""


@bench.command(
    cls=Verb,
    params=[*make_options(BenchConfig), *make_options(LaunchConfig, *LAUNCH_ONLY), DRY_RUN, CONFIG_FILE],
)
def comm(dry_run: bool, **values: Any) -> None:
    """Measure latency and bandwidth of every backend between the ranks.

    Algorithm bandwidth and bus bandwidth are defined as in nccl-tests. In the table, ms is the median time, followed by
    the range of the middle half of all repetitions; busy is the fraction of a rank's cores that the backend keeps busy;
    x gloo is the speed relative to gloo. The measurements are written to comm.jsonl in the run folder, and a plot to
    comm.svg beside it, if matplotlib is installed.
    """
    from cpuft.hosts.cluster import gather_cluster
    from cpuft.launch.leases import renew_leases
    from cpuft.launch.plan import add_transfers, choose_run_dir, plan_bench
    from cpuft.launch.remote import run_attempt
    from cpuft.report.plots import write_plot

    config = pick(LaunchConfig, values)
    run_dir = choose_run_dir(config.run_dir, f"comm-np{config.np}")
    cluster = gather_cluster(config)
    plan = plan_bench(cluster, config, pick(BenchConfig, values), cluster.work_dir(run_dir), os.environ)
    plan = add_transfers(plan, (), {}, cluster, run_dir)
    if dry_run:
        print_plans([plan])
        return
    check_hosts(cluster, config)
    with renew_leases(cluster.access, say):
        code = run_attempt(plan, run_dir, cluster, config.time_limit, say)
    if not code:
        click.echo(f"record: {run_dir}/comm.jsonl")
        try:
            click.echo(f"plot: {write_plot(f'{run_dir}/comm.jsonl')}")
        except CpuftError as error:
            click.echo(f"no plot: {error}")
    sys.exit(code)


@bench.command(
    cls=Verb,
    params=[
        *make_options(ScalingConfig),
        DRY_RUN,
        CONFIG_FILE,
        click.Argument(["run"], shell_complete=complete_runs),
    ],
)
def scaling(run: str, dry_run: bool, **values: Any) -> None:
    """Measure on this machine alone how fast a recorded training would be on many hosts.

    RUN is the folder of a run with one rank that was trained with --record-layer-times. For each number of hosts, as
    many ranks replay a step of it: they wait instead of computing, and send the real messages over simulated links.
    All of it runs in slow motion, so that one machine can carry many ranks, and the figures repeat.

    In the table, "waiting" is the share of a step in which a host waits for messages, and "slowed" the share that the
    CPU time of communication takes from computing. "of the ideal" is the speed relative to as many independent hosts.
    The measurements are written to scaling.jsonl in a new folder, and to the page scaling.html beside it, with a
    timeline of each case, if matplotlib and Jinja2 are installed.
    """
    from pathlib import Path

    from cpuft.execute import run_command
    from cpuft.files import write_text
    from cpuft.launch.plan import choose_run_dir
    from cpuft.launch.scaling import check_machine, list_cases, plan_case, run_cases
    from cpuft.plan import Plan, format_plan
    from cpuft.record import FILE_NAME, MeasuredHeader, format_line, read_record
    from cpuft.report.estimate import find_cores
    from cpuft.report.scaling import format_scaling, write_scaling_page

    config = pick(ScalingConfig, values)
    record = read_record(run)
    cases = list_cases(config, record, find_cores(record))
    path = str(Path(run, FILE_NAME) if Path(run).is_dir() else Path(run))
    as_root = os.geteuid() == 0
    steps = [plan_case(os.path.abspath(path), case, as_root) for case in cases]
    if dry_run:
        click.echo(format_plan(Plan(tuple((step,) for step in steps)), os.getcwd()), nl=False)
        return
    check_machine(as_root)
    folder = Path(choose_run_dir(config.run_dir, "scaling"))
    folder.mkdir(parents=True)
    lines = []
    say(steps[0].why)
    for line in run_cases(steps, run_command):
        lines.append(line)
        header = format_line(MeasuredHeader("bench scaling", record.header.versions))
        text = "".join(f"{text}\n" for text in (header, *map(format_line, lines)))
        write_text(folder / "scaling.jsonl", text)
        if len(lines) < len(steps):
            say(steps[len(lines)].why)
    click.echo(format_scaling(lines, record), nl=False)
    click.echo(f"record: {folder}/scaling.jsonl")
    try:
        click.echo(f"page: {write_scaling_page(lines, record, folder / 'scaling.html')}")
    except CpuftError as error:
        click.echo(f"no page: {error}")
