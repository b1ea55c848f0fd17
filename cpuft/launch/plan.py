"""Plan a run: from a job and the facts of the hosts to the commands and environment settings of every rank."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cpuft.argv import module_command, pack_argv
from cpuft.config import (
    BenchConfig,
    HostMemory,
    LaunchConfig,
    PredictConfig,
    RunMemory,
    TrainConfig,
    WorkerConfig,
    check_engine_for_launch,
    format_arguments,
    format_run_memory,
    list_bench_cases,
    refuse_conflicts,
)
from cpuft.errors import CpuftError
from cpuft.files import PRIVATE, REMOVE
from cpuft.hardware import choose_precision, effective_flags
from cpuft.hosts.cluster import STATE_FILE, Cluster
from cpuft.hosts.topology import Interface, RankCores, choose_comm_cores, choose_interface, plan_placement, spread_cores
from cpuft.launch import mpirun
from cpuft.launch import settings as environment
from cpuft.launch.active_runs import lock_run
from cpuft.launch.checkpoint_copies import choose_copy_seconds, pack_checkpoints
from cpuft.launch.inputs import (
    Bundle,
    gather_missing,
    pack_embedding,
    pack_script,
    pack_training,
    plan_data_copies,
    plan_secrets,
    plan_sending,
)
from cpuft.launch.leases import RENEWAL_SECONDS
from cpuft.launch.results import plan_partial_cleanup, plan_results
from cpuft.launch.resume import CHECKPOINTS, PREPARED_DATA, HostCopy, ResumedRun
from cpuft.launch.settings import script_settings
from cpuft.launch.state import RunState, begin_state, format_state
from cpuft.plan import RunPlan, Setting, Step
from cpuft.rank.call import CALL_FILE, CALL_FOLDER
from cpuft.rank.interruption import NOTICE_VARIABLE
from cpuft.rank.process import OWNER_VARIABLE
from cpuft.tasks import FILE_TASKS

LEAST_FREE_BYTES = 256 << 20
"""Free bytes that the disk of a new run folder must have. A trained encoder takes a few hundred MB."""
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "ipexrun", "mpirun", "mpiexec", "horovodrun")
_LAUNCHER_MODULES = {"torch.distributed": "torchrun", "accelerate.commands": "accelerate", "deepspeed": "deepspeed"}
"""Prefixes of modules that are launchers, and the name of each launcher."""
# Not mkdir -p: of two launches at the same moment one must fail, and a printed plan must not run twice.
_MAKE_FOLDER = '{ mkdir "$1" || { [ ! -d "$1" ] || echo "another run took $1" >&2; exit 1; }; } && mkdir "$1/logs"'
_REUSE_FOLDER = (
    'mkdir -p "$1" && n=1 && while [ -e "$1/logs-$n" ]; do n=$((n+1)); done && '
    '{ [ ! -e "$1/logs" ] || mv "$1/logs" "$1/logs-$n"; } && mkdir "$1/logs"'
)
"""The logs of earlier attempts are kept as logs-N."""


@dataclass(frozen=True)
class Job:
    """What is run: cpuft's own training, or a user's script."""

    config: LaunchConfig
    train: TrainConfig
    script: tuple[str, ...] = ()
    """The script's command, from `plan_script`; empty for cpuft's own training."""
    wrap: bool = False
    """Whether the script gets the fast path."""
    independent: bool = False
    """Whether the ranks of the script are meant to be independent of each other."""
    progress: str = "lines"
    call_file: str = ""
    """This machine's file with a function of the user's, if the script is the module that calls it; else empty."""
    allowed_paths: frozenset[str] | None = None
    """Local files and folders that may be sent to hosts, if `train` comes from a record; None if the user gave it."""


@dataclass(frozen=True)
class Launch:
    """A job, its run folder, and the environment variables that the ranks inherit."""

    job: Job
    run_dir: str
    """Absolute path of the run folder on this machine."""
    environ: Mapping[str, str]


def plan_run(
    job: Job, cluster: Cluster, run_dir: str, environ: Mapping[str, str], resumed: ResumedRun | None = None
) -> RunPlan:
    """Plan a job on these hosts: a new run in `run_dir`, or with `resumed` the next attempt of a run in that folder.

    Asks the hosts which input files they do not have, and reads the local files to compute their checksums. Changes
    nothing on any machine and starts no rank. `run_dir` is the run folder on this machine.
    """
    work, config = cluster.work_dir(run_dir), job.config
    if job.script:
        command, bundles = pack_script(cluster, job.script)
        command = command[1:] if job.call_file else wrap_script(command, cluster.python, job.wrap)
        extra = script_settings(config.np, job.independent)
        plan = plan_launch(cluster, config, work, command, "gloo", environ, resumed, extra)
    else:
        train, bundles = pack_training(cluster, job.train, job.allowed_paths)
        plan = plan_training(cluster, config, train, work, job.progress, environ, resumed=resumed)
    missing = gather_missing(bundles, cluster)
    copies, prepared = (resumed.host_copies, find_prepared_hosts(resumed, cluster)) if resumed else ((), set[str]())
    if resumed and (checkpoints := pack_checkpoints(cluster, work, run_dir, copies)):
        bundles += checkpoints
        folders = {bundle.remote_folder for bundle in checkpoints}
        missing = missing | {cluster.head: missing.get(cluster.head, set()) | folders}
    if config.copy_checkpoints and cluster.works_remotely:
        seconds = choose_copy_seconds(job.train.checkpoint_every)
        note = f"while ranks run, each new checkpoint is copied to {run_dir}/{CHECKPOINTS} (a look every {seconds:g} s)"
        plan = replace(plan, copy_seconds=seconds, notes=(note, *plan.notes))
    plan = add_transfers(plan, bundles, missing, cluster, run_dir, copies, prepared)
    return add_call(plan, job.call_file, cluster, work) if job.call_file else plan


def add_call(plan: RunPlan, call_file: str, cluster: Cluster, work: str) -> RunPlan:
    """Return the plan with a stage that copies the call of a function, which this machine's `call_file` holds, into the
    run folder before the ranks start: on each host that has a disk of its own, else on the head host only.
    """
    names = [one.host.name for one in cluster.assignments] if cluster.has_own_disks else [cluster.head]
    script = f"{PRIVATE}private {cluster.folder} && " if cluster.works_remotely else ""
    script += 'umask 077 && mkdir -p "$0" && cat >"$0/new" && mv "$0/new" "$1"'
    command = ("sh", "-c", script, f"{work}/{CALL_FOLDER}", f"{work}/{CALL_FILE}")
    where = "send the function to {}" if cluster.works_remotely else "copy the function into the folder of the run"
    stage = tuple(Step(where.format(name), command, host=name, stdin_file=call_file) for name in names)
    if cluster.works_remotely:
        return replace(plan, inputs=(*plan.inputs, stage))
    return replace(plan, prepare=(*plan.prepare, stage))


def plan_fetching(cluster: Cluster, resumed: ResumedRun) -> RunPlan:
    """Plan only to fetch a finished run from the head host, and then to remove it from all hosts. Asks no host."""
    plan = RunPlan(command_prefixes=cluster.command_prefixes, resumed=True, owner=resumed.owner)
    return add_transfers(plan, (), {}, cluster, resumed.run_dir, resumed.host_copies)


def add_transfers(
    plan: RunPlan,
    bundles: tuple[Bundle, ...],
    missing: Mapping[str, set[str]],
    cluster: Cluster,
    run_dir: str,
    host_copies: Iterable[HostCopy] = (),
    prepared_hosts: Collection[str] = (),
) -> RunPlan:
    """Return the plan with what is sent to the hosts, what is fetched, and what is removed from the hosts.

    `missing` has the remote folders of the bundles that a host does not have, `run_dir` is on this machine, and
    `host_copies` are those of earlier attempts. If the head host is among `prepared_hosts`, which have the prepared
    examples, nothing is prepared again, and the examples are only copied to other hosts.
    """
    work, used = cluster.work_dir(run_dir), {assignment.host.name for assignment in cluster.assignments}
    copies = plan_data_copies(cluster, work, prepared_hosts) if plan.prepare else ()
    others = {
        copy.host.name: cluster.access.transport.command_prefix(copy.host)
        for copy in host_copies
        if copy.exists and cluster.works_remotely
    }
    claims = cluster.works_remotely and plan.make
    return replace(
        plan,
        claim=((plan_claim(run_dir, begin_state(cluster, run_dir, plan.owner), plan.resumed),),) if claims else (),
        inputs=plan_sending(bundles, missing, cluster),
        prepare=(*(() if cluster.head in prepared_hosts else plan.prepare), *copies),
        results=plan_results(cluster, work, run_dir, sorted(others.keys() - used)),
        partial_cleanup=plan_partial_cleanup(cluster, work) if cluster.works_remotely else (),
        command_prefixes=others | plan.command_prefixes,
    )


def find_prepared_hosts(resumed: ResumedRun, cluster: Cluster) -> set[str]:
    """Return the names of the hosts that have the prepared examples of an automatic restart, without asking them.

    A run that the user resumes prepares them again, because the files with the examples may have changed.
    """
    if not resumed.restart_reason:
        return set()
    if not cluster.works_remotely:
        return {cluster.head} if Path(resumed.run_dir, PREPARED_DATA).exists() else set()
    return {copy.host.name for copy in resumed.host_copies if copy.has_data}


def plan_training(
    cluster: Cluster,
    config: LaunchConfig,
    train: TrainConfig,
    run_dir: str,
    progress: str,
    environ: Mapping[str, str],
    independent: bool = False,
    resumed: ResumedRun | None = None,
) -> RunPlan:
    """Plan to make the run folder, to prepare the examples once, and then to train. Asks no host and writes nothing.

    The plan does not yet send or fetch files: `add_transfers` adds that. `run_dir` is the run folder as the ranks see
    it. `independent` means that each rank trains by itself, to measure what the hosts can do without communication.
    """
    train = check_training(cluster, train, environ)
    check_engine_for_launch(train.engine, bool(config.interruption_notice), independent)
    prepared = f"{run_dir}/{PREPARED_DATA}"
    worker = WorkerConfig(run_dir, prepared, progress, independent, cluster.facts[0].cpu_quota)
    # Until the launcher has fetched the results, the checkpoints on a second host are the only other copy.
    worker = replace(worker, keep_checkpoints=cluster.works_remotely, simulated=cluster.is_simulated)
    if resumed:
        worker = replace(worker, recorded_updates=resumed.updates, global_batch=resumed.global_batch)
        worker = replace(worker, stopped_at=resumed.stopped_at, restart_reason=resumed.restart_reason)
        if resumed.measured and resumed.hostnames.issuperset(facts.hostname for facts in cluster.facts):
            worker = replace(worker, measurements=json.dumps(asdict(resumed.measured)))
    command = ("-m", "cpuft.train", *format_arguments(train), *format_arguments(worker))
    # In an automatic restart, ranks of the last attempt may not be gone yet, and the model is known to fit.
    is_restart = resumed and resumed.restart_reason
    memory = () if is_restart else _describe_host_memory(cluster, train, environ, independent)
    prepare = Step(
        "check and tokenize the examples once, before any rank starts",
        (*module_command(cluster.python, "cpuft.train.data.prepare"), prepared, *memory, *format_arguments(train)),
        _preparation_settings(cluster, run_dir, environ),
        cluster.head,
    )
    plan = plan_launch(cluster, config, run_dir, command, train.backend, environ, resumed)
    return replace(plan, prepare=((prepare,),))


def check_training(cluster: Cluster, train: TrainConfig, environ: Mapping[str, str]) -> TrainConfig:
    """Check the training options, and return them with "fp32" for "auto" if only some hosts have bf16 instructions.
    ONEDNN_MAX_CPU_ISA in `environ` can hide these instructions.
    """
    refuse_unused_data_options(train)
    refuse_conflicts(train)
    limit = environ.get("ONEDNN_MAX_CPU_ISA", "")
    choices = [
        choose_precision(train.precision, train.emulate_bf16, effective_flags(facts.cpu_flags, limit))
        for facts in cluster.facts
    ]
    agree = len({choice.name for choice in choices}) == 1
    return train if agree else replace(train, precision="fp32")


def find_run_precision(cluster: Cluster, train: TrainConfig, environ: Mapping[str, str]) -> str:
    """Return the precision in which all ranks of a run on these hosts train: "bf16", "fp32" or "int8"."""
    train = check_training(cluster, train, environ)
    flags = effective_flags(cluster.facts[0].cpu_flags, environ.get("ONEDNN_MAX_CPU_ISA", ""))
    return choose_precision(train.precision, train.emulate_bf16, flags).name


def refuse_unused_data_options(train: TrainConfig) -> None:
    """Refuse options about data that have no effect with `train.task`, because the user believes in their effect."""
    default, text = TrainConfig(), ("mlm_probability", "whole_word_mask")
    forms = ("delimiter", "quoting", "encoding")
    files = ("train_file", "validation_file", "validation_split", "text_columns", "skip_unlabelled", *forms)
    unlabelled = {"chat": (*forms, "skip_unlabelled"), "text": ("skip_unlabelled",), "pairs": ("skip_unlabelled",)}
    own = unlabelled.get(train.task, ()) if train.task in FILE_TASKS else files
    task = f"--task {train.task}" + ", which is the default task" * (train.task == default.task)
    for name in (*own, *(text if train.task != "text" else ())):
        if getattr(train, name) != getattr(default, name):
            corpus = "--task text for plain texts without labels"
            fits = (
                corpus
                if name in text
                else f"--task files for texts with labels, --task pairs for texts that belong together, or {corpus}"
            )
            raise CpuftError(f"--{name.replace('_', '-')} has no effect with {task}: give {fits}")
    if train.data_dir and train.task in ("demo", *FILE_TASKS):
        raise CpuftError(
            f"--data-dir has no effect with {task}: the option names a folder with the data of a GLUE task, so name "
            "that task as well, for example --task mrpc"
        )


def _describe_host_memory(
    cluster: Cluster, train: TrainConfig, environ: Mapping[str, str], independent: bool
) -> tuple[str, ...]:
    """Return the argument that tells the preparation how much memory the hosts have; () if that is unknown."""
    hosts = []
    for assignment, facts in zip(cluster.assignments, cluster.facts):
        free = min(facts.memory_free, facts.memory_left) if facts.memory_left >= 0 else facts.memory_free
        hosts.append(HostMemory(assignment.host.name, assignment.ranks, free, facts.boot_id, facts.memory_free))
    precision = find_run_precision(cluster, train, environ)
    return format_run_memory(RunMemory(tuple(hosts), precision, independent))


def plan_script(script: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command of a user's script, given as its argv (not empty). Looks at local files and PATH only.

    A .py file is run by the Python that runs cpuft, which also stands for `python` and `python3`.
    """
    if len(script) > 1 and _is_own_python(script[0]):
        arguments = script[2:] if script[1] == "-u" else script[1:]
        if len(arguments) > 1 and arguments[0] == "-m":
            return (sys.executable, *arguments)
        script = arguments if arguments and arguments[0].endswith(".py") else script
    path = Path(script[0])
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            place = "" if path.is_absolute() else f" in the folder {os.getcwd()}"
            raise CpuftError(f"there is no script {script[0]}{place}: give the path of the script")
        if path.suffix == ".py":
            return (sys.executable, str(path.absolute()), *script[1:])
        return (str(path.absolute()), *script[1:])
    if shutil.which(script[0]) is None:
        raise CpuftError(f"there is no script or program {script[0]}: give a .py file or a program in PATH")
    return script


