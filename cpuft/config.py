"""The options that the launcher, the ranks and the record share, each defined once as a dataclass field.

The field's name is the key in YAML files and records, and with dashes it is the command-line flag. `cpuft.cli.options`
makes the flags and the help from the fields.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from cpuft.compressions import COMPRESSIONS, REMOVED_COMPRESSIONS, SHARDED_COMPRESSIONS
from cpuft.errors import CpuftError, suggest_names
from cpuft.files import refuse_special
from cpuft.hardware import PRECISIONS
from cpuft.serialization import load, parse_json
from cpuft.tasks import DECODER_KINDS, EMBEDDING_KINDS, LABEL_KINDS, TASKS, find_task

POOLINGS = ("mean", "cls", "lasttoken")
"""How the hidden states of a text's tokens become one vector: their mean, the first one, or the last one."""
DEFAULT_MODEL = "minilm"
BASE_PRECISIONS = ("auto", "fp32", "bf16", "int8")
PADDINGS = ("dynamic", "max_length")
LABEL_TYPES = ("auto", "class", "number", "multi")
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
"""The values of --delimiter, apart from auto, and the characters that they stand for."""
QUOTINGS = ("auto", "csv", "none")
BACKENDS = ("auto", "gloo", "mpi", "ccl")
ENGINES = ("torch", "ipex", "deepspeed", "ort")
LAST_PORT = 65535
LR_SCHEDULES = ("linear", "cosine", "constant", "constant-with-warmup", "inverse-sqrt")
"""The values of --lr-schedule, which transformers writes with underscores."""
SYNC_SCHEDULES = ("constant", "quadratic")
SHARDS = ("none", "optimizer")
SECTIONS = (
    "Hosts and ranks",
    "Task, model and data",
    "Training recipe",
    "Evaluation while training",
    "Speed and memory",
    "Communication",
    "Output, checkpoints and restarts",
)
"""Headings of the help of `launch` and its relatives, in this order."""

LARGE_DECODER = 200_000_000
"""Number of parameters above which decoders are trained with LoRA, unless --lora-rank says otherwise."""
DEFAULT_LORA_RANK = 16

C = TypeVar("C")


def is_count(text: str, least: int = 1, most: int = 10**12) -> bool:
    """Return whether a text is a whole number from `least` to `most`, written in fewer than 20 digits 0 to 9 only."""
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
    rare: bool = False,
) -> Any:
    """Return a dataclass field that is an option; its metadata has the other parameters by their names.

    Parameters
    ----------
    help: a phrase that can be understood alone, without a period at its end. It names the unit, what 0 means, and the
        default as "(default: ...)" if that is not the value `default`.
    section: the heading in the help, one of SECTIONS, or empty for the last one.
    choices: the only texts that are accepted; empty for any text.
    least, most: None for no limit. A `least` of -1 stands for a default that depends on other options: messages call 0
        the smallest number.
    takes: placeholder for the value in the help; shells complete FILE and FOLDER. TEXT stands for the choices, if there
        are any, and for N if the value is a number.
    rare: whether few runs need the option: only --help-all shows it.
    """
    metadata = {"help": help, "section": section, "choices": choices, "least": least, "most": most}
    metadata |= {"takes": takes, "rare": rare}
    return dataclasses.field(default=default, metadata=metadata)


_hosts, _data, _recipe, _evaluation, _speed, _communication, _output = (
    partial(option, section=section) for section in SECTIONS
)


def _delimiter(section: str = "") -> Any:
    text = "Character between the columns of CSV and TSV files; auto is found in the header line of each file"
    return option("auto", text, section=section, rare=bool(section), choices=("auto", *DELIMITERS))


def _quoting(section: str = "") -> Any:
    text = (
        "Whether quotation marks surround cells of CSV and TSV files (csv), or are a part of the texts, as in GLUE's "
        "files (none); auto is none if a file can only be read so, and refuses a file that is in doubt"
    )
    return option("auto", text, section=section, rare=bool(section), choices=QUOTINGS)


