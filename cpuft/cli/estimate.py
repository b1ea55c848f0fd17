"""`cpuft estimate`: what N hosts would do, before they are rented. Imports no torch."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuft.cli.options import Verb, complete_runs, make_options, pick, refuse_options
from cpuft.config.fields import hosts_option, parse_numbers
from cpuft.config.launch import LaunchConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.files import read_given_text
from cpuft.network_speed import parse_bit_rate

if TYPE_CHECKING:
    from cpuft.instance_types import InstanceType
    from cpuft.record import Measurement, Record
    from cpuft.report.estimate import Network

_OF_PROBE = ("task", "model", "from_config", "tokenizer", "data_dir", "train_file", "validation_file")
PROBE_STEPS = 16
PROBE_SECONDS = 60.0
"""Seconds that the ranks of the short training may take, with their start. Preparing the data comes before."""
MOST_HOSTS = 1024


@dataclass(frozen=True)
class EstimateConfig:
    """The hosts for which `cpuft estimate` estimates, and the network between them."""

    hosts: str = hosts_option("1,2,4,8,16,32,64", "Numbers of hosts to estimate, separated by commas", takes="N,N")
    ppn: int = hosts_option(
        1,
        "Number of ranks on each host, which share its cores. Gradients in int8 or powersgd are averaged within each "
        "host, and only one of its ranks sends them to the other hosts",
        least=1,
        most=1024,
    )
    bandwidth: str = hosts_option(
        "", "Bandwidth of the network between the hosts, such as 10gbit or 100mbit", takes="RATE"
    )
    latency: float = hosts_option(
        100.0,
        "One-way latency between hosts in microseconds; `cpuft doctor --bandwidth` measures it",
        least=0.0,
        most=1e7,
    )
    link: str = hosts_option(
        "",
        "File with a measurement of the network, instead of --bandwidth and --latency: comm.jsonl of `cpuft bench "
        "comm`, or the output of `cpuft doctor --bandwidth --json`",
        takes="FILE",
    )
    instance: str = hosts_option(
        "", "Type of rented host, such as m7i.8xlarge, from which cores, bandwidth and price are known", takes="NAME"
    )
    cores: float = hosts_option(
        0.0, "Cores per host (default: those of --instance, else those of the recorded host)", least=0.0, most=1e6
    )
    price: float = hosts_option(
        0.0, "Price of one host for one hour, in dollars (default: that of --instance)", least=0.0, most=1e6
    )
    compression: str = hosts_option(
        "auto",
        "Format in which gradients are sent; auto is that of RUN, and if RUN had auto or there is no RUN, what cpuft "
        "launch chooses, which may also be powersgd",
        choices=("auto", "none", "bf16", "fp16", "int8"),
    )


@click.command(
    cls=Verb,
    params=[
        *make_options(EstimateConfig),
        *make_options(TrainConfig, only=_OF_PROBE),
        click.Option(["--json"], is_flag=True, help="Print the estimates as one JSON object"),
        click.Argument(["run"], required=False, shell_complete=complete_runs),
    ],
    alternatives=(("link", "bandwidth"), ("link", "latency")),
)
def estimate(run: str | None, json: bool, **values: Any) -> None:
    """Estimate time, speed, efficiency and price on 1 to 64 hosts before you rent them.

    The estimate is based on RUN, the folder of a run with one rank, and on the speed of the network between the hosts,
    which you give with --bandwidth, --link or --instance. Without RUN, 16 steps of --task are trained on this machine
    for at most a minute. With --hosts, you can choose other numbers of hosts, up to 1024.
    """
    from cpuft.instance_types import find_instance
    from cpuft.record import read_record
    from cpuft.report.estimate import (
        Network,
        describe_job,
        estimate_hosts,
        estimates_to_json,
        find_network,
        format_estimates,
        read_job,
        scale_cores,
    )
    from cpuft.serialization import format_json

    config = pick(EstimateConfig, values)
    hosts = parse_numbers(config.hosts, "--hosts", MOST_HOSTS)
    if run:
        refuse_options(TrainConfig, "is for the short training that is done without RUN: leave out this option, or RUN")
    rented = find_instance(config.instance) if config.instance else None
    bits = parse_bit_rate(config.bandwidth, "--bandwidth")
    if not (bits or config.link or rented):
        raise CpuftError(
            "the speed of the network between the hosts is not known: give --bandwidth, such as 10gbit, --link with "
            "comm.jsonl of cpuft bench comm, or --instance, such as c7i.8xlarge"
        )
    link = _read_link(config.link) if config.link else None  # before the short training, which would be for nothing
    record = read_record(run) if run else _probe(pick(TrainConfig, values))
    job = read_job(record, config.compression)
    network = find_network(link, job.levels[0]) if isinstance(link, list) else link
    if network is None:
        rate = bits or (rented.gbits_per_second * 1e9 if rented else 0.0)
        network = Network(rate, config.latency / 1e6)
    cores = config.cores or (rented.cores if rented else job.cores)
    price = config.price or (rented.dollars_per_hour if rented else 0.0)
    notes = describe_job(job, network, run or "a probe of this machine") + _describe_instance(record, rented)
    if record.header.simulated:
        notes.append("the run was on a simulated host: simulated hosts that share their cores are slower than this.")
    if config.ppn > 1:
        notes.append(f"what the {config.ppn} ranks of a host send each other is not counted if there is one host only.")
    job = scale_cores(job, cores, config.ppn)
    found = [estimate_hosts(job, network, number, price) for number in hosts]
    title = f"{record.header.task} with {record.header.model} on hosts of {cores:g} cores"
    if json:
        click.echo(format_json(estimates_to_json(found, notes)))
    else:
        click.echo(format_estimates(found, notes, title), nl=False)


def _read_link(path: str) -> Network | list[Measurement]:
    from cpuft.record import parse_measurements
    from cpuft.report.estimate import read_doctor_links

    text = read_given_text(path, "--link", "give a comm.jsonl that cpuft bench comm wrote")
    return read_doctor_links(text, path) or parse_measurements(text, path)


def _describe_instance(record: Record, rented: InstanceType | None) -> list[str]:
    if rented is None:
        return []
    flags, other = record.header.cpu_flags, ""
    is_arm, has_amx = rented.cpu == "arm", rented.cpu == "amx"
    if is_arm != ("asimd" in flags):
        other = f"it {'has' if is_arm else 'lacks'} an Arm CPU"
    elif has_amx != ("amx_bf16" in flags):
        other = f"it {'has' if has_amx else 'lacks'} AMX"
    advice = f"; {other}, unlike the recorded CPU: measure one before you rent many" if other else ""
    return [
        f"{rented.name}: {rented.cores} cores, {rented.gbits_per_second:g} Gbit/s, about "
        f"{rented.dollars_per_hour:g} dollars an hour ({rented.dated}){advice}."
    ]


def _probe(train: TrainConfig) -> Record:
    """Train 16 steps on this machine for at most a minute, and return the record, whose files are removed."""
    import tempfile  # takes half the time of `cpuft estimate --help`

    from cpuft.hosts.cluster import gather_cluster
    from cpuft.launch.plan import plan_training
    from cpuft.launch.run_state import begin_state
    from cpuft.launch.supervise import run_as_head_host
    from cpuft.record import read_record

    launch = LaunchConfig(np=1)
    cluster = gather_cluster(launch)
    with tempfile.TemporaryDirectory(prefix="cpuft-probe-") as folder:
        run_dir = f"{folder}/run"
        probe = replace(train, max_steps=PROBE_STEPS, save_model=False)
        plan = plan_training(cluster, launch, probe, run_dir, "lines", os.environ)
        click.echo("estimate: training for at most a minute on this machine", err=True)
        try:
            with redirect_stdout(sys.stderr):  # programs read the table from standard output
                state = begin_state(cluster, run_dir, plan.owner)
                run_as_head_host(plan, run_dir, state, PROBE_SECONDS, cluster.access.transport)
        except CpuftError:
            # On a slow machine the time limit stops the training, and the steps until then are enough.
            if not Path(run_dir, "record.jsonl").exists():
                raise
        if not Path(run_dir, "record.jsonl").exists():
            raise CpuftError("the short training ended before its first step: see the messages above")
        return read_record(run_dir)