def name_script(command: tuple[str, ...]) -> str:
    """Return the name of the run of a user's script, such as "train" for train.py and for `-m package.train`."""
    if command[0] != sys.executable or len(command) == 1:
        return Path(command[0]).stem
    if command[1] == "-m" and len(command) > 2:
        return command[2].rpartition(".")[2]
    return Path(command[1]).stem


def refuse_other_launchers(script: tuple[str, ...]) -> None:
    """Refuse a script that another launcher starts. Every rank would start a job of its own, which trains by itself."""
    name = Path(script[0]).name
    if _is_own_python(script[0]):
        arguments = list(script[1:])
        while arguments and arguments[0].startswith("-") and arguments[0] != "-m":
            del arguments[: 2 if arguments[0] in ("-X", "-W") else 1]
        module = arguments[1] if len(arguments) > 1 and arguments[0] == "-m" else ""
        name = next((known for prefix, known in _LAUNCHER_MODULES.items() if module.startswith(prefix)), "")
    if name in _LAUNCHERS:
        raise CpuftError(
            f"cpuft launch starts the ranks itself, and {name} would start a job of its own on each of them: leave "
            f"{name} and its options out (cpuft launch --np N -- train.py ...), or add --independent"
        )


def _is_own_python(program: str) -> bool:
    """Whether a program is the interpreter that runs cpuft, so that `python train.py` means `train.py`. A bare `python`
    or `python3` counts as that one, because it may be another one, or missing, on other hosts.
    """
    if program in ("python", "python3"):
        return True
    found = shutil.which(program) or ""
    return Path(found).name.startswith("python") and os.path.realpath(Path(found).parent) == os.path.realpath(
        Path(sys.executable).parent
    )