def _encoding(section: str = "") -> Any:
    text = (
        "Encoding of files of texts, such as windows-1252 or shift_jis; auto is UTF-8, and UTF-16 for a file that "
        "begins with its byte order mark"
    )
    return option("auto", text, section=section, rare=bool(section), takes="NAME")


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training. The defaults are the usual GLUE recipe: length 128, batch 32 per rank, 2e-5, 3 epochs."""

    task: str = _data(
        "demo",
        "What to train: a GLUE task (cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli); demo, a small built-in "
        "task; files, your own labelled examples; text, masked language modelling on your own texts, or next-token "
        "prediction with --causal; chat, the assistant's turns of your own conversations; an embedding "
        "model: pairs, from texts that belong together, such as questions and answers, or scored-pairs, from pairs of "
        "texts with a score of their similarity; or rerank, a model that scores how relevant a document is to a query",
        choices=tuple(TASKS),
        takes="TASK",
    )
    model: str = _data(
        DEFAULT_MODEL,
        "Pretrained model: a local folder or a name on the Hugging Face hub. minilm is a small encoder that needs no "
        "download",
        takes="NAME",
    )
    from_config: str = _data(
        "",
        "Train a new model with random weights instead of --model: bert-base, bert-large, bert-1.5b, or the path of a "
        "Hugging Face config.json",
        takes="NAME",
    )
    tokenizer: str = _data(
        "",
        "Tokenizer: a local folder or a name on the Hugging Face hub (default: the model's own; with --from-config, a "
        "WordPiece tokenizer is made from the training texts)",
        takes="NAME",
    )
    vocab_size: int = _data(
        30522,
        "Maximum vocabulary size of the tokenizer that --from-config makes from the training texts",
        least=64,
        most=1 << 20,
        rare=True,
    )
    data_dir: str = _data(
        "",
        "Folder of the GLUE data, with files such as MRPC/train.tsv (default: download from the Hugging Face hub)",
        takes="FOLDER",
    )
    train_file: str = _data(
        "",
        "Training data: paths or patterns such as 'data/*.csv', separated by commas. With --task files: CSV, TSV or "
        "JSON lines files, also compressed with gzip, Parquet or Arrow files, folders of datasets.save_to_disk, or "
        "hub:OWNER/NAME/CONFIGURATION:SPLIT@REVISION for a data set of the Hugging Face hub, of which configuration, "
        "split and revision may be left out; so also with --task pairs and scored-pairs. With --task text: text files, "
        "folders of them, or a column of any of these files. With --task chat: JSON lines files whose lines have "
        "messages, a list of objects with role (system, user, assistant or tool) and content",
        takes="FILE",
    )
    validation_file: str = _data(
        "",
        "Validation data in the same form as --train-file (default: a part of the training data, see "
        "--validation-split). With --task pairs also a folder in the form of BEIR, with corpus.jsonl, queries.jsonl "
        "and the folder qrels",
        takes="FILE",
    )
    text_columns: str = _data(
        "",
        "Name of the column of the texts in your files, or two names with a comma between them if an example is a "
        "pair of texts (default: the pair sentence1,sentence2 or another usual pair if the file has it, else the "
        "column sentence, text or another usual name; tokens if an example is a list of words; with --task text, "
        "the column text). --task text joins the texts of several columns. With --task pairs: the columns of anchor, "
        "positive and, if there are any, negatives, such as question,answer (default: anchor,positive or another usual "
        "pair, and all columns whose names begin with negative)",
        takes="NAMES",
    )
    label_column: str = _data(
        "label",
        "Name of the column of the labels in your files (default: label; tags if an example is a list of words). "
        "For several labels per example, write sports|news in a CSV cell, or a list in JSON lines. An example that "
        "is a list of words has a list with one tag per word",
        takes="NAME",
    )
    label_type: str = _data(
        "auto",
        "Type of the labels of --task files: class (one class per example), number (regression) or multi (several "
        "classes per example). auto decides by the values: numbers are regression if at least one has a fraction, "
        "such as 3.5, several labels are multi, and all others are classes; tags of words need no type",
        choices=LABEL_TYPES,
        rare=True,
    )
    skip_unlabelled: bool = _data(
        False,
        "With --task files, scored-pairs and rerank, leave out rows without a label (empty, nan, None or NA), and "
        "say how many they are, instead of refusing them",
    )
    delimiter: str = _delimiter(SECTIONS[1])
    quoting: str = _quoting(SECTIONS[1])
    encoding: str = _encoding(SECTIONS[1])
    max_length: int = _data(
        128,
        "Maximum number of tokens per example: longer examples are truncated, conversations at the end of an answer, "
        "and --task text cuts its texts into pieces of this length",
        least=8,
    )
    validation_split: float = _data(
        0.1,
        "Fraction of the rows of --task files, of the conversations of --task chat, or of the lines of --task text, "
        "that is kept for validation when there is no --validation-file; of texts, up to 64 lines in a row are taken "
        "from all parts",
        least=0.001,
        most=0.5,
    )
    causal: bool = _data(
        False,
        "With --task text, train a decoder, such as Llama, Qwen3, SmolLM or Gemma 3, to predict each next token "
        "(continued pre-training) instead of masked tokens",
    )
    chat_template: str = _data(
        "",
        "With --task chat, file with the jinja template that renders conversations, which is saved with the tokenizer "
        "(default: the tokenizer's own)",
        takes="FILE",
        rare=True,
    )
    pack: bool = _data(
        False,
        "With --task chat, put several conversations into one sequence of up to --max-length tokens, so that little "
        "is padded; attention stays within each conversation. --batch-size then counts such sequences",
    )
    mlm_probability: float = _data(
        0.15, "Fraction of the tokens that --task text masks for the model to predict", least=0.01, most=0.9, rare=True
    )
    whole_word_mask: bool = _data(False, "With --task text, mask all tokens of a word together", rare=True)
    pooling: str = _data(
        "auto",
        "How an embedding model makes one vector of a text's tokens: their mean, the first one (cls) or the last one; "
        "auto is what the files of sentence-transformers beside the model say, else mean",
        choices=("auto", *POOLINGS),
        rare=True,
    )
    query_prompt: str = _data(
        "auto",
        "With --task pairs, text that is put in front of each anchor, such as 'query: '; auto takes the prompt named "
        "query of the model, if it has one",
        rare=True,
    )
    document_prompt: str = _data(
        "auto",
        "With --task pairs, text that is put in front of each positive and negative, such as 'passage: '; auto takes "
        "the prompt named document, passage or corpus of the model, if it has one",
        rare=True,
    )
    hard_negatives: int = _data(
        0,
        "With --task rerank and pairs, for data without irrelevant documents: number of irrelevant documents that are "
        "found for each query before the training, those that --mining-model takes for the most similar ones. 0 finds "
        "none",
        least=0,
        most=100,
    )
    mining_model: str = _data(
        "",
        "Embedding model that --hard-negatives compares texts with: the folder of a model or of a run, or a name on "
        "the Hugging Face hub (default: --model, if it is an embedding model)",
        takes="NAME",
        rare=True,
    )
    epochs: float = _recipe(3.0, "Number of passes over the training examples, such as 3 or 0.5", least=0.0)
    max_steps: int = _recipe(0, "Number of updates to train, instead of --epochs; 0 trains for --epochs", least=0)
    max_train_samples: int = _recipe(0, "Train on only this many examples, the first ones; 0 uses all", least=0)
    batch_size: int = _recipe(32, "Number of examples per rank in one forward and backward pass", least=1)
    gradient_accumulation: int = _recipe(
        1, "Number of forward and backward passes per rank for one update, whose gradients are averaged", least=1
    )
    lora_rank: int = _recipe(
        -1,
        "Rank of LoRA adapters (peft): only the adapters and the head of the task are trained. Encoders get adapters "
        "in the linear layers of attention, decoders also in those of feed-forward. Alpha is twice the rank. 0 trains "
        "all weights "
        "(default: 16 for decoders above 200 million parameters with --task chat, --causal, --task files and GLUE "
        "tasks, else 0)",
        least=-1,
        most=1024,
    )
    learning_rate: float = _recipe(
        -1.0,
        "Highest learning rate (default: 2e-5; 1e-4 for --task demo; 2e-4 with LoRA adapters)",
        least=-1.0,
    )
    lr_schedule: str = _recipe(
        "linear",
        "How the learning rate changes after the warm-up: linear and cosine fall to 0 at the last update, inverse-sqrt "
        "falls with the square root of the number of updates, constant-with-warmup stays; constant stays and has no "
        "warm-up",
        choices=LR_SCHEDULES,
    )
    warmup_ratio: float = _recipe(
        0.0,
        "Fraction of the updates that warm up: in them, the learning rate rises linearly from 0",
        least=0.0,
        most=1.0,
    )
    warmup_steps: int = _recipe(
        0,
        "Number of updates that warm up, instead of --warmup-ratio: in them, the learning rate rises linearly from 0",
        least=0,
        rare=True,
    )
    weight_decay: float = _recipe(0.0, "Weight decay of AdamW; biases and layer norms have none", least=0.0)
    adam_beta1: float = _recipe(
        0.9, "Decay rate of AdamW's mean of gradients, its first moment", least=0.0, most=0.999999, rare=True
    )
    adam_beta2: float = _recipe(
        0.999, "Decay rate of AdamW's mean of squared gradients, its second moment", least=0.0, most=0.999999, rare=True
    )
    adam_epsilon: float = _recipe(
        1e-8,
        "Number that AdamW adds to the square root of the second moment, so that it never divides by 0",
        least=0.0,
        rare=True,
    )
    layerwise_lr_decay: float = _recipe(
        1.0,
        "Factor by which the learning rate becomes smaller from each layer to the one below it: the head has the whole "
        "rate, the top layer this factor of it, and so on down to the embeddings; 1 gives all layers the same rate",
        least=0.01,
        most=1.0,
        rare=True,
    )
    label_smoothing: float = _recipe(
        0.0,
        "Share of the target probability that is spread evenly over all classes (label smoothing), for tasks with one "
        "class per example or per word",
        least=0.0,
        most=0.99,
        rare=True,
    )
    class_weights: str = _recipe(
        "",
        "Weight of each class in the loss, for tasks with one class per example or per word: balanced (inverse to "
        "the frequency in the training data), or a number for each class with commas between them, in the order in "
        "which the run names the classes (default: all classes count the same)",
        takes="balanced|LIST",
    )
    temperature: float = _recipe(
        -1.0,
        "With --task pairs, number by which similarities are divided in the loss (default: 0.05 if the model compares "
        "embeddings by their cosine, 1 if by their dot product)",
        least=-1.0,
        rare=True,
    )
    symmetric_loss: bool = _recipe(
        False, "With --task pairs, also learn to find the anchor of each positive, as the half of the loss", rare=True
    )
    gather_negatives: bool = _recipe(
        True,
        "With --task pairs, the texts of all ranks are negatives of each anchor; --no-gather-negatives uses only those "
        "of its own rank, as --sync-every above 1 does. scored-pairs compares scores in the same way",
        rare=True,
    )
    similarity_loss: str = _recipe(
        "cosent",
        "Loss of --task scored-pairs: cosent compares the order of all pairs of a batch; mse is the squared difference "
        "between cosine and score, which must be from -1 to 1",
        choices=("cosent", "mse"),
        rare=True,
    )
    matryoshka: str = _recipe(
        "",
        "Train embeddings that can be cut to fewer dimensions: numbers of dimensions with commas between them, such as "
        "384,256,128, whose losses are added (default: all dimensions only)",
        takes="N,N",
        rare=True,
    )
    micro_batch: int = _recipe(
        0,
        "With --task pairs and scored-pairs, number of examples whose activations are in memory at the same time, at "
        "most --batch-size (gradient caching): the gradients stay the same, and each example takes a third more time. "
        "0 keeps the whole batch in memory",
        least=0,
        rare=True,
    )
    max_grad_norm: float = _recipe(
        1.0,
        "Scale gradients down when their global norm is larger than this; 0 turns clipping off",
        least=0.0,
        rare=True,
    )
    dropout: float = _recipe(
        -1.0,
        "Dropout probability everywhere in the model (default: as in the model's configuration)",
        least=-1.0,
        rare=True,
    )
    seed: int = _recipe(
        42,
        "Random seed of new weights, dropout, masking and the order of the examples; with --task demo also of the "
        "examples themselves",
        least=0,
    )
    precision: str = _speed(
        "auto",
        "Number format of matrix products: auto is bf16 if the CPU has AMX or AVX512_BF16, otherwise fp32. int8 "
        "multiplies in 8 bits, except for the gradients of weights; it is faster than fp32 on CPUs with VNNI and "
        "without bf16, and may change the metric slightly",
        choices=PRECISIONS,
    )
    base_precision: str = _speed(
        "auto",
        "With LoRA adapters, number format of the frozen weights: fp32, bf16, or int8 with one scale for each output, "
        "where embedding and head are bf16. They are mapped from a file, so that the ranks of a host share their "
        "memory, and converted for one matrix product at a time. auto gives each rank a copy of its own, layers "
        "in the format of --precision and the embedding in fp32",
        choices=BASE_PRECISIONS,
        rare=True,
    )
    padding: str = _speed(
        "dynamic",
        "dynamic: examples of similar length are in one batch, which is padded to its longest example. max_length: "
        "examples are in random order, and all are padded to --max-length",
        choices=PADDINGS,
        rare=True,
    )
    engine: str = _speed(
        "torch",
        "Training engine: torch is cpuft's own. To compare speeds, ipex (Intel Extension for PyTorch), deepspeed "
        "(ZeRO) and ort (ONNX Runtime) train with those packages, which you install yourself",
        choices=ENGINES,
    )
    fast_path: bool = _speed(
        True,
        "Use cpuft's own CPU implementation of the encoder layers and of AdamW; --no-fast-path uses those of "
        "transformers and torch",
        rare=True,
    )
    compile: bool = _speed(False, "Use torch.compile instead of the fast path", rare=True)
    gradient_checkpointing: bool = _speed(
        False, "Save memory by recomputing activations in the backward pass; steps take longer"
    )
    emulate_bf16: bool = _speed(
        False, "Allow --precision bf16 on a CPU without bf16 instructions, where it is slower than fp32", rare=True
    )
    eval_batch_size: int = _speed(
        32, "Number of examples per rank in one forward pass of the evaluation", least=1, rare=True
    )
    backend: str = _communication(
        "auto",
        "Library that carries collectives between ranks; auto measures gloo, mpi and ccl (oneCCL) in the first run "
        "on these hosts, uses the fastest, and uses it again in later runs on them",
        choices=BACKENDS,
    )
    grad_compression: str = _communication(
        "auto",
        "Format in which gradients are sent; auto is bf16 with --precision bf16 and otherwise none, unless the "
        "measured network between hosts is so slow that bf16, int8 or powersgd is faster; with --sync-every above "
        "1, auto is int8",
        choices=COMPRESSIONS,
    )
    sync_every: int = _communication(
        1,
        "Average the parameters of all ranks only after this many updates, each rank training independently in between "
        "(local SGD). It is for links on which nothing else is fast enough, because it costs accuracy: with 8, about "
        "0.02 after 63 updates. 1 averages gradients at every update",
        least=1,
    )
    sync_schedule: str = _communication(
        "constant",
        "With --sync-every N above 1: constant averages after every N updates; quadratic after N updates while the "
        "learning rate is highest and in the warm-up, and later less often, after N * (highest rate / rate)^2 updates "
        "(the method QSR). All ranks are averaged at the end",
        choices=SYNC_SCHEDULES,
        rare=True,
    )
    outer_momentum: float = _communication(
        0.0,
        "With --sync-every above 1, Nesterov momentum of the step that moves the parameters to their average over "
        "the ranks, as in the method DiLoCo, whose value is 0.9; the learning rate of this step is then 0.7. 0 "
        "takes the average as it is",
        least=0.0,
        most=0.99,
        rare=True,
    )
    shard: str = _communication(
        "none",
        "optimizer: each rank keeps only its share of the optimizer state (ZeRO stage 1), which saves memory and gives "
        "the same losses",
        choices=SHARDS,
    )
    comm_timeout: float = _communication(
        300.0, "Seconds that a collective may take before the run ends with an error", least=1.0, rare=True
    )
    eval_every: str = _evaluation(
        "none",
        "When to evaluate while training: epoch (after each epoch), a number of updates, or none. Every run evaluates "
        "at its end, too",
        takes="epoch|N|none",
    )
    best_metric: str = _evaluation(
        "",
        "Metric by which --save-best and --early-stopping compare evaluations, such as f1 (default: the first metric "
        "of the task)",
        takes="NAME",
    )
    save_best: bool = _evaluation(
        False, "Save the weights of the evaluation with the best --best-metric, not those of the last update"
    )
    early_stopping: int = _evaluation(
        0,
        "End the training after this many evaluations in a row that did not improve --best-metric; 0 never ends it "
        "early",
        least=0,
    )
    save_model: bool = _output(
        True, "Save the trained model and its tokenizer in the folder model of the run", rare=True
    )
    lora_merge: bool = _output(
        False,
        "With --lora-rank, save the whole model with the adapters merged into it, not the adapters alone",
        rare=True,
    )
    report_to: str = _output(
        "",
        "Trackers that follow the run, separated by commas: tensorboard, mlflow, wandb, trackio; each needs its "
        "package on the head host. A tracker that fails or is slow does not disturb the run (default: none)",
        takes="LIST",
    )
    checkpoint_every: float = _output(
        -1.0,
        "Seconds between checkpoints, from which a run is restarted or resumed; the newest two stay until the run is "
        "complete. 0 writes them only when the run is asked to stop, at the end on several remote hosts, and with "
        "--save-best (default: chosen so that checkpoints take at most 2 % of the time; cpuft compare takes 0)",
        least=-1.0,
    )

    def __post_init__(self) -> None:
        """Choose the learning rate if it is negative, which means that the user did not give one.

        It stays negative if `choose_lora` has yet to decide on LoRA. Adapters need ten times the rate of whole models.
        The demo has few and short examples: in three epochs at 2e-5 it would end at an accuracy of 0.79.
        """
        if self.learning_rate < 0 and not self.may_choose_lora:
            rate = 2e-4 if self.lora_rank > 0 else 1e-4 if self.task == "demo" else 2e-5
            object.__setattr__(self, "learning_rate", rate)

    @property
    def may_choose_lora(self) -> bool:
        """Whether the size of the model decides on LoRA."""
        kind = find_task(self.task, self.causal).kind
        has_labels = kind in LABEL_KINDS and self.task != "demo"
        learns = kind in DECODER_KINDS or (has_labels and self.model != DEFAULT_MODEL)
        return self.lora_rank < 0 and learns and self.engine == "torch" and self.precision != "int8"

    def choose_lora(self, parameters: int) -> TrainConfig:
        """Return the options with the LoRA rank for a decoder of so many parameters, 0 for an encoder."""
        is_large = self.may_choose_lora and parameters > LARGE_DECODER and not self.from_config
        return self if self.lora_rank >= 0 else dataclasses.replace(self, lora_rank=DEFAULT_LORA_RANK * is_large)


CHANGEABLE_ON_RESUME = (
    "backend",
    "grad_compression",
    "shard",
    "comm_timeout",
    "eval_batch_size",
    "gradient_checkpointing",
    "checkpoint_every",
    "save_model",
    "lora_merge",
    "report_to",
)
"""Training options that may change when a run is resumed: they decide how these hosts train, not what is learned."""


@dataclass(frozen=True)
class WorkerConfig:
    """What the launcher passes to each rank in addition to TrainConfig; users do not see these options."""

    run_dir: str = option("", "Folder of the run, for the record and the model (default: nothing is saved)")
    prepared: str = option("", "Tokenized data, made by cpuft.train.data.prepare (default: prepare it now)")
    progress: str = option("lines", "How rank 0 shows its progress", choices=("bar", "lines"))
    independent: bool = option(
        False, "Each rank trains independently, to measure the best that the hosts can do together"
    )
    cpu_quota: float = option(
        0.0, "CPU time that the control group of the head host allows, in cores; 0 is no limit", least=0.0
    )
    simulated: bool = option(False, "The hosts are parts of one machine")
    recorded_updates: int = option(-1, "Resume the run in run_dir, whose record has this many updates", least=-1)
    stopped_at: float = option(0.0, "When the run was interrupted, in seconds since 1970; 0 if not known", least=0.0)
    restart_reason: str = option("", "Why the run was restarted")
    global_batch: int = option(0, "Examples per update on all ranks (default: --batch-size on each rank)", least=0)
    measurements: str = option("", "What the first start of the run has measured, as JSON (default: measure now)")
    keep_checkpoints: bool = option(
        False, "Keep the checkpoints at the end of the run; the launcher removes them after it has fetched the results"
    )


@dataclass(frozen=True)
class LaunchConfig:
    """Where the ranks run, how they are started, and when they are stopped or started again."""

    np: int = _hosts(
        0,
        "Number of ranks on all hosts together (default: --ppn on each host, or one for each NUMA node of each host, "
        "but no more than its slots)",
        least=1,
    )
    ppn: int = _hosts(
        0,
        "Number of ranks on each host: the hosts are used in order until all --np ranks have a place, and a host "
        "with fewer cores or slots is an error (default: --np divided by the number of hosts, rounded up, if the hosts "
        "allow it)",
        least=0,
    )
    hostfile: str = _hosts(
        "",
        "File with one host per line, the head host first, which starts the ranks on the others; optionally with "
        "slots=N or user=NAME (default: in a job of Slurm, an MPIJob or AWS Batch, the hosts of the job, else this "
        "machine)",
        takes="FILE",
    )
    cluster: str = _hosts("", "Name of a cluster made by cpuft provision, instead of --hostfile", takes="NAME")
    only_hosts: str = _hosts(
        "", "Use only these of the hosts, separated by commas, in this order (default: all)", takes="NAMES", rare=True
    )
    iface: str = _hosts(
        "",
        "Network interface that the ranks use, such as eth0 (default: the one whose route leads to the other hosts)",
        takes="NAME",
        rare=True,
    )
    ssh_config: str = _hosts(
        "",
        "Configuration file of the ssh client (default: that of --cluster, else your own ~/.ssh/config)",
        takes="FILE",
    )
    mpirun: str = _hosts(
        "",
        "Path of the mpirun or srun that starts the ranks (default: the mpirun of cpuft's Python environment, then "
        "of PATH; then, in a Slurm job, srun)",
        takes="FILE",
        rare=True,
    )
    master_port: int = _hosts(
        0, "TCP port of rank 0's torch store (MASTER_PORT); 0 takes a free port", least=0, most=LAST_PORT, rare=True
    )
    check: bool = _hosts(
        True,
        "Run a short form of cpuft doctor before the launch; an error ends the launch, a warning does not",
        rare=True,
    )
    comm_cores: int = _communication(
        -1,
        "Cores per rank that are reserved for communication threads (default: an eighth of the cores, at most 4, "
        "also with --backend auto; 0 with --backend gloo, with one rank, with fewer than 8 cores per rank and for "
        "your own script)",
        least=-1,
        rare=True,
    )
    run_dir: str = _output(
        "",
        "Folder for the record, the logs, the checkpoints and the model; it must not exist yet, and cpuft compare "
        "makes one folder per run in it (default: a new folder in runs/)",
        takes="FOLDER",
    )
    time_limit: float = _output(
        0.0,
        "Largest number of seconds of each run, from the start of its ranks; evaluation and restarts count. A run "
        "that takes longer is ended without a new checkpoint: after cpuft launch, --resume continues it; cpuft "
        "compare ends without its other runs and its report. 0 is no limit",
        least=0.0,
    )
    max_restarts: int = _output(
        -1,
        "Restarts allowed after the loss of a host or a rank, after an interruption notice, or after an error that "
        "may not occur again (default: 3 with several hosts, else 0)",
        least=-1,
    )
    min_np: int = _output(1, "Minimum number of ranks for a restart; with fewer, the run ends", least=1, rare=True)
    interruption_notice: str = _output(
        "",
        "File that appears on a host, or URL that answers with HTTP status 200, when that host will be taken away. "
        "Then the run saves a checkpoint (your own script only if it asks cpuft.interrupted) and restarts on the "
        "other hosts; without other hosts it exits with code 75 (default: clusters of spot instances made by cpuft "
        "provision aws watch the URL of EC2)",
        takes="FILE|URL",
    )
    copy_checkpoints: bool = _output(
        False,
        "While the run trains on hosts with disks of their own, copy each new checkpoint from the head host to the run "
        "folder on this machine, where --resume finds it for other hosts if the head host is lost",
        rare=True,
    )
    grace_period: float = _output(
        0.0,
        "Seconds that a run has to save a checkpoint after cpuft launch receives SIGTERM; then the ranks are "
        "killed. Your own script saves one only if it asks cpuft.interrupted. 0 kills the ranks at once",
        least=0.0,
    )


ALTERNATIVES = (("model", "from_config"), ("warmup_ratio", "warmup_steps"))
"""Pairs of options of which only one may be given."""

PLACE_OPTIONS = ("ppn", "hostfile", "cluster", "iface", "ssh_config", "mpirun", "check", "run_dir")
"""Options of LaunchConfig that cpuft predict has as well, beside --np: where ranks run, and how they are started."""
LAUNCH_ONLY = ("interruption_notice", "copy_checkpoints", "grace_period", "max_restarts", "min_np")
"""Options of LaunchConfig that only `cpuft launch` has."""


@dataclass(frozen=True)
class ScriptConfig:
    """How `cpuft launch` runs the user's own script."""

    wrap: bool = _speed(
        False,
        "Use the fast path in the Hugging Face Trainer of your script, without changing the script; on CPUs with "
        "AMX or AVX512_BF16 it multiplies in bf16, whatever the script asks for",
    )
    independent: bool = _communication(
        False,
        "Start ranks of a script that are meant to be independent, and do not check that they form one process group",
        rare=True,
    )


