"""Estimate how much memory a rank will need, and check that it fits on its host before any rank starts.

No layer is run for it: that would take longer than all other preparations, and the head host may not have the kernels
of the other hosts. Tests compare the estimate with what autograd keeps, and scripts/check-fit with what ranks use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpuft.compressions import COMPRESSIONS_WITH_FEEDBACK, SHARDED_COMPRESSIONS
from cpuft.config.train import DEFAULT_LORA_RANK, TrainConfig
from cpuft.errors import CpuftError
from cpuft.host_memory import HostMemory, RunMemory
from cpuft.tasks import DECODER_KINDS, EMBEDDING_KINDS, TEXT_KINDS, find_task
from cpuft.train.data.archive import Prepared
from cpuft.train.data.order import count_updates, is_grouped, plan_epoch, select_for_rank
from cpuft.train.model_shape import ModelShape, find_shape

SHARED_BYTES = 250_000_000
"""Part of `_PROCESS_BYTES` that all ranks of a host share: pages of libraries."""
_PROCESS_BYTES = 550_000_000
"""Resident memory before the model is loaded: Python, torch 2.13, transformers, oneDNN, and SciPy for the metrics."""
_FRAGMENTATION = 0.15
"""Unusable gaps in glibc's heap, as a share of what is allocated and freed again; 5 to 35 % were measured."""
_ADAPTER_FRAGMENTATION = 0.35
"""The same for a decoder with LoRA adapters. One run of 135 million parameters needed 36 % of its activations."""
SHARED_WEIGHTS = "shared weights"
"""Part of an estimate that all ranks of a host share: mapped weights of --base-precision."""
_BUCKET_BYTES = 64_000_000
"""Gradients that are being sent: buckets, and a communication library's copies of them."""
CHUNK_LOGITS = 1 << 26
"""Most logits that the loss of next-token prediction computes at once (`objective.chunked_loss`): 268 MB in fp32. Each
chunk reads and writes the gradient of the head's weight once, so that much smaller chunks would be slower."""
KNOWN_ERROR = 0.1
"""How far below its estimate a peak was measured (scripts/check-fit), as a share."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of a rank."""

    examples: int
    length: int
    """Positions of each example, with padding."""
    tokens: int
    """Tokens of all examples, without padding."""
    reads_all_tokens: bool = False
    """Whether the head reads all tokens, not only the first one of each example."""
    targets: int = 0
    """Number of tokens that the head predicts."""

    @property
    def positions(self) -> int:
        """Number of positions of the batch, with padding."""
        return self.examples * self.length


class Layer(NamedTuple):
    """The bytes of one layer's activations."""

    kept: int
    """What autograd keeps for the backward pass."""
    last: int
    """What it keeps of the last layer, of which a head may read first tokens alone."""
    inputs: int
    """What it keeps with gradient checkpointing."""
    again: int
    """What backward then computes again at a time."""
    scratch: int
    """What is allocated and freed again beside `kept`, in feed-forward or attention."""


