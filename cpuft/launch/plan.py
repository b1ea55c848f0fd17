"""Plan a run: from a job and the facts of the hosts to the commands and environment settings of every rank."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cpuft.config import (
    BenchConfig,
    LaunchConfig,
    Room,
    Rooms,
    TrainConfig,
    WorkerConfig,
    format_arguments,
    format_rooms,
    plan_turns,
    refuse_conflicts,
    refuse_engine,
)
from cpuft.errors import CpuftError
from cpuft.files import PRIVATE, REMOVE
from cpuft.hardware import choose_precision, effective_flags
from cpuft.hosts.cluster import Cluster
from cpuft.hosts.topology import Interface, RankCores, choose_comm_cores, choose_interface, plan_placement
from cpuft.launch import mpirun
from cpuft.launch import settings as environment
from cpuft.launch.inputs import add_transfers, gather_missing, pack_script, pack_training, plan_secrets
from cpuft.launch.resume import ROWS, ResumedRun
from cpuft.launch.settings import script_settings
from cpuft.launch.supervise import describe_lease_renewal
from cpuft.plan import RunPlan, Setting, Step
from cpuft.rank.interruption import NOTICE_VARIABLE
from cpuft.words import own_module, pack_words

LEAST_FREE_BYTES = 256 << 20
"""Room that a run directory must have: records and logs are small, a trained encoder is a few hundred MB."""

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "ipexrun", "mpirun", "mpiexec", "horovodrun")
_LAUNCHER_MODULES = {"torch.distributed": "torchrun", "accelerate.commands": "accelerate", "deepspeed": "deepspeed"}
"""How names of modules begin that are launchers, and the name of each launcher."""

# Not mkdir -p: of two launches at the same moment one must fail, and a printed plan must not run twice.
_MAKE = '{ mkdir "$1" || { [ ! -d "$1" ] || echo "another run took $1" >&2; exit 1; }; } && mkdir "$1/logs"'
_MAKE_AGAIN = (
    'mkdir -p "$1" && n=1 && while [ -e "$1/logs-$n" ]; do n=$((n+1)); done && '
    '{ [ ! -e "$1/logs" ] || mv "$1/logs" "$1/logs-$n"; } && mkdir "$1/logs"'
)
"""Logs of earlier starts stay beside the new ones."""


def plan_placements(
    cluster: Cluster, config: LaunchConfig, backend: str
) -> tuple[tuple[tuple[RankCores, ...], ...], str]:
    """Cores of every rank, host by host, and why communication got as many of them as it did."""
    per_rank = min(len(f.cores) // a.ranks for a, f in zip(cluster.assignments, cluster.facts))
    comm_cores, reason = choose_comm_cores(per_rank, config.np, backend)
    if config.comm_cores >= 0:
        comm_cores, reason = config.comm_cores, "as you asked with --comm-cores"
    placements = tuple(plan_placement(f.cores, a.ranks, comm_cores) for a, f in zip(cluster.assignments, cluster.facts))
    return placements, reason


def plan_settings(
    cluster: Cluster, config: LaunchConfig, backend: str, environ: Mapping[str, str]
) -> tuple[tuple[Setting, ...], tuple[tuple[Setting, ...], ...]]:
    """The shared settings, and each host's own, with the user's values kept."""
    environ = environment.user_variables(environ)
    placements, reason = plan_placements(cluster, config, backend)
    interfaces = plan_interfaces(cluster, config.iface)
    port = config.master_port or cluster.facts[0].free_port
    shared = environment.shared_settings(interfaces[0], port, cluster.facts, config.np, cluster.flavour.name == "srun")
    shared = environment.keep_user_values(shared, environ)
    hosts = []
    for host_facts, interface, ranks in zip(cluster.facts, interfaces, placements):
        disjoint = sum(len(set(rank.compute)) for rank in ranks) == len({c for rank in ranks for c in rank.compute})
        settings = environment.host_settings(
            host_facts, interface, ranks, cluster.flavour.name == "intel" and disjoint, reason
        )
        hosts.append(_without_cores_of_others(environment.keep_user_values(settings, environ)))
    shared += environment.forwarded_settings(environ, shared + hosts[0])
    return shared, tuple(hosts)


def _without_cores_of_others(settings: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """Where the user pins ranks by a domain of their own, ours is no longer what ranks must find."""
    if "I_MPI_PIN_DOMAIN" not in environment.user_set_names(settings):
        return settings
    return tuple(setting for setting in settings if setting.name != "CPUFT_CORES")


def plan_interfaces(cluster: Cluster, wanted: str) -> tuple[Interface, ...]:
    """Each host's interface towards the others; loopback when there is one host only."""
    if len(cluster.facts) == 1 and not wanted:
        return (Interface("lo", "127.0.0.1", "all ranks are on one host"),)
    return tuple(choose_interface(f, next(iter(f.routes)), wanted) for f in cluster.facts)