@dataclass(frozen=True)
class ResumeConfig:
    """Which run `cpuft launch` resumes."""

    resume: str = _output(
        "",
        "Resume the run in this folder from its last checkpoint, with its training options and number of ranks; "
        "--np, and options that decide how the hosts train, such as --backend or --gradient-checkpointing, may "
        "change. The hosts are those of --cluster, or of --hostfile and --ssh-config, with which the run was started, "
        "unless you name others; give the other options of the launch again, such as --grace-period. Give your own "
        "script again, too: it starts anew, and loads what it has saved with cpuft.save_state",
        takes="FOLDER",
    )


@dataclass(frozen=True)
class DetachConfig:
    """Whether the command stays on this machine."""

    detach: bool = _hosts(
        False,
        "Move the command to the head host and return when its run has begun there. The run goes on when you log out "
        "or this machine is off; cpuft attach shows it and fetches its results",
    )


@dataclass(frozen=True)
class CompareConfig:
    """What `cpuft compare` varies."""

    np: str = _hosts("1,2", "Numbers of ranks to compare, separated by commas, such as 1,2,4", takes="N,N")
    scaling: str = _hosts(
        "weak",
        "weak: every rank has batches of --batch-size examples. strong: all runs have the global batch of the run "
        "with the fewest ranks, divided among their ranks",
        choices=("weak", "strong"),
    )
    ideal: bool = _hosts(
        False,
        "For each number of ranks, also measure the same number of ranks without communication, each training on "
        "its own share of the examples: the upper limit of the speed",
    )
    repeats: int = _hosts(
        1, "Number of rounds; each round does all runs once, and the report then shows the spread", least=1
    )
    seeds: int = _hosts(
        1,
        "Number of seeds: each number of ranks is trained with --seed, with --seed + 1, and so on. The report then has "
        "the mean of each metric, its standard error, and whether all numbers of ranks reach the same metric",
        least=1,
        most=1000,
    )


