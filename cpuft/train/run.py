"""A whole run on one rank: data, model, proof, training, evaluation, model and record."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import resource
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from cpuft.comm import take_traffic
from cpuft.comm.compression.table import resolve_compression, wire_type_name
from cpuft.config import COMPRESSIONS_WITH_FEEDBACK, TrainConfig, WorkerConfig, refuse_conflicts
from cpuft.hardware import DECIDING_FLAGS, Cpu, Precision, choose_precision, effective_flags, parse_cpuinfo
from cpuft.rank.interruption import handle_interruption
from cpuft.rank.world import parse_world
from cpuft.record import (
    PHASES,
    Footer,
    Header,
    Line,
    RecordedRank,
    ResumedLine,
    StepLine,
    Writer,
    drop_warm_up,
    format_line,
)
from cpuft.train.checkpoint.files import FOLDER, remove_all
from cpuft.train.checkpoint.final_model import save_model
from cpuft.train.checkpoint.policy import Keeper, Past, find_keepers, resume
from cpuft.train.checkpoint.state import State
from cpuft.train.data.archive import Prepared, read_prepared
from cpuft.train.data.prepare import describe_data, prepare, warn_of_unknown
from cpuft.train.engines import check_engine, name_packages
from cpuft.train.evaluate import evaluate
from cpuft.train.exchange.compression import count_sent_numbers
from cpuft.train.fast.kernels import kernel_status
from cpuft.train.interruption import obey
from cpuft.train.loop import Loop, settle_messages, train
from cpuft.train.lora import check_lora
from cpuft.train.model import count_parameters, name_model
from cpuft.train.objective.table import make_objective
from cpuft.train.optimizer import describe_fast_path
from cpuft.train.precision import format_products
from cpuft.train.process_group import gather, process_group, prove_equal_parameters, prove_one_job
from cpuft.train.recall import find_products, recall, recall_backend
from cpuft.train.reporter import Progress
from cpuft.train.startup import settle

_EARLY_PROOFS = (2, 20)
"""Updates of this start after which ranks must have equal parameters: what makes them differ mostly does so at once,
and is to end a run before its hours are lost. Not the first update: with a warm-up its learning rate is 0."""
_PACKAGES = ("cpuft", "torch", "transformers", "tokenizers", "numpy")

Trained = tuple[list[StepLine], list[dict[str, float]], str]
"""Its steps, each rank's seconds of a steady step by phase, and the checksum of the parameters."""


@dataclass
class Story:
    """What a run tells as it goes on: to who watches, to its record on rank 0, and to a rank's checkpoints."""

    progress: Progress
    writer: Writer | None = None
    keeper: Keeper | None = None
    keeps: bool = False
    """Whether some ranks write checkpoints, this one or others."""
    past: list[StepLine] = field(default_factory=list)
    """Steps before it was resumed."""

    def add(self, line: Line) -> None:
        """Record a line."""
        if self.writer:
            self.writer.write(line)
        if self.keeper:
            self.keeper.note(line)