def plan_training(
    cluster: Cluster,
    config: LaunchConfig,
    train: TrainConfig,
    run_dir: str,
    progress: str,
    environ: Mapping[str, str],
    apart: bool = False,
    resumed: ResumedRun | None = None,
) -> RunPlan:
    """Prepare the data once, then train: the run directory holds all that the ranks read and write."""
    train = check_training(cluster, train, environ)
    refuse_engine(train.engine, bool(config.interruption_notice), apart)
    prepared = f"{run_dir}/{ROWS}"
    worker = WorkerConfig(run_dir, prepared, progress, apart, cluster.facts[0].cpu_quota)
    # Until the launcher has fetched the results, the checkpoints are their only copy on a second host.
    worker = replace(worker, keep_checkpoints=cluster.away)
    if resumed:
        worker = replace(worker, resume=resumed.updates, global_batch=resumed.global_batch)
        worker = replace(worker, since=resumed.since, because=resumed.because)
        if resumed.measured and resumed.places.issuperset(facts.hostname for facts in cluster.facts):
            worker = replace(worker, measured=json.dumps(asdict(resumed.measured)))
    command = ("-m", "cpuft.train", *format_arguments(train), *format_arguments(worker))
    # Of a run that starts again by itself, ranks before may not be gone yet, and it fitted then.
    rooms = () if resumed and resumed.because else describe_host_memory(cluster, train, environ, apart)
    prepare = Step(
        "check and tokenise the rows once, before any rank starts",
        (*own_module(cluster.python, "cpuft.train.data.prepare"), prepared, *rooms, *format_arguments(train)),
        (*_settings_there(cluster), *(plan_secrets(cluster, run_dir, environ)[0][0] if cluster.away else ())),
        cluster.master,
    )
    plan = plan_launch(cluster, config, run_dir, command, train.backend, environ, resumed)
    return replace(plan, prepare=((prepare,),))


def plan_script(script: tuple[str, ...]) -> tuple[str, ...]:
    """The command of a user's own script: by this Python when it is one of Python's, else as it is.

    `python train.py` is the same as `train.py`, and `python -m train` is run by this Python as well.

    Raises CpuftError: there is no such script or program.
    """
    if len(script) > 1 and _is_own_python(script[0]):
        words = script[2:] if script[1] == "-u" else script[1:]
        if len(words) > 1 and words[0] == "-m":
            return (sys.executable, *words)
        script = words if words and words[0].endswith(".py") else script
    path = Path(script[0])
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            place = "" if path.is_absolute() else f" in the folder {os.getcwd()}"
            raise CpuftError(f"there is no script {script[0]}{place}: give the path of the script")
        if path.suffix == ".py":
            return (sys.executable, str(path.absolute()), *script[1:])
        return (str(path.absolute()), *script[1:])
    if shutil.which(script[0]) is None:
        raise CpuftError(f"there is no script or program {script[0]}: name a .py file or a program of PATH")
    return script


def name_script(command: tuple[str, ...]) -> str:
    """The name of a run of a user's own script: `train` for train.py and for `-m package.train`.

    Parameters
    ----------
    command: from `plan_script`.
    """
    if command[0] != sys.executable:
        return Path(command[0]).stem
    return command[2].rpartition(".")[2] if command[1] == "-m" else Path(command[1]).stem


def refuse_other_launchers(script: tuple[str, ...]) -> None:
    """Refuse a script that another launcher is to start on each of several ranks.

    Every rank would start a job of its own, and train a copy that is connected with no other.

    Raises CpuftError: the script is started by a launcher.
    """
    name = Path(script[0]).name
    if _is_own_python(script[0]) and script[1:2] == ("-m",) and len(script) > 2:
        name = next((known for module, known in _LAUNCHER_MODULES.items() if script[2].startswith(module)), "")
    if name in _LAUNCHERS:
        raise CpuftError(
            f"cpuft launch starts the ranks itself, and {name} would start a job of its own on each of them: leave "
            f"{name} and its options out (cpuft launch --np N -- train.py ...), or add --independent"
        )