SWEEP_SEARCHES = ("grid", "random", "tpe")
SWEEP_PRUNERS = ("auto", "median", "none")
DIRECTIONS = ("auto", "maximize", "minimize")


@dataclass(frozen=True)
class SweepConfig:
    """What `cpuft sweep` varies, and where its runs train."""

    hosts_per_run: int = _hosts(1, "Number of hosts on which each run trains", least=1)
    ranks_per_host: int = _hosts(1, "Number of ranks on each host of a run", least=1)
    parallel: str = _hosts(
        "",
        "Largest number of runs at the same time (default: one for each --hosts-per-run hosts, and one on this machine "
        "alone). On this machine alone, each run gets an equal part of the cores; auto trains the first configuration "
        "for about 30 s to measure whether one run at a time on all cores is faster than two on half of them each",
        takes="N|auto",
    )
    price: float = _hosts(0.0, "Price of one host for one hour, in dollars, for the report", least=0.0, most=1e6)
    conditions: str = _recipe(
        "",
        "YAML file with a list of alternatives, each a mapping of options to values, lists or ranges; each is combined "
        "with the values on the command line",
        takes="FILE",
    )
    search: str = _recipe(
        "grid",
        "grid: all combinations of the values. random: --trials configurations that are drawn from them, each with all "
        "values of --seed. tpe: --trials configurations that Optuna chooses one after another, near good ones before "
        "(tree-structured Parzen estimator), each with all values of --seed. Only random and tpe take ranges with "
        "fractions, such as 1e-5..1e-3",
        choices=SWEEP_SEARCHES,
    )
    trials: int = _recipe(0, "With --search random or tpe, number of configurations", least=0)
    search_seed: int = _recipe(0, "With --search random or tpe, seed of the draws", least=0)
    pruner: str = _evaluation(
        "auto",
        "Which runs are ended early. median: those whose best evaluation while training (see --eval-every) is worse "
        "than the median of the finished configurations after the same share of their training. auto: median with "
        "--search tpe if runs evaluate while training, otherwise none",
        choices=SWEEP_PRUNERS,
    )
    metric: str = _evaluation(
        "", "Metric that is compared (default: the first one that the task reports)", takes="NAME"
    )
    direction: str = _evaluation(
        "auto", "Whether a larger or a smaller metric is better; auto knows it for cpuft's metrics", choices=DIRECTIONS
    )
    stop_after_failures: int = _output(
        0, "Number of failed runs after which the sweep ends; 0 continues with the other runs, however many", least=0
    )
    resume: str = _output(
        "",
        "Continue the sweep in this folder: runs that have a metric stay, and the others are resumed or started. "
        "Options of the launches, such as --cluster, are those of the sweep unless they are given again; give --mpirun "
        "and --ssh-config again",
        takes="FOLDER",
    )
    yes: bool = _output(False, "Start even more than 10,000 runs")