def measure_layer(shape: ModelShape, config: TrainConfig, batch: LargestBatch) -> Layer:
    """Return the bytes of one layer's activations. `shape` has layers; every precision but bf16 counts as fp32."""
    # A decoder's own layer is as measured. A fast one keeps inputs of products and norms, queries, keys and values also
    # before norms, and what the activation's gradient needs.
    size, hidden, inner = 2 if config.precision == "bf16" else 4, shape.hidden, shape.inner
    tokens, positions = batch.tokens, batch.positions
    if _is_fast(shape, config) and shape.norms:  # fast.layers, pre-norm
        ends, packed = shape.norms - 2, shape.query + 2 * shape.key
        widths = (4 + ends) * hidden + shape.query + (1 + shape.norms_heads) * packed + 3 * inner
        kept = (size * widths + 4 * shape.norms) * tokens
        inputs = (size * (1 + (ends > 0)) * hidden + 4) * tokens
        last = inputs if config.gradient_checkpointing else kept
        return Layer(kept, last, inputs, kept + inputs, 2 * size * inner * tokens)
    if _is_fast(shape, config):  # fast.layers, post-norm
        # Positions of disentangled attention, as large as two examples, are left out.
        kept = (size * (8 * hidden + 2 * inner) + 16) * tokens
        last = size * (3 * tokens * hidden + batch.examples * (8 * hidden + 2 * inner))
        again = (2 * size * (hidden + inner) + 8) * tokens
        scratch = size * (3 * hidden + inner) * tokens
        return Layer(kept, kept if batch.reads_all_tokens else last, (4 * size * hidden + 8) * tokens, again, scratch)
    # Layers of transformers' own. With bf16, autocast's copy of the weights.
    weights = 2 * shape.linear_parameters // shape.layers if size == 2 and not _maps_weights(config) else 0
    norm = 4 if config.lora_rank > 0 else 8  # with its result before it is scaled, where norms are trained
    widths = hidden * (shape.norms * norm + (8 if size == 4 else 10)) + 4 * size * inner
    widths += (shape.query + shape.key) * (2 * size + norm * shape.norms_heads)
    has_mask = config.pack or tokens < positions
    kept = widths * positions + size * positions * batch.length * has_mask + weights
    return Layer(kept, kept, 4 * hidden * positions, 2 * kept, 0)


def _is_fast(shape: ModelShape, config: TrainConfig) -> bool:
    return shape.may_be_fast and config.uses_fast_path


def _maps_weights(config: TrainConfig) -> bool:
    return config.lora_rank > 0 and config.base_precision != "auto"


def measure_activations(shape: ModelShape, config: TrainConfig, batch: LargestBatch) -> tuple[int, int, int]:
    """Return the bytes of a training step's activations: those that forward keeps before it comes to the head, the most
    that there is at a time, and what gradient checkpointing leaves unusable in the heap. `shape` has layers.
    """
    layer = measure_layer(shape, config, batch)
    copies = 3 if shape.norms else 1 + batch.reads_all_tokens  # of the embeddings and around the last norm
    kept = (4 * copies * shape.hidden + 24) * batch.positions + layer.last
    kept += (layer.inputs if config.gradient_checkpointing else layer.kept) * (shape.layers - 1)
    most = kept + max(layer.scratch, head_bytes(shape, config, batch.targets))
    if not config.gradient_checkpointing:
        return kept, most, 0
    # Backward has freed what the last layer keeps before it comes to the others. Small tensors that stay divide the
    # memory that forward layers have freed, so that the layers which backward recomputes do not fit there.
    most = max(most, kept - layer.last + layer.again + layer.scratch)
    return kept, most, 2 * layer.again + layer.scratch if _is_fast(shape, config) else layer.kept


def head_bytes(shape: ModelShape, config: TrainConfig, targets: int, trains: bool = True) -> int:
    """Return the most bytes that predicting `targets` tokens takes, 0 for 0: logits with gradients, of decoders in
    chunks; a bf16 copy of the weight, as large as the embedding; and if a decoder `trains` it, its gradient.
    """
    if not targets:
        return 0
    is_bf16, weight = config.precision == "bf16", shape.vocab_size * shape.hidden
    # A weight in fp32 is copied to bf16 as a whole. One that is held in bf16 is not.
    copy = 2 * weight if is_bf16 and not (_maps_weights(config) and config.base_precision != "fp32") else 0
    if not shape.norms:
        return 12 * targets * shape.vocab_size + copy
    chunk = min(targets * shape.vocab_size, max(CHUNK_LOGITS, shape.vocab_size))
    # A second gradient: that of a tied embedding, or its copy in a rank's bucket.
    gradient = (4 + 2 * is_bf16) * weight if trains and config.lora_rank <= 0 else 0
    return (8 + 2 * is_bf16) * chunk + copy + gradient + 4 * targets * shape.hidden


