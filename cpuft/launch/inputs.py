"""Send to the hosts the files that a run needs from this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cpuft import transfer
from cpuft.argv import make_shell_line, module_command
from cpuft.config.fields import format_flag
from cpuft.config.launch import LaunchConfig
from cpuft.config.predict import PredictConfig
from cpuft.config.train import TRAINING_INPUTS, TrainConfig
from cpuft.errors import CpuftError, last_line
from cpuft.files import check_private_folder, hash_text, make_private_folder, split_paths, write_text
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.registry import state_root
from cpuft.hosts.ssh_config import COMMAND_OPTIONS
from cpuft.hosts.transport import map_hosts, try_hosts
from cpuft.launch.resume import PREPARED_DATA
from cpuft.plans import RunPlan, Stages, Step
from cpuft.serialization import load, parse_json

_LARGE_BYTES, _LEAST_HOSTS = 64_000_000, 3
"""Least bytes, for all hosts together, and fewest hosts of a bundle of which this machine, whose uplink may be slow,
sends one copy only."""
_SENT_AT_ONCE = 16
"""Most hosts that get files at the same time: the logins of more keep the sender's cores from the others."""
_NOTES = ".named"
"""Folder beside the registry of clusters with a note of what the user named when each run was started."""
_MODEL = "model"
_Config = TypeVar("_Config", TrainConfig, PredictConfig)


@dataclass(frozen=True)
class Bundle:
    """Files and folders of one local folder that are sent to hosts together."""

    sources: tuple[Path, ...]
    """Paths on this machine; empty if only hosts have the files."""
    remote_folder: str
    """Folder on the hosts that holds `sources` under their names."""
    nbytes: int = 0
    is_for_head: bool = False
    """Whether only the head host needs the files."""

    @property
    def place(self) -> tuple[str, ...]:
        """(`remote_folder`, its checksum), or (`remote_folder`,) if no checksum names it, as that of a checkpoint."""
        name = os.path.basename(self.remote_folder)
        return (self.remote_folder, name) if re.fullmatch("[0-9a-f]{24}", name) else (self.remote_folder,)


def list_input_paths(train: TrainConfig, options: Collection[str] = TRAINING_INPUTS) -> set[str]:
    """Return the absolute paths of the existing local files and folders that options of the training name: `options`,
    by default all that may name one. Names of the hub and other missing paths are left out.
    """
    names = [name for option in TRAINING_INPUTS if option in options for name in split_paths(getattr(train, option))]
    return {str(path) for name in names if name and (path := Path(name).absolute()).exists()}


@dataclass(frozen=True)
class LaunchNote:
    """What the user named when a run was started, and `--resume` uses again."""

    paths: tuple[str, ...] = ()
    """Absolute paths of local files and folders that may be sent to hosts."""
    cluster: str = ""
    hostfile: str = ""
    """Absolute path, as that of `ssh_config`."""
    ssh_config: str = ""
    id: str = ""
    """Id of a detached run; else empty."""
    run_dir: str = ""
    """Absolute path of the run folder of a detached run; else empty."""


def make_note(config: LaunchConfig, paths: Iterable[str]) -> LaunchNote:
    """Return the note of a launch with these options, whose paths become absolute, and with `paths` in sorted order."""
    files = (path and os.path.abspath(os.path.expanduser(path)) for path in (config.hostfile, config.ssh_config))
    return LaunchNote(tuple(sorted(paths)), config.cluster, *files)


def save_note(run_dir: str, note: LaunchNote, environ: Mapping[str, str]) -> None:
    """Note what the user named for the run in `run_dir`, an absolute path, or remove the note if `note` is empty.
    Errors are ignored. The note is beside the registry ($CPUFT_STATE), because a host writes what is in the run folder.
    """
    with suppress(CpuftError, OSError):
        path = _note_file(run_dir, environ)
        if note != LaunchNote():
            make_private_folder(path.parent, "set CPUFT_STATE to a folder of your own")
            write_text(path, json.dumps(dataclasses.asdict(note)))
        else:
            path.unlink(missing_ok=True)


def load_note(run_dir: str, environ: Mapping[str, str]) -> LaunchNote:
    """Return what `save_note` noted for this `run_dir`; an empty note if there is none that can be read and trusted."""
    with suppress(CpuftError, OSError, ValueError):
        path = _note_file(run_dir, environ)
        check_private_folder(path.parent)
        return load(LaunchNote, parse_json(path.read_text(encoding="utf-8")))
    return LaunchNote()


def list_detached(environ: Mapping[str, str]) -> list[LaunchNote]:
    """Return the notes of detached runs that were started or attached to here, oldest first; skip unreadable ones."""
    with suppress(CpuftError, OSError):
        folder = state_root(environ) / _NOTES
        check_private_folder(folder)
        notes = []
        for path in folder.glob("*.json"):
            with suppress(OSError, ValueError):  # another launch may remove its note now
                note = load(LaunchNote, parse_json(path.read_text(encoding="utf-8")))
                notes.append((path.stat().st_mtime, path.name, note))
        return [note for _, _, note in sorted(notes, key=lambda one: one[:2]) if note.id]
    return []