@dataclass(frozen=True)
class BenchConfig:
    """What `cpuft bench comm` measures; the lists are separated by commas."""

    backends: str = _data(
        "gloo,mpi,ccl",
        "Backends to measure, separated by commas: gloo, mpi, ccl; auto adds the one that cpuft launch would choose",
        takes="LIST",
    )
    operations: str = _data(
        "all_reduce",
        "Collectives to measure, separated by commas: all_reduce, all_gather, reduce_scatter, broadcast",
        takes="LIST",
    )
    dtypes: str = _data(
        "float32,bfloat16",
        "Data types to send, separated by commas: float32, float64, bfloat16, float16, int32",
        takes="LIST",
    )
    sizes: str = _data(
        "1024,32768,1048576,26214400,115343360",
        "Message sizes in bytes, separated by commas; 26214400 is the size of a DDP bucket",
        takes="LIST",
    )
    rounds: int = _data(1, "How many times all backends are measured, in turn", least=1)
    comm_timeout: float = _communication(
        60.0, "Seconds that a collective may take before the measurement ends with an error", least=1.0
    )


def option_names(config: type) -> list[str]:
    """Return the field names of a configuration class, in their order, with underscores."""
    return [field.name for field in dataclasses.fields(config)]


def format_flag(name: str, value: object = True) -> str:
    """Return the command-line flag of an option: `--batch-size`, or `--no-fast-path` if `value` is False."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def format_arguments(config: Any) -> list[str]:
    """Return a command-line argument for each option that differs from its default: ["--task=mrpc", ...]."""
    fields = [field for field in dataclasses.fields(config) if getattr(config, field.name) != field.default]
    return [f"{format_flag(field.name)}={getattr(config, field.name)}" for field in fields]


def parse_arguments(config: type[C], arguments: Sequence[str]) -> C:
    """Return the configuration that arguments describe; the inverse of `format_arguments`."""
    fields = _fields(config)
    types, texts, rest = get_type_hints(config), dict[str, str](), iter(arguments)
    for argument in rest:
        flag, equals, text = argument.partition("=")
        name = flag[2:].replace("-", "_")
        if flag[:2] != "--" or name not in fields:
            raise CpuftError(f"{flag[:80]!r} is no option here: {suggest_names(flag, map(format_flag, fields))}")
        value = text if equals else next(rest, None)
        if value is None:
            raise CpuftError(f"{flag} has no value: write {flag}=VALUE")
        texts[name] = value
    return config(**{name: parse_value(fields[name], types[name], text) for name, text in texts.items()})


def _fields(config: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(config)}


def parse_value(field: dataclasses.Field[Any], kind: type, text: str) -> Any:
    """Return the value of an option, a field made by `option`, from its text; CpuftError if the field refuses it."""
    flag, choices = format_flag(field.name), field.metadata["choices"]
    if choices and text not in choices:
        raise CpuftError(describe_unknown_value(flag, text, choices))
    if kind is str:
        return text
    least, most = field.metadata["least"], field.metadata["most"]
    low, high = -math.inf if least is None else least, math.inf if most is None else most
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        # Python accepts digits of any script, other programs do not; nan and infinity are of no use.
        if text.isascii() and math.isfinite(value) and low <= value <= high:
            return value
    except (KeyError, ValueError, OverflowError):
        pass
    digits = "" if text.isascii() else ", in the digits 0 to 9"
    raise CpuftError(f"{flag} {text[:80]!r} is not valid: give {_describe_values(kind, least, most)}{digits}")


def _describe_values(kind: type, least: float | None, most: float | None) -> str:
    if kind is bool:
        return "True or False"
    noun = "a whole number" if kind is int else "a number"
    # -1 as the smallest number stands for a default that depends on other options.
    limits = max(least or 0, 0), most or 0
    low, high = (str(int(limit)) if limit == int(limit) else f"{limit:g}" for limit in limits)
    if least is None:
        return noun if most is None else f"{noun} of {high} or less"
    return f"{noun} of {low} or more" if most is None else f"{noun} from {low} to {high}"


_NO_GPU = "works on GPUs only, and cpuft trains on CPUs"
_NO_FP16 = (
    "is not supported: choose bf16, which is fast on CPUs with AMX or AVX512_BF16, or fp32, which runs on every CPU"
)
_VALUES = {"nccl": _NO_GPU, "rccl": _NO_GPU, "fp16": _NO_FP16, "float16": _NO_FP16, "half": _NO_FP16}
"""Values that other trainers accept and cpuft does not, with the answer."""


def describe_unknown_value(option: str, value: str, choices: Collection[str]) -> str:
    """Return the message for a value that is none of an option's `choices`, with the values to choose from."""
    if option == "--grad-compression" and value in REMOVED_COMPRESSIONS:
        return REMOVED_COMPRESSIONS[value]
    known = _VALUES.get(value.lower(), "")
    if known == _NO_GPU:
        return f"{option} {value} {known}: choose one of {', '.join(choices)}"
    if known and {"bf16", "fp32"} <= set(choices):
        return f"{option} {value} {known}"
    return f"{value!r} is not a value of {option}: {suggest_names(value, choices)}"