def wrap_script(command: tuple[str, ...], python: str, wrap: bool) -> tuple[str, ...]:
    """Return the command that runs a Python script under cpuft's checks, and with `wrap` also with the fast path. Any
    other command is returned unchanged, or refused with `wrap`. `python` is the one that runs the ranks.
    """
    if len(command) < 2 or command[0] != python or not (command[1] == "-m" or command[1].endswith(".py")):
        if wrap:
            raise CpuftError("--wrap takes a Python script: cpuft launch --wrap -- train.py ...")
        return command
    return ("-m", "cpuft.train.wrap" if wrap else "cpuft.rank.script", *command[1:])


def plan_bench(
    cluster: Cluster, config: LaunchConfig, bench: BenchConfig, run_dir: str, environ: Mapping[str, str]
) -> RunPlan:
    """Plan to make the run folder and to measure the communication backends: the ranks write RUN_DIR/comm.jsonl."""
    list_bench_cases(bench)
    if config.np < 2:
        raise CpuftError("bench comm measures the links between ranks: start two or more, e.g. --np 2")
    command = ("-m", "cpuft.comm.bench", f"{run_dir}/comm.jsonl", *format_arguments(bench))
    return plan_launch(cluster, config, run_dir, command, "auto", environ)


def plan_embedding(
    cluster: Cluster, config: LaunchConfig, request: PredictConfig, run_dir: str, environ: Mapping[str, str]
) -> RunPlan:
    """Plan to compute embeddings on the ranks, into the file of the run folder that `request.output` names.

    Asks the hosts which input files they do not have, and reads the local files to compute their checksums. Changes
    nothing. `run_dir` is the run folder on this machine.
    """
    work = cluster.work_dir(run_dir)
    request, bundles = pack_embedding(cluster, replace(request, output=f"{work}/{request.output}", overwrite=False))
    module, arguments = "cpuft.train.embed_on_hosts", format_arguments(request)
    threads = Setting(
        "TOKENIZERS_PARALLELISM", "true", "ranks tokenize texts while they compute, on all of their cores"
    )
    plan = plan_launch(cluster, config, work, ("-m", module, *arguments), "gloo", environ, extra=(threads,))
    plan = add_transfers(plan, bundles, gather_missing(bundles, cluster), cluster, run_dir)
    check = Step(
        "check the file and the model once, before any rank starts",
        (*module_command(cluster.python, module), "check", *arguments),
        _preparation_settings(cluster, work, environ),
        cluster.head,
    )
    return replace(plan, prepare=((check,),))


