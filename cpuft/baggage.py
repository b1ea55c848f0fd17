"""What a run needs of this machine's files, on hosts that do not see them: sent once, kept there by checksum."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cpuft import ssh
from cpuft.cluster import Cluster
from cpuft.config import TrainConfig
from cpuft.environment import secrets_for_ranks
from cpuft.errors import CpuftError, counted
from cpuft.files import PRIVATE, REMOVE, SENT, remove_command
from cpuft.hostfile import Host
from cpuft.plan import Plan, Step

_ROWS = "data.npz"
_SEND_SECONDS = 1800.0
_TRAINING_INPUTS = ("model", "data_dir", "train_file", "validation_file")


@dataclass(frozen=True)
class Parcel:
    """Files and folders that lie beside each other, and where they are on the hosts."""

    sources: tuple[Path, ...]
    there: str
    """Folder that holds `sources` by their names."""


def pack_training(cluster: Cluster, train: TrainConfig) -> tuple[TrainConfig, tuple[Parcel, ...]]:
    """The training options with paths as they are on the hosts, and what has to travel for that."""
    if not _has_own_disks(cluster):
        return train, ()
    parcels, changes = [], dict[str, str]()
    for name in _TRAINING_INPUTS:
        path = Path(getattr(train, name) or "/nowhere").absolute()
        if path.exists():
            parcels.append(pack((path,), cluster.inputs))
            changes[name] = f"{parcels[-1].there}/{path.name}"
    return replace(train, **changes), tuple(parcels)  # type: ignore[arg-type]  # all of them are texts


def pack_script(cluster: Cluster, command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Parcel, ...]]:
    """The command of a user's script with paths as they are on the hosts, and what has to travel.

    A Python script takes the modules and packages beside it along. An argument that names a file or folder, by itself
    or after `--option=`, is sent too; the working directory and what holds it are not.
    """
    if not _has_own_disks(cluster):
        return command, ()
    is_python = command[0] == sys.executable
    words: list[str] = [cluster.python] if is_python else []
    parcels: list[Parcel] = []
    for index, word in enumerate(command[len(words) :]):
        option, value = _split_option(word)
        path = Path(os.path.abspath(value))  # without dots, unlike Path.absolute
        # A program's bare name is looked for on the host's own PATH.
        is_name = index == 0 and "/" not in value
        if is_name or not value or not os.path.exists(path) or path in (Path.cwd(), *Path.cwd().parents):
            words.append(word)
            continue
        sources = _find_modules(path) if index == 0 and is_python else (path,)
        parcels.append(pack(sources, cluster.inputs))
        words.append(f"{option}{parcels[-1].there}/{path.name}")
    return tuple(words), tuple(parcels)


def _has_own_disks(cluster: Cluster) -> bool:
    return cluster.away and not cluster.reach.shares_files


def _split_option(word: str) -> tuple[str, str]:
    """("--data=", "rows.csv") of --data=rows.csv; the option alone has no value, and a plain word no option."""
    if not word.startswith("-"):
        return "", word
    option, equals, value = word.partition("=")
    return option + equals, value


def _find_modules(script: Path) -> tuple[Path, ...]:
    """The script, and what it may import from its own folder: modules, and packages."""
    packages = {path.parent for path in script.parent.glob("*/__init__.py")}
    return tuple(sorted({script, *script.parent.glob("*.py")} | packages))


def pack(sources: tuple[Path, ...], inputs: str) -> Parcel:
    """The parcel of these files and folders: equal names and contents have the same place in the hosts' `inputs`."""
    digest = hashlib.sha256()
    for path, name in _list_files(sources):
        digest.update(f"{name}\0{path.stat().st_size}\0{path.stat().st_mode & 0o111}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return Parcel(sources, f"{inputs}/{digest.hexdigest()[:24]}")


def _list_files(sources: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
    """Every file of a parcel and its name in there; what Python compiled is left out."""
    for source in sources:
        found = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        for path in found:
            if "__pycache__" not in path.parts:
                yield path, str(path.relative_to(source.parent))


def send_parcels(parcels: tuple[Parcel, ...], cluster: Cluster, say: Callable[[str], None]) -> None:
    """Put every parcel on every host that lacks it, side by side.

    Raises
    ------
    CpuftError: naming every host that could not take it, with what it said.
    """
    hosts = [assignment.host for assignment in cluster.assignments]
    if not parcels:
        return
    lacking = ssh.side_by_side(lambda host: _find_lacking(host, parcels, cluster), hosts)
    for parcel in parcels:
        needy = [host for host, missing in zip(hosts, lacking) if parcel.there in missing]
        if needy:
            with tempfile.NamedTemporaryFile(suffix=".tar") as file:
                size = _write_tar(parcel, file.name)
                say(f"send {parcel.sources[0].name} ({size / 1e6:.1f} MB) to {counted(len(needy), 'host')}")
                ssh.side_by_side(partial(_send, parcel=parcel, tar=file.name, cluster=cluster), needy)


def _write_tar(parcel: Parcel, path: str) -> int:
    """Links are followed, because what they point to is not there: a hub's cache is made of them."""
    with tarfile.open(path, mode="w", dereference=True) as archive:
        for source, name in _list_files(parcel.sources):
            archive.add(source, name, recursive=False)
    return Path(path).stat().st_size


def _find_lacking(host: Host, parcels: tuple[Parcel, ...], cluster: Cluster) -> set[str]:
    """Parcels that the host lacks, by place. What lies there is trusted, so nobody else may write there."""
    script = f'{PRIVATE}private "$1" && private "$1/inputs" && shift || exit 1\n'
    script += 'for path; do test -d "$path" || echo "$path"; done'
    words = ("sh", "-c", script, "find", cluster.folder, *(parcel.there for parcel in parcels))
    answer = ssh.run(host, ssh.quote_command(words, {}), config_path=cluster.reach.ssh_config)
    if answer.exit_code:
        said = (answer.errors.strip().splitlines() or ["look at its disk"])[-1]
        raise CpuftError(f"host {host.name} has no place for what the run needs: {said}")
    return set(answer.output.split())


def _send(host: Host, parcel: Parcel, tar: str, cluster: Cluster) -> None:
    """Unpack beside its place and rename: a parcel is there as a whole or not at all."""
    there = shlex.quote(parcel.there)
    command = (
        f"set -e\n{REMOVE}part=$(mktemp -d {there}.XXXXXX); trap 'remove {shlex.quote(cluster.inputs)} $part' EXIT; "
        f"tar -C $part -xof -; mv -T $part {there} || test -d {there}"
    )
    answer = ssh.run(host, command, seconds=_SEND_SECONDS, config_path=cluster.reach.ssh_config, stdin_file=tar)
    if answer.exit_code:
        said = " ".join(answer.errors.split())[-200:]
        raise CpuftError(f"host {host.name} could not take {parcel.sources[0].name} ({said}): look at its disk")


@contextmanager
def secrets_there(plan: Plan, cluster: Cluster, work: str, environ: Mapping[str, str]) -> Iterator[None]:
    """What the processes of a run on other hosts are to have and nobody may see, in a file for each, which takes it.

    Raises
    ------
    CpuftError: naming every host that could not take it, with what it said.
    """
    text = json.dumps(secrets_for_ranks(environ))
    prepares = any(setting.name == SENT for stage in plan.stages for step in stage for setting in step.settings)
    if cluster.inherits or text == "{}":
        yield
        return

    def send(index: int) -> None:
        names = [*map(str, range(cluster.assignments[index].ranks)), *(["prepare"] if prepares and not index else [])]
        paths = [f"{cluster.sent_file(work, index)}-{name}" for name in names]
        script = f'{PRIVATE}umask 077; private "$1" && mkdir -p "$2" && shift 2 && tee -- "$@" >/dev/null'
        ask(index, ("sh", "-c", script, "send", cluster.folder, os.path.dirname(paths[0]), *paths), text)

    def remove(index: int) -> None:
        ask(index, remove_command(cluster.folder, os.path.dirname(cluster.sent_file(work, index))))

    def ask(index: int, words: tuple[str, ...], stdin: str = "") -> None:
        host = cluster.assignments[index].host
        answer = ssh.run(host, ssh.quote_command(words, {}), stdin, config_path=cluster.reach.ssh_config)
        if answer.exit_code:
            said = " ".join(answer.errors.split())[-200:]
            raise CpuftError(f"host {host.name} could not take the run's variables ({said}): look at its disk")

    try:
        ssh.side_by_side(send, range(len(cluster.assignments)))
        yield
    finally:
        with suppress(CpuftError):
            ssh.side_by_side(remove, range(len(cluster.assignments)))


def plan_rows(plan: Plan, cluster: Cluster, work: str) -> Plan:
    """The plan of a training with a stage after the rows' preparation that gives them to the other hosts."""
    others = [assignment.host.name for assignment in cluster.assignments[1:]]
    if not _has_own_disks(cluster) or not others:
        return plan
    script = 'folder=$1; shift; tar -C "$folder" -cf - ' + _ROWS + ' | ssh -o BatchMode=yes "$@"'
    folder = shlex.quote(work)
    receive = f"{PRIVATE}private {cluster.folder} && mkdir -p {folder} && "
    receive += f"{{ test -e {folder}/{_ROWS} || tar -C {folder} -xf -; }}"
    stage = tuple(
        Step(
            f"give the rows to {name}",
            ("bash", "-o", "pipefail", "-c", script, "rows", work, *cluster.reach.mpirun_options, name, receive),
        )
        for name in others
    )
    return replace(plan, stages=(*plan.stages[:2], stage, *plan.stages[2:]))