_LAYERS = "it trains with its own layers"
_WEIGHTS = "it keeps the fp32 weights to itself"
_SHARDS = "it shards the optimizer state itself"
_UNTESTED = "this combination is not tested"
_NO_CHECKPOINTS = "it writes no checkpoints, in which the best weights are kept"
_OWN_LAYERS = {"fast_path": _LAYERS, "compile": _LAYERS, "lora_rank": _LAYERS, "gradient_checkpointing": _UNTESTED}
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


def check_engine_for_launch(engine: str, has_notice: bool, is_independent: bool) -> None:
    """Raise CpuftError if an engine does not support what a launch asks for."""
    if has_notice and engine != "torch":
        raise CpuftError(
            f"--interruption-notice needs checkpoints, and --engine {engine} writes none: leave out one of them"
        )
    if is_independent and engine == "deepspeed":
        raise CpuftError(
            "--ideal trains every rank independently, which --engine deepspeed cannot: leave out one of them"
        )


EMBEDDING_OPTIONS = {
    "pooling": EMBEDDING_KINDS,
    "query_prompt": ("pairs",),
    "document_prompt": ("pairs",),
    "temperature": ("pairs",),
    "symmetric_loss": ("pairs",),
    "gather_negatives": EMBEDDING_KINDS,
    "similarity_loss": ("similarity",),
    "matryoshka": EMBEDDING_KINDS,
    "micro_batch": EMBEDDING_KINDS,
    "hard_negatives": ("pairs", "relevance"),
    "mining_model": ("pairs", "relevance"),
}
"""Options of embedding models and rerankers, and the kinds of tasks that have each."""


def refuse_conflicts(config: TrainConfig) -> None:
    """Raise CpuftError if training options exclude each other, or are for another task."""
    default, kind = TrainConfig(), find_task(config.task, config.causal).kind
    if config.grad_compression in REMOVED_COMPRESSIONS:  # from a record
        raise CpuftError(REMOVED_COMPRESSIONS[config.grad_compression])
    for name, reason in UNSUPPORTED_BY_ENGINE.get(config.engine, {}).items():
        if _is_used(config, name, default):
            flag = format_flag(name, getattr(config, name))
            raise CpuftError(f"--engine {config.engine} excludes {flag}, because {reason}: leave out one of them")
    if config.engine == "ort" and (config.precision, config.backend) != ("fp32", "gloo"):
        # Under torch 2.3, DistributedDataParallel waited for process groups written in Python with the GIL held. Others
        # were not tried since cpuft does without it.
        raise CpuftError("--engine ort trains only in fp32 and over gloo: add --precision fp32 --backend gloo")
    if config.causal and config.task != "text":
        raise CpuftError(f"--causal is for --task text only, and this is --task {config.task}: leave it out")
    for name in ("chat_template", "pack"):
        if getattr(config, name) and kind != "chat":
            raise CpuftError(f"{format_flag(name)} is for --task chat only: leave it out")
    if kind in DECODER_KINDS:
        _refuse_decoder_conflicts(config, default)
    if config.engine == "ort" and config.task == "text":
        raise CpuftError(
            "--engine ort cannot train --task text, because it masks the same positions in every batch: leave out one "
            "of them"
        )
    if config.label_type != "auto" and config.task != "files":
        raise CpuftError(
            f"--label-type {config.label_type} is only for --task files, and the type of the labels of --task "
            f"{config.task} is known: leave out --label-type"
        )
    if config.precision == "int8":
        for name in ("engine", "fast_path", "compile", "lora_rank"):
            if _is_used(config, name, default):
                flag = format_flag(name, getattr(config, name))
                raise CpuftError(f"--precision int8 needs the fast path, which excludes {flag}: leave out one of them")
    if config.sync_schedule != "constant" and config.sync_every == 1:
        raise CpuftError(
            f"--sync-schedule {config.sync_schedule} changes nothing by itself: add --sync-every 4, or leave it out"
        )
    if config.shard != "none" and config.sync_every > 1:
        raise CpuftError(
            "--sync-every lets each rank update all parameters by itself, and --shard lets it update only its share: "
            "leave out one of them"
        )
    if config.shard != "none" and config.grad_compression not in ("auto", *SHARDED_COMPRESSIONS):
        raise CpuftError(
            f"--shard supports only {', '.join(SHARDED_COMPRESSIONS)} as --grad-compression: leave out "
            f"--grad-compression {config.grad_compression}, or --shard"
        )
    if config.lora_rank > 0 and config.from_config:
        raise CpuftError(
            "--lora-rank adapts a pretrained model, and --from-config makes an untrained one: leave out one of them"
        )
    if config.eval_every not in ("epoch", "none") and not is_count(config.eval_every):
        raise CpuftError(
            f"--eval-every {config.eval_every!r:.60} is not valid: give epoch, none, or a number of updates, 1 or more"
        )
    for name in ("save_best", "early_stopping", "best_metric"):
        if config.eval_every == "none" and getattr(config, name):
            raise CpuftError(
                f"{format_flag(name)} compares evaluations while training, and there are none: add --eval-every epoch"
            )
    if config.best_metric and not (config.save_best or config.early_stopping):
        raise CpuftError(
            "--best-metric changes nothing by itself: add --save-best or --early-stopping, or leave it out"
        )
    if config.lr_schedule == "constant" and (config.warmup_ratio or config.warmup_steps):
        raise CpuftError("--lr-schedule constant has no warm-up: write constant-with-warmup")
    for name, kinds in EMBEDDING_OPTIONS.items():
        if kind not in kinds and getattr(config, name) != getattr(default, name):
            flag = format_flag(name, getattr(config, name))
            tasks = " and ".join(task.name for task in TASKS.values() if task.kind in kinds)
            raise CpuftError(f"{flag} is for --task {tasks} only: leave it out")
    if config.mining_model and not config.hard_negatives:
        raise CpuftError(
            f"--mining-model {config.mining_model} changes nothing by itself: add --hard-negatives 5, or leave it out"
        )
    if kind in EMBEDDING_KINDS and config.engine != "torch":
        raise CpuftError(f"--engine {config.engine} does not train embedding models: leave --engine out")
    if config.base_precision != "auto":
        flag = f"--base-precision {config.base_precision}"
        if config.lora_rank <= 0 and not config.may_choose_lora:
            raise CpuftError(
                f"{flag} is for the frozen weights of LoRA runs, and all weights are trained: add --lora-rank "
                f"{DEFAULT_LORA_RANK}, or leave {flag} out"
            )
        if config.compile:
            raise CpuftError(f"{flag} is not tested with --compile: leave out one of them")
    if config.lora_merge and config.lora_rank <= 0 and not config.may_choose_lora:
        raise CpuftError("--lora-merge merges LoRA adapters, and there are none: add --lora-rank 16, or leave it out")


