"""Send to the hosts what a run needs from this machine: files, and environment variables that may be secret."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from cpuft.config import TrainConfig
from cpuft.errors import CpuftError
from cpuft.files import (
    PRIVATE,
    REMOVE,
    SENT,
    check_private,
    hash_file,
    hash_text,
    make_private,
    remove_command,
    split_paths,
    write_text,
)
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.hostfile import Host
from cpuft.hosts.registry import state_root
from cpuft.hosts.transport import KEEP_ALIVE, attempt, side_by_side
from cpuft.launch import settings as environment
from cpuft.launch.mpirun import KEY
from cpuft.launch.results import MERGE, NEW
from cpuft.launch.resume import ROWS, HostCopy, plan_partial_cleanup
from cpuft.plan import RunPlan, Setting, Stages, Step
from cpuft.serialization import load, parse_json
from cpuft.words import own_module

_SEND = 'folder=$1 count=$2; shift 2; tar -C "$folder" --exclude=__pycache__ -chf - -- "${@:1:count}" | "${@:count+1}"'
"""Links are followed, because what they point to is not there: a hub's cache is made of them."""

_HERE = Path(__file__)
_UNPACK = f"set -e\n{PRIVATE}{REMOVE}" + _HERE.with_name("unpack.sh").read_text(encoding="utf-8")
"""Unpacks beside its place and renames: a bundle is there as a whole or not at all."""
_FIND = PRIVATE + _HERE.with_name("lacking.sh").read_text(encoding="utf-8")
_PACK = _HERE.with_name("pack.sh").read_text(encoding="utf-8")
"""The supervisor holds the lock until the last rank has ended. A run that refused its input has left nothing."""
_NAMED = ".named"
"""Folder beside the clusters' entries: for each run the files and folders that the user named when it was started."""
_TRAINING_INPUTS = ("model", "from_config", "tokenizer", "data_dir", "train_file", "validation_file")


@dataclass(frozen=True)
class Bundle:
    """Files and folders that lie beside each other, and where they are on the hosts."""

    sources: tuple[Path, ...]
    """Here; none of what only hosts have any more."""
    there: str
    """Folder that holds `sources` by their names."""
    nbytes: int = 0
    """Of all files."""


def list_input_paths(train: TrainConfig, options: Collection[str] = _TRAINING_INPUTS) -> set[str]:
    """Absolute paths of the files and folders of this machine that these training options name."""
    words = [word for name in _TRAINING_INPUTS if name in options for word in split_paths(getattr(train, name))]
    return {str(path) for word in words if word and (path := Path(word).absolute()).exists()}


def save_allowed_paths(run_dir: str, paths: Collection[str], environ: Mapping[str, str]) -> None:
    """Keep on this machine which of its files and folders the user named for a run, so that `--resume` may send them.

    The run's folder would be no place for that, because what is there comes from a host. Where the state folder cannot
    be written, the user has to name them again.
    """
    with suppress(CpuftError, OSError):
        path = _named_file(run_dir, environ)
        if paths:
            make_private(path.parent, "set CPUFT_STATE to a folder of your own")
            write_text(path, json.dumps(sorted(paths)))
        else:
            path.unlink(missing_ok=True)


def load_allowed_paths(run_dir: str, environ: Mapping[str, str]) -> set[str]:
    """What `save_allowed_paths` kept for a run; nothing for a run that was started elsewhere."""
    with suppress(CpuftError, OSError, ValueError):
        path = _named_file(run_dir, environ)
        check_private(path.parent)
        return set(load(list[str], parse_json(path.read_text(encoding="utf-8"))))
    return set()


def _named_file(run_dir: str, environ: Mapping[str, str]) -> Path:
    return state_root(environ) / _NAMED / f"{hash_text(run_dir, 24)}.json"


