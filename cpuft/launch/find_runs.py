"""Find detached runs on the hosts that may have them, for `cpuft runs`, `attach` and the verbs that name a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace

from cpuft.config.launch import LaunchConfig
from cpuft.errors import CpuftError, escape_controls, format_command
from cpuft.hosts.cluster import find_access, read_host_folder, read_hosts
from cpuft.hosts.registry import list_names, search_roots
from cpuft.hosts.transport import try_hosts
from cpuft.launch.detached import NO_CLUSTER, Detached, Head, HeadLostError, list_place_options
from cpuft.launch.detached_head import ENDED, RUNNING, Description
from cpuft.launch.inputs import LaunchNote, list_detached
from cpuft.launch.progress_bar import format_seconds
from cpuft.launch.resume import has_begun
from cpuft.launch.run_folder import choose_run_dir


def list_heads(config: LaunchConfig) -> list[Head]:
    """Return the hosts of `config` as possible head hosts, in the order of its cluster or hostfile, else those of the
    MPIJob or Slurm job around this process, else this machine alone. Raises CpuftError: they cannot be read or found,
    or --only-hosts does not fit them.
    """
    access, options = find_access(config), list_place_options(config)
    return [Head(host, access, options) for host in read_hosts(config)]


def list_known_places(config: LaunchConfig, environ: Mapping[str, str]) -> list[LaunchConfig]:
    """Return [`config`] if it names a cluster or hostfile; else, sorted, a config for each that was named when a noted
    detached run was started, and still exists, or if there is none [`config`] on Linux, whose machine may have runs.
    """
    if config.cluster or config.hostfile:
        return [config]
    clusters = {"", *(name for root in search_roots(environ) for name in list_names(root))}
    places = sorted({_find_place(note) for note in list_detached(environ)}, key=str)
    return [one for one in places if one.cluster in clusters and os.path.exists(one.hostfile or "/")] or (
        [config] if sys.platform == "linux" else []
    )


def _find_place(note: LaunchNote) -> LaunchConfig:
    return LaunchConfig(cluster=note.cluster, hostfile=note.hostfile, ssh_config=note.ssh_config)


def list_runs(config: LaunchConfig) -> tuple[list[tuple[Head, Description]], list[CpuftError]]:
    """Return the detached runs of all hosts that `config` names, and why hosts could not be asked. Raises no
    CpuftError: one about `config` itself is returned, too.
    """
    try:
        heads = list_heads(config)
    except CpuftError as error:
        return [], [error]
    answers = try_hosts(Head.list_runs, heads)
    found = [(head, one) for head, runs in zip(heads, answers) if isinstance(runs, list) for one in runs]
    return found, [answer for answer in answers if isinstance(answer, CpuftError)]


def list_needed(cluster: str) -> tuple[list[str], list[str]]:
    """Return the ids of the detached runs that are active on a cluster, and of the others whose results nobody has
    fetched; two empty lists if there is no such cluster or its head host does not answer.
    """
    with suppress(CpuftError):
        head, *_ = list_heads(LaunchConfig(cluster=cluster))
        # This machine may be the head host of several clusters.
        own, option = {cluster, NO_CLUSTER}, f"--cluster={cluster}"
        runs = [one for one in head.list_runs() if one.order.cluster in own or option in one.order.arguments]
        active = [one.order.id for one in runs if one.state == RUNNING]
        return active, [one.order.id for one in runs if one.has_results and one.state != RUNNING]
    return [], []


def find_run(run: str, config: LaunchConfig, environ: Mapping[str, str]) -> tuple[Detached, Description]:
    """Return the detached run that has this id, or an id that begins like this, or this run folder. If `config` names
    no hosts, those with which the run was started are asked, or all of `list_known_places`. Raises CpuftError: several
    runs or none are found; HeadLostError: none is found, and a host that may have it does not answer.
    """
    folder, notes = os.path.realpath(run), [one for one in list_detached(environ) if run]
    same = [one for one in notes if one.run_dir == folder] or [one for one in notes if one.id.startswith(run)]
    note = same[0] if len(same) == 1 else LaunchNote()
    is_placed = config.cluster or config.hostfile or not note.id
    answers = list(map(list_runs, list_known_places(config, environ) if is_placed else [_find_place(note)]))
    # A run folder has the id of its run, also where nothing else is known about the run.
    begin = note.id or (read_host_folder(run).partition("/")[0] if run else "") or run
    found = [pair for runs, _ in answers for pair in runs if begin and pair[1].order.id.startswith(begin)]
    errors = [error for _, unasked in answers for error in unasked]
    ids = sorted({one.order.id for _, one in found})
    if len(ids) > 1:
        raise CpuftError(f"several detached runs begin with {run} ({', '.join(ids)}): give more of the id")
    if not ids and errors:
        advice = f": if the host is lost, continue with cpuft launch --resume {note.run_dir}" if note.id else ""
        kind = HeadLostError if any(error.is_transient for error in errors) else CpuftError
        raise kind(f"detached run {run} was not found, and {'; '.join(map(str, errors))}{advice}")
    if not ids:
        raise CpuftError(
            f"there is no detached run {run}: see cpuft runs, and name its hosts with --cluster or --hostfile"
        )
    (head, description), *_ = found
    known = next((one.run_dir for one in list_detached(environ) if one.id == description.order.id), "")
    folder = description.order.run_dir if not description.order.claimed else known
    return Detached(head, description.order, folder), description


def choose_folder(run: Detached, description: Description, wanted: str) -> Detached:
    """Return the run with the folder on this machine that gets its results; no folder is made.
    It is `wanted`, else the one that the user named when the run was started here, else runs/NAME in the working
    folder. A host never says which folder is written to. Raises CpuftError: the host's name for the run is no name of a
    folder, or the folder exists and is not this run's, or cannot be made.
    """
    if run.run_dir and not wanted:
        return run
    name = os.path.basename(description.order.run_dir)
    if name in ("", ".", "..") or not name.isprintable():
        raise CpuftError(f"host {run.head.host.name} calls the run {name!r}: give its folder here with --run-dir")
    folder = os.path.realpath(wanted or f"runs/{name}")
    if not read_host_folder(folder) == description.order.claimed != "":
        folder = choose_run_dir(folder, name)
    return replace(run, run_dir=folder)


def list_unseen(seen: Collection[str], errors: Collection[CpuftError], environ: Mapping[str, str]) -> list[str]:
    """Return a line that says how to continue the run for each detached run noted on this machine whose folder here has
    a usable run state and nothing else, unless its id is in `seen`. Empty without `errors`: all hosts have answered.
    """
    return [
        f"the head host of run {note.id} may be lost, and nobody restarts the run then: continue it with cpuft launch "
        f"--resume {format_command((note.run_dir,))}"
        for note in list_detached(environ)
        if errors and note.id not in seen and read_host_folder(note.run_dir) and not has_begun(note.run_dir)
    ]


def list_run_cells(head: Head, one: Description) -> tuple[str, ...]:
    """Return what `cpuft runs` shows: id, verb, name of the run folder, host, "95 s ago" or "3 h 05 min ago", state,
    results. The state is the phase of an active run ("running" before the first), "ended, exit code N" or "lost".
    Results are "MACHINE:FOLDER" if they were fetched, "on HOST" while they can be fetched, else "".
    """
    state = one.phase if one.phase and one.state == RUNNING else one.state
    state += f", exit code {one.code}" if one.state == ENDED else ""
    where = one.fetched or (f"on {head.host.name}" if one.has_results else "")
    age = f"{format_seconds(one.seconds)} ago"
    name = os.path.basename(one.order.run_dir)
    return tuple(map(escape_controls, (one.order.id, one.order.verb, name, head.host.name, age, state, where)))