def _is_used(config: TrainConfig, name: str, default: TrainConfig) -> bool:
    """Return whether an option differs from its default; no LoRA, in whatever form, is the default."""
    return config.lora_rank > 0 if name == "lora_rank" else getattr(config, name) != getattr(default, name)


def _refuse_decoder_conflicts(config: TrainConfig, default: TrainConfig) -> None:
    task = "--task chat" if config.task == "chat" else "--causal"
    reasons = {
        "engine": "decoders are trained with --engine torch only",
        "compile": "decoders are not tested with it",
        "mlm_probability": "no token is masked",
        "whole_word_mask": "no token is masked",
    }
    for name, reason in reasons.items():
        if getattr(config, name) != getattr(default, name):
            raise CpuftError(
                f"{task} excludes {format_flag(name, getattr(config, name))}, because {reason}: leave it out"
            )
    if config.precision == "int8":
        raise CpuftError(f"{task} excludes --precision int8, which is for encoders: leave it out")
    if config.from_config and not config.tokenizer:
        raise CpuftError(
            f"{task} with --from-config needs --tokenizer, because the tokenizers that cpuft makes drop spaces and "
            f"capitals: name the tokenizer of a decoder"
        )


@dataclass(frozen=True)
class PredictConfig:
    """What `cpuft predict` predicts, and where the predictions go."""

    run: str = option("", "Folder of the run")
    file: str = option(
        "",
        "Examples to predict: a CSV, TSV or JSON lines file, or a GLUE file of the run's task; with an embedding "
        "model, texts in any format that --train-file reads, also larger than memory; with a decoder, prompts in a "
        "column prompt or text, or conversations in JSON lines with messages",
        takes="FILE",
    )
    split: str = option(
        "",
        "Examples to predict instead of --file: the validation examples of the run, or the test examples of its GLUE "
        "task",
        takes="validation|test",
    )
    output: str = option(
        "",
        "CSV file to write (default: predictions.csv in RUN; for GLUE's test examples the file name that GLUE "
        "expects). With an embedding model, a file of embeddings that ends in .npy or .parquet (default: "
        "embeddings.npy in RUN). With a decoder, prompts and answers as CSV or, if it ends in .jsonl, JSON lines",
        takes="FILE",
    )
    text_columns: str = option(
        "",
        "Column of the texts in --file, or two columns separated by a comma (default: as in the run)",
        takes="NAMES",
    )
    label_column: str = option(
        "",
        "Column of the labels in --file, with which the metrics are computed (default: as in the run, if the file has "
        "that column)",
        takes="NAME",
    )
    delimiter: str = _delimiter()
    quoting: str = _quoting()
    encoding: str = _encoding()
    data_dir: str = option(
        "", "Folder of the GLUE data, with files such as MRPC/test.tsv (default: as in the run)", takes="FOLDER"
    )
    overwrite: bool = option(False, "Replace the --output file if an earlier cpuft predict wrote it")
    model: str = option(
        "",
        "Embedding model, instead of RUN: the folder or the Hugging Face hub name of a model of sentence-transformers, "
        "or minilm",
        takes="NAME",
    )
    id_column: str = option(
        "",
        "Column of --file whose texts a Parquet file of embeddings has as ids (default: the numbers of the rows)",
        takes="NAME",
    )
    normalize: bool = option(False, "Scale embeddings to length 1, if the model does not do so anyway")
    dimensions: int = option(
        0, "Cut embeddings to this number of dimensions, the first ones; 0 keeps those of the model", least=0
    )
    prompt: str = option(
        "",
        "Prompt that an embedding model gets in front of each text: query, document or another name of a prompt of the "
        "model, or the text itself, such as 'query: '",
        takes="NAME|TEXT",
    )
    np: int = _hosts(
        1,
        "Number of processes that compute embeddings: ranks on all hosts together with --hostfile, --cluster or in a "
        "job on several hosts, else processes of this host, which share its cores",
        least=1,
    )
    with_input: bool = option(False, "Also write the texts of each example, beside its prediction")
    max_new_tokens: int = option(
        256, "With a run of --task chat or --causal, largest number of tokens of an answer", least=1, most=1 << 20
    )
    temperature: float = option(
        0.0,
        "With a run of --task chat or --causal, temperature at which tokens are drawn, with the top-k and top-p of the "
        "model's generation_config.json; 0 always takes the most likely token",
        least=0.0,
        most=100.0,
    )
    batch_size: int = option(0, "Number of examples in one forward pass; 0 takes the run's --eval-batch-size", least=0)
    precision: str = option("auto", "Number format; auto is the run's", choices=("auto", "bf16", "fp32"))


_EMBEDDING_FILES = {".npy": b"\x93NUMPY", ".parquet": b"PAR1"}
"""Endings of the names of files of embeddings, and the first bytes of such files."""


def name_embeddings(request: PredictConfig) -> Path:
    """Return the file of embeddings to write, --output or embeddings.npy in the run's folder, if it may be written."""
    if not request.output and not request.run:
        raise CpuftError("--model needs --output: name a file for the embeddings that ends in .npy or .parquet")
    path = Path(request.output or Path(request.run, "embeddings.npy"))
    if path.suffix not in _EMBEDDING_FILES:
        raise CpuftError(f"{path} has the ending {path.suffix!r:.20}: give an --output that ends in .npy or .parquet")
    if request.id_column and path.suffix != ".parquet":
        raise CpuftError(f"{path} has no room for the ids of --id-column: give an --output that ends in .parquet")
    refuse_special(path)
    try:
        with path.open("rb") as file:
            begin = file.read(6)
    except FileNotFoundError:
        return path
    except OSError as error:
        raise CpuftError(f"{path} cannot be written ({error.strerror}): give another --output") from None
    if begin and not begin.startswith(_EMBEDDING_FILES[path.suffix]):
        raise CpuftError(f"{path} exists and holds no embeddings: give another --output")
    if begin and not request.overwrite:
        raise CpuftError(f"{path} exists: give another --output, or replace the file with --overwrite")
    return path


