"""Every task that `--task` names. To add one of GLUE's kind, add it to `TASKS`; no other file has to change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A task: what a model learns to predict for each example, or for each word of it."""

    name: str
    texts: tuple[str, ...]
    """Names of the one or two columns that hold the texts, in the files of the GLUE download."""
    label: str
    """Name of the column that holds the label; empty where examples have no labels."""
    labels: tuple[str, ...]
    """The labels as they are written, in the order of their class numbers; empty for scores."""
    metrics: tuple[str, ...]
    folder: str = ""
    """Folder in the GLUE download; empty for a task that is not GLUE's."""
    hub_texts: tuple[str, ...] = ()
    """Names of the text columns in the hub's `nyu-mll/glue`, where they differ from `texts`."""
    columns: tuple[str, ...] = ()
    """Names of all columns, where the files of the GLUE download have no header line."""
    validation: tuple[tuple[str, str], ...] = (("", "dev"),)
    """Validation splits: the suffix of their metrics' names, and the stem of the file's name."""
    kind: str = "class"
    """What is predicted: class (one of `labels` for each example), labels (any number of them), tags (one of them for
    each word), score (a number), masked (the masked tokens of a text), causal (each next token of a text), chat (the
    tokens of the assistant in a conversation), pairs (which text belongs to which, for embeddings), similarity (how
    similar two texts are, for embeddings), or relevance (how relevant a document is to a query)."""


_PAIR = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_ENTAILS = ("entailment", "not_entailment")

TASKS = {
    task.name: task
    for task in (
        Task(
            "cola",
            ("sentence",),
            "label",
            _BINARY,
            ("matthews_correlation",),
            "CoLA",
            columns=("source", "label", "original", "sentence"),
        ),
        Task("sst2", ("sentence",), "label", _BINARY, ("accuracy",), "SST-2"),
        Task("mrpc", ("#1 String", "#2 String"), "Quality", _BINARY, ("accuracy", "f1"), "MRPC", hub_texts=_PAIR),
        Task("stsb", _PAIR, "score", (), ("pearson", "spearman"), "STS-B", kind="score"),
        Task("qqp", ("question1", "question2"), "is_duplicate", _BINARY, ("accuracy", "f1"), "QQP"),
        Task(
            "mnli",
            _PAIR,
            "gold_label",
            ("entailment", "neutral", "contradiction"),
            ("accuracy",),
            "MNLI",
            hub_texts=("premise", "hypothesis"),
            validation=(("", "dev_matched"), ("_mismatched", "dev_mismatched")),
        ),
        Task("qnli", ("question", "sentence"), "label", _ENTAILS, ("accuracy",), "QNLI"),
        Task("rte", _PAIR, "label", _ENTAILS, ("accuracy",), "RTE"),
        Task("wnli", _PAIR, "label", _BINARY, ("accuracy",), "WNLI"),
        Task("demo", _PAIR, "label", _BINARY, ("accuracy", "f1")),
        Task("files", (), "label", (), ("accuracy", "f1")),
        Task("text", ("text",), "", (), ("perplexity", "masked_accuracy"), kind="masked"),
        Task("chat", ("messages",), "", (), ("perplexity", "token_accuracy"), kind="chat"),
        Task("pairs", (), "", (), ("ndcg@10", "mrr@10", "map@100", "recall@10", "accuracy@1"), kind="pairs"),
        Task("scored-pairs", (), "score", (), ("spearman", "pearson"), kind="similarity"),
        Task("rerank", (), "label", (), ("ndcg@10", "mrr@10", "map"), kind="relevance"),
    )
}
"""Tasks by name, in the order of the help. Columns and labels are those of the GLUE benchmark's files, metrics those of
its paper (Wang et al. 2018), table 1."""

CAUSAL = Task("text", ("text",), "", (), ("perplexity", "token_accuracy"), kind="causal")

FILE_TASKS = tuple(task.name for task in TASKS.values() if not task.folder and task.name != "demo")
"""Tasks whose examples come from the user's files."""
EMBEDDING_KINDS = ("pairs", "similarity")
SENTENCE_TRANSFORMERS_KINDS = (*EMBEDDING_KINDS, "relevance")
"""Kinds of tasks whose models sentence-transformers loads."""
DECODER_KINDS = ("causal", "chat")
LABEL_KINDS = ("class", "labels", "tags", "score")
TEXT_KINDS = ("masked", *DECODER_KINDS)
"""Kinds of tasks that predict tokens of texts, so that examples need no labels."""


def find_task(name: str, causal: bool = False) -> Task:
    """Return the task of --task; CAUSAL in place of "text" for a decoder (`causal`). KeyError: the name is unknown."""
    return CAUSAL if causal and name == "text" else TASKS[name]
