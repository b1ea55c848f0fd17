"""Plan a run: from a job and the facts of the hosts to the commands and environment settings of every rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from cpuft.argv import module_command, pack_argv
from cpuft.config.bench import BenchConfig, list_bench_cases
from cpuft.config.conflicts import check_engine_for_launch, refuse_conflicts
from cpuft.config.fields import format_arguments, option_names
from cpuft.config.launch import LaunchConfig, ScriptConfig
from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.errors import CpuftError
from cpuft.files import PRIVATE
from cpuft.hardware import choose_precision, effective_flags
from cpuft.host_memory import HostMemory, RunMemory, format_run_memory
from cpuft.hosts.cluster import Cluster
from cpuft.launch import mpirun
from cpuft.launch.fetched_checkpoints import choose_copy_seconds, pack_checkpoints
from cpuft.launch.inputs import (
    Bundle,
    gather_missing,
    pack_embedding,
    pack_files,
    pack_script,
    plan_data_copies,
    plan_sending,
)
from cpuft.launch.lease_renewal import RENEWAL_SECONDS
from cpuft.launch.rank_variables import (
    keep_user_values,
    plan_interfaces,
    plan_settings,
    script_settings,
    user_variables,
)
from cpuft.launch.results import plan_partial_cleanup, plan_results
from cpuft.launch.resume import CHECKPOINTS, PREPARED_DATA, HostCopy, ResumedRun, check_newest_checkpoint
from cpuft.launch.run_folder import plan_claim, plan_run_folder
from cpuft.launch.run_state import begin_state
from cpuft.launch.script_command import wrap_script
from cpuft.launch.secret_files import plan_secrets
from cpuft.plans import RunPlan, Setting, Step
from cpuft.rank.call import CALL_FILE, CALL_FOLDER
from cpuft.rank.interruption import NOTICE_VARIABLE
from cpuft.rank.process import OWNER_VARIABLE


@dataclass(frozen=True)
class Job:
    """What is run: cpuft's own training, or a user's script."""

    run_dir: str
    """Absolute path of the run folder on this machine."""
    config: LaunchConfig
    train: TrainConfig
    script: tuple[str, ...] = ()
    """The script's command, from `plan_script`; empty for cpuft's own training."""
    options: ScriptConfig = ScriptConfig()
    """Options of the script's launch."""
    progress: str = "lines"
    call_file: str = ""
    """This machine's file with a function of the user's, if the script is the module that calls it; else empty."""
    allowed_paths: frozenset[str] | None = None
    """Local files and folders that may be sent to hosts, if `train` comes from a record; None if the user gave it."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the ranks inherit."""


