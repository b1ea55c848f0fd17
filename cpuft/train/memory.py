"""Estimate how much memory a rank will need, and check that it fits on its host before any rank starts.

The estimate is a function of the model's sizes, the options and the lengths of the examples. Activations are counted
from what each layer keeps for the backward pass: for the fast path, the tensors that `cpuft.train.fast` saves; for the
eager layers of transformers, what they were measured to keep. scripts/check-fit compares it with what ranks used.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpuft.compressions import COMPRESSIONS_WITH_FEEDBACK, SHARDED_COMPRESSIONS
from cpuft.config import (
    DEFAULT_LORA_RANK,
    HostMemory,
    RunMemory,
    TrainConfig,
)
from cpuft.errors import CpuftError
from cpuft.serialization import load, parse_json
from cpuft.tasks import DECODER_KINDS, EMBEDDING_KINDS, TEXT_KINDS, find_task
from cpuft.train.data.archive import Prepared, Tokens
from cpuft.train.data.order import count_updates, plan_epoch, select_for_rank
from cpuft.train.decoder_memory import (
    FAST_TYPES,
    DecoderShape,
    decoder_activation_bytes,
    decoder_evaluation_bytes,
    read_decoder_shape,
)
from cpuft.train.fast.architectures import (
    ARCHITECTURES,
    ATTENTION_DROPOUT_SETTINGS,
    SIZE_SETTINGS,
    count_position_groups,
)
from cpuft.train.model import find_config, find_model, load_config

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
_EAGER_BYTES = {(4, True): (40, 8, 12), (4, False): (32, 8, 4), (2, True): (28, 4, 6), (2, False): (24, 4, 2)}
"""Bytes that an eager layer keeps for each hidden number and each intermediate number of a token, and for each
attention score; by the bytes of a number in products, and whether there is dropout. Measured."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that decide how much memory it takes. Without `layers`, activations are unknown (0)."""

    linear_parameters: int
    """Number of weights and biases of the layers' linear modules, which the fast path computes in bf16."""
    other_parameters: int
    """Number of all other parameters: embeddings, norms, and the pooler or head."""
    layers: int = 0
    """Number of layers, counted as often as the encoder runs them; 0 for a model that the fast path does not know, for
    which all other sizes are 0, too."""
    hidden: int = 0
    """The hidden size."""
    inner: int = 0
    """The intermediate size, between both products of the feed-forward part."""
    heads: int = 0
    """Number of attention heads of a layer."""
    has_dropout: bool = True
    """Whether attention probabilities have dropout."""
    vocab_size: int = 0
    """Rows of the token embedding."""
    relative_embeddings: int = 0
    """Number of relative embeddings for DeBERTa's disentangled attention; 0 for another attention."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of a rank."""

    examples: int
    """Number of examples."""
    length: int
    """Positions of each example, with padding."""
    tokens: int
    """Tokens of all examples, without padding."""
    reads_all_tokens: bool = False
    """Whether the head reads all tokens, not only the first one of each example."""
    masked: int = 0
    """Number of masked tokens that the head predicts."""

    @property
    def positions(self) -> int:
        """Number of positions of the batch, with padding: examples times length."""
        return self.examples * self.length


def read_shape(settings: Mapping[str, Any], dropout: float = -1.0) -> ModelShape | None:
    """Return the shape of a model from its config.json; None if the fast path does not know the architecture.

    None also if one of the sizes is missing or not a positive whole number.

    Parameters
    ----------
    settings: the content of config.json.
    dropout: the value of --dropout; below 0, the configuration's own rate counts.
    """

    def size(*names: str) -> int:
        found = next((settings[name] for name in names if name in settings), 0)
        return found if type(found) is int and found > 0 else 0

    sizes = {name: size(*names) for name, names in SIZE_SETTINGS.items()}
    architecture = next((one for one in ARCHITECTURES if one.model_type == settings.get("model_type")), None)
    if architecture is None or not all(sizes.values()):
        return None
    layers, hidden, inner, heads, vocab_size, positions = sizes.values()
    different = layers
    if architecture.shared_layers is not None:
        groups, in_group = (size(name) or 1 for name in architecture.shared_layers.counts)
        layers, different = layers * in_group, groups * in_group
    relative = None
    if architecture.relative_embeddings is not None:
        relative = architecture.relative_embeddings.read_size(settings, hidden, positions)
        if relative is None:
            return None
        positions = relative.absolute_positions
    linears = different * (4 * (hidden + 1) * hidden + 2 * hidden * inner + hidden + inner)
    linears += different * relative.layer_parameters if relative else 0
    width = size("embedding_size") or hidden
    embeddings = (vocab_size + positions + size("type_vocab_size") + 2) * width
    # Norms; the pooler, or what a head has in its place; and the projection of narrow embeddings (ELECTRA, ALBERT).
    embeddings += relative.embeddings * hidden if relative else 0
    others = embeddings + different * 4 * hidden + (hidden + 1) * hidden + (width != hidden) * (width + 1) * hidden
    rate = next((settings[name] for name in ATTENTION_DROPOUT_SETTINGS if name in settings), 0.1)
    has_dropout = bool(rate if dropout < 0 else dropout)
    return ModelShape(
        linears, others, layers, hidden, inner, heads, has_dropout, vocab_size, relative.embeddings if relative else 0
    )


