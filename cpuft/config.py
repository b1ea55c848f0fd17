"""Every option of the toolkit, once: flags, help, defaults, YAML keys, worker arguments and recorded options.

A field of a configuration is an option: its name with dashes is the flag, its name is the YAML key.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar, get_type_hints

from cpuft.errors import CpuftError, near_names
from cpuft.hardware import PRECISIONS
from cpuft.serialization import load, parse_json
from cpuft.tasks import TASKS

PADDINGS = ("dynamic", "max_length")
LABEL_TYPES = ("auto", "class", "number", "multi")
BACKENDS = ("auto", "gloo", "mpi", "ccl")
ENGINES = ("torch", "ipex", "deepspeed", "ort")
LAST_PORT = 65535
COMPRESSIONS = ("auto", "none", "bf16", "fp16", "int8", "powersgd")
"""Values of --grad-compression; `cpuft.comm.compression.table` holds their code."""
AUTO_COMPRESSIONS = ("none", "bf16", "int8")
"""What `auto` may choose, from exact to fewest bytes: compressions that cost less than 0.005 of the metric in
scripts/check-seeds. With four ranks and five seeds, int8 differed from exact gradients by +0.0003 (standard error
0.0005) on MRPC and by -0.0018 (0.0011) on SST-2."""
SHARDS = ("none", "optimizer")
SHARDED_COMPRESSIONS = ("none", "bf16", "fp16")
"""Compressions that work with --shard, where each rank receives the sum of its own shard only."""
COMPRESSIONS_WITH_FEEDBACK = ("int8", "powersgd")
"""Compressions with error feedback: what a rank could not send in an update is added to the next one."""
REMOVED_VALUES = {
    ("--grad-compression", "late"): "--grad-compression late was removed, because it cost too much accuracy: give "
    "--grad-compression int8, which sends as many bytes"
}
"""(option, value of an older version) -> what a user who gives it is told."""

SECTIONS = ("Where", "What", "How long, and by what recipe", "How fast", "Between ranks", "What is kept")
"""Subjects of options, in the order of the help."""


OLD_NAMES = {
    "accumulation": "gradient_accumulation",
    "clip_norm": "max_grad_norm",
    "grace": "grace_period",
    "held_out": "validation_split",
    "lora": "lora_rank",
    "mask_share": "mlm_probability",
    "notice": "interruption_notice",
    "plain": "no_fast_path",
    "recompute": "gradient_checkpointing",
    "restarts": "max_restarts",
    "vocabulary": "vocab_size",
    "whole_words": "whole_word_mask",
}
"""Option names of earlier versions, and today's: for flags, YAML files, records, plans and the registry of clusters.