def plan_run(job: Job, cluster: Cluster, resumed: ResumedRun | None = None) -> RunPlan:
    """Plan a job on these hosts: a new run, or with `resumed` its next attempt. Reads the input files here, and asks
    the hosts which of them they lack. Changes nothing. Raises CpuftError: options do not fit, files or hosts cannot be
    used, or the newest checkpoint would not be used.
    """
    run_dir, config, environ = job.run_dir, job.config, job.environ
    work = cluster.work_dir(run_dir)
    if resumed:
        check_newest_checkpoint(resumed.host_copies, cluster, run_dir)
    if job.script:
        command, bundles = pack_script(cluster, job.script)
        command = command[1:] if job.call_file else wrap_script(command, cluster.python, job.options.wrap)
        extra = script_settings(config.np, job.options.independent)
        plan = plan_ranks(cluster, config, work, command, "gloo", environ, resumed, extra)
        flags = [f"--{name}" for name in option_names(ScriptConfig) if getattr(job.options, name)]
        words = ("python", *job.script[1:]) if job.script[0] == sys.executable else job.script
        plan = replace(plan, script_words=(*flags, "--", *words))
    else:
        train, bundles = pack_files(cluster, job.train, allowed=job.allowed_paths)
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
    """Return the plan with a stage that copies the call of a function, this machine's `call_file`, into the run folder
    on the hosts, `work`, before the ranks start: on each host that has a disk of its own, else on the head host only.
    """
    names = list(cluster.hosts) if cluster.has_own_disks else [cluster.head]
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
    """Return the plan with what is sent to the hosts, what is fetched, and what is removed from the hosts. `missing` is
    the answer of `gather_missing`, `run_dir` is on this machine, and `host_copies` are those of earlier attempts.
    `prepared_hosts` have the prepared examples. Raises CpuftError: files to send are no longer here.
    """
    work = cluster.work_dir(run_dir)
    copies = plan_data_copies(cluster, work, prepared_hosts) if plan.prepare else ()
    others = {
        copy.host.name: cluster.access.transport.command_prefix(copy.host)
        for copy in host_copies
        if copy.exists and cluster.works_remotely
    }
    claims, former = cluster.works_remotely and plan.make, sorted(others.keys() - cluster.hosts)
    return replace(
        plan,
        claim=((plan_claim(run_dir, begin_state(cluster, run_dir, plan.owner), plan.resumed),),) if claims else (),
        inputs=plan_sending(bundles, missing, cluster),
        prepare=(*(() if cluster.head in prepared_hosts else plan.prepare), *copies),
        results=plan_results(cluster, work, run_dir, former, plan.resumed and bool(plan.make)),
        partial_cleanup=plan_partial_cleanup(cluster, work) if cluster.works_remotely else (),
        command_prefixes=others | plan.command_prefixes,
    )


