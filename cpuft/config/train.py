"""The options of a training, which the launcher, the ranks and the record share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cpuft.compressions import COMPRESSIONS
from cpuft.config.fields import (
    SECTIONS,
    communication_option,
    data_option,
    evaluation_option,
    option,
    output_option,
    recipe_option,
    speed_option,
)
from cpuft.config.table_files import delimiter_option, encoding_option, quoting_option
from cpuft.hardware import PRECISIONS
from cpuft.tasks import DECODER_KINDS, LABEL_KINDS, TASKS, find_task

POOLINGS = ("mean", "cls", "lasttoken")
"""How the hidden states of a text's tokens become one vector: their mean, the first one, or the last one."""
DEFAULT_MODEL = "minilm"
BACKENDS = ("auto", "gloo", "mpi", "ccl")
ENGINES = ("torch", "ipex", "deepspeed", "ort")
LR_SCHEDULES = ("linear", "cosine", "constant", "constant-with-warmup", "inverse-sqrt")
"""The values of --lr-schedule, which transformers writes with underscores."""

LARGE_DECODER = 200_000_000
"""Number of parameters above which decoders are trained with LoRA, unless --lora-rank says otherwise."""
DEFAULT_LORA_RANK = 16


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training. The defaults are the usual GLUE recipe: length 128, batch 32 per rank, 2e-5, 3 epochs."""

    task: str = data_option(
        "demo",
        "What to train. A GLUE task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte or wnli. demo: a small built-in "
        "task. files: your own labelled examples. text: masked language modelling on your own texts, or next-token "
        "prediction with --causal. chat: the assistant's turns of your own conversations. pairs: an embedding model, "
        "from texts that belong together, such as questions and answers. scored-pairs: the same from pairs of texts "
        "with a score of their similarity. rerank: a model that scores how relevant a document is to a query",
        choices=tuple(TASKS),
        takes="TASK",
    )
    model: str = data_option(
        DEFAULT_MODEL,
        "Pretrained model: a local folder or a name on the Hugging Face hub. minilm is a small encoder that needs no "
        "download",
        takes="NAME",
    )
    from_config: str = data_option(
        "",
        "Train a new model with random weights instead of --model: bert-base, bert-large, bert-1.5b, or the path of a "
        "Hugging Face config.json",
        takes="NAME",
    )
    tokenizer: str = data_option(
        "",
        "Tokenizer: a local folder or a name on the Hugging Face hub (default: the model's own; with --from-config, "
        "a WordPiece tokenizer made from the training texts, but decoders need one)",
        takes="NAME",
    )
    vocab_size: int = data_option(
        30522,
        "Maximum vocabulary size of the tokenizer that --from-config makes from the training texts",
        least=64,
        most=1 << 20,
        rare=True,
    )
    data_dir: str = data_option(
        "",
        "Folder of the GLUE data, with files such as MRPC/train.tsv (default: download from the Hugging Face hub)",
        takes="FOLDER",
    )
    train_file: str = data_option(
        "",
        "Training data: paths or patterns such as 'data/*.csv', separated by commas. They are CSV, TSV or JSON lines "
        "files (also with .gz), Parquet or Arrow files, folders of datasets.save_to_disk, or "
        "hub:OWNER/NAME/CONFIGURATION:SPLIT@REVISION for a data set of the Hugging Face hub, of which configuration, "
        "split and revision may be left out. --task text also takes text files and folders of them, but no hub: "
        "names. --task chat takes only JSON lines, each with messages, a list of objects with role (system, user, "
        "assistant or tool) and content, or in the form of ShareGPT or Alpaca",
        takes="FILE",
    )
    validation_file: str = data_option(
        "",
        "Validation data in the same form as --train-file (default: a part of the training data, see "
        "--validation-split). With --task pairs also a folder in the form of BEIR, with corpus.jsonl, queries.jsonl "
        "and the folder qrels",
        takes="FILE",
    )
    text_columns: str = data_option(
        "",
        "Columns of the texts in your files, with commas between the names: one, or two if an example is a pair of "
        "texts (default: sentence1,sentence2 or another usual pair if the file has it, else sentence or text; "
        "tokens if an example is a list of words). --task text joins the texts of several "
        "columns (default: text, or the only column). With --task pairs and rerank: anchor or query, positive or "
        "document and, if there are any, negatives, such as question,answer (default: a usual pair, and all columns "
        "whose names begin with negative)",
        takes="NAMES",
    )
    label_column: str = data_option(
        "label",
        "Column of the labels or scores in your files (default: label; with --task scored-pairs and rerank also "
        "score or another usual name; tags if an example is a list of words, with one tag per word). Several labels "
        "per example are sports|news in a CSV cell, or a list in JSON lines",
        takes="NAME",
    )
    label_type: str = data_option(
        "auto",
        "Type of the labels of --task files: class (one class per example), number (regression) or multi (several "
        "classes per example). auto decides by the values: numbers are regression if at least one has a fraction, "
        "such as 3.5, several labels are multi, and all others are classes; tags of words need no type",
        choices=("auto", "class", "number", "multi"),
        rare=True,
    )
    skip_unlabelled: bool = data_option(
        False,
        "With --task files, scored-pairs and rerank, leave out rows without a label (empty, nan, None or NA), and "
        "say how many they are, instead of refusing them",
    )
    delimiter: str = delimiter_option()
    quoting: str = quoting_option()
    encoding: str = encoding_option()
    max_length: int = data_option(
        128,
        "Maximum number of tokens per example: longer examples are truncated, conversations after the last answer "
        "that fits, and texts of --task text are cut into pieces of this length",
        least=8,
    )
    validation_split: float = data_option(
        0.1,
        "Fraction of the training data that is kept for validation without --validation-file: rows (with --task "
        "pairs and rerank all rows of an anchor or query together), conversations, or with --task text blocks of up "
        "to 64 lines from all parts of the texts",
        least=0.001,
        most=0.5,
    )
    causal: bool = data_option(
        False,
        "With --task text, train a decoder, such as Llama, Qwen3, SmolLM or Gemma 3, to predict each next token "
        "(continued pre-training) instead of masked tokens",
    )
    chat_template: str = data_option(
        "",
        "With --task chat, file with the jinja template that renders conversations, which is saved with the tokenizer "
        "(default: the tokenizer's own)",
        takes="FILE",
        rare=True,
    )
    pack: bool = data_option(
        False,
        "With --task chat, put several conversations into one sequence of up to --max-length tokens, so that little "
        "is padded; attention stays within each conversation. --batch-size then counts such sequences",
    )
    mlm_probability: float = data_option(
        0.15, "Fraction of the tokens that --task text masks for the model to predict", least=0.01, most=0.9, rare=True
    )
    whole_word_mask: bool = data_option(False, "With --task text, mask all tokens of a word together", rare=True)
    pooling: str = data_option(
        "auto",
        "How an embedding model makes one vector of a text's tokens: their mean, the first one (cls) or the last one; "
        "auto is what the files of sentence-transformers beside the model say, else mean",
        choices=("auto", *POOLINGS),
        rare=True,
    )
    query_prompt: str = data_option(
        "auto",
        "With --task pairs, text that is put in front of each anchor, such as 'query: ' ('' is none); auto takes the "
        "prompt named query of the model, if it has one",
        rare=True,
    )
    document_prompt: str = data_option(
        "auto",
        "With --task pairs, text that is put in front of each positive and negative, such as 'passage: ' ('' is "
        "none); auto takes the prompt named document, passage or corpus of the model, if it has one",
        rare=True,
    )
    hard_negatives: int = data_option(
        0,
        "With --task pairs or rerank, number of irrelevant documents that are added to each query before the "
        "training: documents similar to it, but less than its own, by the rare option --mining-model. It is only for "
        "data without irrelevant documents. 0 adds none",
        least=0,
        most=100,
    )
    mining_model: str = data_option(
        "",
        "Embedding model that --hard-negatives compares texts with: the folder of a model or of a run, or a name on "
        "the Hugging Face hub (default: --model, if it is an embedding model)",
        takes="NAME",
        rare=True,
    )
    epochs: float = recipe_option(3.0, "Number of passes over the training examples, such as 3 or 0.5", least=0.0)
    max_steps: int = recipe_option(0, "Number of updates to train, instead of --epochs; 0 trains for --epochs", least=0)
    max_train_samples: int = recipe_option(0, "Train on only this many examples, the first ones; 0 uses all", least=0)
    batch_size: int = recipe_option(32, "Number of examples per rank in one forward and backward pass", least=1)
    gradient_accumulation: int = recipe_option(
        1, "Number of forward and backward passes per rank for one update, whose gradients are averaged", least=1
    )
    lora_rank: int = recipe_option(
        -1,
        "Rank of LoRA adapters (peft): only the adapters and the head of the task are trained. Encoders get adapters "
        "in the linear layers of attention, decoders also in those of feed-forward. Alpha is twice the rank. 0 trains "
        "all weights "
        "(default: 16 for decoders above 200 million parameters with --task chat, --causal, --task files and GLUE "
        "tasks, else 0)",
        least=-1,
        most=1024,
    )
    learning_rate: float = recipe_option(
        -1.0,
        "Highest learning rate (default: 2e-5; 1e-4 for --task demo; 2e-4 with LoRA adapters)",
        least=-1.0,
    )
    lr_schedule: str = recipe_option(
        "linear",
        "Learning rate after the warm-up: linear and cosine fall to almost 0 at the last update; inverse-sqrt falls "
        "with 1/sqrt(updates), and hardly without a warm-up; constant-with-warmup stays the same; constant stays the "
        "same and has no warm-up",
        choices=LR_SCHEDULES,
    )
    warmup_ratio: float = recipe_option(
        0.0,
        "Fraction of the updates that warm up: in them, the learning rate rises linearly from 0",
        least=0.0,
        most=1.0,
    )
    warmup_steps: int = recipe_option(
        0,
        "Number of updates that warm up, instead of --warmup-ratio: in them, the learning rate rises linearly from 0",
        least=0,
        rare=True,
    )
    weight_decay: float = recipe_option(0.0, "Weight decay of AdamW; biases and layer norms have none", least=0.0)
    adam_beta1: float = recipe_option(
        0.9, "Decay rate of AdamW's mean of gradients, its first moment", least=0.0, most=0.999999, rare=True
    )
    adam_beta2: float = recipe_option(
        0.999, "Decay rate of AdamW's mean of squared gradients, its second moment", least=0.0, most=0.999999, rare=True
    )
    adam_epsilon: float = recipe_option(
        1e-8,
        "Number that AdamW adds to the square root of the second moment, so that it never divides by 0",
        least=0.0,
        rare=True,
    )
    layerwise_lr_decay: float = recipe_option(
        1.0,
        "Factor by which the learning rate becomes smaller from each layer to the one below it: the head has the whole "
        "rate, the top layer this factor of it, and so on down to the embeddings; 1 gives all layers the same rate",
        least=0.01,
        most=1.0,
        rare=True,
    )
    label_smoothing: float = recipe_option(
        0.0,
        "Share of the target probability that is spread evenly over all classes (label smoothing), for tasks with one "
        "class per example or per word",
        least=0.0,
        most=0.99,
        rare=True,
    )
    class_weights: str = recipe_option(
        "",
        "Weight of each class in the loss, for tasks with one class per example or per word: balanced (inverse to "
        "the frequency in the training data), or a number for each class with commas between them, in the order in "
        "which cpuft data show lists the classes (default: all classes count the same)",
        takes="balanced|LIST",
    )
    temperature: float = recipe_option(
        -1.0,
        "With --task pairs, number by which similarities are divided in the loss (default: 0.05 if the model compares "
        "embeddings by their cosine, 1 if by their dot product)",
        least=-1.0,
        rare=True,
    )
    gather_negatives: bool = recipe_option(
        True,
        "With --task pairs, negatives are the texts of all ranks, and --task scored-pairs compares the scores of all "
        "ranks; --no-gather-negatives compares only within a rank, as --sync-every above 1 always does",
        rare=True,
    )
    similarity_loss: str = recipe_option(
        "cosent",
        "Loss of --task scored-pairs: cosent compares the order of all pairs of a batch; mse is the squared difference "
        "between cosine and score, which must be from -1 to 1",
        choices=("cosent", "mse"),
        rare=True,
    )
    matryoshka: str = recipe_option(
        "",
        "Train embeddings that can be cut to fewer dimensions: numbers of dimensions with commas between them, first "
        "the model's own, such as 384,256,128, whose losses are added (default: only the model's own)",
        takes="N,N",
        rare=True,
    )
    micro_batch: int = recipe_option(
        0,
        "With --task pairs and scored-pairs, number of examples whose activations are in memory at the same time, at "
        "most --batch-size (gradient caching): the gradients stay the same, and each example takes a third more time. "
        "0 keeps the whole batch in memory",
        least=0,
        rare=True,
    )
    max_grad_norm: float = recipe_option(
        1.0,
        "Scale gradients down when their global norm is larger than this; 0 turns clipping off",
        least=0.0,
        rare=True,
    )
    dropout: float = recipe_option(
        -1.0,
        "Dropout probability everywhere in the model (default: as in the model's configuration)",
        least=-1.0,
        rare=True,
    )
    seed: int = recipe_option(
        42,
        "Random seed of new weights, dropout, masking and the order of the examples; with --task demo also of the "
        "examples themselves",
        least=0,
    )
    precision: str = speed_option(
        "auto",
        "Number format of matrix products: auto is bf16 if the CPUs of all hosts have AMX, AVX512_BF16 or bf16 of "
        "Arm (there unless torch's fp32 is clearly faster), otherwise fp32. int8 (encoders only) multiplies in 8 bits, "
        "except for the gradients of weights; it is faster than fp32 on CPUs with VNNI and without bf16, and may "
        "change the metric slightly",
        choices=PRECISIONS,
    )
    base_precision: str = speed_option(
        "auto",
        "With LoRA adapters, number format of the frozen weights: fp32, bf16, or int8 with one scale per output "
        "channel (embedding and head in bf16). To save memory, the ranks of a host share one copy, and each matrix "
        "product converts its weights before it uses them. auto: each rank has its own copy, layers in the format of "
        "--precision, the embedding in fp32",
        choices=("auto", "fp32", "bf16", "int8"),
        rare=True,
    )
    engine: str = speed_option(
        "torch",
        "Training engine: torch is cpuft's own. To compare speeds, ipex (Intel Extension for PyTorch), deepspeed "
        "(ZeRO) and ort (ONNX Runtime) train with those packages, which you install yourself",
        choices=ENGINES,
    )
    fast_path: bool = speed_option(
        True,
        "Use cpuft's own CPU implementation of the model's layers and of AdamW; --no-fast-path uses those of "
        "transformers and torch",
        rare=True,
    )
    gradient_checkpointing: bool = speed_option(
        False, "Save memory by recomputing activations in the backward pass; steps take longer"
    )
    emulate_bf16: bool = speed_option(
        False, "Allow --precision bf16 on a CPU without bf16 instructions, where it is slower than fp32", rare=True
    )
    eval_batch_size: int = speed_option(
        32, "Number of examples per rank in one forward pass of the evaluation", least=1, rare=True
    )
    backend: str = communication_option(
        "auto",
        "Library that carries collectives between ranks; auto measures gloo, mpi and ccl (oneCCL) in the first run "
        "on these hosts, and takes the one that needs least time and CPU in this run and in later ones on them",
        choices=BACKENDS,
    )
    grad_compression: str = communication_option(
        "auto",
        "Format in which gradients are sent; auto is bf16 with --precision bf16 and otherwise none, unless the "
        "measured network between hosts is so slow that bf16, int8 or powersgd is faster; with --sync-every above "
        "1, auto is int8",
        choices=COMPRESSIONS,
    )
    sync_every: int = communication_option(
        1,
        "Average the parameters of all ranks only after this many updates, each rank training independently in "
        "between (local SGD). It is for links on which nothing else is fast enough, because it costs accuracy: with "
        "8, that of MRPC was 0.02 lower after 63 updates. 1 averages gradients at every update",
        least=1,
    )
    outer_momentum: float = communication_option(
        0.0,
        "With --sync-every above 1, Nesterov momentum with which the parameters move to their average over the ranks "
        "(DiLoCo, which has 0.9); the learning rate of this outer step is then 0.7, not 1. 0 takes the average as it "
        "is",
        least=0.0,
        most=0.99,
        rare=True,
    )
    shard: str = communication_option(
        "none",
        "optimizer: each rank keeps only its share of the optimizer state (ZeRO stage 1), which saves memory and gives "
        "the same losses",
        choices=("none", "optimizer"),
    )
    comm_timeout: float = communication_option(
        300.0, "Seconds that a collective may take before the run ends with an error", least=1.0, rare=True
    )
    eval_every: str = evaluation_option(
        "none",
        "When to evaluate while training: epoch (after each epoch), a number of updates, or none. Every run evaluates "
        "at its end, too",
        takes="epoch|N|none",
    )
    best_metric: str = evaluation_option(
        "",
        "With --eval-every, metric by which --save-best and --early-stopping compare evaluations, such as f1, or "
        "macro-f1 (the mean F1 of the classes) for examples with one class (default: the first metric of the task)",
        takes="NAME",
    )
    save_best: bool = evaluation_option(
        False,
        "With --eval-every, save the weights of the best evaluation by --best-metric, not those of the last update",
    )
    early_stopping: int = evaluation_option(
        0,
        "With --eval-every, end the training after this many evaluations in a row without a better --best-metric; 0 "
        "never ends it early",
        least=0,
    )
    slice_by: str = evaluation_option(
        "",
        "With --task files, column of your files, with at most 100 different values, such as a language; cpuft report "
        "then shows the metrics for each of its 20 most frequent values (default: none)",
        takes="NAME",
    )
    examples: bool = evaluation_option(
        True,
        "Keep the beginnings of the validation examples' texts in predictions.parquet of the run folder; --no-examples "
        "keeps no text there, because texts may be private",
        rare=True,
    )
    save_model: bool = output_option(
        True, "Save the trained model and its tokenizer in the folder model of the run", rare=True
    )
    lora_merge: bool = output_option(
        False,
        "With LoRA adapters, save the whole model with the adapters merged into it, not them alone",
        rare=True,
    )
    report_to: str = output_option(
        "",
        "Trackers that follow the run, separated by commas: tensorboard, mlflow, wandb, trackio; each needs its "
        "package on the head host. A tracker that fails or is slow does not disturb the run (default: none)",
        takes="LIST",
    )
    checkpoint_every: float = output_option(
        -1.0,
        "Seconds between checkpoints, from which a run is restarted or resumed; the newest two stay until the run is "
        "complete. 0 writes one only when the run is asked to stop, at a best evaluation with --save-best, and at the "
        "end on several remote hosts, in case the head host is lost before its results are fetched (default: they take "
        "at most 2 % of the time; cpuft compare takes 0)",
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
    def uses_fast_path(self) -> bool:
        """Whether layers that the fast path knows are replaced: `fast_path` is set, and the engine is torch."""
        return self.fast_path and self.engine == "torch"

    @property
    def may_choose_lora(self) -> bool:
        """Whether the model's size decides on LoRA: `lora_rank` is -1, the engine torch, the precision not int8, and
        the task trains a decoder, or a model other than minilm on labels other than those of demo.
        """
        kind = find_task(self.task, self.causal).kind
        has_labels = kind in LABEL_KINDS and self.task != "demo"
        learns = kind in DECODER_KINDS or (has_labels and self.model != DEFAULT_MODEL)
        return self.lora_rank < 0 and learns and self.engine == "torch" and self.precision != "int8"

    def choose_lora(self, parameters: int) -> TrainConfig:
        """Return the options with `lora_rank` as given, else 16 if `may_choose_lora` and a pretrained model has more
        than 200 million `parameters`, else 0; callers give 0 `parameters` for an encoder. The learning rate follows.
        """
        is_large = self.may_choose_lora and parameters > LARGE_DECODER and not self.from_config
        return self if self.lora_rank >= 0 else dataclasses.replace(self, lora_rank=DEFAULT_LORA_RANK * is_large)


TRAINING_INPUTS = (
    "model",
    "from_config",
    "tokenizer",
    "data_dir",
    "train_file",
    "validation_file",
    "mining_model",
    "chat_template",
)
"""Training options that may name files of the user's machine."""
EVALUATION_ONLY = ("slice_by", "examples")
"""Training options that change nothing about the training, only what is kept of its evaluation."""
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
    *EVALUATION_ONLY,
)
"""Training options that may change when a run is resumed: they decide how these hosts train, not what is learned."""

_MASKING_OPTIONS = ("mlm_probability", "whole_word_mask")
_OF_DATA = [one.name for one in dataclasses.fields(TrainConfig) if one.metadata["section"] == SECTIONS[1]]
DATA_OPTIONS = (*(name for name in _OF_DATA if name not in _MASKING_OPTIONS), "max_train_samples", "seed")
"""The options of a training that decide on its data, which `cpuft data show` has."""


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
    is_measured: bool = option(False, "The speed of the training is measured, so that nothing may run beside it")
    keep_checkpoints: bool = option(
        False, "Keep the checkpoints at the end of the run; the launcher removes them after it has fetched the results"
    )