MINED_ENDINGS = (".csv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class MineConfig:
    """Where `cpuft mine` searches hard negatives, and which ones it takes."""

    model: str = option(
        "",
        "Embedding model that compares anchors and documents: the folder of a run, the folder or the Hugging Face hub "
        "name of a model of sentence-transformers, or minilm",
        takes="NAME",
    )
    file: str = option(
        "", "Rows of an anchor and a positive, in any format that --train-file of --task pairs reads", takes="FILE"
    )
    output: str = option(
        "",
        "File to write with the columns anchor, positive, negative_1, negative_2 and so on; it ends in .csv, .jsonl or "
        ".parquet",
        takes="FILE",
    )
    text_columns: str = option(
        "",
        "Columns of anchor and positive in --file, with a comma between them (default: anchor,positive or another "
        "usual pair)",
        takes="NAMES",
    )
    corpus: str = option(
        "", "More documents among which negatives are searched, beside the positives of --file", takes="FILE"
    )
    corpus_column: str = option(
        "",
        "Column of the documents in --corpus (default: the only column, or text or another usual name)",
        takes="NAME",
    )
    delimiter: str = _delimiter()
    quoting: str = _quoting()
    encoding: str = _encoding()
    overwrite: bool = option(False, "Replace the --output file if it is there")
    negatives: int = option(3, "Number of negatives for each anchor; anchors with fewer are left out", least=1)
    skip_top: int = option(
        0,
        "Number of the most similar documents that are skipped, because they may be positives without a label; "
        "documents that the limits below leave out do not count",
        least=0,
    )
    search_depth: int = option(
        0, "Take negatives only from this number of documents that are most similar to the anchor; 0: from all", least=0
    )
    max_score: float = option(1.0, "Highest cosine of an anchor and its negative; 1 is no limit", least=-1.0, most=1.0)
    min_score: float = option(-1.0, "Lowest cosine of an anchor and its negative; -1 is no limit", least=-1.0, most=1.0)
    absolute_margin: float = option(
        -1.0,
        "How far the cosine of a negative must be below that of the anchor's least similar positive, such as 0.1 "
        "(default: no limit)",
        least=-1.0,
    )
    relative_margin: float = option(
        -1.0,
        "The same as a share of the positive's cosine: 0.05 takes negatives of up to 95 % of it (default: no limit)",
        least=-1.0,
    )
    batch_size: int = option(
        0, "Number of texts in one forward pass; 0 takes as many as have 1024 tokens together", least=0
    )
    precision: str = option(
        "auto",
        "Number format; auto is bf16 where the CPU multiplies it, else fp32",
        choices=("auto", "bf16", "fp32"),
    )
    np: int = option(1, "Number of processes of this host that compute embeddings; they share its cores", least=1)


TableOptions = TrainConfig | PredictConfig | MineConfig
"""Options with --delimiter, --quoting and --encoding."""

DATA_OPTIONS = (
    "task",
    "model",
    "from_config",
    "tokenizer",
    "vocab_size",
    "data_dir",
    "train_file",
    "validation_file",
    "text_columns",
    "label_column",
    "label_type",
    "skip_unlabelled",
    "delimiter",
    "quoting",
    "encoding",
    "max_length",
    "validation_split",
    "causal",
    "chat_template",
    "pack",
    "pooling",
    "query_prompt",
    "document_prompt",
    "hard_negatives",
    "mining_model",
    "max_train_samples",
    "seed",
)
"""The options of a training that decide on its data, which `cpuft data show` has."""

EXPORT_FORMATS = ("onnx", "openvino")


@dataclass(frozen=True)
class ExportConfig:
    """What `cpuft export` exports, in which format, and where to."""

    run: str = option("", "Folder of the run")
    format: str = option(
        "onnx",
        "Format of the exported model: onnx for ONNX Runtime and others, or openvino for OpenVINO",
        choices=EXPORT_FORMATS,
    )
    precision: str = option(
        "fp32",
        "Number format of the weights: int8 makes the files smaller and the model faster on most CPUs, but may lose "
        "accuracy; --validate measures how much",
        choices=("fp32", "int8"),
    )
    validate: bool = option(
        False, "Compare metrics and speed of the exported model with those of the run, on the run's validation examples"
    )
    output: str = option(
        "",
        "Folder to make for the exported model (default: in RUN, named after format and precision, such as onnx-int8)",
        takes="FOLDER",
    )
    data_dir: str = option(
        "",
        "Folder of the GLUE data that --validate reads, with files such as MRPC/dev.tsv (default: as in the run)",
        takes="FOLDER",
    )
    batch_size: int = option(
        0, "Number of examples in one forward pass of --validate; 0 takes the run's --eval-batch-size", least=0
    )


_MEMORY_FLAG = "--host-memory="


@dataclass(frozen=True)
class HostMemory:
    """Memory of one host of a run. Simulated hosts on one machine share that machine's memory."""

    host: str
    ranks: int
    free_bytes: int
    """Bytes of memory that the host has free; 0 if that is not known."""
    machine: str = ""
    """Boot id of the machine, which simulated hosts share; empty if that is not known."""
    machine_bytes: int = 0


@dataclass(frozen=True)
class RunMemory:
    """Memory of all hosts of a run, by which the preparation of the data checks whether the training fits."""

    hosts: tuple[HostMemory, ...]
    """The head host first."""
    precision: str
    independent: bool = False


def format_run_memory(memory: RunMemory) -> tuple[str, ...]:
    """Return ("--host-memory=JSON",), which passes this to a process, or () if a host's memory is not known."""
    return (f"{_MEMORY_FLAG}{json.dumps(asdict(memory))}",) if all(host.free_bytes for host in memory.hosts) else ()


def split_run_memory(arguments: Sequence[str]) -> tuple[RunMemory | None, list[str]]:
    """Return the memory that `format_run_memory` passed, if it is there, and the other arguments in their order."""
    found = [arg.removeprefix(_MEMORY_FLAG) for arg in arguments if arg.startswith(_MEMORY_FLAG)]
    others = [arg for arg in arguments if not arg.startswith(_MEMORY_FLAG)]
    return (load(RunMemory, parse_json(found[-1])) if found else None), others


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bit_rate(rate: str, flag: str = "--net") -> int:
    """Return the bits per second of a rate as tc(8) writes them: 10**9 for "1gbit", 10**8 for "100mbit"; 0 for ""."""
    if not rate:
        return 0
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmgt]?)bit", rate)
    bits = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not bits:
        raise CpuftError(f"{flag} {rate[:60]!r} is not a bit rate: write for example 1gbit or 100mbit")
    return bits


TYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
"""Bytes of one element of the types that --dtypes accepts."""
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
BenchCase = tuple[str, str, str, int]
"""One measurement: backend (or auto), operation, data type, and bytes of the message."""


def list_bench_cases(config: BenchConfig) -> list[BenchCase]:
    """Return the measurements of `cpuft bench comm` in their order; each round repeats the whole list."""
    lists = {name: getattr(config, name).split(",") for name in ("backends", "operations", "dtypes", "sizes")}
    known = {"backends": BACKENDS, "operations": OPERATIONS, "dtypes": tuple(TYPE_BYTES)}
    for option_name, names in known.items():
        for name in lists[option_name]:
            if name not in names:
                raise CpuftError(describe_unknown_value(f"--{option_name}", name, names))
    if not all(map(is_count, lists["sizes"])):
        raise CpuftError(f"--sizes {config.sizes[:60]} is not a list of bytes: write for example 1024,26214400")
    for size, dtype in itertools.product(lists["sizes"], lists["dtypes"]):
        if int(size) % TYPE_BYTES[dtype]:
            raise CpuftError(
                f"--sizes: {size} bytes are not a whole number of {dtype} elements: give a multiple of "
                f"{TYPE_BYTES[dtype]}"
            )
    cases = itertools.product(range(config.rounds), *(lists[name] for name in lists))
    return [(backend, operation, dtype, int(size)) for _, backend, operation, dtype, size in cases]