def find_batches(prepared: Prepared, config: TrainConfig, ranks: int) -> tuple[LargestBatch, LargestBatch]:
    """Return rank 0's batch with the most tokens in the first epoch, and the batch of evaluation with the most; of an
    embedding model, examples are the texts of --micro-batch rows, all as long as the longest text.
    """
    lengths, texts = prepared.train.lengths, 1
    if prepared.kind in EMBEDDING_KINDS:
        texts, rows = len(prepared.texts), config.micro_batch or config.batch_size
        config = replace(config, batch_size=rows, gradient_accumulation=1)
    size = config.batch_size * config.gradient_accumulation * ranks
    updates = count_updates(len(lengths), size, config.epochs, config.max_steps)
    plans = plan_epoch(lengths, size, config.seed, 0, is_grouped(prepared.kind))[: max(1, updates)]
    batches = [lengths[select_for_rank(examples, 0, ranks)[: config.batch_size]] for examples in plans]
    largest = max(batches, key=lambda batch: int(batch.sum()))
    evaluated = np.sort(np.concatenate([tokens.lengths for tokens in prepared.validation.values()]))[::-1]
    evaluated = evaluated[: config.eval_batch_size * ranks : ranks]
    share = float(prepared.kind in DECODER_KINDS)
    if prepared.kind == "masked":
        share = config.mlm_probability
    elif prepared.kind == "chat":
        share = float(prepared.train.labels[:1_000_000].mean())  # of tokens that the assistant says

    def describe(lengths: NDArray[np.int64], length: int, texts: int) -> LargestBatch:
        reads_all_tokens, tokens = prepared.kind in ("tags", *TEXT_KINDS, *EMBEDDING_KINDS), int(lengths.sum())
        return LargestBatch(len(lengths) * texts, length, tokens, reads_all_tokens, round(share * tokens))

    length = int(largest.max()) if is_grouped(prepared.kind) else min(config.max_length, int(lengths.max()))
    return describe(largest, length, texts), describe(evaluated, int(evaluated[0]), 1)


