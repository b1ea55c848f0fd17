"""Which options of a training exclude each other, or have no effect with its task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cpuft.compressions import SHARDED_COMPRESSIONS
from cpuft.config.fields import format_flag
from cpuft.config.train import DEFAULT_LORA_RANK, TrainConfig
from cpuft.errors import CpuftError
from cpuft.serialization import is_count
from cpuft.tasks import DECODER_KINDS, EMBEDDING_KINDS, FILE_TASKS, TASKS, find_task

ALTERNATIVES = (("model", "from_config"), ("warmup_ratio", "warmup_steps"))
"""Pairs of options of which only one may be given."""
_DEFAULT = TrainConfig()
_LAYERS = "it trains with its own layers"
_WEIGHTS = "it keeps the fp32 weights to itself"
_SHARDS = "it shards the optimizer state itself"
_UNTESTED = "this combination is not tested"
_NO_CHECKPOINTS = "it writes no checkpoints, in which the best weights are kept"
_OWN_LAYERS = {"fast_path": _LAYERS, "lora_rank": _LAYERS, "gradient_checkpointing": _UNTESTED}
UNSUPPORTED_BY_ENGINE = {
    "ipex": {**_OWN_LAYERS, "sync_every": _WEIGHTS, "shard": _WEIGHTS, "save_best": _NO_CHECKPOINTS},
    "deepspeed": {
        **_OWN_LAYERS,
        "sync_every": _WEIGHTS,
        "grad_compression": "it sends gradients in its own way",
        "shard": _SHARDS,
        "save_best": _NO_CHECKPOINTS,
        "layerwise_lr_decay": _UNTESTED,
    },
    "ort": {**_OWN_LAYERS, "shard": _UNTESTED, "save_best": _NO_CHECKPOINTS},
}
"""Value of --engine -> options that it does not support, and the reason."""


def name_alternatives(given: Mapping[str, str], pairs: Iterable[tuple[str, str]] = ALTERNATIVES) -> str:
    """Return why two of the `given` options, names and how the user writes them, exclude each other; else ""."""
    found = (f"{given[one]} and {given[other]}" for one, other in pairs if one in given and other in given)
    return next((f"{both} exclude each other: leave out one of them" for both in found), "")


def check_engine_for_launch(engine: str, has_notice: bool, is_independent: bool) -> None:
    """Raise CpuftError for --interruption-notice with another engine than torch, or for --ideal with deepspeed."""
    if has_notice and engine != "torch":
        raise CpuftError(
            f"--interruption-notice needs checkpoints, and --engine {engine} writes none: leave out one of them"
        )
    if is_independent and engine == "deepspeed":
        raise CpuftError(
            "--ideal trains every rank independently, which --engine deepspeed cannot: leave out one of them"
        )


_EMBEDDINGS, _WITH_NEGATIVES = ("pairs", "scored-pairs"), ("pairs", "rerank")
_TABLES = tuple(task for task in FILE_TASKS if task != "chat")
_TASKS: dict[str, Sequence[str]] = {
    "data_dir": [task.name for task in TASKS.values() if task.folder],
    **dict.fromkeys(("train_file", "validation_file", "validation_split", "text_columns"), FILE_TASKS),
    **dict.fromkeys(("delimiter", "quoting", "encoding"), _TABLES),
    "skip_unlabelled": ("files", "scored-pairs", "rerank"),
    **dict.fromkeys(("causal", "mlm_probability", "whole_word_mask"), ("text",)),
    **dict.fromkeys(("chat_template", "pack"), ("chat",)),
    **dict.fromkeys(("label_type", "slice_by"), ("files",)),
    "label_column": ("files", "scored-pairs", "rerank"),
    **dict.fromkeys(("pooling", "gather_negatives", "matryoshka", "micro_batch"), _EMBEDDINGS),
    **dict.fromkeys(("query_prompt", "document_prompt", "temperature"), ("pairs",)),
    "similarity_loss": ("scored-pairs",),
    **dict.fromkeys(("hard_negatives", "mining_model"), _WITH_NEGATIVES),
}
"""Options that only some tasks have, and these tasks."""


_LORA = ("lora_rank", "may_choose_lora")
_NEEDS = {
    "outer_momentum": (("sync_every",), "--sync-every 4"),
    "save_best": (("eval_every",), "--eval-every epoch"),
    "early_stopping": (("eval_every",), "--eval-every epoch"),
    "best_metric": (("save_best", "early_stopping"), "--save-best or --early-stopping"),
    "mining_model": (("hard_negatives",), "--hard-negatives 5"),
    "base_precision": (_LORA, f"--lora-rank {DEFAULT_LORA_RANK}"),
    "lora_merge": (_LORA, f"--lora-rank {DEFAULT_LORA_RANK}"),
}
"""Options that have an effect only with one of others, and what to add."""


def refuse_conflicts(config: TrainConfig) -> None:
    """Raise CpuftError if training options exclude each other, are for another task, or would have no effect."""
    kind = find_task(config.task, config.causal).kind
    _exclude(config, f"--engine {config.engine}", UNSUPPORTED_BY_ENGINE.get(config.engine, {}))
    if config.engine == "ort" and (config.precision, config.backend) != ("fp32", "gloo"):
        # Under torch 2.3, DistributedDataParallel waited for process groups written in Python with the GIL held. Others
        # were not tried since cpuft does without it.
        raise CpuftError("--engine ort trains only in fp32 and over gloo: add --precision fp32 --backend gloo")
    for name, tasks in _TASKS.items():
        if config.task not in tasks and _is_used(config, name):
            flag, task = format_flag(name, getattr(config, name)), f"--task {config.task}"
            raise CpuftError(f"{flag} has no effect with {task}: leave it out, or give --task {' or '.join(tasks)}")
    if kind in DECODER_KINDS:
        _refuse_decoder_conflicts(config)
    if config.engine == "ort" and config.task == "text":
        raise CpuftError("--engine ort masks the same positions in every batch of --task text: leave out one of them")
    if config.precision == "int8":
        reason = "it needs the fast path"
        _exclude(config, "--precision int8", dict.fromkeys(("engine", "fast_path", "lora_rank"), reason))
    for name, (others, advice) in _NEEDS.items():
        if _is_used(config, name) and not any(_is_used(config, other) for other in others):
            raise CpuftError(f"{format_flag(name)} changes nothing by itself: add {advice}, or leave it out")
    if config.shard != "none":
        _exclude(config, "--shard", {"sync_every": "each rank updates only its share of the parameters"})
        if config.grad_compression not in ("auto", *SHARDED_COMPRESSIONS):
            raise CpuftError(
                f"--shard supports only {', '.join(SHARDED_COMPRESSIONS)} as --grad-compression: leave out "
                f"--grad-compression {config.grad_compression}, or --shard"
            )
    if config.from_config:
        _exclude(config, "--from-config", {"lora_rank": "adapters are for a pretrained model"})
    if config.eval_every not in ("epoch", "none") and not is_count(config.eval_every):
        raise CpuftError(
            f"--eval-every {config.eval_every!r:.60} is not valid: give epoch, none, or a number of updates, 1 or more"
        )
    if config.lr_schedule == "constant" and (config.warmup_ratio or config.warmup_steps):
        raise CpuftError("--lr-schedule constant has no warm-up: write constant-with-warmup")
    if kind in EMBEDDING_KINDS:
        _exclude(config, f"--task {config.task}", {"engine": "embedding models are trained with --engine torch only"})


def _is_used(config: TrainConfig, name: str) -> bool:
    """Return whether an option differs from its default; no LoRA, in whatever form, is the default."""
    return config.lora_rank > 0 if name == "lora_rank" else getattr(config, name) != getattr(_DEFAULT, name)


def _exclude(config: TrainConfig, what: str, reasons: Mapping[str, str]) -> None:
    """Raise CpuftError if an option is used that `what` excludes, by the reasons of these options."""
    for name, reason in reasons.items():
        if _is_used(config, name):
            flag = format_flag(name, getattr(config, name))
            raise CpuftError(f"{what} excludes {flag}, because {reason}: leave out one of them")


def _refuse_decoder_conflicts(config: TrainConfig) -> None:
    task, unmasked = "--task chat" if config.task == "chat" else "--causal", "no token is masked"
    reasons = {"engine": "decoders are trained with --engine torch only"}
    _exclude(config, task, reasons | dict.fromkeys(("mlm_probability", "whole_word_mask"), unmasked))
    if config.precision == "int8":
        raise CpuftError(f"{task} excludes --precision int8, which is for encoders: leave it out")
    if config.from_config and not config.tokenizer:
        raise CpuftError(f"{task} with --from-config needs --tokenizer: name the tokenizer of a decoder")