def pack_training(
    cluster: Cluster, train: TrainConfig, named: Collection[str] | None = None
) -> tuple[TrainConfig, tuple[Bundle, ...]]:
    """The training options with paths as they are on the hosts, and what has to travel for that.

    Parameters
    ----------
    named: absolute paths that may be sent, where some options come from a record, which a host may have written; None
        where the user gave all options.

    Raises CpuftError: a path would be sent that is not among `named`.
    """
    if not cluster.has_own_disks:
        return train, ()
    bundles, changes = [], dict[str, str]()
    for name in _TRAINING_INPUTS:
        there = []
        for word in split_paths(getattr(train, name)):
            path = Path(word or "/nowhere").absolute()
            if path.is_relative_to(cluster.inputs):  # of a run that goes on: it was sent when that began
                bundles.append(Bundle((), str(path.parent)))
            elif path.exists():
                if named is not None and str(path) not in named:
                    flag = "--" + name.replace("_", "-")
                    raise CpuftError(
                        f"the run's record says {flag} {word}, which was not named for this run on this machine, and a "
                        f"record may come from a host: add {flag} {word} if the hosts are to get it"
                    )
                bundles.append(make_bundle((path,), cluster.inputs))
                word = f"{bundles[-1].there}/{path.name}"
            there.append(word)
        changes[name] = ",".join(there)
    return replace(train, **changes), tuple(bundles)  # type: ignore[arg-type]  # all of them are texts


def pack_script(cluster: Cluster, command: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[Bundle, ...]]:
    """The command of a user's script with paths as they are on the hosts, and what has to travel.

    A Python script takes the modules and packages beside it along. An argument that names a file or folder, by itself
    or after `--option=`, is sent too; the working directory and what holds it are not.
    """
    if not cluster.has_own_disks:
        return command, ()
    is_python = command[0] == sys.executable
    words: list[str] = [cluster.python] if is_python else []
    bundles: list[Bundle] = []
    for index, word in enumerate(command[len(words) :]):
        option, value = _split_option(word)
        path = Path(os.path.abspath(value))  # without dots, unlike Path.absolute
        # A program's bare name is looked for on the host's own PATH.
        is_name = index == 0 and "/" not in value
        if is_name or not value or not os.path.exists(path) or path in (Path.cwd(), *Path.cwd().parents):
            words.append(word)
            continue
        sources = _find_modules(path) if index == 0 and is_python else (path,)
        bundles.append(make_bundle(sources, cluster.inputs))
        words.append(f"{option}{bundles[-1].there}/{path.name}")
    return tuple(words), tuple(bundles)


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


def make_bundle(sources: tuple[Path, ...], inputs: str) -> Bundle:
    """The bundle of these files and folders: equal names and contents have the same place in the hosts' `inputs`."""
    files = list(_list_files(sources))
    told = [f"{name}\0{path.stat().st_mode & 0o111}\0{hash_file(path)}" for path, name in files]
    nbytes = sum(path.stat().st_size for path, _ in files)
    return Bundle(sources, f"{inputs}/{hash_text(chr(0).join(told), 24)}", nbytes)


