"""A whole run on one rank: process group, data, model, training, evaluation, saved model and record."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch

from cpuft.comm.backend_choice import Choice
from cpuft.comm.compression.table import resolve_compression, wire_type_name
from cpuft.compressions import COMPRESSIONS_WITH_FEEDBACK
from cpuft.config.conflicts import refuse_conflicts
from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.errors import CpuftError, counted
from cpuft.hardware import choose_precision
from cpuft.judge.simple_models import KINDS
from cpuft.kernels import kernel_status, plain_torch
from cpuft.rank.interruption import handle_interruption
from cpuft.rank.other_load import OtherLoad
from cpuft.rank.world import parse_world
from cpuft.record import EarlierMeasurements, Header, Line, RecordedRank, Writer, format_line
from cpuft.serialization import load, parse_json
from cpuft.train.baseline_process import BaselineProcess
from cpuft.train.checkpoint.folders import FOLDER, remove_all
from cpuft.train.checkpoint.resume import ResumePoint, resume
from cpuft.train.checkpoint.state import TrainingState
from cpuft.train.checkpoint.timing import Checkpoints
from cpuft.train.checkpoint.writer_thread import CheckpointWriter, choose_writer_ranks
from cpuft.train.data.archive import read_prepared
from cpuft.train.data.describe import describe_data
from cpuft.train.data.prepare import prepare
from cpuft.train.data.recipe import check_recipe
from cpuft.train.engines import check_engine
from cpuft.train.model import choose_lora
from cpuft.train.objective.table import make_objective
from cpuft.train.precision import drop_slow_bf16, format_products, measure_products, read_cpu
from cpuft.train.ranks import (
    broadcast_value,
    check_ranks,
    gather,
    join_process_group,
    prove_equal_parameters,
    share_random_weights,
)
from cpuft.train.reporter import Progress, RunReporter, make_header, make_resumed_line
from cpuft.train.results import save_results
from cpuft.train.run_warnings import RunWatch, find_early_warnings
from cpuft.train.setup import TrainingSetup, UpdateObserver
from cpuft.train.startup import resume_garbage_collection
from cpuft.train.tracker_process import run_trackers
from cpuft.train.training import train_and_evaluate, train_independently


def run(config: TrainConfig, worker: WorkerConfig, started: float, observers: Sequence[UpdateObserver] = ()) -> None:
    """Run this rank of a training from start to end: train, evaluate, save the model and the record. Collective.

    Rank 0 writes the record to `worker.run_dir`, if there is one, and the model if `config.save_model` is set. With
    `worker.independent` nothing is evaluated and no model is saved. `started` is the perf_counter value at which this
    process began.

    Raises CpuftError: the run is not possible, its loss is not finite, the ranks' parameters differ, or the disk is
    full while the model is saved. Raises TrainingInterrupted: the run was asked to stop, and a checkpoint was written.
    """
    refuse_conflicts(config)
    config, lora_reason = choose_lora(config)
    check_engine(config)
    world, cpu = parse_world(os.environ), read_cpu()
    precision = choose_precision(config.precision, config.emulate_bf16, cpu.flags)
    earlier = read_earlier_measurements(worker.measurements, world.size)
    with ExitStack() as stack:
        # Join the other ranks, and check that they form one job.
        wire_type = wire_type_name(resolve_compression(config.grad_compression, precision.name))
        before = choose_earlier_backend(earlier, world.size)
        group = join_process_group(world, config.backend, config.comm_timeout, wire_type, before)
        choice = stack.enter_context(group)
        ranks = check_ranks(world)
        kernels, kernel_warning = _find_kernels(config, ranks, worker.independent)
        if kernels == "absent" and not worker.independent:
            stack.enter_context(plain_torch())  # now, because layers keep the kernels with which they are made
        products = measure_products(precision.name)
        if config.precision == "auto":  # rank 0 decides, because ranks do not measure quite the same
            faster = broadcast_value(drop_slow_bf16(precision, cpu.flags, products, earlier.precision))
            if faster != precision:
                precision, products = faster, measure_products(faster.name)

        # Load data and model.
        prepared = read_prepared(worker.prepared or str(prepare(config)))
        check_recipe(config, prepared)
        objective = make_objective(config, prepared)
        torch.manual_seed(config.seed)
        model = objective.load_model(config)
        if not worker.independent:
            share_random_weights(model)
        setup = TrainingSetup(
            model,
            objective,
            config,
            prepared,
            precision.name,
            world,
            worker.independent,
            worker.global_batch,
            earlier.gradients,
        )
        setup.observers += observers

        # Show and record what is trained.
        header = replace(make_header(setup, worker, ranks, choice.backend, cpu, kernels), products=products)
        reporter = RunReporter(Progress(worker.progress, world.rank))
        progress = reporter.progress
        progress.show_start(header, f"{precision.reason}; {format_products(header.products)}", choice.reason)
        progress.show(describe_data(prepared, config))
        progress.show(f"fast path: {header.fast_path}")
        compression = setup.compression_reason and f"gradients as {setup.compression}: {setup.compression_reason}"
        early = find_early_warnings(setup.config, prepared)
        for warning in (lora_reason, kernel_warning, compression, *early):
            if warning:
                progress.show(warning)
        checkpoints, done = _begin(reporter, setup, worker, header, stack)
        if world.rank == 0:
            watch = RunWatch(setup.config, prepared, setup.updates, setup.global_batch, setup.best_metric)
            earlier_lines: list[Line] = [*reporter.earlier_steps, *reporter.earlier_evaluations]
            for line in earlier_lines:
                watch.add(line)  # what it warns of was shown before the run was resumed
            reporter.watch = watch
        if reporter.record and not worker.independent:
            stack.enter_context(run_trackers(config.report_to, worker.run_dir, progress.show))
        baseline = None
        if reporter.record and not worker.independent and prepared.kind in KINDS:
            baseline = stack.enter_context(closing(BaselineProcess(config, worker.is_measured, progress.show)))
            setup.observers.append(baseline)
        with setup.exchange.full_weights():
            prove_equal_parameters(model, "before the first step")
        resume_garbage_collection()

        # Train, then save the model and finish the record.
        train = train_independently if worker.independent else train_and_evaluate
        load = OtherLoad(header.ranks[world.rank].cpus)
        result = train(setup, reporter, checkpoints, done)
        save_results(setup, reporter, worker, header, result, baseline, load, started)
        finish(checkpoints, worker, world.local_rank)
        if result.difference:
            saved = "the model of rank 0 was saved" if config.save_model else "no model was to be saved"
            raise CpuftError(f"{result.difference}. The training is complete, and {saved}")


def _begin(
    reporter: RunReporter, setup: TrainingSetup, worker: WorkerConfig, header: Header, stack: ExitStack
) -> tuple[Checkpoints, int]:
    """Restore the newest checkpoint if the run is resumed; then open the record and prepare checkpoints. Collective.

    Checkpoints are written only in a run folder, with --engine torch, and by ranks that train together; then SIGUSR1
    asks the run to stop from here on. Returns the checkpoints, and the number of updates that are done.
    """
    config, world, exchange = setup.config, setup.world, setup.exchange
    is_resumed = worker.recorded_updates >= 0
    writes_checkpoints = bool(worker.run_dir) and not worker.independent and config.engine == "torch"
    root, point = Path(worker.run_dir, FOLDER), ResumePoint()
    needs_state = writes_checkpoints or is_resumed
    state = TrainingState(setup.model, setup.optimizer, exchange.shards) if needs_state else None
    if state and is_resumed:
        point = resume(state, root, world, header.options, header.data)
        exchange.reset()
        reporter.earlier_steps = point.record.steps if point.record else []
        reporter.earlier_evaluations = point.record.evaluations if point.record else []
    record_text = point.text or format_line(header) + "\n"
    if worker.run_dir and world.rank == 0:
        reporter.record = stack.enter_context(Writer(worker.run_dir, record_text if is_resumed else None))
        if not is_resumed:
            reporter.record.write(header)
    checkpoints = Checkpoints(exchange)
    if state and writes_checkpoints:
        writer = None
        if world.rank in choose_writer_ranks(gather(world.local_rank)):
            every = config.checkpoint_every or math.inf
            writer = CheckpointWriter(state, root, world.rank, every)
            writer.begin(record_text.splitlines(), point.update)
        reporter.checkpoint_writer = writer
        is_on_several_hosts = world.size > world.local_size
        keeps_final = worker.keep_checkpoints and is_on_several_hosts
        checkpoints = Checkpoints(exchange, writer, state, root, keeps_final)
        handle_interruption()
    if is_resumed:
        line = make_resumed_line(header, worker, point.update)
        reporter.progress.show_resumption(line, setup.updates)
        reporter.add(line)
    return checkpoints, point.update


def finish(checkpoints: Checkpoints, worker: WorkerConfig, local_rank: int) -> None:
    """Wait for the last checkpoint and for all ranks; then the first rank of each host removes its checkpoints, unless
    the launcher still has to fetch the results (`worker.keep_checkpoints`). Collective.
    """
    checkpoints.finish()
    # Where the launcher still has to fetch the results, the checkpoints stay until it has.
    if worker.run_dir and local_rank == 0 and not worker.keep_checkpoints:
        remove_all(Path(worker.run_dir, FOLDER))


def _find_kernels(config: TrainConfig, ranks: list[RecordedRank], independent: bool) -> tuple[str, str]:
    """Compile or load the C++ kernels on every rank, before anything is timed. Return ("compiled" or "absent", a
    warning or ""), or ("", "") if neither layers nor gradients may need kernels. Collective.

    Ranks that train together must round alike in an update, or their parameters drift apart. So if a rank has no
    kernels, the caller lets no rank use them.
    """
    may_encode = len(ranks) > 1 and config.grad_compression in ("auto", *COMPRESSIONS_WITH_FEEDBACK)
    status = kernel_status() if config.uses_fast_path or may_encode else ""
    statuses, capabilities = zip(*gather((status, torch.backends.cpu.get_cpu_capability())))
    hosts = [rank.host for rank in ranks]
    kernels, warning = _describe_kernels(statuses, hosts, independent) if status else ("", "")
    # With other exchanges, an update is made by one rank, or ranks differ on purpose.
    is_same_update = not independent and config.sync_every == 1 and config.shard != "optimizer"
    if is_same_update and not (config.uses_fast_path and kernels == "compiled"):
        _check_capabilities(capabilities, hosts)
    return kernels, warning


def _check_capabilities(capabilities: Sequence[str], hosts: Sequence[str]) -> None:
    """Raise CpuftError if torch uses other vector instructions on some hosts: its AdamW would round differently."""
    hosts_of = {one: sorted({h for c, h in zip(capabilities, hosts) if c == one}) for one in sorted(set(capabilities))}
    if len(hosts_of) > 1:
        found = ", ".join(f"{one} on {' and '.join(names)}" for one, names in hosts_of.items())
        least = min(hosts_of, key=["DEFAULT", "AVX2", "AVX512", *hosts_of].index)
        raise CpuftError(
            f"torch computes with {found}, so the ranks would round their updates differently: export "
            f"ATEN_CPU_CAPABILITY={least.lower()} for all ranks, or let all ranks train with cpuft's compiled kernels"
        )


def _describe_kernels(statuses: Sequence[str], hosts: Sequence[str], independent: bool = False) -> tuple[str, str]:
    """Return what the header records, and a warning or "", from each rank's status: `on`, or `off: ` and the reason."""
    missing = {host: status for host, status in zip(hosts, statuses) if status != "on"}
    if not missing:
        return "compiled", ""
    reasons = ", ".join(dict.fromkeys(status.removeprefix("off: ") for status in missing.values()))
    where = f"not used on {', '.join(missing)} ({reasons})"
    if "on" in statuses and not independent:
        where += ", and so by no other rank, because all ranks must round alike"
    slower = "training without them is slower, on x86-64 2 to 3 times"
    return "absent", f"warning: the compiled kernels are {where}: {slower}"


def read_earlier_measurements(text: str, ranks: int) -> EarlierMeasurements:
    """Return what was measured when the run began, by the launcher's JSON ("": `ranks` only). ValueError: not valid."""
    return load(EarlierMeasurements, parse_json(text), "--measurements") if text else EarlierMeasurements(ranks)


def choose_earlier_backend(earlier: EarlierMeasurements, ranks: int) -> Choice | None:
    """Return the backend that `auto` chose when the run began, with the reason; None if it chose none."""
    if not earlier.backend:
        return None
    others = f", on {counted(earlier.ranks, 'rank')}" if earlier.ranks != ranks else ""
    return Choice(earlier.backend, f"as measured when the run began{others}")