def estimate_rank(
    shape: ModelShape, config: TrainConfig, prepared: Prepared, ranks: int, writes_checkpoints: bool
) -> dict[str, int]:
    """Return the bytes that a rank holds at its peak with the largest batches of these examples, by part: weights,
    shared weights, masters, moments, gradients, activations, checkpoint's copy, buffers and process.

    A part that is not needed is 0. `checkpoint's copy` is of the state while this rank writes a checkpoint, and
    `process` is the interpreter, libraries and gaps in the heap. Activations are not estimated with `shape.layers` 0,
    and of encoders without the fast path. The precision of `config` is fp32, bf16 or int8.
    """
    size, adapts = 2 if config.precision == "bf16" else 4, config.lora_rank > 0
    weight_size = size if _is_fast(shape, config) else 4
    linears, others = shape.linear_parameters, shape.other_parameters
    weights, shared = weight_size * linears + 4 * others, 0
    if _maps_weights(config):
        linear_size, table_size = {"fp32": (4, 4), "bf16": (2, 2), "int8": (1, 2)}[config.base_precision]
        shared = linear_size * linears + table_size * shape.tables
        # The largest product is expanded in a buffer: queries, keys and values, or feed-forward's first.
        expanded = max(shape.query + 2 * shape.key, (2 if shape.norms else 1) * shape.inner) * shape.hidden
        weights = 4 * (others - shape.tables) + size * expanded
    if adapts:
        # Two factors of each linear module of attention. Encoders train their head, and decoders adapt feed-forward.
        widths, others = 4 * shape.hidden + 2 * shape.query + 2 * shape.key, (shape.hidden + 1) * shape.hidden
        if shape.norms:
            widths, others = widths + 3 * (shape.hidden + shape.inner), 0
        linears = config.lora_rank * shape.layers * widths
        weights += weight_size * linears
    trained, shards = linears + others, ranks if config.shard == "optimizer" else 1
    train, evaluation = find_batches(prepared, config, ranks)
    activations = gaps = 0
    if shape.layers and (shape.norms or _is_fast(shape, config)):
        _, activations, gaps = measure_activations(shape, config, train)
        # With int8, backward needs the weights in 8 bits, too.
        activations += shape.linear_parameters * (config.precision == "int8")
        # Without gradients, there are the activations of one layer at a time.
        widths = 3 * shape.query + 2 * shape.key + (3 if shape.norms else 2) * shape.inner
        evaluating = (12 * shape.hidden + size * widths) * evaluation.positions
        evaluating += head_bytes(shape, config, evaluation.targets, trains=False)
        activations = max(activations, evaluating)
    # Of --sync-every, the averaged parameters and the outer momentum; of a compression, what is not sent yet.
    feedback = 16 if config.sync_every > 1 else 4 * (config.grad_compression in COMPRESSIONS_WITH_FEEDBACK)
    keeps_copy = writes_checkpoints and (config.checkpoint_every or config.save_best) and config.engine == "torch"
    parts = {
        "weights": weights,
        SHARED_WEIGHTS: shared,
        "masters": 4 * linears // shards if weight_size == 2 else 0,
        "moments": 8 * trained // shards,
        # A single rank frees them before the forward pass, but the gaps that activations leave do not fit them.
        "gradients": weight_size * linears + 4 * others + (4 * trained // shards if shards > 1 else 0),
        # At the end, ranks with sharded master weights hold all of them for a moment.
        "activations": max(activations, 4 * linears if shards > 1 else 0),
        "checkpoint's copy": 12 * trained if keeps_copy else 0,
        "buffers": _BUCKET_BYTES + feedback * trained if ranks > 1 else 0,
    }
    share = _ADAPTER_FRAGMENTATION if adapts and shape.norms else _FRAGMENTATION
    gaps += round(share * (parts["moments"] + parts["gradients"] + parts["activations"]))
    return parts | {"process": _PROCESS_BYTES + gaps}


Estimator = Callable[[TrainConfig, int, bool], dict[str, int]]
"""Calls `estimate_rank` with options, the number of ranks, and whether the rank writes checkpoints."""


class Shortage(NamedTuple):
    """What the ranks of one host, or of all simulated hosts on one machine, need."""

    host: HostMemory
    """The host, or the machine of several simulated hosts, with all their ranks."""
    needed_bytes: int
    parts: dict[str, int]
    """Bytes of all these ranks by part. Their sum counts libraries that ranks share once for each rank, `needed_bytes`
    only once. Mapped weights count once for a host in both."""


def check_fit(config: TrainConfig, prepared: Prepared, memory: RunMemory) -> None:
    """Raise CpuftError if 90 % of the estimate does not fit into the free memory of a host or machine, with what would
    make the run fit. Activations of encoders that do not train with the fast path are not counted.
    """
    shape, config = find_shape(config, prepared.vocab_size), replace(config, precision=memory.precision)

    @cache
    def estimate(config: TrainConfig, ranks: int, writes_checkpoints: bool) -> dict[str, int]:
        return estimate_rank(shape, config, prepared, ranks, writes_checkpoints)

    if shortage := find_shortage(config, memory, estimate, 1 - KNOWN_ERROR):
        raise CpuftError(f"{_describe_shortage(shortage)}: {suggest_changes(config, memory, estimate)}")


def find_shortage(config: TrainConfig, memory: RunMemory, estimate: Estimator, factor: float = 1.0) -> Shortage | None:
    """Return the host or machine that lacks the most memory; None if all ranks fit. For the comparison, estimates are
    multiplied by `factor`, and hosts on the same machine, such as simulated ones, must also fit together.
    """
    found, by_machine = list[Shortage](), dict[str | int, list[Shortage]]()
    total = 1 if memory.independent else sum(host.ranks for host in memory.hosts)
    for number, host in enumerate(memory.hosts):
        # The first ranks of the first two hosts write checkpoints.
        writes = [number < 2 and not memory.independent, *[False] * (host.ranks - 1)]
        ranks = [estimate(config, total, one) for one in writes]
        parts = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
        parts[SHARED_WEIGHTS] = ranks[0].get(SHARED_WEIGHTS, 0)  # once for all ranks
        found.append(Shortage(host, sum(parts.values()) - SHARED_BYTES * (host.ranks - 1), parts))
        by_machine.setdefault(host.machine or number, []).append(found[-1])
    for some in (some for some in by_machine.values() if len(some) > 1):
        names, count = ", ".join(one.host.host for one in some), sum(one.host.ranks for one in some)
        machine = HostMemory(f"the machine of {names}", count, max(one.host.machine_bytes for one in some))
        parts = {name: sum(one.parts[name] for one in some) for name in some[0].parts}
        found.append(Shortage(machine, sum(one.needed_bytes for one in some) - SHARED_BYTES * (len(some) - 1), parts))
    worst = max(found, key=lambda one: one.needed_bytes - one.host.free_bytes)
    return worst if worst.needed_bytes * factor > worst.host.free_bytes else None


def _describe_shortage(shortage: Shortage) -> str:
    """Return a clause such as `node1 has 4.0 GB free, and its rank needs 6.1 GB (activations 3.0 GB)`."""
    largest = sorted(shortage.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {nbytes / 1e9:.1f} GB" for name, nbytes in largest)
    host, needed = shortage.host, f"{shortage.needed_bytes / 1e9:.1f} GB ({parts})"
    who = "its rank needs" if host.ranks == 1 else f"its {host.ranks} ranks need"
    return f"{host.host} has {host.free_bytes / 1e9:.1f} GB free, and {who} {needed}"


def suggest_changes(config: TrainConfig, memory: RunMemory, estimate: Estimator) -> str:
    """Return "add --shard optimizer" or the like, the fastest change that makes the run fit; else other advice."""
    found = list_changes(config, 1 if memory.independent else sum(host.ranks for host in memory.hosts))
    if config.lora_rank > 0 and config.base_precision != "int8":
        for narrow in ({"base_precision": "bf16"}, {"base_precision": "int8"}):
            found += [narrow, narrow | {"gradient_checkpointing": True}]
    may_adapt = find_task(config.task, config.causal).kind in DECODER_KINDS and not config.from_config
    if may_adapt and config.lora_rank <= 0:
        found.append({"lora_rank": DEFAULT_LORA_RANK, "gradient_checkpointing": True})
    for changes in found:
        if not find_shortage(replace(config, **changes), memory, estimate):
            options = " ".join(f"--{name} {value}" for name, value in changes.items())
            end = ", which trains adapters instead of all weights" * ("lora_rank" in changes)
            return f"add {options.replace('_', '-').replace(' True', '')}{end}"
    return "take a smaller model, more hosts with a smaller --batch-size each, or hosts with more memory"


def _can_shard(config: TrainConfig, ranks: int) -> bool:
    exchanges = config.sync_every == 1 and config.grad_compression in ("auto", *SHARDED_COMPRESSIONS)
    return exchanges and config.engine == "torch" and config.shard == "none" and ranks > 1


def list_changes(config: TrainConfig, ranks: int) -> list[dict[str, Any]]:
    """Return dicts of options (names of TrainConfig) for the same updates with less memory, the fastest first."""
    rows, micro_batches = config.batch_size, config.gradient_accumulation
    # Each choice with its cost: the share by which a step takes longer; without checkpoints, what a loss may cost.
    choices: list[list[tuple[float, dict[str, Any]]]] = [
        [(0.05, {"shard": "optimizer"})] * _can_shard(config, ranks),
        [
            (0.08 * power, {"batch_size": rows >> power, "gradient_accumulation": micro_batches << power})
            for power in range(1, rows.bit_length())
            if rows % (1 << power) == 0
        ],
        [(0.3, {"gradient_checkpointing": True})] * (config.engine == "torch" and not config.gradient_checkpointing),
        [(0.5, {"checkpoint_every": 0})] * bool(config.checkpoint_every),
    ]
    every = product(*([(0.0, {}), *choice] for choice in choices))
    combined = sorted(every, key=lambda some: sum(cost for cost, _ in some))
    return [{name: new for _, changes in some for name, new in changes.items()} for some in combined[1:]]
