"""Every option of the toolkit, once: flags, help, defaults, YAML keys, worker arguments and recorded options.

A field of a configuration is an option: its name with dashes is the flag, its name is the YAML key.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from cpuft.hardware import PRECISIONS

PADDINGS = ("dynamic", "max_length")
TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "demo", "files")
BACKENDS = ("auto", "gloo", "mpi", "ccl")
ENGINES = ("torch", "ipex")
LAST_PORT = 65535
COMPRESSIONS = ("auto", "none", "bf16", "fp16", "powersgd")


def option(
    default: Any, help: str, *, choices: tuple[str, ...] = (), least: float | None = None, most: float | None = None
) -> Any:
    """A configuration field: its default, what it means to a user, and what values it takes.

    Parameters
    ----------
    choices: the only texts allowed; empty for any.
    least, most: the smallest and the largest number allowed.
    """
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "least": least, "most": most})


@dataclass(frozen=True)
class TrainConfig:
    """What a rank trains. Defaults are the well-known GLUE recipe: length 128, batch 32 a rank, 2e-5, 3 epochs."""

    task: str = option(
        "demo", "GLUE task, 'demo' (built in), or 'files' with --train-file and --validation-file", choices=TASKS
    )
    model: str = option("minilm", "folder or hub name of an encoder; 'minilm' is the one that needs no hub")
    data_dir: str = option("", "folder with the GLUE layout (TASK/train.tsv); without it the hub is asked")
    train_file: str = option("", "your own training rows, CSV, TSV or JSON lines (with --task files)")
    validation_file: str = option("", "your own validation rows (with --task files)")
    text_columns: str = option("", "one or two text columns, comma between (default: sentence1,sentence2 or text)")
    label_column: str = option("label", "column of the label (with --task files)")
    max_length: int = option(128, "tokens of a row at most, longer rows are cut", least=8)
    padding: str = option("dynamic", "pad to the longest row of the batch, or always to --max-length", choices=PADDINGS)
    batch_size: int = option(32, "rows a rank sees in one forward pass", least=1)
    accumulation: int = option(1, "forward passes a rank adds up before one update", least=1)
    epochs: float = option(3.0, "passes over the training rows", least=0.0)
    max_steps: int = option(0, "stop after so many updates (0: as many as --epochs takes)", least=0)
    max_train_samples: int = option(0, "train on the first rows only (0: all)", least=0)
    learning_rate: float = option(2e-5, "peak learning rate", least=0.0)
    weight_decay: float = option(0.0, "AdamW's weight decay; biases and norms get none", least=0.0)
    warmup_ratio: float = option(0.0, "share of the updates over which the rate climbs to its peak", least=0.0)
    clip_norm: float = option(1.0, "gradients are scaled down to this norm (0: off)", least=0.0)
    dropout: float = option(-1.0, "dropout of hidden states and attention (-1: the model's own)", least=-1.0)
    precision: str = option(
        "auto", "auto: bf16 where the hardware has it (AMX or AVX512_BF16), else fp32", choices=PRECISIONS
    )
    engine: str = option(
        "torch", "torch: our fast path; ipex: Intel's extension, in an environment with torch 2.8", choices=ENGINES
    )
    plain: bool = option(False, "switch the fast path off: the model's own layers, autocast and torch's AdamW")
    compile: bool = option(False, "torch.compile of the model's own layers, instead of the fast path")
    emulate_bf16: bool = option(False, "run bf16 even where the hardware lacks it: correct, and slower than fp32")
    backend: str = option(
        "auto", "what carries gradients between ranks; auto measures all and remembers the fastest", choices=BACKENDS
    )
    grad_compression: str = option(
        "auto", "what gradients are sent as; auto: bf16 where training is bf16, else none", choices=COMPRESSIONS
    )
    sync_every: int = option(1, "updates between averagings of parameters (1: gradients at every update)", least=1)
    comm_timeout: float = option(300.0, "seconds a collective may take before the run stops", least=1.0)
    eval_batch_size: int = option(32, "rows a rank sees in one forward pass of evaluation", least=1)
    seed: int = option(42, "seed of everything random", least=0)
    save_model: bool = option(True, "keep the trained model and tokenizer in the run directory")


@dataclass(frozen=True)
class WorkerConfig:
    """What the launcher tells a rank beyond the training options."""

    run_dir: str = option("", "directory of the run: record and model go there (default: nothing is kept)")
    prepared: str = option("", "tokenised data made by cpuft.train.data.prepare (default: prepare it now)")
    progress: str = option("lines", "how rank 0 shows progress", choices=("bar", "lines"))


@dataclass(frozen=True)
class LaunchConfig:
    """Where ranks run and how they are started."""

    np: int = option(1, "ranks in all", least=1)
    ppn: int = option(0, "ranks a host (0: spread over the hosts, the first hosts filled first)", least=0)
    cluster: str = option("", "cluster made by cpuft provision, by name (instead of --hostfile)")
    hostfile: str = option("", "hosts, one a line, the first is the master (default: this machine)")
    run_dir: str = option("", "directory of the run, made new (default: one in runs/, by what is run, and the time)")
    mpirun: str = option("", "mpirun to use (default: the one of the environment, then of PATH)")
    iface: str = option("", "network interface between the hosts (default: the one that routes to them)")
    master_port: int = option(0, "port of the master rank's store (0: a free one)", least=0, most=LAST_PORT)
    comm_cores: int = option(-1, "cores a rank leaves to communication (-1: worked out from the cores)", least=-1)
    ssh_config: str = option("", "ssh client configuration for the hosts (default: your own)")
    check: bool = option(True, "with several hosts: look at them with the doctor before ranks start")
    time_limit: float = option(0.0, "seconds a run may take before it is stopped (0: no limit)", least=0.0)


@dataclass(frozen=True)
class ScriptConfig:
    """How `cpuft launch` runs a script of yours."""

    wrap: bool = option(False, "with a script: bring the fast path to the Hugging Face Trainer in it")


@dataclass(frozen=True)
class CompareConfig:
    """What `cpuft compare` varies."""

    scaling: str = option(
        "weak", "weak: --batch-size a rank, as the recipe does; strong: --batch-size in all", choices=("weak", "strong")
    )


@dataclass(frozen=True)
class BenchConfig:
    """What `cpuft bench comm` measures. Lists have commas between."""

    backends: str = option("gloo,mpi,ccl", "backends to measure; auto among them: what it would choose, beside them")
    operations: str = option("all_reduce", "of all_reduce, all_gather, reduce_scatter and broadcast")
    dtypes: str = option("float32,bfloat16", "types of the numbers sent")
    sizes: str = option("1024,32768,1048576,26214400,115343360", "bytes of a message; 26214400 is a DDP bucket")
    rounds: int = option(1, "go over the backends so often, in turn", least=1)
    comm_timeout: float = option(60.0, "seconds a collective may take before the run stops", least=1.0)


def option_names(config: type) -> list[str]:
    """The option names of a configuration class, in order."""
    return [field.name for field in dataclasses.fields(config)]


def format_arguments(config: Any) -> list[str]:
    """The command-line arguments from which `parse_arguments` makes an equal configuration. All options are named."""
    return [f"--{field.name.replace('_', '-')}={getattr(config, field.name)}" for field in dataclasses.fields(config)]
