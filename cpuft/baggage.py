"""What a run needs of this machine's files, on hosts that do not see them: sent once, kept there by checksum."""

from __future__ import annotations

import hashlib
import shlex
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cpuft import ssh
from cpuft.cluster import Cluster
from cpuft.config import TrainConfig
from cpuft.errors import CpuftError
from cpuft.hostfile import Host
from cpuft.plan import Plan, Step

_STORE = "/var/tmp/cpuft-inputs"
_ROWS = "data.npz"
_SEND_SECONDS = 1800.0
_INPUTS = ("model", "data_dir", "train_file", "validation_file")


@dataclass(frozen=True)
class Parcel:
    """A file or folder, or a script with the modules beside it, and where it is on the hosts."""

    sources: tuple[Path, ...]
    there: str
    """Folder that holds `sources` by their names."""


def pack_training(cluster: Cluster, train: TrainConfig) -> tuple[TrainConfig, tuple[Parcel, ...]]:
    """The training options with paths as they are on the hosts, and what has to travel for that."""
    if not cluster.away or cluster.reach.shares_files:
        return train, ()
    parcels, changes = [], dict[str, Any]()
    for name in _INPUTS:
        path = Path(getattr(train, name) or "/nowhere").absolute()
        if path.exists():
            parcels.append(_pack((path,)))
            changes[name] = f"{parcels[-1].there}/{path.name}"
    return replace(train, **changes), tuple(parcels)


def pack_script(cluster: Cluster, command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Parcel, ...]]:
    """The command of a user's script with paths as they are on the hosts, and what has to travel.

    The script takes the Python modules beside it along; an argument that names a file or folder is sent too.
    """
    if not cluster.away or cluster.reach.shares_files:
        return command, ()
    words, parcels = [cluster.python], []
    for index, word in enumerate(command[1:]):
        path = Path(word).absolute()
        if not word or word.startswith("-") or not path.exists():
            words.append(word)
            continue
        beside = tuple(sorted(path.parent.glob("*.py"))) if index == 0 and path.suffix == ".py" else (path,)
        parcels.append(_pack(beside))
        words.append(f"{parcels[-1].there}/{path.name}")
    return tuple(words), tuple(parcels)


def _pack(sources: tuple[Path, ...]) -> Parcel:
    digest = hashlib.sha256()
    for source in sources:
        for path in _files(source):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(source.parent)}\0{len(content)}\0".encode() + content)
    return Parcel(sources, f"{_STORE}/{digest.hexdigest()[:24]}")


def _files(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
    else:
        yield from sorted(path for path in source.rglob("*") if path.is_file())


def send_parcels(parcels: tuple[Parcel, ...], cluster: Cluster) -> None:
    """Put every parcel on every host that lacks it, side by side.

    Raises
    ------
    CpuftError: naming every host that could not take it, with what it said.
    """
    for parcel in parcels:
        with tempfile.NamedTemporaryFile(suffix=".tar") as file:
            with tarfile.open(fileobj=file, mode="w") as archive:
                for source in parcel.sources:
                    archive.add(source, source.name)
            file.flush()
            send = partial(_send, parcel=parcel, tar=file.name, cluster=cluster)
            with ThreadPoolExecutor(max_workers=16) as pool:
                problems = list(pool.map(send, [assignment.host for assignment in cluster.assignments]))
        if any(problems):
            raise CpuftError("; ".join(problem for problem in problems if problem))


def _send(host: Host, parcel: Parcel, tar: str, cluster: Cluster) -> str:
    there, config = shlex.quote(parcel.there), cluster.reach.ssh_config
    try:
        if not ssh.run(host, f"test -d {there}", config_path=config).exit_code:
            return ""
        receive = (
            f"set -e; part=$(mktemp -d {there}.XXXXXX); tar -C $part -xf -; mv -T $part {there} || test -d {there}"
        )
        command = f"mkdir -p {_STORE} && {receive}"
        answer = ssh.run(host, command, seconds=_SEND_SECONDS, config_path=config, stdin_file=tar)
    except CpuftError as error:
        return str(error)
    said = " ".join(answer.errors.split())[-200:]
    return (
        f"host {host.name} could not take {parcel.sources[0].name} ({said}): look at its disk"
        if answer.exit_code
        else ""
    )


def plan_rows(plan: Plan, cluster: Cluster, work: str) -> Plan:
    """The plan of a training with a stage after the rows' preparation that gives them to the other hosts."""
    others = [assignment.host.name for assignment in cluster.assignments[1:]]
    if not cluster.away or cluster.reach.shares_files or not others:
        return plan
    script = 'folder=$1; shift; tar -C "$folder" -cf - ' + _ROWS + ' | ssh -o BatchMode=yes "$@"'
    folder = shlex.quote(work)
    receive = f"mkdir -p {folder} && {{ test -e {folder}/{_ROWS} || tar -C {folder} -xf -; }}"
    stage = tuple(
        Step(
            f"give the rows to {name}",
            ("bash", "-o", "pipefail", "-c", script, "rows", work, *cluster.reach.mpirun_options, name, receive),
        )
        for name in others
    )
    return replace(plan, stages=(*plan.stages[:2], stage, *plan.stages[2:]))
