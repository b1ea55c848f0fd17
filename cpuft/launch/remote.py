"""Runs a plan on the master where that is another machine: the plan goes there, results come back.

The master's end is this file too: `python -m cpuft.launch.remote PLAN.json` supervises the run as if typed there.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.execute import Interrupted, run_step
from cpuft.files import PRIVATE, remove_command
from cpuft.hosts import door
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.hostfile import Host
from cpuft.launch.inputs import Parcel, send_parcels
from cpuft.launch.supervise import run_plan
from cpuft.plan import Plan, Step, dump_plan, load_plan
from cpuft.rank.process import end_with_parent
from cpuft.words import own_module

_SSH_FAILED = 255
_END_SECONDS = 15
"""What ranks, mpirun and the supervisor on the master need to end once this side has gone."""


def run_plan_there(
    plan: Plan,
    run_dir: str,
    cluster: Cluster,
    environ: Mapping[str, str],
    seconds: float,
    parcels: tuple[Parcel, ...] = (),
) -> int:
    """Run a plan on the master to its end, fetch its run directory, and leave nothing there; the exit code.

    `parcels` travel to all hosts first.

    Its output appears here as it comes. When this process is stopped, the connection ends, and with it the run.

    Raises
    ------
    CpuftError: the master cannot be reached, or was lost.
    Interrupted: a signal came; what the ranks recorded until then has been fetched.
    """
    host, work = cluster.assignments[0].host, cluster.work_dir(run_dir)
    order = {"plan": dump_plan(plan), "run_dir": work, "hosts": cluster.rank_hosts, "seconds": seconds}
    send_parcels(parcels, cluster, lambda line: print(line, file=sys.stderr, flush=True))
    make = f'{PRIVATE}private "$1" && mkdir -m 700 "$2"'
    _ask(host, cluster, ("sh", "-c", make, "make", cluster.folder, os.path.dirname(work)))
    try:
        _ask(host, cluster, ("sh", "-c", 'cat >"$1"', "write", f"{work}.json"), json.dumps(order))
        code = run_step(plan_start(work, cluster), environ, None, lambda: None)
        if code == _SSH_FAILED:
            raise CpuftError(f"the connection to the master {host.name} was lost: look at it with cpuft doctor")
        _fetch(host, cluster, work, run_dir)
    except Interrupted:
        _fetch(host, cluster, work, run_dir)
        raise
    finally:
        _clean(cluster, os.path.dirname(work))
    return code


def _clean(cluster: Cluster, folder: str) -> None:
    """Take the run's working directory from all hosts; one that was lost meanwhile must not hide how the run ended."""
    for assignment in cluster.assignments:
        with suppress(CpuftError):
            _ask(assignment.host, cluster, remove_command(cluster.folder, folder))


def plan_start(work: str, cluster: Cluster) -> Step:
    """Supervise the run that is described in `work`.json, over ssh."""
    command = (*own_module(cluster.python, "cpuft.launch.remote"), f"{work}.json")
    return Step("supervise the ranks from the master", ("ssh", *_ssh_words(cluster), _line(command, cluster)))


def plan_there(plan: Plan, cluster: Cluster) -> Plan:
    """The same plan as commands of this machine, each over ssh: what --dry-run shows."""
    stages = tuple(
        tuple(
            replace(step, command=("ssh", *_ssh_words(cluster), _line(step.command, cluster, step)), settings=())
            for step in stage
        )
        for stage in plan.stages
    )
    return Plan(stages, plan.notes)


def _ssh_words(cluster: Cluster) -> tuple[str, ...]:
    host = cluster.assignments[0].host
    words: tuple[str, ...] = ("-F", cluster.reach.ssh_config) if cluster.reach.ssh_config else ()
    words += ("-o", "BatchMode=yes")
    words += ("-l", host.user) if host.user else ()
    words += ("-p", str(host.port)) if host.port else ()
    return (*words, host.name)


def _line(command: tuple[str, ...], cluster: Cluster, step: Step | None = None) -> str:
    settings = cluster.reach.settings | ({s.name: s.value for s in step.settings} if step else {})
    # exec: the command becomes the child of sshd's own process, and ends with it.
    return f"exec {door.quote_command(command, settings)}"


def _ask(host: Host, cluster: Cluster, command: tuple[str, ...], stdin: str = "") -> None:
    answer = door.run(host, door.quote_command(command, {}), stdin, config_path=cluster.reach.ssh_config)
    if answer.exit_code:
        said = " ".join((answer.errors or answer.output).split())[-300:]
        raise CpuftError(f"host {host.name} has no place for the run's files ({said}): look at its disk and /var/tmp")


def _fetch(host: Host, cluster: Cluster, work: str, run_dir: str) -> None:
    """Wait for the supervisor there to end, then copy what it left, if it came so far."""
    wait = f"flock -w {_END_SECONDS} {work}.json true; test -d {work}"
    if door.run(host, wait, seconds=_END_SECONDS + 10, config_path=cluster.reach.ssh_config).exit_code:
        return
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    door.fetch_folder(host, work, run_dir, config_path=cluster.reach.ssh_config)


def main() -> None:
    """The master's end. Exit code: the run's, or 2 with one line."""
    import fcntl

    end_with_parent(15)
    with open(sys.argv[1], encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        order = json.load(file)
        try:
            plan, hosts = load_plan(order["plan"]), tuple(order["hosts"])
            code = run_plan(plan, order["run_dir"], hosts, os.environ, order["seconds"])
        except CpuftError as error:
            print(f"cpuft: error: {error}", file=sys.stderr)
            code = 2
        except Interrupted as stopped:
            code = stopped.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