def _is_own_python(word: str) -> bool:
    """Whether a command is the interpreter that runs cpuft, so that `python train.py` means `train.py`.

    A bare `python` or `python3` is taken for that one: it need not be the same, or there at all, on other hosts.
    """
    if word in ("python", "python3"):
        return True
    found = shutil.which(word) or ""
    return Path(found).name.startswith("python") and os.path.realpath(Path(found).parent) == os.path.realpath(
        Path(sys.executable).parent
    )


def wrap_script(command: tuple[str, ...], python: str, wrap: bool) -> tuple[str, ...]:
    """The command that runs a script of `python` to a good end, and with `wrap` with the fast path under its Trainer.

    Raises CpuftError: it is no Python script, and `wrap` wants one.
    """
    if len(command) < 2 or command[0] != python or not (command[1] == "-m" or command[1].endswith(".py")):
        if wrap:
            raise CpuftError("--wrap takes a Python script: cpuft launch --wrap -- train.py ...")
        return command
    return ("-m", "cpuft.train.wrap" if wrap else "cpuft.rank.script", *command[1:])


def plan_launch(
    cluster: Cluster,
    config: LaunchConfig,
    run_dir: str,
    command: tuple[str, ...],
    backend: str,
    environ: Mapping[str, str],
    resumed: ResumedRun | None = None,
    extra: tuple[Setting, ...] = (),
) -> RunPlan:
    """One mpirun over all hosts; each rank's output goes into a file of its own in the run directory.

    `command` is a program, or `-m` and a module of ours. Of a `resumed` run the directory is there already. `extra`
    settings are for all ranks; where the user has set one of these variables, the user's value is kept.
    """
    shared, per_host = plan_settings(cluster, config, backend, environ)
    sent, without, words = plan_secrets(cluster, run_dir, environ)
    per_host = tuple(settings + place for settings, place in zip(per_host, sent))
    groups = tuple(
        mpirun.RankGroup(assignment.host.name, assignment.ranks, settings)
        for assignment, settings in zip(cluster.assignments, per_host)
    )
    shared += environment.keep_user_values(extra, environment.user_variables(environ))
    shared += (Setting("CPUFT_RUN_DIR", run_dir, "what a script of yours writes there on the master, you get"),)
    if notice := find_notice(config.interruption_notice) if config.interruption_notice else cluster.access.notice:
        shared += (Setting(NOTICE_VARIABLE, notice, "each host's first rank looks there every 5 s"),)
    shared += (Setting("CPUFT_RESUMED", "1", "the run goes on, from what $CPUFT_RUN_DIR has"),) if resumed else ()
    logs = f"{run_dir}/logs"
    interface = plan_interfaces(cluster, config.iface)[0].name
    rank_command = (*own_module(cluster.python, "cpuft.rank"), *pack_words(command))
    command = mpirun.plan_mpirun(cluster.flavour, groups, shared, rank_command, logs, interface)
    make = _plan_folder(cluster, run_dir, resumed)
    own = mpirun.step_settings(cluster.flavour, cluster.access.mpirun_options, cluster.as_root, cluster.bootstrap)
    start = Step(
        f"start {config.np} ranks with {cluster.flavour.title}; output of rank N: {logs}/rank-N.out and .err",
        (*without, *mpirun.MAKE_KEY, *command),
        (*own, *_settings_there(cluster)),
        cluster.master,
    )
    renewal = tuple(shlex.split(cluster.access.renewal))
    notes = plan_notes(cluster, shared, per_host, (*words, *describe_lease_renewal(renewal)))
    plan = RunPlan(((make,),), ranks=((start,),), notes=notes, ways=cluster.ways, resumed=bool(resumed))
    return replace(plan, renewal=renewal)


def find_notice(place: str) -> str:
    """A notice's address, or the absolute path of its file. Raises CpuftError for an address that cannot be asked."""
    scheme, colons, _ = place.partition("://")
    if not colons:
        return os.path.abspath(place)
    if scheme not in ("http", "https"):
        raise CpuftError(f"--interruption-notice asks http and https, not {scheme}: name such an address, or a file")
    return place