def run(config: TrainConfig, worker: WorkerConfig, started: float) -> None:
    """Train as configured; `started` is the perf_counter value at which this process began."""
    for check in (refuse_conflicts, check_engine, check_lora):
        check(config)
    cpu = read_cpu()
    world, precision = parse_world(os.environ), choose_precision(config.precision, config.emulate_bf16, cpu.flags)
    measured = recall(worker.measured, world.size)
    with ExitStack() as stack:
        sent_as = wire_type_name(resolve_compression(config.grad_compression, precision.name))
        known = recall_backend(measured, world.size)
        choice = stack.enter_context(process_group(world, config.backend, config.comm_timeout, sent_as, known))
        ranks = prove_one_job(world)
        kernels, why_slow = find_kernels(config, ranks)
        prepared = read_prepared(worker.prepared or str(prepare(config)))
        objective = make_objective(config, prepared)
        torch.manual_seed(config.seed)
        model = objective.load_model(config)
        story = Story(stack.enter_context(Progress(worker.progress, world.rank)))
        header = make_header(config, prepared, precision, choice.backend, ranks, count_parameters(model), cpu)
        header = replace(header, products=find_products(header, measured), kernels=kernels)
        apart, batch = worker.apart, worker.global_batch
        loop = Loop(model, objective, config, prepared, precision.name, world, apart, batch, measured.gradients)
        travels = count_sent_numbers(
            model, objective, config, prepared
        )  # after Loop, which looks at the word embedding
        header = replace(header, apart=worker.apart, gradients=loop.gradients, global_batch=loop.global_batch)
        header = replace(header, fast_path=describe_fast_path(model, config))
        header = replace(header, travels=travels, rows=len(prepared.train), cores_allowed=worker.cores_allowed)
        story.progress.begin(header, f"{precision.reason}; {format_products(header.products)}", choice.reason)
        story.progress.note(describe_data(prepared, config))
        story.progress.note(f"fast path: {header.fast_path}")
        if unknown := warn_of_unknown(prepared):
            story.progress.note(unknown)
        if why_slow:
            story.progress.note(why_slow)
        if loop.rung_reason:
            story.progress.note(f"gradients as {loop.gradients}: {loop.rung_reason}")
        begin(story, loop, worker, header, stack)
        with loop.exchange.full_weights():
            prove_equal_parameters(model, "before the first step")
        settle()
        steps, phases, checksum = (train_apart if worker.apart else train_together)(loop, story, worker)
        peak = max(gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
        with loop.exchange.full_weights():
            if story.writer and config.save_model and not worker.apart:
                source = config.tokenizer or config.model
                save_model(model, source, worker.run_dir, config.lora_merge, prepared.tokenizer)
        if story.writer:
            story.writer.write(make_footer(steps, peak, time.perf_counter() - started, checksum, phases))
        end(story, loop, worker)


def begin(story: Story, loop: Loop, worker: WorkerConfig, header: Header, stack: ExitStack) -> None:
    """Go on where the run had come to, if it is one to go on with; then open the record and what keeps checkpoints."""
    config, world, past = loop.config, loop.world, Past()
    keeps = bool(worker.run_dir) and not worker.apart and config.engine == "torch"
    root = Path(worker.run_dir, FOLDER)
    parts = loop.exchange.shards
    state = State(loop.model, loop.optimizer, parts) if keeps or worker.resume >= 0 else None
    if state and worker.resume >= 0:
        settle_messages(loop)
        past = resume(state, root, world, header.options, header.data)
        loop.exchange.reset()
        loop.done, story.past = past.update, past.record.steps if past.record else []
    lines = past.text or format_line(header) + "\n"
    if worker.run_dir and world.rank == 0:
        begun = None if worker.resume < 0 else lines
        story.writer = stack.enter_context(Writer(worker.run_dir, begun))
        if begun is None:
            story.writer.write(header)
    if state and keeps:
        story.keeps = True
        if world.rank in find_keepers(header.ranks):
            every = config.checkpoint_every or math.inf
            story.keeper = Keeper(state, root, world.rank, every, loop.exchange.contribute_to_checkpoint)
            story.keeper.begin(lines.splitlines(), past.update)
        obey(loop, story.keeper, story.add)
        handle_interruption()
    if worker.resume >= 0:
        line = make_resumed_line(header, past, worker)
        story.progress.resumed(line, loop.updates)
        story.add(line)


def make_resumed_line(header: Header, past: Past, worker: WorkerConfig) -> ResumedLine:
    """That a run goes on, for its record."""
    reset = []
    if header.options["sync_every"] > 1:
        reset.append("the outer momentum, and moments of all ranks but the one that kept its own")
    elif (header.gradients or header.options["grad_compression"]) in COMPRESSIONS_WITH_FEEDBACK:
        reset.append("what was left to be sent (error feedback)")
    return ResumedLine(
        step=past.update,
        repeated=max(0, worker.resume - past.update),
        world_size=header.world_size,
        ranks=header.ranks,
        backend=header.backend,
        precision=header.precision,
        reset=", ".join(reset),
        started=header.started,
        lost_seconds=round(max(0.0, time.time() - worker.since), 1) if worker.since else 0.0,
        because=worker.because,
    )


def end(story: Story, loop: Loop, worker: WorkerConfig) -> None:
    """Remove the checkpoints once the model and the record are whole, unless the launcher still has to fetch these."""
    if story.keeper:
        story.keeper.end()
    dist.barrier()
    if worker.run_dir and loop.world.local_rank == 0 and not worker.keep_checkpoints:
        remove_all(Path(worker.run_dir, FOLDER))


def keep_final_state(loop: Loop, story: Story, worker: WorkerConfig) -> None:
    """Write a last checkpoint after the last update, on two hosts, while the model is evaluated and saved.

    If the first host is lost before the launcher has fetched the results, the run is evaluated and saved again from
    this checkpoint, and no update is repeated. On one host, losing the host would lose the checkpoint as well.
    """
    on_several_hosts = loop.world.size > loop.world.local_size
    if not (story.keeps and worker.keep_checkpoints and on_several_hosts):
        return
    if story.keeper:
        story.keeper.keep(loop.updates, skip_if_busy=False)
    else:
        loop.exchange.contribute_to_checkpoint()


def train_together(loop: Loop, story: Story, worker: WorkerConfig) -> Trained:
    """Train and evaluate as one job, recorded as it goes."""
    steps: list[StepLine] = []
    for line in train(loop):
        steps.append(line)
        story.progress.step(line, loop.updates)
        story.add(line)
        # Between two averages of parameters (--sync-every) ranks differ by intention.
        if line.step - loop.done in _EARLY_PROOFS and loop.config.sync_every == 1 and line.step < loop.updates:
            with loop.exchange.full_weights():
                prove_equal_parameters(loop.model, f"after update {line.step}")
            take_traffic()  # no step's
    keep_final_state(loop, story, worker)
    with loop.exchange.full_weights():
        checksum = prove_equal_parameters(loop.model, "after the last step")
    story.progress.evaluating(sum(len(rows) for rows in loop.prepared.validation.values()))
    evaluation = evaluate(loop, loop.updates)
    story.progress.evaluated(evaluation)
    story.add(evaluation)
    return story.past + steps, gather(average_phases(steps)), checksum


def train_apart(loop: Loop, story: Story, worker: WorkerConfig) -> Trained:
    """Train each rank for itself from the same moment on, recorded at the end; there is no one model to evaluate."""
    own: list[StepLine] = []
    for line in train(loop):
        own.append(line)
        story.progress.step(line, loop.updates)
    steps = merge_steps(gather(own))
    for line in steps:
        story.add(line)
    return steps, gather(average_phases(own)), ""


def read_cpu() -> Cpu:
    """This CPU, with the flags that oneDNN may use."""
    cpu = parse_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"), platform.machine())
    return cpu._replace(flags=effective_flags(cpu.flags, os.environ.get("ONEDNN_MAX_CPU_ISA", "")))


def find_kernels(config: TrainConfig, ranks: list[RecordedRank]) -> tuple[str, str]:
    """Compile or load the C++ kernels on every rank, before anything is timed.

    Returns
    -------
    tuple[str, str]
        `Header.kernels`, and a line for the user: which hosts have no kernels, why, and what to do; empty if all have.
    """
    if not config.fast_path or config.compile or config.engine != "torch":
        return "", ""
    return describe_kernels(gather(kernel_status()), [rank.host for rank in ranks])


def describe_kernels(statuses: list[str], hosts: list[str]) -> tuple[str, str]:
    """What `find_kernels` returns, from each rank's `kernel_status` and host."""
    missing = {host: status for host, status in zip(hosts, statuses) if status != "on"}
    if not missing:
        return "compiled", ""
    reasons = ", ".join(dict.fromkeys(status.removeprefix("off: ") for status in missing.values()))
    slower = "training without them is 2 to 3 times slower"
    return "absent", f"warning: the compiled kernels are not used on {', '.join(missing)} ({reasons}): {slower}"


def make_header(
    config: TrainConfig,
    prepared: Prepared,
    precision: Precision,
    backend: str,
    ranks: list[RecordedRank],
    parameters: int,
    cpu: Cpu,
) -> Header:
    """What this run is, for the record."""
    packages = (*_PACKAGES, *name_packages(config.engine))
    return Header(
        task=config.task,
        model=name_model(config),
        data=prepared.checksum,
        options=dict(vars(config)),
        world_size=len(ranks),
        ranks=ranks,
        backend=backend,
        precision=precision.name,
        cpu_model=cpu.model,
        cpu_flags=[flag for flag in DECIDING_FLAGS if flag in cpu.flags],
        versions={"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages},
        global_batch=config.batch_size * config.gradient_accumulation * len(ranks),
        parameters=parameters,
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def merge_steps(ranks: list[list[StepLine]]) -> list[StepLine]:
    """The steps of ranks that trained apart, as one run's: rows of all, the mean of their seconds and losses."""
    return [
        replace(
            lines[0],
            loss=statistics.fmean(line.loss for line in lines),
            samples=sum(line.samples for line in lines),
            tokens=sum(line.tokens for line in lines),
            step_seconds=statistics.fmean(line.step_seconds for line in lines),
            compute_seconds=[line.step_seconds for line in lines],
        )
        for lines in zip(*ranks)
    ]


def average_phases(steps: list[StepLine]) -> dict[str, float]:
    """Seconds of a steady step by phase."""
    steady = drop_warm_up(steps)
    return {
        name: statistics.fmean(getattr(line, f"{name}_seconds") for line in steady) if steady else 0.0
        for name in PHASES
    }


def make_footer(
    steps: list[StepLine],
    peak_memory_bytes: int,
    total_seconds: float,
    checksum: str,
    phases: list[dict[str, float]],
) -> Footer:
    """Sums over all steps; the steady rate leaves out the first tenth of them."""
    steady = drop_warm_up(steps)
    seconds = sum(line.step_seconds for line in steps)
    steady_seconds = sum(line.step_seconds for line in steady)
    samples = sum(line.samples for line in steps)
    return Footer(
        train_seconds=seconds,
        samples=samples,
        samples_per_second=samples / seconds if seconds else 0.0,
        steady_samples_per_second=sum(line.samples for line in steady) / steady_seconds if steady_seconds else 0.0,
        tokens_per_second=sum(line.tokens for line in steps) / seconds if seconds else 0.0,
        peak_memory_bytes=peak_memory_bytes,
        total_seconds=total_seconds,
        checksum=checksum,
        bytes_per_step=sum(line.bytes_sent for line in steps) / len(steps) if steps else 0.0,
        phases=phases,
    )
