"""Every option of the toolkit, once: flags, help, defaults, YAML keys, worker arguments and recorded options.

A field of a configuration is an option: its name with dashes is the flag, its name is the YAML key.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from cpuft.errors import CpuftError
from cpuft.hardware import PRECISIONS
from cpuft.serialization import load, parse_json

PADDINGS = ("dynamic", "max_length")
TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "demo", "files", "text")
LABEL_TYPES = ("auto", "class", "number", "multi")
BACKENDS = ("auto", "gloo", "mpi", "ccl")
ENGINES = ("torch", "ipex", "deepspeed", "ort")
LAST_PORT = 65535
COMPRESSIONS = ("auto", "none", "bf16", "fp16", "int8", "late", "powersgd")
PROVEN = ("none", "bf16", "int8")
"""What `auto` may choose, from exact to thrifty: shown by scripts/check-seeds to cost less than 0.005 of the metric.
Four ranks, five seeds: int8 differed from exact by +0.0003 (standard error 0.0005) on MRPC, by -0.0018 (0.0011) on
SST-2."""
SHARDS = ("none", "optimizer")
SHARDED = ("none", "bf16", "fp16")
"""What gradients may be sent as where each rank gets the sum of its part only."""
WITH_FEEDBACK = ("int8", "late", "powersgd")
"""Ways in which a rank keeps for the next update what it has not sent."""

SECTIONS = ("Where", "What", "How long, and by what recipe", "How fast", "Between ranks", "What is kept")
"""Subjects of options, in the order of the help."""


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

    task: str = _what("demo", "of GLUE, demo (built in), or yours: files, text", choices=TASKS)
    model: str = _what("minilm", "folder or hub name; minilm needs no hub", takes="NAME")
    from_config: str = _what("", "untrained: bert-base, bert-large, bert-1.5b, FILE", takes="NAME")
    tokenizer: str = _what("", "folder or hub name (default: the model's own)", takes="NAME")
    vocabulary: int = _what(30522, "words of one made for --from-config", least=64, most=1 << 20)
    data_dir: str = _what("", "holds TASK/train.tsv (default: ask the hub)", takes="FOLDER")
    train_file: str = _what("", "rows (CSV, TSV, JSON lines), or texts (or FOLDER)", takes="FILE")
    validation_file: str = _what("", "likewise, to validate on", takes="FILE")
    text_columns: str = _what("", "one or two (default: sentence1,sentence2 or text; tokens, a list of words)")
    label_column: str = _what("label", "a label; several: a list or a|b; of words: a list (default: label, or tags)")
    label_type: str = _what("auto", "what labels of --task files are; multi: several a row", choices=LABEL_TYPES)
    max_length: int = _what(128, "tokens of a row; longer rows are cut", least=8)
    held_out: float = _what(0.1, "share of your texts to validate on", least=0.001, most=0.5)
    mask_share: float = _what(0.15, "share of the tokens of texts to be guessed", least=0.01, most=0.9)
    whole_words: bool = _what(False, "guess whole words, not parts of them")
    epochs: float = _recipe(3.0, "passes over the training rows", least=0.0)
    max_steps: int = _recipe(0, "stop after so many updates (default: all epochs)", least=0)
    max_train_samples: int = _recipe(0, "train on the first rows only (default: all)", least=0)
    batch_size: int = _recipe(32, "rows a rank sees in one forward pass", least=1)
    accumulation: int = _recipe(1, "forward passes a rank adds up for one update", least=1)
    lora: int = _recipe(0, "rank of adapters, trained instead; 0: off", least=0, most=1024)
    learning_rate: float = _recipe(-1.0, "peak rate (default: 2e-5; demo 1e-4, --lora 2e-4)", least=-1.0)
    warmup_ratio: float = _recipe(0.0, "share of the updates in which the rate climbs", least=0.0)
    weight_decay: float = _recipe(0.0, "AdamW's; biases and norms get none", least=0.0)
    clip_norm: float = _recipe(1.0, "gradients are scaled down to this; 0: off", least=0.0)
    dropout: float = _recipe(-1.0, "dropout everywhere (default: the model's own)", least=-1.0)
    seed: int = _recipe(42, "seed of everything random", least=0)
    precision: str = _fast("auto", "auto: bf16 where AMX or AVX512_BF16 is", choices=PRECISIONS)
    padding: str = _fast("dynamic", "to the longest row, or to --max-length", choices=PADDINGS)
    engine: str = _fast("torch", "torch is ours; others where installed", choices=ENGINES)
    plain: bool = _fast(False, "no fast path: the model's own layers and AdamW")
    compile: bool = _fast(False, "torch.compile instead of the fast path")
    recompute: bool = _fast(False, "layers compute again in backward: less memory")
    emulate_bf16: bool = _fast(False, "bf16 even where the CPU lacks it: slower than fp32")
    eval_batch_size: int = _fast(32, "rows a rank sees at once in evaluation", least=1)
    backend: str = _between("auto", "carries gradients; auto measures first", choices=BACKENDS)
    grad_compression: str = _between("auto", "of gradients; auto: as the link needs", choices=COMPRESSIONS)
    sync_every: int = _between(1, "updates between averages; 1: gradients, always", least=1)
    outer_momentum: float = _between(0.0, "of those averages; DiLoCo's: 0.9", least=0.0, most=0.99)
    shard: str = _between("none", "optimizer: each rank keeps a part", choices=SHARDS)
    comm_timeout: float = _between(300.0, "seconds a collective may take", least=1.0)
    save_model: bool = _kept(True, "keep the trained model and tokenizer")
    lora_merge: bool = _kept(False, "of --lora: the whole model, adapters merged")
    checkpoint_every: float = _kept(-1.0, "seconds; 0: none (default: 2 % of the time)", least=-1.0)

    def __post_init__(self) -> None:
        """Choose the learning rate that the user did not give.

        Adapters need ten times the rate of whole models. The demo has few and short examples: in three epochs at 2e-5
        it would end at an accuracy of 0.79.
        """
        if self.learning_rate < 0:
            rate = 2e-4 if self.lora else 1e-4 if self.task == "demo" else 2e-5
            object.__setattr__(self, "learning_rate", rate)


_KEEPING = ("checkpoint_every", "save_model", "lora_merge")
FREE_ON_RESUME = ("backend", "grad_compression", "shard", "comm_timeout", "eval_batch_size", "recompute", *_KEEPING)
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
    restarts: int = _recipe(-1, "after a loss (default: 3 on several hosts)", least=-1)
    min_np: int = _recipe(1, "restart on so many ranks at least", least=1)
    comm_cores: int = _between(-1, "cores kept for communication (default: worked out)", least=-1)
    run_dir: str = _kept("", "folder of the run (default: a new one in runs/)", takes="FOLDER")
    notice: str = _kept("", "once it is there, the run saves itself and ends", takes="FILE|URL")
    grace: float = _kept(0.0, "seconds that SIGTERM leaves for that", least=0.0)


ONE_OF = (("model", "from_config"),)
"""Options that mean the same thing: of each pair one may be given."""

LAUNCH_ALONE = ("notice", "grace", "restarts", "min_np")
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
    """The option names of a configuration class, in order."""
    return [field.name for field in dataclasses.fields(config)]


def format_arguments(config: Any) -> list[str]:
    """The command-line arguments from which `parse_arguments` makes an equal configuration. All options are named."""
    return [f"--{field.name.replace('_', '-')}={getattr(config, field.name)}" for field in dataclasses.fields(config)]


_LAYERS = "it trains with layers of its own"
_WEIGHTS = "it keeps the fp32 weights to itself"
_SENDS = "it sends gradients in its own way"
_SHARES = "it shares the optimizer out itself"
_UNTRIED = "nobody has tried both"
_OWN_LAYERS = {"plain": _LAYERS, "compile": _LAYERS, "lora": _LAYERS, "recompute": _UNTRIED}
EXCLUDED = {
    "ipex": {**_OWN_LAYERS, "sync_every": _WEIGHTS, "shard": _WEIGHTS},
    "deepspeed": {**_OWN_LAYERS, "sync_every": _WEIGHTS, "grad_compression": _SENDS, "shard": _SHARES},
    "ort": {**_OWN_LAYERS, "shard": _UNTRIED},
}
"""Engine -> options that it excludes, and why."""


def refuse_engine(engine: str, notice: bool, apart: bool) -> None:
    """Raises CpuftError: an engine cannot do what a launch wants, which says `--notice`, or trains ranks `apart`."""
    if notice and engine != "torch":
        raise CpuftError(f"--notice wants a checkpoint, and --engine {engine} makes none: leave one of them out")
    if apart and engine == "deepspeed":
        raise CpuftError("--ideal trains ranks apart, and --engine deepspeed together only: leave one of them out")


def refuse_conflicts(config: TrainConfig) -> None:
    """Raises CpuftError: two options exclude each other; which, why, and the next move."""
    default = TrainConfig()
    for name, why in EXCLUDED.get(config.engine, {}).items():
        if getattr(config, name) != getattr(default, name):
            flags = f"--engine {config.engine} excludes --{name.replace('_', '-')}"
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
        for name in ("engine", "plain", "compile", "lora"):
            if getattr(config, name) != getattr(default, name):
                raise CpuftError(f"--precision int8 is the fast path's own, and --{name} goes without: leave one out")
    if config.shard != "none" and config.sync_every > 1:
        raise CpuftError("--sync-every has each rank make all updates itself, --shard a part of each: leave one out")
    if config.shard != "none" and config.grad_compression not in ("auto", *SHARDED):
        asked = f"--grad-compression {config.grad_compression}"
        raise CpuftError(f"--shard sends gradients as {', '.join(SHARDED)} only: leave {asked} out, or --shard")
    if config.lora and config.from_config:
        raise CpuftError("--lora adapts a model that has learned, and --from-config makes one: leave one of them out")
    if config.lora_merge and not config.lora:
        raise CpuftError("--lora-merge says how adapters are kept, and there are none: add --lora 16, or leave it out")


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