def _plan_folder(cluster: Cluster, run_dir: str, resumed: ResumedRun | None) -> Step:
    script = f"{PRIVATE}private {cluster.folder} && umask 077 && " if cluster.away else ""
    if resumed and resumed.fetched == cluster.master:
        script = f'{REMOVE}{script}remove {cluster.folder} "$1/logs" "$1"/logs-* && '
    script += 'mkdir -p "$0" && ' + (_MAKE_AGAIN if resumed else _MAKE)
    words = ("sh", "-c", script, os.path.dirname(run_dir), run_dir)
    return Step("make the run's directory", words, host=cluster.master)


def _settings_there(cluster: Cluster) -> tuple[Setting, ...]:
    reasons = {"XDG_CACHE_HOME": "the cache of the user who made the cluster"}
    return tuple(
        Setting(name, value, reasons.get(name, "so that its Python finds cpuft there"))
        for name, value in cluster.access.settings.items()
        if cluster.away
    )


def plan_bench(
    cluster: Cluster, config: LaunchConfig, bench: BenchConfig, run_dir: str, environ: Mapping[str, str]
) -> RunPlan:
    """Measure the backends on these hosts.

    Raises CpuftError: a value of `bench` that cannot be measured, or fewer than two ranks.
    """
    plan_turns(bench)
    if config.np < 2:
        raise CpuftError("bench comm measures the links between ranks: start two or more, e.g. --np 2")
    command = ("-m", "cpuft.comm.bench", f"{run_dir}/comm.jsonl", *format_arguments(bench))
    return plan_launch(cluster, config, run_dir, command, "auto", environ)


def plan_notes(
    cluster: Cluster,
    shared: tuple[Setting, ...],
    per_host: tuple[tuple[Setting, ...], ...],
    about_secrets: tuple[str, ...],
) -> tuple[str, ...]:
    """What the user should know: where ranks go, what of theirs was kept, each setting with its reason."""
    notes = ["ranks: " + ", ".join(f"{a.ranks} on {a.host.name}" for a in cluster.assignments)]
    kept = sorted({name for settings in (shared, *per_host) for name in environment.user_set_names(settings)})
    notes += [f"kept as you set them: {', '.join(kept)}"] if kept else []
    notes += [f"{mpirun.KEY}: by it ranks know each other; made as they start, it is on no command line"]
    notes += about_secrets
    notes += ["", "settings on every host:"] + [f"  {s.name}={s.value}  {s.reason}" for s in shared]
    for assignment, settings in zip(cluster.assignments, per_host):
        notes += ["", f"settings on {assignment.host.name}:"] + [f"  {s.name}={s.value}  {s.reason}" for s in settings]
    return tuple(notes)


def refuse_unread_rows(train: TrainConfig) -> None:
    """Raises CpuftError when rows are named that `train.task` does not read: it would train on others."""
    default, text = TrainConfig(), ("validation_split", "mlm_probability", "whole_word_mask")
    own = {"files": (), "text": ()}.get(train.task, ("train_file", "validation_file", "text_columns"))
    task = f"--task {train.task}" + ", which is the default task" * (train.task == default.task)
    for name in (*own, *(text if train.task != "text" else ())):
        if getattr(train, name) != getattr(default, name):
            corpus = "--task text for plain texts without labels"
            fits = corpus if name in text else f"--task files for texts with labels, or {corpus}"
            raise CpuftError(f"--{name.replace('_', '-')} has no effect with {task}: give {fits}")
    if train.data_dir and train.task in ("demo", "files", "text"):
        raise CpuftError(
            f"--data-dir has no effect with {task}: the option names a folder with the data of a GLUE task, so name "
            "that task as well, for example --task mrpc"
        )


def check_training(cluster: Cluster, train: TrainConfig, environ: Mapping[str, str]) -> TrainConfig:
    """The training options for these hosts: where only some have bf16 and `auto` is asked for, all use fp32.

    Raises CpuftError: bf16 asked for where a host lacks it; options of rows that --task does not read, or that exclude
    each other.
    """
    refuse_unread_rows(train)
    refuse_conflicts(train)
    limit = environ.get("ONEDNN_MAX_CPU_ISA", "")
    choices = [
        choose_precision(train.precision, train.emulate_bf16, effective_flags(facts.cpu_flags, limit))
        for facts in cluster.facts
    ]
    agree = len({choice.name for choice in choices}) == 1
    return train if agree else replace(train, precision="fp32")