def _note_file(run_dir: str, environ: Mapping[str, str]) -> Path:
    return state_root(environ) / _NOTES / f"{hash_text(run_dir, 24)}.json"


def pack_files(
    cluster: Cluster,
    config: _Config,
    options: Collection[str] = TRAINING_INPUTS,
    allowed: Collection[str] | None = None,
) -> tuple[_Config, tuple[Bundle, ...]]:
    """Return the configuration with the hosts' paths of the local files that `options` of it name, and the bundles to
    send; `config` and () if the hosts share this machine's files.

    Names without a local file, such as those of the hub, stay. A file that an earlier launch of the run sent has a
    bundle without sources. Some options may come from a record, which a host may have written: then only paths in
    `allowed` may be sent. Raises CpuftError: a path is not allowed; else as `make_bundle`.
    """
    if not cluster.has_own_disks:
        return config, ()
    bundles, changes = [], dict[str, str]()
    for option in options:
        remote_names = []
        for name in split_paths(getattr(config, option)):
            path = Path(name or "/nowhere").absolute()
            # A resumed run, whose files were sent when it was started. On the head host, they are files like others.
            if path.is_relative_to(cluster.inputs) and not path.exists():
                bundles.append(Bundle((), str(path.parent)))
            elif path.exists():
                if allowed is not None and str(path) not in allowed:
                    flag = format_flag(option)
                    raise CpuftError(
                        f"the run's record says {flag} {name}, which was not named for this run on this machine, and a "
                        f"record may come from a host: add {flag} {name} if the hosts are to get it"
                    )
                bundles.append(make_bundle((path,), cluster.inputs))
                name = f"{bundles[-1].remote_folder}/{path.name}"
            remote_names.append(name)
        changes[option] = ",".join(remote_names)
    return replace(config, **changes), tuple(bundles)  # type: ignore[arg-type]  # all of them are texts


def pack_embedding(cluster: Cluster, request: PredictConfig) -> tuple[PredictConfig, tuple[Bundle, ...]]:
    """Return the request with RUN/model in place of its `run` and the paths on the hosts, and the bundles to send: the
    model, if it is here, and for the head host the files of --file, which rank 0 reads; local paths and () if the hosts
    share this machine's files. Raises as `make_bundle`.
    """
    request = replace(request, model=request.model or f"{request.run}/{_MODEL}", run="")
    request, files = pack_files(cluster, request, ("file",))
    request, model = pack_files(cluster, request, ("model",))
    return request, (*(replace(one, is_for_head=True) for one in files), *model)


def pack_script(cluster: Cluster, command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Bundle, ...]]:
    """Return the command with the hosts' Python and paths, and the bundles to send; `command` and () if the hosts share
    this machine's files.

    A Python script is sent with the modules and packages in its folder. A file or folder that an argument names, by
    itself or after `--option=`, is sent too, but neither the working directory nor a folder that contains it. Raises as
    `make_bundle`.
    """
    if not cluster.has_own_disks:
        return command, ()
    is_python = command[0] == sys.executable
    argv: list[str] = [cluster.python] if is_python else []
    bundles: list[Bundle] = []
    for index, argument in enumerate(command[len(argv) :]):
        option, value = _split_option(argument)
        is_script = index == 0 and is_python
        # Python looks for modules where a link to a script leads. abspath is without "..", unlike Path.absolute.
        path = Path((os.path.realpath if is_script else os.path.abspath)(value))
        # The bare name of a program is looked up in the host's own PATH.
        is_name = index == 0 and not os.path.dirname(value)
        is_sendable = os.path.isfile(path) or os.path.isdir(path)  # unlike a device such as /dev/null, or a pipe
        if is_name or not value or not is_sendable or path in (Path.cwd(), *Path.cwd().parents):
            argv.append(argument)
            continue
        sources = _find_modules(path) if is_script else (path,)
        bundles.append(make_bundle(sources, cluster.inputs))
        argv.append(f"{option}{bundles[-1].remote_folder}/{path.name}")
    return tuple(argv), tuple(bundles)


def _split_option(argument: str) -> tuple[str, str]:
    """Return ("--data=", "rows.csv") for --data=rows.csv, ("--all", "") for --all, and ("", "x") for x."""
    if not argument.startswith("-"):
        return "", argument
    option, equals, value = argument.partition("=")
    return option + equals, value


def _find_modules(script: Path) -> tuple[Path, ...]:
    packages = {path.parent for path in script.parent.glob("*/__init__.py")}
    # Emacs marks a file that is edited by a link to nowhere, .#train.py.
    modules = {path for path in script.parent.glob("*.py") if path.exists()}
    return tuple(sorted({script} | modules | packages))


def make_bundle(sources: tuple[Path, ...], inputs: str) -> Bundle:
    """Return the bundle of these files and folders of one folder, without `__pycache__`. All are read: the bundle's
    folder on the hosts, in `inputs`, is named by a checksum of names, contents and executable bits. Raises CpuftError:
    a link leads nowhere or to a folder around it, or a file changes meanwhile.
    """
    try:
        found = [one for source in sources for one in transfer.walk(str(source), source.name)]
        digests = [digest for _, digest in transfer.hash_blocks(found)]
    except transfer.TransferError as error:
        raise CpuftError(str(error)) from None
    checksum = transfer.make_checksum(found, digests)
    return Bundle(sources, f"{inputs}/{checksum}", sum(one.size for one in found))