A new name that begins with `no_` means that the old option switched on what the new one switches off.
"""

C = TypeVar("C")


def is_count(text: str, least: int = 1, most: int = 10**12) -> bool:
    """Whether a text is a whole number from `least` to `most`, in plain digits; of thousands of them int raises."""
    return text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most


def option(
    default: Any,
    help: str,
    *,
    section: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    takes: str = "TEXT",
) -> Any:
    """A configuration field: its default, what it means to a user, and what values it takes.

    Parameters
    ----------
    section: one of SECTIONS, the subject under which the help lists it; the usual ones stand first.
    choices: the only texts allowed; empty for any.
    least, most: the smallest and the largest number allowed.
    takes: what the help calls a text; shells complete FILE and FOLDER.
    """
    told = {"help": help, "section": section, "choices": choices, "least": least, "most": most, "takes": takes}
    return dataclasses.field(default=default, metadata=told)


_where, _what, _recipe, _fast, _between, _kept = (partial(option, section=section) for section in SECTIONS)


@dataclass(frozen=True)
class TrainConfig:
    """What a rank trains. Defaults are the well-known GLUE recipe: length 128, batch 32 a rank, 2e-5, 3 epochs."""

    task: str = _what("demo", "of GLUE, demo (built in), or yours: files, text", choices=tuple(TASKS))
    model: str = _what("minilm", "folder or hub name; minilm needs no hub", takes="NAME")
    from_config: str = _what("", "untrained: bert-base, bert-large, bert-1.5b, FILE", takes="NAME")
    tokenizer: str = _what("", "folder or hub name (default: the model's own)", takes="NAME")
    vocab_size: int = _what(30522, "words of one made for --from-config", least=64, most=1 << 20)
    data_dir: str = _what("", "holds TASK/train.tsv (default: ask the hub)", takes="FOLDER")
    train_file: str = _what("", "rows (CSV, TSV, JSON lines), or texts (or FOLDER)", takes="FILE")
    validation_file: str = _what("", "likewise, to validate on", takes="FILE")
    text_columns: str = _what("", "one or two (default: sentence1,sentence2 or text; tokens, a list of words)")
    label_column: str = _what("label", "a label; several: a list or a|b; of words: a list (default: label, or tags)")
    label_type: str = _what("auto", "what labels of --task files are; multi: several a row", choices=LABEL_TYPES)
    max_length: int = _what(128, "tokens of a row; longer rows are cut", least=8)
    validation_split: float = _what(0.1, "share of your texts to validate on", least=0.001, most=0.5)
    mlm_probability: float = _what(0.15, "share of the tokens of texts to be guessed", least=0.01, most=0.9)
    whole_word_mask: bool = _what(False, "guess whole words, not parts of them")
    epochs: float = _recipe(3.0, "passes over the training rows", least=0.0)
    max_steps: int = _recipe(0, "stop after so many updates (default: all epochs)", least=0)
    max_train_samples: int = _recipe(0, "train on the first rows only (default: all)", least=0)
    batch_size: int = _recipe(32, "rows a rank sees in one forward pass", least=1)
    gradient_accumulation: int = _recipe(1, "forward passes a rank adds up for one update", least=1)
    lora_rank: int = _recipe(0, "rank of adapters, trained instead; 0: off", least=0, most=1024)
    learning_rate: float = _recipe(-1.0, "peak rate (default: 2e-5; demo 1e-4, --lora-rank 2e-4)", least=-1.0)
    warmup_ratio: float = _recipe(0.0, "share of the updates in which the rate climbs", least=0.0)
    weight_decay: float = _recipe(0.0, "AdamW's; biases and norms get none", least=0.0)
    max_grad_norm: float = _recipe(1.0, "gradients are scaled down to this; 0: off", least=0.0)
    dropout: float = _recipe(-1.0, "dropout everywhere (default: the model's own)", least=-1.0)
    seed: int = _recipe(42, "seed of everything random", least=0)
    precision: str = _fast("auto", "auto: bf16 where AMX or AVX512_BF16 is", choices=PRECISIONS)
    padding: str = _fast("dynamic", "to the longest row, or to --max-length", choices=PADDINGS)
    engine: str = _fast("torch", "torch is ours; others where installed", choices=ENGINES)
    fast_path: bool = _fast(True, "cpuft's own layers and AdamW instead of the model's")
    compile: bool = _fast(False, "torch.compile instead of the fast path")
    gradient_checkpointing: bool = _fast(False, "layers compute again in backward: less memory")
    emulate_bf16: bool = _fast(False, "bf16 even where the CPU lacks it: slower than fp32")
    eval_batch_size: int = _fast(32, "rows a rank sees at once in evaluation", least=1)
    backend: str = _between("auto", "carries gradients; auto measures first", choices=BACKENDS)
    grad_compression: str = _between("auto", "of gradients; auto: as the link needs", choices=COMPRESSIONS)
    sync_every: int = _between(1, "updates between averages; 1: gradients, always", least=1)
    outer_momentum: float = _between(0.0, "of those averages; DiLoCo's: 0.9", least=0.0, most=0.99)
    shard: str = _between("none", "optimizer: each rank keeps a part", choices=SHARDS)
    comm_timeout: float = _between(300.0, "seconds a collective may take", least=1.0)
    save_model: bool = _kept(True, "keep the trained model and tokenizer")
    lora_merge: bool = _kept(False, "of --lora-rank: the whole model, adapters merged")
    checkpoint_every: float = _kept(-1.0, "seconds; 0: none (default: 2 % of the time)", least=-1.0)

    def __post_init__(self) -> None:
        """Choose the learning rate that the user did not give.

        Adapters need ten times the rate of whole models. The demo has few and short examples: in three epochs at 2e-5
        it would end at an accuracy of 0.79.
        """
        if self.learning_rate < 0:
            rate = 2e-4 if self.lora_rank else 1e-4 if self.task == "demo" else 2e-5
            object.__setattr__(self, "learning_rate", rate)


_KEEPING = ("checkpoint_every", "save_model", "lora_merge")
FREE_ON_RESUME = (
    "backend",
    "grad_compression",
    "shard",
    "comm_timeout",
    "eval_batch_size",
    "gradient_checkpointing",
    *_KEEPING,
)
"""Options that may change when a run goes on: they say how it is trained on these hosts, not what."""


@dataclass(frozen=True)
class WorkerConfig:
    """What the launcher tells a rank beyond the training options."""

    run_dir: str = option("", "directory of the run: record and model go there (default: nothing is kept)")
    prepared: str = option("", "tokenised data made by cpuft.train.data.prepare (default: prepare it now)")
    progress: str = option("lines", "how rank 0 shows progress", choices=("bar", "lines"))
    apart: bool = option(False, "each rank trains for itself: what the hosts could do together at best")
    cores_allowed: float = option(0.0, "CPU time the master's control group allows, in cores; 0: no limit", least=0.0)
    resume: int = option(-1, "goes on with the run of run-dir, of which so many updates were recorded", least=-1)
    since: float = option(0.0, "when the run broke off, in seconds since 1970 (default: nobody knows)", least=0.0)
    because: str = option("", "why it did")
    global_batch: int = option(0, "rows of an update (default: a batch for each rank)", least=0)
    measured: str = option("", "what the run's first start has measured, as JSON (default: measure)")
    keep_checkpoints: bool = option(False, "leave the checkpoints at the end: the launcher removes them after fetching")


@dataclass(frozen=True)
class LaunchConfig:
    """Where ranks run and how they are started."""

    np: int = _where(1, "ranks in all", least=1)
    ppn: int = _where(0, "ranks a host (default: spread over the hosts)", least=0)
    hostfile: str = _where("", "hosts, the master first (default: this machine)", takes="FILE")
    cluster: str = _where("", "cluster of cpuft provision, instead of --hostfile", takes="NAME")
    iface: str = _where("", "interface between hosts (default: by the route)", takes="NAME")
    ssh_config: str = _where("", "ssh client configuration (default: your own)", takes="FILE")
    mpirun: str = _where("", "(default: the environment's, then PATH's)", takes="FILE")
    master_port: int = _where(0, "port of rank 0's store (default: a free one)", least=0, most=LAST_PORT)
    check: bool = _where(True, "the doctor looks at several hosts first")
    time_limit: float = _recipe(0.0, "seconds a run may take (default: no limit)", least=0.0)
    max_restarts: int = _recipe(-1, "after a loss (default: 3 on several hosts)", least=-1)
    min_np: int = _recipe(1, "restart on so many ranks at least", least=1)
    comm_cores: int = _between(-1, "cores kept for communication (default: worked out)", least=-1)
    run_dir: str = _kept("", "folder of the run (default: a new one in runs/)", takes="FOLDER")
    interruption_notice: str = _kept("", "once it is there, the run saves itself and ends", takes="FILE|URL")
    grace_period: float = _kept(0.0, "seconds that SIGTERM leaves for that", least=0.0)


ONE_OF = (("model", "from_config"),)
"""Options that mean the same thing: of each pair one may be given."""

LAUNCH_ONLY = ("interruption_notice", "grace_period", "max_restarts", "min_np")
"""Options of LaunchConfig that say something to `cpuft launch` only."""


@dataclass(frozen=True)
class ScriptConfig:
    """How `cpuft launch` runs a script of yours."""

    wrap: bool = _fast(False, "bring the fast path to the Trainer in your script")
    independent: bool = _between(False, "do not require that the ranks of a script form one process group")


@dataclass(frozen=True)
class ResumeConfig:
    """How `cpuft launch` goes on with a run."""

    resume: str = _kept("", "go on with this run, with its options", takes="FOLDER")


@dataclass(frozen=True)
class CompareConfig:
    """What `cpuft compare` varies."""

    np: str = _where("1,2", "numbers of ranks to compare, e.g. 1,2,4", takes="N,N")
    scaling: str = _where("weak", "--batch-size is a rank's (weak) or all's", choices=("weak", "strong"))
    ideal: bool = _where(False, "measure the ideal, too: as many ranks apart")
    repeats: int = _where(1, "take all runs so often, in turn: intervals", least=1)


@dataclass(frozen=True)
class BenchConfig:
    """What `cpuft bench comm` measures. Lists have commas between."""

    backends: str = _what("gloo,mpi,ccl", "backends; with auto: what it would choose, too", takes="LIST")
    operations: str = _what("all_reduce", "all_reduce, all_gather, reduce_scatter, broadcast", takes="LIST")
    dtypes: str = _what("float32,bfloat16", "types of the numbers sent", takes="LIST")
    sizes: str = _what(
        "1024,32768,1048576,26214400,115343360", "bytes of a message; 26214400 is a DDP bucket", takes="LIST"
    )
    rounds: int = _what(1, "go over the backends so often, in turn", least=1)
    comm_timeout: float = _between(60.0, "seconds a collective may take", least=1.0)


def option_names(config: type) -> list[str]:
    """Return the option names of a configuration class, in order."""
    return [field.name for field in dataclasses.fields(config)]


def format_flag(name: str, value: object = True) -> str:
    """Return the command-line flag of an option: `--batch-size`, or `--no-fast-path` if the value is False."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def find_new_name(name: str, known: Collection[str]) -> tuple[str, bool]:
    """Return today's name of an option in `known`, and whether a boolean value is to be negated.

    Parameters
    ----------
    name: as a flag, a YAML key or a stored option has it, with underscores; perhaps of an earlier version (OLD_NAMES).
    known: names of the options that exist. A name among them, or one that has no new name there, is returned as it is.
    """
    new = OLD_NAMES.get(name, name)
    if name in known or new in known:
        return (name if name in known else new), False
    positive = new.removeprefix("no_")
    return (positive, True) if positive in known else (name, False)