def choose_run_dir(wanted: str, name: str) -> str:
    """The absolute path of a new run directory: the wanted one, or runs/NAME-TIME.

    Raises CpuftError: it exists, its parent cannot be written, or the disk is full.
    """
    path = Path(wanted or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if path.exists():
        what = "the folder" if path.is_dir() else "a file"
        raise CpuftError(
            f"{what} {path} exists already, and a run needs a new folder: give --run-dir the name of a folder that "
            "does not exist yet, or leave --run-dir out, and cpuft makes a new folder in runs"
        )
    parent = next(folder for folder in path.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
        raise CpuftError(f"{parent} cannot be written: name another place with --run-dir")
    free = shutil.disk_usage(parent).free
    if free < LEAST_FREE_BYTES:
        raise CpuftError(
            f"the disk of {parent} is full ({free >> 20} MB free, a run needs {LEAST_FREE_BYTES >> 20} MB): "
            f"make room, or name another place with --run-dir"
        )
    return str(path)


@dataclass(frozen=True)
class Job:
    """A training, or a script of the user's own."""

    config: LaunchConfig
    train: TrainConfig
    script: tuple[str, ...] = ()
    """Its command, from `planning.plan_script`; empty for a training."""
    wrap: bool = False
    independent: bool = False
    """Whether the ranks of the script are meant to be independent of each other."""
    progress: str = "lines"
    named: frozenset[str] | None = None
    """Files and folders that may be sent to hosts, where `train` is a record's; None where the user gave all of it."""


@dataclass(frozen=True)
class Launch:
    """A job, where its run lies, and what its ranks inherit."""

    job: Job
    run_dir: str
    environ: Mapping[str, str]


def plan_run(
    job: Job, cluster: Cluster, run_dir: str, environ: Mapping[str, str], resumed: ResumedRun | None = None
) -> RunPlan:
    """The whole plan of a job on these hosts: of a new run in `run_dir`, or with `resumed` of one that goes on there.

    Asks the hosts which inputs they lack, and changes nothing.

    Raises CpuftError: it cannot run there.
    """
    work, config = cluster.work_dir(run_dir), job.config
    if job.script:
        command, bundles = pack_script(cluster, job.script)
        command = wrap_script(command, cluster.python, job.wrap)
        extra = script_settings(config.np, job.independent)
        plan = plan_launch(cluster, config, work, command, "gloo", environ, resumed, extra)
    else:
        train, bundles = pack_training(cluster, job.train, job.named)
        plan = plan_training(cluster, config, train, work, job.progress, environ, resumed=resumed)
    missing = gather_missing(bundles, cluster)
    kept, have = (resumed.kept, find_prepared_hosts(resumed, cluster)) if resumed else ((), set[str]())
    return add_transfers(plan, bundles, missing, cluster, run_dir, kept, have)


def plan_fetching(cluster: Cluster, resumed: ResumedRun) -> RunPlan:
    """The plan that only fetches a finished run from the head host, and then removes it from all hosts."""
    plan = RunPlan(ways=cluster.ways, resumed=True)
    return add_transfers(plan, (), {}, cluster, resumed.run_dir, resumed.kept)


def find_prepared_hosts(resumed: ResumedRun, cluster: Cluster) -> set[str]:
    """Hosts that have the prepared rows of this very launch, where it starts its run again."""
    if not resumed.because:
        return set()
    if not cluster.away:
        return {cluster.master} if Path(resumed.run_dir, ROWS).exists() else set()
    return {one.host.name for one in resumed.kept if one.rows}


def describe_host_memory(
    cluster: Cluster, train: TrainConfig, environ: Mapping[str, str], apart: bool
) -> tuple[str, ...]:
    """The preparation's word for it; none where a host does not know."""
    hosts = []
    for assignment, facts in zip(cluster.assignments, cluster.facts):
        free = min(facts.memory_free, facts.memory_left) if facts.memory_left >= 0 else facts.memory_free
        hosts.append(Room(assignment.host.name, assignment.ranks, free, facts.boot_id, facts.memory_free))
    flags = effective_flags(cluster.facts[0].cpu_flags, environ.get("ONEDNN_MAX_CPU_ISA", ""))
    return format_rooms(Rooms(tuple(hosts), choose_precision(train.precision, train.emulate_bf16, flags).name, apart))
