"""The tasks, as data: where their rows stand, what their labels are, which metrics GLUE scores them by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """What is to be told of each row, or of each of its words."""

    name: str
    texts: tuple[str, ...]
    """Columns of the one or two texts, in the GLUE download's files."""
    label: str
    """Column of the label; empty where rows have none."""
    labels: tuple[str, ...]
    """Label texts in the order of class numbers; empty for scores."""
    metrics: tuple[str, ...]
    folder: str = ""
    """Folder in the GLUE download; empty for a task that is not GLUE's."""
    hub_texts: tuple[str, ...] = ()
    """The same columns in the hub's `nyu-mll/glue`, where they differ."""
    columns: tuple[str, ...] = ()
    """Column names of files that have no header line."""
    validation: tuple[tuple[str, str], ...] = (("", "dev"),)
    """Validation splits: what is appended to the metrics' names, and the file's stem."""
    kind: str = "class"
    """A row has one of `labels` (class), any of them (labels), one for each word (tags), or a number (score)."""


_PAIR = ("sentence1", "sentence2")
_BINARY = ("0", "1")
_ENTAILS = ("entailment", "not_entailment")

# Their names are the choices of the option --task in cpuft.config.
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
        Task("text", ("text",), "", (), ("perplexity", "masked_accuracy"), kind="masked"),
        Task("files", (), "label", (), ("accuracy", "f1")),
    )
}
"""Labels, columns and metrics: the GLUE benchmark's files and its paper (Wang et al. 2018), table 1."""