def estimate_memory(
    shape: ModelShape | DecoderShape,
    config: TrainConfig,
    precision: str,
    train: LargestBatch,
    evaluation: LargestBatch,
    ranks: int,
    writes_checkpoints: bool,
) -> dict[str, int]:
    """Return the bytes that a rank holds at its peak, by part.

    The parts are weights, shared weights (mapped ones of --base-precision), masters (fp32 master weights), moments (of
    AdamW), gradients, activations, checkpoint's copy, buffers (of the exchange) and process (the interpreter, libraries
    and gaps in the heap). A part that is not needed is 0; with `shape.layers` 0, activations are not estimated. The sum
    of all parts is the peak.

    Parameters
    ----------
    precision: what the ranks compute in: fp32, bf16 or int8.
    train, evaluation: the largest batch of training and of evaluation.
    ranks: number of ranks that train together.
    writes_checkpoints: whether this rank holds a copy of the state while it writes checkpoints.
    """
    if isinstance(shape, DecoderShape):
        return _estimate_decoder(shape, config, precision, train, evaluation, ranks, writes_checkpoints)
    size, fast = 2 if precision == "bf16" else 4, config.engine == "torch" and config.fast_path and not config.compile
    weight_size, shards = size if fast else 4, ranks if config.shard == "optimizer" else 1
    # --lora-rank trains two factors for each of attention's linear layers, and the head's product.
    adapters = 8 * config.lora_rank * shape.layers * shape.hidden + (shape.hidden + 1) * shape.hidden
    linears, others = (0, adapters) if config.lora_rank > 0 else (shape.linear_parameters, shape.other_parameters)
    trained = linears + others
    temporary = temporary_bytes(shape, fast, size, train)
    training = activation_bytes(shape, fast, config.gradient_checkpointing, size, train)[1]
    training += max(temporary, logit_bytes(shape, size, train.masked))
    training += shape.linear_parameters * (precision == "int8")  # the weights in 8 bits, which backward needs, too
    evaluating = evaluation_bytes(shape, fast, size, evaluation) + logit_bytes(shape, size, evaluation.masked)
    feedback = 0  # of --sync-every, the averaged parameters and the outer momentum; of a compression, the unsent rest
    if config.sync_every > 1:
        feedback = 16 * trained
    elif config.grad_compression in COMPRESSIONS_WITH_FEEDBACK:
        feedback = 4 * trained
    keeps_copy = writes_checkpoints and (config.checkpoint_every or config.save_best) and config.engine == "torch"
    if config.lora_rank > 0 and config.base_precision != "auto":
        table = min(shape.vocab_size * shape.hidden, shape.other_parameters)  # narrow in ALBERT and ELECTRA
        shared = _mapped_bytes(config.base_precision, shape.linear_parameters, table)
        # Those of queries, keys and values, or of the first product of feed-forward, are expanded in a buffer.
        weights = 4 * (shape.other_parameters - table) + size * max(3 * shape.hidden, shape.inner) * shape.hidden
    else:
        shared, weights = 0, weight_size * shape.linear_parameters + 4 * shape.other_parameters
    parts = {
        "weights": weights,
        SHARED_WEIGHTS: shared,
        "masters": 4 * linears // shards if weight_size == 2 else 0,
        "moments": 8 * trained // shards,
        # A single rank frees them before the forward pass, but the gaps that activations leave do not fit them.
        "gradients": weight_size * linears + 4 * others + (4 * trained // shards if shards > 1 else 0),
        # At the end, ranks with sharded master weights hold all of them for a moment.
        "activations": max(training, evaluating, 4 * linears if shards > 1 else 0),
        "checkpoint's copy": 12 * trained if keeps_copy else 0,
        "buffers": _BUCKET_BYTES + feedback if ranks > 1 else 0,
    }
    gaps = _FRAGMENTATION * (parts["moments"] + parts["gradients"] + parts["activations"])
    if config.gradient_checkpointing and shape.layers:
        # Small tensors that stay divide the memory that forward layers have freed, so that the layers which backward
        # recomputes do not fit there.
        gaps += 2 * _recompute_bytes(shape, fast, size, train) + temporary
    return parts | {"process": _PROCESS_BYTES + round(gaps)}


def _estimate_decoder(
    shape: DecoderShape,
    config: TrainConfig,
    precision: str,
    train: LargestBatch,
    evaluation: LargestBatch,
    ranks: int,
    writes_checkpoints: bool,
) -> dict[str, int]:
    """Return what `estimate_memory` does, for a decoder. Weights of transformers' own layers are in fp32."""
    size, adapts = 2 if precision == "bf16" else 4, config.lora_rank > 0
    shape = replace(shape, base_precision=config.base_precision if adapts else "auto")
    fast = shape.may_be_fast and config.engine == "torch" and config.fast_path and not config.compile
    adapters = shape.count_adapter_parameters(max(0, config.lora_rank))
    trained, shards = adapters if adapts else shape.parameters, ranks if config.shard == "optimizer" else 1
    has_mask = config.pack or train.tokens < train.positions
    training = decoder_activation_bytes(
        shape,
        size,
        adapts,
        config.gradient_checkpointing,
        train.positions,
        train.positions * train.length * has_mask,
        train.masked,
        train.tokens if fast else 0,
    )
    weight_size = size if fast else 4
    linears = shape.layers * shape.layer_parameters
    others = shape.parameters - linears
    low = (adapters if adapts else linears) if weight_size == 2 else 0
    feedback = 16 * trained if config.sync_every > 1 else 0
    if config.grad_compression in COMPRESSIONS_WITH_FEEDBACK:
        feedback = 4 * trained
    keeps_copy = writes_checkpoints and (config.checkpoint_every or config.save_best)
    shared, weights = 0, weight_size * (linears + adapters) + 4 * others
    if shape.base_precision != "auto":
        tables = (2 - shape.is_tied) * shape.embedding_parameters
        shared, weights = _mapped_bytes(config.base_precision, linears, tables), weight_size * adapters
        # Those of gate and up, the largest product, are expanded in a buffer.
        weights += 4 * (others - tables) + 2 * size * shape.inner * shape.hidden
    parts = {
        "weights": weights,
        SHARED_WEIGHTS: shared,
        "masters": 4 * low // shards,
        "moments": 8 * trained // shards,
        "gradients": 4 * trained - 2 * low + (4 * trained // shards if shards > 1 else 0),
        "activations": max(training, decoder_evaluation_bytes(shape, size, evaluation.positions, evaluation.masked)),
        "checkpoint's copy": 12 * trained if keeps_copy else 0,
        "buffers": _BUCKET_BYTES + feedback if ranks > 1 else 0,
    }
    share = _ADAPTER_FRAGMENTATION if adapts else _FRAGMENTATION
    gaps = share * (parts["moments"] + parts["gradients"] + parts["activations"])
    return parts | {"process": _PROCESS_BYTES + round(gaps)}


def _mapped_bytes(base_precision: str, linears: int, tables: int) -> int:
    """Bytes of mapped weights: of linear layers, and of embedding and head, which are bf16 with int8."""
    if base_precision == "int8":
        return linears + 2 * tables
    return (4 if base_precision == "fp32" else 2) * (linears + tables)


def activation_bytes(
    shape: ModelShape, fast: bool, gradient_checkpointing: bool, size: int, batch: LargestBatch
) -> tuple[int, int]:
    """Return the bytes that the forward pass keeps for backward, and the most that is there during backward.

    The second number may be larger with gradient checkpointing, which adds one recomputed layer at a time; without it,
    both are equal. Both are 0 for a shape without layers.

    Parameters
    ----------
    fast: whether the model has the fast layers.
    size: bytes of a number in products: 2 for bf16, else 4.
    """
    if not shape.layers:
        return 0, 0
    layer = _layer_bytes(shape, fast, size, batch)
    last = _last_layer_bytes(shape, size, batch) if fast and not batch.reads_all_tokens else layer
    # Embeddings are summed and normed in fp32. Eager ones also keep a dropout mask, and the head's input in fp32.
    copies = 1 + batch.reads_all_tokens if fast else 1 + shape.has_dropout + (size == 4)
    embeddings = (4 * copies * shape.hidden + 24) * batch.positions
    # With gradient checkpointing, an eager layer keeps its input; a fast one also the attention's context, the product
    # of that, and the sum before the last norm.
    inputs = (4 * size * shape.hidden + 8) * batch.tokens if fast else 4 * batch.positions * shape.hidden
    if gradient_checkpointing and shape.relative_embeddings and not fast:
        # All layers share the mask of each pair of tokens, and the number of its relative embedding.
        embeddings += 8 * (batch.examples + 1) * batch.length**2
    kept = embeddings + (inputs if gradient_checkpointing else layer) * (shape.layers - 1) + last
    if not gradient_checkpointing:
        return kept, kept
    # The last layer is not recomputed, and backward has freed what it keeps before it comes to the others.
    return kept, max(kept, kept - last + _recompute_bytes(shape, fast, size, batch))


def _recompute_bytes(shape: ModelShape, fast: bool, size: int, batch: LargestBatch) -> int:
    """Bytes of the part of a layer that is recomputed at once: in a fast layer, feed-forward or attention."""
    if not fast:
        return _layer_bytes(shape, fast, size, batch)
    feed_forward = (2 * size * (shape.hidden + shape.inner) + 8) * batch.tokens
    return max(feed_forward, 3 * size * batch.tokens * shape.hidden)


def _layer_bytes(shape: ModelShape, fast: bool, size: int, batch: LargestBatch) -> int:
    """Bytes that one layer keeps for backward.

    In `fast.encoder.run_layer`: the inputs of four products and of two norms; queries, keys and values; the slope and
    the result of GELU. In an eager layer: what was measured, and autocast's copy of the weights.
    """
    if fast:
        return (size * (8 * shape.hidden + 2 * shape.inner) + 16) * batch.tokens + _position_bytes(shape, size, batch)
    hidden, inner, score = _EAGER_BYTES[size, shape.has_dropout]
    scores = batch.positions * batch.length * shape.heads
    weights = 2 * shape.linear_parameters // shape.layers if size == 2 else 0
    kept = batch.positions * (hidden * shape.hidden + inner * shape.inner + 16) + score * scores + weights
    if not (relative := shape.relative_embeddings):
        return kept
    # Products with all positions, which are repeated for each example, and the numbers by which they are gathered.
    kept += size * batch.positions * (2 * shape.heads * relative + shape.hidden)
    return kept + 2 * size * (batch.examples + 1) * relative * shape.hidden + scores * 5 // 4


def _last_layer_bytes(shape: ModelShape, size: int, batch: LargestBatch) -> int:
    """Bytes that a fast last layer keeps if the head reads only first tokens: keys and values of all, else of those."""
    own = size * (3 * batch.tokens * shape.hidden + batch.examples * (8 * shape.hidden + 2 * shape.inner))
    return own + _position_bytes(shape, size, batch)


def _position_bytes(shape: ModelShape, size: int, batch: LargestBatch) -> int:
    """Bytes that a fast layer keeps for disentangled attention: embeddings, and positions of keys and of queries."""
    distances = 2 * batch.length - 1
    rows = 2 * distances + min(distances, shape.relative_embeddings)
    return size * rows * shape.hidden if shape.relative_embeddings else 0


def temporary_bytes(shape: ModelShape, fast: bool, size: int, batch: LargestBatch) -> int:
    """Return the bytes that one layer allocates and frees again: in feed-forward, or in eager attention after that.

    Parameters
    ----------
    fast, size: as for `activation_bytes`: whether layers are fast ones, and the bytes of a number in products (2 or 4).
    """
    scores, inner = batch.positions * batch.length * shape.heads, batch.tokens * shape.inner
    if not fast:
        return 4 * max(2 * inner, 3 * scores - 2 * inner)
    positions = 0  # the gradients of both arrays of positions, in fp32
    if shape.relative_embeddings:
        groups = count_position_groups(batch.examples, shape.heads)
        positions = 8 * groups * (2 * batch.length - 1) * shape.hidden
    return size * 3 * batch.tokens * shape.hidden + max(size * inner, positions)


def logit_bytes(shape: ModelShape, size: int, masked: int) -> int:
    """Return the bytes for predicting masked tokens; 0 if `masked`, their number, is 0.

    They are three fp32 numbers for each masked token and each token of the vocabulary (logits and their gradients), and
    with `size` 2 (bf16) autocast's copy of the weights.
    """
    return (12 * masked + (2 * shape.hidden if size == 2 and masked else 0)) * shape.vocab_size


def evaluation_bytes(shape: ModelShape, fast: bool, size: int, batch: LargestBatch) -> int:
    """Return the bytes of activations in evaluation: those of one layer at a time.

    Parameters
    ----------
    fast, size: as for `activation_bytes`: whether layers are fast ones, and the bytes of a number in products (2 or 4).
    """
    attention = 0 if fast else 7 * shape.hidden + 2 * batch.length * shape.heads
    return batch.positions * (8 * shape.hidden + size * max(attention, 4 * shape.hidden + 2 * shape.inner))


KNOWN_ERROR = 0.1
"""How far below its estimate a peak was measured (scripts/check-fit), as a share. A run within this error is not
refused."""

Estimator = Callable[[TrainConfig, int, bool], dict[str, int]]
"""From options, the number of ranks, and whether the rank writes checkpoints, to the rank's bytes by part, as
`estimate_memory` returns them."""


class Shortage(NamedTuple):
    """What the ranks of one host, or of all simulated hosts on one machine, need: `needed_bytes` in total."""

    host: HostMemory
    """The host, or the machine of several simulated hosts, with all their ranks."""
    needed_bytes: int
    """Bytes that all these ranks need together."""
    parts: dict[str, int]
    """Bytes of all these ranks by part: weights, moments and so on. Their sum counts libraries that ranks share once
    for each rank, `needed_bytes` only once. Mapped weights count once for a host in both."""


def check_fit(config: TrainConfig, prepared: Prepared, memory: RunMemory) -> None:
    """Raise CpuftError if a host has not enough memory for its ranks.

    The message says what they need and what would make it fit. A host passes if 90 % of the estimate fits into its free
    memory. Activations of models that the fast path does not know are not counted. CpuftError is also raised if the
    model's configuration cannot be read.

    Parameters
    ----------
    memory: the free memory of each host of the run, and the precision.
    """
    shape = find_shape(config, prepared.vocab_size)

    @cache
    def estimate(config: TrainConfig, ranks: int, writes_checkpoints: bool) -> dict[str, int]:
        return estimate_rank(shape, config, memory.precision, prepared, ranks, writes_checkpoints)

    if shortage := find_shortage(config, memory, estimate, 1 - KNOWN_ERROR):
        raise CpuftError(f"{describe_shortage(shortage)}: {suggest_changes(config, memory, estimate)}")


def find_shape(config: TrainConfig, vocab_size: int) -> ModelShape | DecoderShape:
    """Return the shape of the model that the options name; for next-token prediction that of a decoder.

    For an architecture that is not known, and for a model on the hub, it has no layers, and only the
    parameters in the folder's safetensors files (0 if there are none).

    Parameters
    ----------
    vocab_size: of the tokenizer, for an untrained model.

    Raises CpuftError: the model's folder or --from-config names no model.
    """
    if config.from_config:
        settings = load_config(config, {}, vocab_size).to_dict()
        return read_shape_for(config, settings) or ModelShape(0, 0)
    source = Path(find_model(config.model))
    try:  # not through transformers, whose import takes longer than the whole check
        path = Path(find_config(str(source)), "config.json")
        settings = load(dict[str, Any], parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        settings = {}
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    return read_shape_for(config, settings) or ModelShape(0, nbytes // 4)


def read_shape_for(config: TrainConfig, settings: Mapping[str, Any]) -> ModelShape | DecoderShape | None:
    """Return what `read_decoder_shape` does for a task of decoders, else what `read_shape` does.

    For labels, a decoder has a small head in place of the one that shares its size with the embedding.
    """
    if find_task(config.task, config.causal).kind in DECODER_KINDS:
        return read_decoder_shape(settings)
    if settings.get("model_type") in FAST_TYPES and (found := read_decoder_shape(settings)):
        return replace(found, is_tied=True)
    return read_shape(settings, config.dropout)


def estimate_rank(
    shape: ModelShape | DecoderShape,
    config: TrainConfig,
    precision: str,
    prepared: Prepared,
    ranks: int,
    writes_checkpoints: bool,
) -> dict[str, int]:
    """Return the bytes that a rank holds at its peak, by part, with the largest batches of these examples.

    The parts are those of `estimate_memory`: weights, masters, moments, gradients, activations, checkpoint's copy,
    buffers, process. `prepared` must have validation examples.
    """
    reads_all_tokens = prepared.kind in ("tags", *TEXT_KINDS, *EMBEDDING_KINDS)
    if prepared.kind in EMBEDDING_KINDS:
        train = find_largest_text_batch(prepared, config, ranks)
    else:
        train = find_largest_batch(prepared.train, config, ranks, reads_all_tokens)
    lengths = np.sort(np.concatenate([tokens.lengths for tokens in prepared.validation.values()]))
    evaluated = lengths[::-1][: config.eval_batch_size * ranks : ranks]
    evaluation = LargestBatch(len(evaluated), int(evaluated[0]), int(evaluated.sum()))
    if prepared.kind == "masked":
        train, evaluation = (
            replace(batch, masked=round(config.mlm_probability * batch.tokens)) for batch in (train, evaluation)
        )
    if prepared.kind in DECODER_KINDS:
        train, evaluation = (replace(batch, masked=batch.tokens) for batch in (train, evaluation))
    return estimate_memory(shape, config, precision, train, evaluation, ranks, writes_checkpoints)


def find_largest_text_batch(prepared: Prepared, config: TrainConfig, ranks: int) -> LargestBatch:
    """Return the largest batch of an embedding model: its examples are the texts, of which an example has several.

    Only --micro-batch examples are in memory at the same time. The batches are those of `find_largest_batch`, in random
    order.
    """
    size, texts = config.micro_batch or config.batch_size, len(prepared.texts)
    one_batch = replace(config, batch_size=size, gradient_accumulation=1, padding="max_length")
    found = find_largest_batch(prepared.train, one_batch, ranks, True)
    longest = int(prepared.train.lengths.max())
    length = min(config.max_length, longest)
    return replace(found, examples=found.examples * texts, length=length)


def find_largest_batch(tokens: Tokens, config: TrainConfig, ranks: int, reads_all_tokens: bool = False) -> LargestBatch:
    """Return the batch with the most tokens that rank 0 of `ranks` has in the first epoch.

    Parameters
    ----------
    tokens: the training split, with at least one example.
    reads_all_tokens: copied into the result: whether the head reads all tokens.
    """
    lengths, size = tokens.lengths, config.batch_size * config.gradient_accumulation * ranks
    updates = count_updates(len(lengths), size, config.epochs, config.max_steps)
    plans = plan_epoch(lengths, size, config.seed, 0, config.padding == "dynamic")[: max(1, updates)]
    batches = [lengths[select_for_rank(examples, 0, ranks)[: config.batch_size]] for examples in plans]
    largest = max(batches, key=lambda batch: int(batch.sum()))
    length = config.max_length if config.padding == "max_length" else int(largest.max())
    return LargestBatch(len(largest), length, int(largest.sum()), reads_all_tokens)


def find_shortage(config: TrainConfig, memory: RunMemory, estimate: Estimator, factor: float = 1.0) -> Shortage | None:
    """Return the host or machine with the largest shortage of memory; None if all ranks fit.

    Hosts on the same machine, such as simulated ones, must also fit together; such a machine is called `the machine of
    HOST, HOST`.

    Parameters
    ----------
    memory: at least one host.
    estimate: returns the bytes of a rank by part.
    factor: what estimates are multiplied by before they are compared; below 1, a small shortage is accepted.
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


def describe_shortage(shortage: Shortage) -> str:
    """Return one clause on how much memory a host has and how much its ranks need, with the three largest parts.

    For example: `node1 has 4.0 GB free, and its 2 ranks need 6.1 GB (activations 3.0 GB, moments 1.8 GB, process 1.1
    GB)`.
    """
    largest = sorted(shortage.parts.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {nbytes / 1e9:.1f} GB" for name, nbytes in largest)
    host, needed = shortage.host, f"{shortage.needed_bytes / 1e9:.1f} GB ({parts})"
    who = "its rank needs" if host.ranks == 1 else f"its {host.ranks} ranks need"
    return f"{host.host} has {host.free_bytes / 1e9:.1f} GB free, and {who} {needed}"


def suggest_changes(config: TrainConfig, memory: RunMemory, estimate: Estimator) -> str:
    """Return advice that makes the run fit, as the end of an error message.

    It is the first that is enough of: the options that cost the least time (`add --shard optimizer`); with LoRA, frozen
    weights that ranks share (`add --base-precision bf16`, or int8); up to 64 hosts like the one with the least memory,
    with one rank each (`take 4 hosts like node1 with one rank each: --np 4 --batch-size 8`); for decoders, LoRA (`add
    --lora-rank 16, which trains adapters instead of all weights`); `take a smaller model, or hosts with more memory`.
    """
    smallest, ranks = min(memory.hosts, key=lambda host: host.free_bytes), sum(host.ranks for host in memory.hosts)
    for changes in list_changes(config, 1 if memory.independent else ranks):
        if not find_shortage(replace(config, **changes), memory, estimate):
            return f"add {_format_options(changes)}"
    may_share = config.lora_rank > 0 and not config.compile
    for base_precision in ("bf16", "int8") if may_share and config.base_precision != "int8" else ():
        narrow: dict[str, Any] = {"base_precision": base_precision}
        for changes in (narrow, narrow | {"gradient_checkpointing": True}):
            if not find_shortage(replace(config, **changes), memory, estimate):
                return f"add {_format_options(changes)}"
    count = ranks
    while count <= 64:
        more = replace(memory, hosts=(HostMemory(smallest.host, 1, smallest.free_bytes),) * count)
        smaller: dict[str, Any] = {"batch_size": max(1, config.batch_size * ranks // count)}
        for changes in (smaller, *([smaller | {"shard": "optimizer"}] if _can_shard(config, count) else [])):
            if not find_shortage(replace(config, **changes), more, estimate):
                options = _format_options({"np": count} | changes)
                return f"take {count} hosts like {smallest.host} with one rank each: {options}"
        count *= 2
    adapters: dict[str, Any] = {"lora_rank": DEFAULT_LORA_RANK, "gradient_checkpointing": True}
    may_adapt = find_task(config.task, config.causal).kind in DECODER_KINDS and not config.from_config
    if may_adapt and config.lora_rank <= 0 and not find_shortage(replace(config, **adapters), memory, estimate):
        return f"add {_format_options(adapters)}, which trains adapters instead of all weights"
    return "take a smaller model, or hosts with more memory"


def _can_shard(config: TrainConfig, ranks: int) -> bool:
    """Whether --shard optimizer can be added to the options."""
    exchanges = config.sync_every == 1 and config.grad_compression in ("auto", *SHARDED_COMPRESSIONS)
    return exchanges and config.engine == "torch" and config.shard == "none" and ranks > 1


def list_changes(config: TrainConfig, ranks: int) -> list[dict[str, Any]]:
    """Return sets of option changes that lead to the same updates with less memory, the cheapest in time first.

    Each is a dict from names of TrainConfig to new values: shard, batch_size with gradient_accumulation,
    gradient_checkpointing, checkpoint_every 0, and all combinations. Empty if none of them can be changed.

    Parameters
    ----------
    ranks: number of ranks that train together.
    """
    divisors = [2**power for power in range(config.batch_size.bit_length()) if config.batch_size % 2**power == 0]
    smaller = [
        {"batch_size": config.batch_size // n, "gradient_accumulation": config.gradient_accumulation * n}
        for n in divisors[1:]
    ]
    # Each choice with its cost: the share by which a step takes longer; without checkpoints, what a loss may cost.
    shards = [(0.05, {"shard": "optimizer"})] * _can_shard(config, ranks)
    can_recompute = config.engine == "torch" and not config.gradient_checkpointing
    recompute = [(0.3, {"gradient_checkpointing": True})] * can_recompute
    no_checkpoints = [(0.5, {"checkpoint_every": 0})] * bool(config.checkpoint_every)
    choices = [shards, [(0.08 * number, one) for number, one in enumerate(smaller, 1)], recompute, no_checkpoints]
    nothing: list[tuple[float, dict[str, Any]]] = [(0.0, {})]
    combined = [tuple(zip(*some)) for some in product(*(nothing + choice for choice in choices))]
    return [dict(ChainMap(*reversed(changes))) for _, changes in sorted(combined, key=lambda one: sum(one[0]))[1:]]


def _format_options(changes: dict[str, Any]) -> str:
    return " ".join(f"--{name} {value}" for name, value in changes.items()).replace("_", "-").replace(" True", "")