def _preparation_settings(cluster: Cluster, work: str, environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """Return the settings of a step on the head host that prepares a run, before its ranks start."""
    secrets = plan_secrets(cluster, work, environ)[0][0] if cluster.works_remotely else ()
    return (*_settings_on_hosts(cluster), *secrets)


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
    """Plan to make the run folder, and to start the ranks on all hosts with one mpirun or srun. Asks no host.

    The parts for input files, preparation and results are empty. `run_dir` is the run folder as the ranks see it.
    `command` is what each rank runs: a program, or "-m" and a module of cpuft, with arguments. `backend` determines the
    cores for communication. `extra` are further settings, in place of cpuft's usual ones of the same names; values that
    the user has set in `environ` are kept.
    """
    shared, per_host = plan_settings(cluster, config, backend, environ)
    secret_settings, without_secrets, notes = plan_secrets(cluster, run_dir, environ)
    per_host = tuple(settings + secret for settings, secret in zip(per_host, secret_settings))
    groups = tuple(
        mpirun.RankGroup(assignment.host.name, assignment.ranks, settings)
        for assignment, settings in zip(cluster.assignments, per_host)
    )
    shared = tuple(setting for setting in shared if setting.name not in {one.name for one in extra})
    shared += environment.keep_user_values(extra, environment.user_variables(environ))
    owner = resumed.owner + 1 if resumed else 1
    shared += (Setting(OWNER_VARIABLE, str(owner), "number of this start of the run"),)
    shared += (Setting("CPUFT_RUN_DIR", run_dir, "the run folder; files that a script writes there are fetched"),)
    if (
        notice := _find_notice(config.interruption_notice)
        if config.interruption_notice
        else cluster.access.entry.notice
    ):
        reason = "interruption notice, which the first rank of each host looks for every 5 s"
        shared += (Setting(NOTICE_VARIABLE, notice, reason),)
    shared += (Setting("CPUFT_RESUMED", "1", "the run continues from what is in $CPUFT_RUN_DIR"),) if resumed else ()
    logs = f"{run_dir}/logs"
    interface = _plan_interfaces(cluster, config.iface)[0].name
    rank_command = (*module_command(cluster.python, "cpuft.rank"), *pack_argv(command))
    command = mpirun.plan_mpirun(cluster.mpi, groups, shared, rank_command, logs, interface)
    own = mpirun.mpirun_settings(
        cluster.mpi, cluster.access.mpirun_options, cluster.as_root, cluster.bootstrap, len(cluster.assignments)
    )
    start = Step(
        f"start {config.np} ranks with {cluster.mpi.title}; output of rank N: {logs}/rank-N.out and .err",
        (*without_secrets, *mpirun.MAKE_KEY, *command),
        (*own, *_settings_on_hosts(cluster)),
        cluster.head,
    )
    if renewal := cluster.access.entry.renewal:
        every = f"every {RENEWAL_SECONDS:.0f} s"
        notes += (f"until the launch ends, this command renews the lease of each host {every}: {renewal}",)
    return RunPlan(
        make=((_plan_run_folder(cluster, run_dir, resumed),),),
        ranks=((start,),),
        notes=_plan_notes(cluster, shared, per_host, notes),
        command_prefixes=cluster.command_prefixes,
        resumed=bool(resumed),
        owner=owner,
    )


def _find_notice(place: str) -> str:
    """Return the place of an interruption notice: a URL unchanged, a file, which need not exist, as absolute path."""
    scheme, colons, _ = place.partition("://")
    if not colons:
        return os.path.abspath(place)
    if scheme not in ("http", "https"):
        raise CpuftError(f"--interruption-notice supports http and https, not {scheme}: give such a URL, or a file")
    return place


def _plan_run_folder(cluster: Cluster, run_dir: str, resumed: ResumedRun | None) -> Step:
    script = f"{PRIVATE}private {cluster.folder} && umask 077 && " if cluster.works_remotely else ""
    if resumed and resumed.fetched_from == cluster.head:
        script = f'{REMOVE}{script}remove {cluster.folder} "$1/logs" "$1"/logs-* && '
    script += 'mkdir -p "$0" && ' + (_REUSE_FOLDER if resumed else _MAKE_FOLDER)
    command = ("sh", "-c", script, os.path.dirname(run_dir), run_dir)
    return Step("make the run folder", command, host=cluster.head)


def plan_claim(run_dir: str, state: RunState, is_resumed: bool) -> Step:
    """Return the step that makes the run folder on this machine, with the state, which says the run's id."""
    make = 'mkdir -p "$1"' if is_resumed else 'mkdir -p "${1%/*}/" && mkdir "$1"'
    script = f'{make} && printf "%s" "$3" >"$2.new" && mv "$2.new" "$2"'
    words = ("sh", "-c", script, "claim", run_dir, f"{run_dir}/{STATE_FILE}", format_state(state))
    return Step("make the run folder on this machine", words)


def _settings_on_hosts(cluster: Cluster) -> tuple[Setting, ...]:
    """Return the settings that cpuft's own commands need on hosts with disks of their own."""
    reasons = {"XDG_CACHE_HOME": "the cache of the user who made the cluster"}
    return tuple(
        Setting(name, value, reasons.get(name, "so that Python finds cpuft on the hosts"))
        for name, value in cluster.access.entry.settings.items()
        if cluster.works_remotely
    )


def plan_settings(
    cluster: Cluster, config: LaunchConfig, backend: str, environ: Mapping[str, str]
) -> tuple[tuple[Setting, ...], tuple[tuple[Setting, ...], ...]]:
    """Return the environment variables of the ranks: those that all hosts share, and further ones of each host.

    Values that the user has set in `environ` are kept, and the user's own variables for MPI, oneCCL and OpenMP are
    added. `backend` determines the cores for communication.
    """
    environ = environment.user_variables(environ)
    placements, reason = _plan_placements(cluster, config, backend)
    interfaces = _plan_interfaces(cluster, config.iface)
    port = config.master_port or cluster.facts[0].free_port
    by_srun = cluster.mpi.name == "srun"
    shared = environment.shared_settings(interfaces[0], port, cluster.facts, config.np, by_srun)
    shared = environment.keep_user_values(shared, environ)
    hosts = []
    for facts, interface, ranks in zip(cluster.facts, interfaces, placements):
        disjoint = sum(len(set(rank.compute)) for rank in ranks) == len({c for rank in ranks for c in rank.compute})
        pinned_by_mpi = cluster.mpi.name == "intel" and disjoint
        settings = environment.host_settings(facts, interface, ranks, pinned_by_mpi, reason)
        settings = environment.keep_user_values(settings, environ)
        if "I_MPI_PIN_DOMAIN" in environment.user_set_names(settings):
            # The user pins the ranks, so they must not check that they are on the planned cores.
            settings = tuple(setting for setting in settings if setting.name != "CPUFT_CORES")
        hosts.append(settings)
    shared += environment.forwarded_settings(environ, shared + hosts[0])
    return shared, tuple(hosts)


def _plan_placements(
    cluster: Cluster, config: LaunchConfig, backend: str
) -> tuple[tuple[tuple[RankCores, ...], ...], str]:
    """Return which cores each rank of each host uses, and why communication got as many cores as it did."""
    comm_cores, reason = choose_comm_cores(cluster.cores_per_rank, config.np, backend)
    if config.comm_cores >= 0:
        comm_cores, reason = config.comm_cores, "as you set with --comm-cores"
    hosts = zip([one.ranks for one in cluster.assignments], spread_cores(cluster.facts))
    most = cluster.most_cores
    return tuple(plan_placement(cores[: ranks * most or None], ranks, comm_cores) for ranks, cores in hosts), reason


def _plan_interfaces(cluster: Cluster, wanted: str) -> tuple[Interface, ...]:
    """Return each host's network interface towards the others: `wanted`, or if it is "" the one that routes there."""
    if len(cluster.facts) == 1 and not wanted:
        return (Interface("lo", "127.0.0.1", "all ranks are on one host"),)
    return tuple(choose_interface(f, next(iter(f.routes)), wanted) for f in cluster.facts)


def _plan_notes(
    cluster: Cluster,
    shared: tuple[Setting, ...],
    per_host: tuple[tuple[Setting, ...], ...],
    other_notes: tuple[str, ...],
) -> tuple[str, ...]:
    """Return what the user should know: where the ranks run, and each setting with its reason."""
    notes = ["ranks: " + ", ".join(f"{a.ranks} on {a.host.name}" for a in cluster.assignments)]
    kept = sorted({name for settings in (shared, *per_host) for name in environment.user_set_names(settings)})
    notes += [f"variables kept as you set them: {', '.join(kept)}"] if kept else []
    notes += [f"{mpirun.KEY}: secret by which ranks recognize each other; made at the start, on no command line"]
    notes += other_notes
    notes += ["", "settings on every host:"] + [f"  {s.name}={s.value}  {s.reason}" for s in shared]
    for assignment, settings in zip(cluster.assignments, per_host):
        notes += ["", f"settings on {assignment.host.name}:"] + [f"  {s.name}={s.value}  {s.reason}" for s in settings]
    return tuple(notes)


def choose_run_dir(wanted: str, name: str) -> str:
    """Return the absolute path of a new run folder, without links, and do not make it.

    It is `wanted`, or if this is "" runs/NAME-YYYYMMDD-HHMMSS (local time) in the working directory, with -2 behind it
    or a higher number if this process is not the first to get that name.
    """
    # Hosts and caches know a run by its path, so the same folder must always have the same one.
    path = Path(os.path.realpath(wanted) if wanted else _find_unused_name(os.path.realpath(f"runs/{name}")))
    if path.exists():
        what = "the folder" if path.is_dir() else "a file"
        raise CpuftError(
            f"{what} {path} exists already, and a run needs a new folder: give --run-dir the name of a folder that "
            "does not exist yet, or leave --run-dir out, and cpuft makes a new folder in runs"
        )
    parent = next(folder for folder in path.parents if folder.exists())
    if not os.access(parent, os.W_OK | os.X_OK) or not parent.is_dir():
        raise CpuftError(f"{parent} is not writable: give another folder with --run-dir")
    free = shutil.disk_usage(parent).free
    if free < LEAST_FREE_BYTES:
        raise CpuftError(
            f"the disk of {parent} is full ({free >> 20} MB free, a run needs {LEAST_FREE_BYTES >> 20} MB): "
            f"make room, or give a folder on another disk with --run-dir"
        )
    return str(path)


_taken_name = ExitStack()
atexit.register(_taken_name.close)


def _find_unused_name(beginning: str) -> str:
    """Return a path with the time behind it that no other process on this machine gets in the same second."""
    _taken_name.close()  # of an earlier call, whose folder exists by now
    path = f"{beginning}-{time.strftime('%Y%m%d-%H%M%S')}"
    for name in itertools.chain([path], (f"{path}-{number}" for number in itertools.count(2))):
        with suppress(CpuftError):
            _taken_name.enter_context(lock_run(f"{name}#name"))
            if not os.path.lexists(name):
                return name
    raise AssertionError