def find_prepared_hosts(resumed: ResumedRun, cluster: Cluster) -> set[str]:
    """Return the names of the hosts that have the prepared examples of an automatic restart. For a run that the user
    resumes, none: the examples are prepared again, because the files with them may have changed.
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
    work: str,
    progress: str,
    environ: Mapping[str, str],
    independent: bool = False,
    resumed: ResumedRun | None = None,
    is_measured: bool = False,
) -> RunPlan:
    """Plan to make the run folder, to prepare the examples once, and then to train. Asks no host.

    The plan neither sends nor fetches files: `add_transfers` adds that. `work` is the run folder as the ranks see it.
    `independent` means that each rank trains by itself, to measure what the hosts can do without communication, and
    `is_measured` that nothing may run beside it. Raises CpuftError: options exclude each other or do not fit the hosts.
    """
    train, precision = check_training(cluster, train, environ)
    check_engine_for_launch(train.engine, bool(config.interruption_notice), independent)
    prepared = f"{work}/{PREPARED_DATA}"
    worker = WorkerConfig(
        work,
        prepared,
        progress,
        independent,
        cluster.facts[0].cpu_quota,
        # Until the launcher has fetched the results, the checkpoints on a second host are the only other copy.
        keep_checkpoints=cluster.works_remotely,
        simulated=cluster.is_simulated,
        is_measured=is_measured,
    )
    if resumed:
        worker = replace(worker, recorded_updates=resumed.updates, global_batch=resumed.global_batch)
        worker = replace(worker, stopped_at=resumed.stopped_at, restart_reason=resumed.restart_reason)
        if resumed.measured and resumed.hostnames.issuperset(facts.hostname for facts in cluster.facts):
            worker = replace(worker, measurements=json.dumps(asdict(resumed.measured)))
    command = ("-m", "cpuft.train", *format_arguments(train), *format_arguments(worker))
    # In an automatic restart, ranks of the last attempt may not be gone yet, and the model is known to fit.
    is_restart = resumed and resumed.restart_reason
    memory = () if is_restart else _describe_host_memory(cluster, precision, independent)
    prepare = Step(
        "check and tokenize the examples once, before any rank starts",
        (*module_command(cluster.python, "cpuft.train.data.prepare"), prepared, *memory, *format_arguments(train)),
        _preparation_settings(cluster, work, environ),
        cluster.head,
    )
    plan = plan_ranks(cluster, config, work, command, train.backend, environ, resumed)
    return replace(plan, prepare=((prepare,),))


def check_training(cluster: Cluster, train: TrainConfig, environ: Mapping[str, str]) -> tuple[TrainConfig, str]:
    """Return the training options, with "fp32" for "auto" if only some hosts have bf16 instructions, which
    ONEDNN_MAX_CPU_ISA in `environ` can hide, and the precision in which all ranks train: "bf16", "fp32" or "int8".
    Raises CpuftError: options exclude each other or have no effect, or a host lacks bf16 for --precision bf16.
    """
    refuse_conflicts(train)
    limit = environ.get("ONEDNN_MAX_CPU_ISA", "")
    first, *others = {
        choose_precision(train.precision, train.emulate_bf16, effective_flags(facts.cpu_flags, limit)).name
        for facts in cluster.facts
    }
    return (replace(train, precision="fp32"), "fp32") if others else (train, first)


def _describe_host_memory(cluster: Cluster, precision: str, independent: bool) -> tuple[str, ...]:
    hosts = []
    for assignment, facts in zip(cluster.assignments, cluster.facts):
        free = min(facts.memory_free, facts.memory_left) if facts.memory_left >= 0 else facts.memory_free
        hosts.append(HostMemory(assignment.host.name, assignment.ranks, free, facts.boot_id, facts.memory_free))
    return format_run_memory(RunMemory(tuple(hosts), precision, independent))


def plan_bench(
    cluster: Cluster, config: LaunchConfig, bench: BenchConfig, work: str, environ: Mapping[str, str]
) -> RunPlan:
    """Plan to measure backends into WORK/comm.jsonl, where `work` is the run folder as the ranks see it. Raises
    CpuftError: an option is wrong, or `config.np` is below 2.
    """
    list_bench_cases(bench)
    if config.np < 2:
        raise CpuftError("bench comm measures the links between ranks: start two or more, e.g. --np 2")
    command = ("-m", "cpuft.comm.bench", f"{work}/comm.jsonl", *format_arguments(bench))
    return plan_ranks(cluster, config, work, command, "auto", environ)


def plan_embedding(
    cluster: Cluster, config: LaunchConfig, request: PredictConfig, run_dir: str, environ: Mapping[str, str]
) -> RunPlan:
    """Plan to compute embeddings on the ranks, into the file of the run folder that `request.output` names. `run_dir`
    is the run folder on this machine. Reads input files and asks hosts as `plan_run`, and raises the same.
    """
    work = cluster.work_dir(run_dir)
    request, bundles = pack_embedding(cluster, replace(request, output=f"{work}/{request.output}", overwrite=False))
    module, arguments = "cpuft.train.embed_on_hosts", format_arguments(request)
    threads = Setting(
        "TOKENIZERS_PARALLELISM", "true", "ranks tokenize texts while they compute, on all of their cores"
    )
    plan = plan_ranks(cluster, config, work, ("-m", module, *arguments), "gloo", environ, extra=(threads,))
    plan = add_transfers(plan, bundles, gather_missing(bundles, cluster), cluster, run_dir)
    check = Step(
        "check the file and the model once, before any rank starts",
        (*module_command(cluster.python, module), "check", *arguments),
        _preparation_settings(cluster, work, environ),
        cluster.head,
    )
    return replace(plan, prepare=((check,),))


def _preparation_settings(cluster: Cluster, work: str, environ: Mapping[str, str]) -> tuple[Setting, ...]:
    if not cluster.works_remotely:
        return ()
    return (*cluster.access.settings, *plan_secrets(cluster, work, environ)[0][0])


def plan_ranks(
    cluster: Cluster,
    config: LaunchConfig,
    work: str,
    command: tuple[str, ...],
    backend: str,
    environ: Mapping[str, str],
    resumed: ResumedRun | None = None,
    extra: tuple[Setting, ...] = (),
) -> RunPlan:
    """Plan to make the run folder, and to start the ranks on all hosts with one mpirun or srun. Asks no host.

    `work` is the run folder as the ranks see it. `command` is what each rank runs: a program, or "-m" and a module
    of cpuft, with arguments. `backend` determines the cores for communication. `extra` are further settings, in place
    of cpuft's usual ones of the same names; values that the user has set in `environ` are kept. Raises CpuftError: a
    host lacks the interface of --iface, or any to the others, or another option cannot be used.
    """
    shared, per_host = plan_settings(cluster, config, backend, environ)
    secret_settings, without_secrets, notes = plan_secrets(cluster, work, environ)
    per_host = tuple(settings + secret for settings, secret in zip(per_host, secret_settings))
    groups = tuple(zip(cluster.assignments, per_host))
    shared = tuple(setting for setting in shared if setting.name not in {one.name for one in extra})
    shared += keep_user_values(extra, user_variables(environ))
    owner = resumed.owner + 1 if resumed else 1
    shared += (Setting(OWNER_VARIABLE, str(owner), "number of this start of the run"),)
    shared += (Setting("CPUFT_RUN_DIR", work, "the run folder; files that a script writes there are fetched"),)
    if notice := _find_notice(config.interruption_notice) or cluster.access.entry.notice:
        reason = "interruption notice, which the first rank of each host looks for every 5 s"
        shared += (Setting(NOTICE_VARIABLE, notice, reason),)
    shared += (Setting("CPUFT_RESUMED", "1", "the run continues from what is in $CPUFT_RUN_DIR"),) if resumed else ()
    logs = f"{work}/logs"
    interface = plan_interfaces(cluster, config.iface)[0].name
    rank_command = (*module_command(cluster.python, "cpuft.rank"), *pack_argv(command))
    command = mpirun.plan_mpirun(cluster.mpi, groups, shared, rank_command, logs, interface)
    own = mpirun.mpirun_settings(
        cluster.mpi, cluster.access.mpirun_options, cluster.as_root, cluster.bootstrap, len(cluster.assignments)
    )
    start = Step(
        f"start {config.np} ranks with {cluster.mpi.title}; output of rank N: {logs}/rank-N.out and .err",
        (*without_secrets, *mpirun.MAKE_KEY, *command),
        (*own, *(cluster.access.settings if cluster.works_remotely else ())),
        cluster.head,
    )
    if renewal := cluster.access.entry.renewal:
        every = f"every {RENEWAL_SECONDS:.0f} s"
        notes += (f"until the launch ends, this command renews the lease of each host {every}: {renewal}",)
    return RunPlan(
        make=((plan_run_folder(cluster, work, resumed),),),
        ranks=((start,),),
        notes=_plan_notes(cluster, shared, per_host, notes),
        command_prefixes=cluster.command_prefixes,
        resumed=bool(resumed),
        owner=owner,
    )


def _find_notice(place: str) -> str:
    scheme, colons, _ = place.partition("://")
    if not colons:
        return place and os.path.abspath(place)
    if scheme not in ("http", "https"):
        raise CpuftError(f"--interruption-notice supports http and https, not {scheme}: give such a URL, or a file")
    return place


def _plan_notes(
    cluster: Cluster,
    shared: tuple[Setting, ...],
    per_host: tuple[tuple[Setting, ...], ...],
    other_notes: tuple[str, ...],
) -> tuple[str, ...]:
    notes = ["ranks: " + ", ".join(f"{a.ranks} on {a.host.name}" for a in cluster.assignments)]
    kept = sorted({one.name for settings in (shared, *per_host) for one in settings if one.from_user})
    notes += [f"variables kept as you set them: {', '.join(kept)}"] if kept else []
    notes += [f"{mpirun.KEY}: secret by which ranks recognize each other; made at the start, on no command line"]
    notes += other_notes
    notes += ["", "settings on every host:"] + [f"  {s.name}={s.value}  {s.reason}" for s in shared]
    for assignment, settings in zip(cluster.assignments, per_host):
        notes += ["", f"settings on {assignment.host.name}:"] + [f"  {s.name}={s.value}  {s.reason}" for s in settings]
    return tuple(notes)