def _list_files(sources: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
    """Every file of a bundle and its name in there; what Python compiled is left out."""
    for source in sources:
        found = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        for path in found:
            if "__pycache__" not in path.parts:
                yield path, str(path.relative_to(source.parent))


def gather_missing(bundles: tuple[Bundle, ...], cluster: Cluster) -> dict[str, set[str]]:
    """Host -> places of the bundles that it lacks, asked side by side. Changes nothing there.

    Raises CpuftError: somebody else could have written what lies there, and a run would trust it.
    """
    hosts = [assignment.host for assignment in cluster.assignments]
    words = ("sh", "-c", _FIND, "find", cluster.folder, *(bundle.there for bundle in bundles))

    def ask(host: Host) -> set[str]:
        answer = cluster.access.transport.run(host, words)
        if answer.exit_code:
            said = (answer.errors.strip().splitlines() or ["look at its disk"])[-1]
            raise CpuftError(f"host {host.name} has no place for what the run needs: {said}")
        return set(answer.output.split())

    return dict(zip((host.name for host in hosts), side_by_side(ask, hosts if bundles else [])))


def plan_sending(bundles: tuple[Bundle, ...], missing: Mapping[str, set[str]], cluster: Cluster) -> Stages:
    """Every bundle to every host that lacks it: a stage a bundle, the hosts side by side.

    Raises CpuftError: a host lacks what was sent to others by an earlier launch, and is not known here.
    """
    stages = []
    for bundle in bundles:
        needy = [host for host, places in missing.items() if bundle.there in places]
        if needy and not bundle.sources:
            said = f"{', '.join(needy)} lacks {bundle.there}, which the run was started with"
            raise CpuftError(f"{said}: name --model, --data-dir or files of rows again, as then")
        names = [source.name for source in bundle.sources]
        folder = str(bundle.sources[0].parent) if names else ""
        send = ("bash", "-o", "pipefail", "-c", _SEND, "send", folder, str(len(names)), *names)
        unpack = ("sh", "-c", _UNPACK, "unpack", cluster.folder, bundle.there)
        size = f"{bundle.nbytes / 1e6:.1f} MB"
        stages.append(
            tuple(Step(f"send {names[0]} to {h} ({size})", (*send, *cluster.command_on(h, unpack))) for h in needy)
        )
    return tuple(stage for stage in stages if stage)


def plan_data_copies(cluster: Cluster, work: str, have: Collection[str] = ()) -> Stages:
    """The prepared rows from the master to the other hosts, where these have disks of their own, but to those that have
    them already. They are there as a whole or not at all."""
    script = (
        'folder=$1; shift; tar -C "$folder" -cf - '
        + ROWS
        + " | ssh -o BatchMode=yes "
        + shlex.join(KEEP_ALIVE)
        + ' "$@"'
    )
    folder = shlex.quote(work)
    receive = f"{PRIVATE}private {cluster.folder} && mkdir -p {folder} && part=$(mktemp -d {folder}.XXXXXX) && "
    receive += f'tar -C "$part" -xf - && mv "$part/{ROWS}" {folder} && rmdir "$part"'
    stage = tuple(
        Step(
            f"give the rows to {assignment.host.name}",
            (
                *("bash", "-o", "pipefail", "-c", script, "rows", work),
                *(*cluster.access.mpirun_options, assignment.host.name, receive),
            ),
            host=cluster.master,
        )
        for assignment in cluster.assignments[1:]
        if assignment.host.name not in have
    )
    return (stage,) if stage and cluster.has_own_disks else ()


def plan_results(
    cluster: Cluster, work: str, run_dir: str, resumed: bool = False, others: Sequence[str] = ()
) -> Stages:
    """The run's directory from the master, then nothing of the run left on any host, `others` of earlier starts too."""
    if not cluster.away:
        return ()
    pack = cluster.command_on(cluster.master, ("sh", "-c", _PACK, "pack", work))
    own = own_module(sys.executable, "cpuft.launch.results")
    fetch = Step(f"fetch the run from {cluster.master}", (*own, MERGE if resumed else NEW, run_dir, *pack))
    remove = remove_command(cluster.folder, os.path.dirname(work))
    names = [*(assignment.host.name for assignment in cluster.assignments), *others]
    return ((fetch,), tuple(Step(f"take the run away from {name}", remove, host=name) for name in names))


def add_transfers(
    plan: RunPlan,
    bundles: tuple[Bundle, ...],
    missing: Mapping[str, set[str]],
    cluster: Cluster,
    run_dir: str,
    kept: Iterable[HostCopy] = (),
    have: Collection[str] = (),
) -> RunPlan:
    """The plan with what its hosts need from this machine, and what comes back.

    `kept`: what hosts have of earlier starts of the run; `have`: those where its prepared rows are.
    """
    work, used = cluster.work_dir(run_dir), {assignment.host.name for assignment in cluster.assignments}
    rows = plan_data_copies(cluster, work, have) if plan.prepare else ()
    others = {one.host.name: cluster.access.transport.way(one.host) for one in kept if one.there and cluster.away}
    return replace(
        plan,
        inputs=plan_sending(bundles, missing, cluster),
        prepare=(*(() if cluster.master in have else plan.prepare), *rows),
        results=plan_results(cluster, work, run_dir, plan.resumed, sorted(others.keys() - used)),
        kept=plan_partial_cleanup(cluster, work) if cluster.away else (),
        ways=others | plan.ways,
    )


_SENT = PRIVATE + REMOVE + Path(__file__).with_name("sent.sh").read_text(encoding="utf-8")
"""Writes, refreshes and removes the files. A host removes those that nobody took or refreshed for ten minutes."""
_REFRESH_SECONDS = 200.0


def plan_secrets(
    cluster: Cluster, run_dir: str, environ: Mapping[str, str]
) -> tuple[tuple[tuple[Setting, ...], ...], tuple[str, ...], tuple[str, ...]]:
    """What becomes of what may be secret: each host's settings, words before mpirun, and notes.

    Ranks here inherit it. Where other hosts take part, mpirun hands its environment to whoever is first to call itself
    a host's proxy: it has none of it.
    """
    names = sorted(name for name, value in environ.items() if environment.may_be_secret(name, value))
    notes = [f"left out, because no shell can set it: {name}" for name in environment.unexportable_names(environ)]
    if cluster.inherits:
        notes += [f"may be secret, so ranks only inherit them: {', '.join(names)}"] if names else []
        return ((),), (), tuple(notes)
    sent = ", ".join([KEY, *sorted(environment.secrets_for_ranks(environ))])
    kept = ", ".join(sorted(set(names) - environment.secrets_for_ranks(environ).keys()))
    way = "srun" if cluster.access.transport.bootstrap else "ssh"
    notes += [f"may be secret, so each rank gets it by a file of its own, over {way}: {sent}"]
    notes += [f"may be secret, so they stay here, and ranks do without: {kept}"] if kept else []
    settings = tuple(
        (Setting(SENT, cluster.sent_file(run_dir, index), f"each rank takes {sent} from its file, which goes then"),)
        for index in range(len(cluster.assignments))
    )
    without = () if cluster.away or not names else ("env", *(word for name in names for word in ("-u", name)))
    return settings, without, tuple(notes)


@contextmanager
def secrets_on_hosts(plan: RunPlan, cluster: Cluster, work: str, environ: Mapping[str, str]) -> Iterator[None]:
    """What the processes of a run on other hosts are to have and nobody may see, in a file for each, which takes it.

    Raises CpuftError: naming every host that could not take it, with what it said.
    """
    text = json.dumps({KEY: secrets.token_hex(32)} | environment.secrets_for_ranks(environ))
    prepares = any(setting.name == SENT for stage in plan.prepare for step in stage for setting in step.settings)
    if cluster.inherits:
        yield
        return

    def send(index: int) -> None:
        names = [*map(str, range(cluster.assignments[index].ranks)), *(["prepare"] if prepares and not index else [])]
        ask(index, "send", *(f"{cluster.sent_file(work, index)}-{name}" for name in names), stdin=text)

    def ask(index: int, what: str, *paths: str, stdin: str = "") -> str:
        host = cluster.assignments[index].host
        folder = os.path.dirname(cluster.sent_file(work, index))
        words = ("sh", "-c", _SENT, "sent", what, cluster.folder, folder, *paths)
        answer = cluster.access.transport.run(host, words, stdin)
        if answer.exit_code:
            said = " ".join(answer.errors.split())[-200:]
            raise CpuftError(f"host {host.name} could not take the run's variables ({said}): look at its disk")
        return answer.output

    def answering() -> list[int]:
        silent = cluster.access.transport.silent
        return [index for index, one in enumerate(cluster.assignments) if one.host.name not in silent]

    def refresh() -> None:
        """Until every process has taken its file, tell the hosts that the launcher is still there."""
        while not over.wait(_REFRESH_SECONDS):
            answers = attempt(lambda index: ask(index, "refresh"), answering())
            if not any(answers):
                return

    over = threading.Event()
    try:
        side_by_side(send, range(len(cluster.assignments)))
        threading.Thread(target=refresh, daemon=True).start()
        yield
    finally:
        over.set()
        with suppress(CpuftError):
            side_by_side(lambda index: ask(index, "remove"), answering())