def gather_missing(bundles: tuple[Bundle, ...], cluster: Cluster) -> dict[str, set[str]]:
    """Return by host name the remote folders of the bundles of which the host lacks files; {} without bundles. All
    hosts are asked at once. Raises CpuftError: a host cannot be used, or others may write to its folder.
    """

    def ask(host: Host) -> set[str]:
        folders = (one.remote_folder for one in bundles)
        answer = cluster.access.run_module(host, transfer, "find-missing", cluster.folder, *folders)
        if answer.exit_code:
            reason = last_line(answer.errors, "check its disk").removeprefix("cpuft: error: ")
            raise CpuftError(f"host {host.name} has no safe folder for the files of the run: {reason}")
        return set(answer.output.split())

    return dict(zip(cluster.hosts, map_hosts(ask, list(cluster.hosts.values()) if bundles else [])))


def keep_bundles(plan: RunPlan, cluster: Cluster) -> None:
    """Note on the hosts that a plan's bundles are used now, and remove those unused for 30 days. Errors are ignored."""
    used = sorted({*re.findall(rf"{re.escape(cluster.inputs)}/[0-9a-f]{{24}}", str(plan))})
    hosts = list(cluster.hosts.values()) if cluster.has_own_disks else []
    # A host that does not answer is reported by the first step that needs it.
    try_hosts(lambda host: cluster.access.run_module(host, transfer, "keep-bundles", cluster.inputs, *used), hosts)


def plan_sending(bundles: tuple[Bundle, ...], missing: Mapping[str, set[str]], cluster: Cluster) -> Stages:
    """Plan to send bundles to the hosts that miss them (`gather_missing`). If three or more, with the head host, lack
    over 64 MB together, only the head host gets a bundle from this machine, and sends it on to the others. Raises
    CpuftError: a bundle to be sent has no sources.
    """
    stages: list[tuple[Step, ...]] = []
    for bundle in bundles:
        hosts = [host for host, folders in missing.items() if bundle.remote_folder in folders]
        if bundle.is_for_head:
            hosts = [host for host in hosts if host == cluster.head]
        if not hosts:
            continue
        if not bundle.sources:
            raise CpuftError(
                f"{bundle.remote_folder}, with which the run was started, is missing on {', '.join(hosts)}: name "
                "--model, --data-dir or the files with examples again, as when it was started"
            )
        folder, names = str(bundle.sources[0].parent), tuple(source.name for source in bundle.sources)
        whys = {host: f"send {names[0]} to {host} ({bundle.nbytes / 1e6:.1f} MB)" for host in hosts}
        is_large = len(hosts) >= _LEAST_HOSTS and bundle.nbytes * len(hosts) > _LARGE_BYTES
        # If the head host has it from an earlier run, that may have written to its folders.
        passes_on = is_large and cluster.head in hosts
        from_here = {host: why for host, why in whys.items() if host == cluster.head or not passes_on}
        from_head = {host: why for host, why in whys.items() if host not in from_here}
        place = (cluster.folder, *bundle.place)
        stages += _plan_copies(cluster, folder, names, place, from_here)
        stages += _plan_copies(cluster, bundle.remote_folder, names, place, from_head, sender=cluster.head)
    return tuple(stages)


def _plan_copies(
    cluster: Cluster,
    folder: str,
    names: tuple[str, ...],
    place: tuple[str, ...],
    whys: Mapping[str, str],
    sender: str = "",
) -> Stages:
    """Plan to send files of a folder of `sender`, the head host or "" for this machine, to `place` on the hosts of
    `whys`, which has the text of each step, to 16 at a time.
    """
    access, python = cluster.access, cluster.python if sender else sys.executable
    push = (*module_command(python, "cpuft.transfer"), "push", folder, str(len(names)), *names)
    receive = access.transfer_command("receive", *place)
    ssh = ("ssh", *COMMAND_OPTIONS, *access.mpirun_options)
    steps = []
    for host, why in whys.items():
        there = (*ssh, host, make_shell_line(receive)) if sender else cluster.command_on(host, receive)
        steps.append(Step(why, (*push, *there), access.settings if sender else (), sender))
    return tuple(tuple(steps[n : n + _SENT_AT_ONCE]) for n in range(0, len(steps), _SENT_AT_ONCE))


def plan_data_copies(cluster: Cluster, work: str, have: Collection[str] = ()) -> Stages:
    """Plan to copy the prepared examples, in the run folder `work`, from the head host to the others, except those
    named in `have`; () if no host is left, or hosts have no disks of their own.
    """
    if not cluster.has_own_disks:
        return ()
    names = [name for name in cluster.hosts if name not in have and name != cluster.head]
    whys = {name: f"copy the prepared examples to {name}" for name in names}
    return _plan_copies(cluster, work, (PREPARED_DATA,), (cluster.folder, work), whys, sender=cluster.head)