def rename_old_options(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return options, as an earlier version may have stored them, under the names that they have in this version.

    Names that are not in `known` and have no new name there stay as they are.
    """
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        new, negated = find_new_name(name, known)
        renamed[new] = _negate(value) if negated else value
    return renamed


def _negate(value: Any) -> Any:
    """Negate a boolean, or the text of one as YAML files and command lines have it; other values are returned as is."""
    if isinstance(value, bool):
        return not value
    text = str(value).lower()
    if text in ("true", "yes", "on", "1"):
        return "false"
    return "true" if text in ("false", "no", "off", "0") else value


def format_arguments(config: Any) -> list[str]:
    """Return the command-line arguments from which `parse_arguments` makes an equal configuration, with all options."""
    return [f"{format_flag(field.name)}={getattr(config, field.name)}" for field in dataclasses.fields(config)]


def parse_arguments(config: type[C], arguments: Sequence[str]) -> C:
    """Return the configuration that arguments describe, in the form of `format_arguments`.

    `--name value` is the same as `--name=value`, booleans are True or False, options that are not given have their
    defaults, and names of earlier versions are accepted.

    Raises CpuftError: an unknown option, or a value that the option cannot have.
    """
    fields = _fields(config)
    types, texts, rest = get_type_hints(config), dict[str, str](), iter(arguments)
    for argument in rest:
        flag, equals, text = argument.partition("=")
        name = find_new_name(flag[2:].replace("-", "_"), fields)[0]
        if flag[:2] != "--" or name not in fields:
            raise CpuftError(f"{flag[:80]!r} is no option here: {near_names(flag, map(format_flag, fields))}")
        value = text if equals else next(rest, None)
        if value is None:
            raise CpuftError(f"{flag} has no value: write {flag}=VALUE")
        texts.update(rename_old_options({flag[2:].replace("-", "_"): value}, fields))
    return config(**{name: _parse_value(fields[name], types[name], text) for name, text in texts.items()})


def _fields(config: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(config)}


def _parse_value(field: dataclasses.Field[Any], kind: type, text: str) -> Any:
    flag, choices = format_flag(field.name), field.metadata["choices"]
    if choices and text not in choices:
        raise CpuftError(describe_unknown_value(flag, text, choices))
    if kind is str:
        return text
    try:
        if not text.isascii():
            raise ValueError
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
    except (KeyError, ValueError):
        wanted = {bool: "True or False", int: "a whole number", float: "a number"}[kind]
        raise CpuftError(f"{flag} {text[:80]!r} is not {wanted}: correct the value") from None
    least, most = field.metadata["least"], field.metadata["most"]
    if (least is not None and value < least) or (most is not None and value > most):
        limits = [f"{limit:g} or {word}" for limit, word in ((least, "more"), (most, "less")) if limit is not None]
        raise CpuftError(f"{flag} {text} is out of range: give {', '.join(limits)}")
    return value


_NO_GPU = "works on GPUs only, and cpuft trains on CPUs"
_NO_FP16 = (
    "is not supported: choose bf16, which is fast on CPUs with AMX or AVX512_BF16, or fp32, which runs on every CPU"
)
_VALUES = {"nccl": _NO_GPU, "rccl": _NO_GPU, "fp16": _NO_FP16, "float16": _NO_FP16, "half": _NO_FP16}
"""What to say of values that other trainers have and cpuft does not."""


def describe_unknown_value(option: str, value: str, choices: Collection[str]) -> str:
    """Return the message for a value that is none of an option's `choices`, with the values to choose from."""
    if removed := REMOVED_VALUES.get((option, value)):
        return removed
    known = _VALUES.get(value.lower(), "")
    if known == _NO_GPU:
        return f"{option} {value} {known}: choose one of {', '.join(choices)}"
    if known and {"bf16", "fp32"} <= set(choices):
        return f"{option} {value} {known}"
    return f"{value!r} is not a value of {option}: {near_names(value, choices)}"


_LAYERS = "it trains with layers of its own"
_WEIGHTS = "it keeps the fp32 weights to itself"
_SENDS = "it sends gradients in its own way"
_SHARES = "it shares the optimizer out itself"
_UNTRIED = "nobody has tried both"
_OWN_LAYERS = {"fast_path": _LAYERS, "compile": _LAYERS, "lora_rank": _LAYERS, "gradient_checkpointing": _UNTRIED}
EXCLUDED = {
    "ipex": {**_OWN_LAYERS, "sync_every": _WEIGHTS, "shard": _WEIGHTS},
    "deepspeed": {**_OWN_LAYERS, "sync_every": _WEIGHTS, "grad_compression": _SENDS, "shard": _SHARES},
    "ort": {**_OWN_LAYERS, "shard": _UNTRIED},
}
"""Engine -> options that it excludes, and why."""


def refuse_engine(engine: str, notice: bool, apart: bool) -> None:
    """Raises CpuftError: an engine cannot do what a launch asks for: an interruption `notice`, or ranks `apart`."""
    if notice and engine != "torch":
        raise CpuftError(
            f"--interruption-notice wants a checkpoint, and --engine {engine} makes none: leave one of them out"
        )
    if apart and engine == "deepspeed":
        raise CpuftError("--ideal trains ranks apart, and --engine deepspeed together only: leave one of them out")


def refuse_conflicts(config: TrainConfig) -> None:
    """Raises CpuftError: two options exclude each other; which, why, and the next move."""
    default = TrainConfig()
    if removed := REMOVED_VALUES.get(("--grad-compression", config.grad_compression)):  # from a record
        raise CpuftError(removed)
    for name, why in EXCLUDED.get(config.engine, {}).items():
        if getattr(config, name) != getattr(default, name):
            flags = f"--engine {config.engine} excludes {format_flag(name, getattr(config, name))}"
            raise CpuftError(f"{flags}, because {why}: leave one of them out")
    if config.engine == "ort" and (config.precision, config.backend) != ("fp32", "gloo"):
        # Under torch 2.3, DistributedDataParallel waits for process groups written in Python with the GIL in its hand.
        raise CpuftError("--engine ort trains in fp32 and over gloo only: add --precision fp32 --backend gloo")
    if config.engine == "ort" and config.task == "text":
        raise CpuftError("--engine ort takes the first batch's masked places for all: train --task text without it")
    if config.label_type != "auto" and config.task != "files":
        given = f"--label-type {config.label_type}"
        raise CpuftError(f"{given} is for --task files; the labels of --task {config.task} are known: leave it out")
    if config.precision == "int8":
        for name in ("engine", "fast_path", "compile", "lora_rank"):
            if getattr(config, name) != getattr(default, name):
                flag = format_flag(name, getattr(config, name))
                raise CpuftError(f"--precision int8 is the fast path's own, and {flag} goes without: leave one out")
    if config.shard != "none" and config.sync_every > 1:
        raise CpuftError("--sync-every has each rank make all updates itself, --shard a part of each: leave one out")
    if config.shard != "none" and config.grad_compression not in ("auto", *SHARDED_COMPRESSIONS):
        asked = f"--grad-compression {config.grad_compression}"
        raise CpuftError(
            f"--shard sends gradients as {', '.join(SHARDED_COMPRESSIONS)} only: leave {asked} out, or --shard"
        )
    if config.lora_rank and config.from_config:
        raise CpuftError(
            "--lora-rank adapts a model that has learned, and --from-config makes one: leave one of them out"
        )
    if config.lora_merge and not config.lora_rank:
        raise CpuftError(
            "--lora-merge says how adapters are kept, and there are none: add --lora-rank 16, or leave it out"
        )


@dataclass(frozen=True)
class PredictConfig:
    """Rows for the model of a run, and what becomes of the answers."""

    run: str = option("", "directory of the run")
    file: str = option("", "rows of your own: CSV, TSV or JSON lines", takes="FILE")
    split: str = option("", "the run's validation rows, or GLUE's test rows", takes="validation|test")
    output: str = option("", "(default: predictions.csv in RUN; of GLUE's test rows its own name)", takes="FILE")
    text_columns: str = option("", "one or two (default: the run's)")
    label_column: str = option("", "measured by these labels, if the file has them (default: the run's)")
    data_dir: str = option("", "holds TASK/test.tsv (default: the run's)", takes="FOLDER")
    overwrite: bool = option(False, "replace predictions that an earlier call has written")
    with_input: bool = option(False, "write each row's texts beside its predictions")
    batch_size: int = option(0, "rows at once (default: the run's in evaluation)", least=0)
    precision: str = option("auto", "auto: the run's", choices=("auto", "bf16", "fp32"))


_FLAG = "--rooms="


@dataclass(frozen=True)
class Room:
    """Memory of a host, and of its whole machine, which hosts of the same one share."""

    host: str
    ranks: int
    free_bytes: int
    machine: str = ""
    machine_bytes: int = 0


@dataclass(frozen=True)
class Rooms:
    """All hosts' of a run, the master's first; `apart`: each rank trains for itself."""

    hosts: tuple[Room, ...]
    precision: str
    apart: bool = False


def format_rooms(rooms: Rooms) -> tuple[str, ...]:
    """One word of a command line; none where a host does not know its memory."""
    return (f"{_FLAG}{json.dumps(asdict(rooms))}",) if all(room.free_bytes for room in rooms.hosts) else ()


def take_rooms(words: Sequence[str]) -> tuple[Rooms | None, list[str]]:
    """That word's meaning, and the other words."""
    told = [load(Rooms, parse_json(word.removeprefix(_FLAG))) for word in words if word.startswith(_FLAG)]
    return (told[-1] if told else None), [word for word in words if not word.startswith(_FLAG)]


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bits(rate: str, flag: str = "--net") -> int:
    """Bits a second of a rate ("1gbit", "100mbit"); 0 for an empty one. Raises CpuftError that names the flag."""
    if not rate:
        return 0
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmgt]?)bit", rate)
    if not match or float(match[1]) <= 0:
        raise CpuftError(f"{flag} {rate[:60]!r} is no rate: write e.g. 1gbit or 100mbit")
    return int(float(match[1]) * _UNITS[match[2]])


TYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
Turn = tuple[str, str, str, int]
"""Backend (or auto), operation, type and bytes of one measurement."""


def plan_turns(config: BenchConfig) -> list[Turn]:
    """Backend, operation, type and bytes of each measurement, in turn.

    Raises CpuftError: an unknown name, or a size that is no number, or no whole number of a type's elements.
    """
    lists = {name: getattr(config, name).split(",") for name in ("backends", "operations", "dtypes", "sizes")}
    known = {"backends": BACKENDS, "operations": OPERATIONS, "dtypes": tuple(TYPE_BYTES)}
    for kind, names in known.items():
        for name in lists[kind]:
            if name not in names:
                raise CpuftError(describe_unknown_value(f"--{kind}", name, names))
    if not all(map(is_count, lists["sizes"])):
        raise CpuftError(f"--sizes {config.sizes[:60]} is no list of bytes: write e.g. 1024,26214400")
    for size, dtype in itertools.product(lists["sizes"], lists["dtypes"]):
        if int(size) % TYPE_BYTES[dtype]:
            raise CpuftError(
                f"--sizes: {size} bytes hold no whole number of {dtype}: take a multiple of {TYPE_BYTES[dtype]}"
            )
    turns = itertools.product(range(config.rounds), *(lists[name] for name in lists))
    return [(backend, operation, dtype, int(size)) for _, backend, operation, dtype, size in turns]
