"""`cpuft bench`: measurements of the links between hosts."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import click

from cpuft.cli.common import check_hosts, print_plans, say
from cpuft.cli.options import CONFIG_FILE, DRY_RUN, Verb, Verbs, make_options, pick
from cpuft.config.bench import BenchConfig
from cpuft.config.launch import LAUNCH_ONLY, LaunchConfig

_TEXTS = {
    "run_dir": "Folder for comm.jsonl and the logs; it must not exist yet (default: a new folder in runs/)",
    "time_limit": "Largest number of seconds of the measurement, which is then ended; 0 is no limit",
}


@click.group(cls=Verbs)
def bench() -> None:
    """Measure the communication between ranks."""


@bench.command(
    cls=Verb,
    params=[
        *make_options(BenchConfig),
        *make_options(LaunchConfig, *LAUNCH_ONLY, texts=_TEXTS),
        DRY_RUN,
        CONFIG_FILE,
    ],
)
def comm(dry_run: bool, **values: Any) -> None:
    """Measure latency and bandwidth of every backend between the ranks.

    Algorithm bandwidth and bus bandwidth are defined as in nccl-tests. In the table, ms is the median time, followed by
    the range of the middle half of all repetitions; busy is the fraction of a rank's cores that the backend keeps busy;
    x gloo is the speed relative to gloo. The measurements are written to comm.jsonl in the run folder.
    """
    from cpuft.hosts.cluster import gather_cluster
    from cpuft.launch.attempt import run_attempt
    from cpuft.launch.lease_renewal import renew_leases
    from cpuft.launch.plan import add_transfers, plan_bench
    from cpuft.launch.run_folder import choose_run_dir

    config = pick(LaunchConfig, values)
    cluster = gather_cluster(config)
    config = replace(config, np=cluster.ranks)
    run_dir = choose_run_dir(config.run_dir, f"comm-np{config.np}")
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
    sys.exit(code)
