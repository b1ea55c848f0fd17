"""What a training would learn from: `python -m cpuft.train.data.show`, started by `cpuft data show`."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config.fields import parse_arguments
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted
from cpuft.record import BaselineLine, format_baseline
from cpuft.tasks import EMBEDDING_KINDS, SENTENCE_TRANSFORMERS_KINDS, TASKS, TEXT_KINDS, Task, find_task
from cpuft.terminal import align
from cpuft.train.baseline import find_baseline, find_static_baseline
from cpuft.train.data.archive import UNTAGGED, Prepared, Tokens, read_prepared
from cpuft.train.data.chat import read_chats
from cpuft.train.data.labels import SCORE_KINDS
from cpuft.train.data.prepare import (
    MAX_BLANK_SHARE,
    MAX_UNKNOWN_SHARE,
    checksum_data,
    describe_blank,
    find_unknown_share,
    list_blank,
    prepare,
    read_task_data,
    tokenize,
)
from cpuft.train.data.sources import Examples
from cpuft.train.data.texts import read_corpora, split_texts
from cpuft.train.data.tokenizer import choose_tokenizer, get_tokenizer_name
from cpuft.train.model import check_positions, check_untrained, get_model_name
from cpuft.train.startup import run_as_process

_MAX_LISTED = 20
"""Number of labels in the table of the text form; JSON has all."""
_NO_LIMIT = 1 << 20
"""Most tokens of an example whose whole length is measured."""
_MAX_CUT_SHARE = 0.05
"""Share of the training examples that may be cut without a line that says so."""

Known = dict[tuple[str, ...], set[Any]]
"""The labels of the training examples, by their texts."""


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens of the examples of a split, with special tokens, before --max-length cuts them."""

    shortest: int
    median: float
    mean: float
    percentile_95: float
    longest: int
    cut: int
    """Examples that are longer than --max-length."""
    examples: int
    """All of them; for embedding models, which read each text by itself, the number of texts."""


@dataclass(frozen=True)
class Split:
    """The examples of one split."""

    name: str
    """training, validation, or validation with the suffix of the metrics' names."""
    examples: int
    labels: dict[str, int]
    """Number of examples with each label, for tags of words; empty without classes."""
    scores: list[float]
    """Smallest, mean and largest score; empty for classes."""
    lengths: Lengths
    unknown_share: float
    """Share of the tokens that the tokenizer does not know, special tokens not counted."""
    duplicates: int
    """Examples (of embedding models: texts) that an earlier training example equals."""
    contradictions: int
    """Duplicates whose label the other example does not have."""
    without_text: dict[str, int] = field(default_factory=dict)
    """By column, the number of examples whose text there is empty, nan or null; only columns with such texts."""


@dataclass(frozen=True)
class DataSummary:
    """What `cpuft data show` shows."""

    task: str
    kind: str
    """What is predicted: `Task.kind`."""
    model: str
    tokenizer: str
    """Name of the tokenizer, or empty if one was made from these texts."""
    text_columns: list[str]
    label_column: str
    max_length: int
    splits: list[Split]
    unknown_labels: dict[str, int]
    """Labels of validation examples that no training example has, with the number of these examples."""
    notes: list[str]
    """How the files were understood."""
    problems: list[str]
    """What cpuft launch would refuse, and what harms a training."""
    baselines: list[BaselineLine] = field(default_factory=list)
    """With --baseline, what can be had without a training."""


def summarize(config: TrainConfig) -> DataSummary:
    """Describe the data, also labels that launch would refuse. CpuftError: data, tokenizer or lengths do not fit."""
    check_untrained(config)
    if config.task == "text":
        return _summarize_texts(config)
    if config.task == "chat":
        return _summarize_chats(config)
    data = read_task_data(config, check_labels=False)
    check_positions(config)
    in_words = data.task.kind == "tags"
    tokenizer, _ = choose_tokenizer(config, data.train.list_texts, checksum_data(data, config), in_words)
    known: Known = {}
    splits = [_summarize_split("training", data.train.load(), data.task, tokenizer, config, known)]
    for suffix, split in data.validation.items():
        splits.append(_summarize_split(f"validation{suffix}", split.load(), data.task, tokenizer, config, known))
    return _complete(config, data.task, splits, data.notes)


def _summarize_split(
    name: str, examples: Examples, task: Task, tokenizer: Any, config: TrainConfig, known: Known
) -> Split:
    """Describe a split; if its name is training, its examples are added to `known`."""
    if task.kind == "relevance":  # validation examples have the number of their query, too
        labels = [label[0] if isinstance(label, tuple) else label for label in examples.labels]
        examples = replace(examples, labels=labels)
    scores = np.asarray(examples.labels, np.float64) if task.kind in SCORE_KINDS else np.zeros(0)
    count = len(examples)
    without_text = dict(Counter(chain.from_iterable(list_blank(examples, task))))
    if task.kind in EMBEDDING_KINDS:
        # An embedding model reads each text by itself.
        examples = Examples([(text,) for text in examples.list_texts()], [], False)
        examples = replace(examples, labels=[0.0] * len(examples))
    tokens = tokenize(examples, tokenizer, config.max_length, task)
    duplicates, contradictions = count_duplicates(examples, known, name == "training")
    return Split(
        name,
        count,
        _count_labels(examples, tokens, task),
        [float(scores.min()), float(scores.mean()), float(scores.max())] if len(scores) else [],
        _summarize_lengths(_measure_lengths(examples, tokens, tokenizer, config.max_length, task), config.max_length),
        find_unknown_share(tokens.ids, tokenizer),
        duplicates,
        contradictions,
        without_text,
    )


def _count_labels(examples: Examples, tokens: Tokens, task: Task) -> dict[str, int]:
    """Return the number of examples with each label; of tags, the number of words that --max-length leaves."""
    labels = tokens.labels[tokens.labels != UNTAGGED] if task.kind == "tags" else examples.labels
    numbers = Counter[int](chain.from_iterable(labels) if task.kind == "labels" else map(int, labels))
    return {label: numbers[number] for number, label in enumerate(task.labels)}


def count_duplicates(examples: Examples, known: Known, adds: bool) -> tuple[int, int]:
    """Return the number of examples whose texts are in `known`, and of those of them whose label is not among the
    labels there. With `adds`, each example is added to `known`, so that later examples count too.
    """
    duplicates = contradictions = 0
    for texts, label in zip(examples.texts, examples.labels):
        seen = known.get(texts)
        duplicates += seen is not None
        contradictions += seen is not None and label not in seen
        if adds:
            known.setdefault(texts, set()).add(label)
    return duplicates, contradictions


def _measure_lengths(
    examples: Examples, tokens: Tokens, tokenizer: Any, max_length: int, task: Task
) -> NDArray[np.int64]:
    lengths = tokens.lengths.copy()
    full = np.flatnonzero(lengths >= max_length)
    if len(full):
        texts, labels = [examples.texts[i] for i in full], [examples.labels[i] for i in full]
        whole = tokenize(replace(examples, texts=texts, labels=labels), tokenizer, _NO_LIMIT, task)
        lengths[full] = whole.lengths
    return lengths


def _summarize_lengths(lengths: NDArray[np.int64], max_length: int) -> Lengths:
    return Lengths(
        int(lengths.min()),
        float(np.median(lengths)),
        float(lengths.mean()),
        float(np.percentile(lengths, 95)),
        int(lengths.max()),
        int((lengths > max_length).sum()),
        len(lengths),
    )


def _summarize_texts(config: TrainConfig) -> DataSummary:
    """Return what `summarize` does, for --task text. An example is a piece of text of up to --max-length tokens."""
    prepared = read_prepared(str(prepare(config)))
    corpus, validation = read_corpora(config)
    train_lines, duplicates = set[bytes](), Counter[str]()
    # Twice over the files, because lines of both splits take turns; hashes, because all texts may not fit into memory.
    for name in ("training", "validation"):
        for validates, text, _ in split_texts(corpus, config.validation_split, validation):
            line = hashlib.blake2b(text.encode(), digest_size=12).digest()
            if validates == (name == "validation"):
                duplicates[name] += line in train_lines
            if name == "training" and not validates:
                train_lines.add(line)
    splits = [_describe(prepared, name, duplicates[name], config) for name in ("training", "validation")]
    task = find_task(config.task, config.causal)
    return _complete(config, replace(task, texts=corpus.columns or task.texts), splits)


def _summarize_chats(config: TrainConfig) -> DataSummary:
    """Return what `summarize` does, for --task chat. An example is a conversation, cut to --max-length tokens."""
    config = replace(config, pack=False)
    prepared = read_prepared(str(prepare(config)))
    train, validation = (chats.checksums[chats.chosen] for chats in read_chats(config))
    train = train[: config.max_train_samples or None]
    training = _describe(prepared, "training", len(train) - len(np.unique(train)), config)
    training = replace(training, lengths=replace(training.lengths, cut=prepared.truncated))
    splits = [training, _describe(prepared, "validation", int(np.isin(validation, train).sum()), config)]
    return _complete(config, TASKS["chat"], splits)


def _describe(prepared: Prepared, name: str, duplicates: int, config: TrainConfig) -> Split:
    is_training = name == "training"
    tokens = prepared.train if is_training else prepared.validation[""]
    lengths = _summarize_lengths(tokens.lengths, config.max_length)
    return Split(name, len(tokens), {}, [], lengths, prepared.unknown_share if is_training else 0.0, duplicates, 0)


def _complete(config: TrainConfig, task: Task, splits: list[Split], notes: Sequence[str] = ()) -> DataSummary:
    train, *others = splits
    others_labels = {label: sum(split.labels[label] for split in others) for label in train.labels}
    unknown = {label: count for label, count in others_labels.items() if count and not train.labels[label]}
    summary = DataSummary(
        config.task,
        task.kind,
        get_model_name(config),
        get_tokenizer_name(config),
        list(task.texts),
        task.label,
        config.max_length,
        splits,
        unknown,
        list(notes),
        [],
    )
    return replace(summary, problems=find_problems(summary))


def find_problems(summary: DataSummary) -> list[str]:
    """Return a message for each fault in the summary: fewer than two classes, columns with texts in less than 10 % of
    the examples, labels of validation examples only, duplicates, contradictions, and more than 5 % cut examples or
    unknown tokens; [] for none.
    """
    train, *others = summary.splits
    problems = []
    learned = [label for label, count in train.labels.items() if count]
    if summary.kind not in (*SCORE_KINDS, *EMBEDDING_KINDS, *TEXT_KINDS) and len(learned) < 2:
        which = f"only the class {_show(learned[0])}" if learned else "no class"
        problems.append(f"the training examples have {which}: give examples of at least two classes")
    problems += [
        describe_blank(name, count, split.examples)
        for split in summary.splits
        for name, count in split.without_text.items()
        if count > MAX_BLANK_SHARE * split.examples
    ]
    if summary.unknown_labels:
        named = ", ".join(_show(label) for label in [*summary.unknown_labels][:_MAX_LISTED])
        problems.append(f"only validation examples have the label {named}: correct them, or train on such examples")
    for split in others:
        # A document that is searched for may well be one that the model has learned.
        if split.duplicates and summary.kind not in EMBEDDING_KINDS:
            share = _percent(split.duplicates, split.examples) if summary.kind not in TEXT_KINDS else "some"
            problems.append(
                f"{share} of the {split.name} examples are training examples, too, so that the metric is better than "
                f"on new examples: remove them from one of the two"
            )
    if train.contradictions:
        problems.append(f"labels of {counted(train.contradictions, 'training example')} contradict others: mend them")
    if train.lengths.cut > _MAX_CUT_SHARE * train.lengths.examples:
        share = _percent(train.lengths.cut, train.lengths.examples)
        problems.append(f"--max-length {summary.max_length} cuts {share} of the training texts: consider a larger one")
    if train.unknown_share > MAX_UNKNOWN_SHARE:
        problems.append(f"{train.unknown_share:.0%} of the tokens are unknown: give another --tokenizer")
    return problems


_KINDS = {
    "class": "one class per example",
    "labels": "several classes per example",
    "tags": "a class for each word",
    "score": "a number per example (regression)",
    "masked": "masked tokens of texts",
    "causal": "each next token of texts",
    "chat": "the assistant's tokens in conversations",
    "pairs": "which texts belong together (embeddings)",
    "similarity": "how similar two texts are (embeddings)",
    "relevance": "how relevant a document is to a query",
}


def format_summary(summary: DataSummary) -> list[str]:
    """Return the lines that `cpuft data show` prints without --json: the task, a table of figures with a column for
    each split, notes, baselines, and problems.
    """
    splits = summary.splits
    train = splits[0]
    label = f" -> {_show(summary.label_column)}" if summary.label_column else ""
    lines = [
        f"task       {summary.task}: {_KINDS[summary.kind]}",
        f"columns    {', '.join(map(_show, summary.text_columns))}{label}",
        f"tokenizer  {_show(summary.tokenizer) or 'made from the training texts'}",
        "",
    ]
    rows = [["", *(split.name for split in splits)], ["examples", *(f"{split.examples:,}" for split in splits)]]
    common = sorted(train.labels, key=lambda one: -train.labels[one])[:_MAX_LISTED]
    kept = {*common, *summary.unknown_labels}
    what = "tag" if summary.kind == "tags" else "class"
    for name in [one for one in train.labels if one in kept]:
        cells = [_count(split.labels[name], sum(split.labels.values())) for split in splits]
        rows.append([f"{what} {_show(name)}", *cells])
    if len(kept) < len(train.labels):
        rows.append([f"and {len(train.labels) - len(kept)} rarer ones", *("" for _ in splits)])
    if train.scores:
        rows.append(["scores", *("{0:g} to {2:g}, mean {1:.3g}".format(*split.scores) for split in splits)])
    if any(split.without_text for split in splits):
        rows.append(["without a text", *(f"{max(split.without_text.values(), default=0):,}" for split in splits)])
    rows.append(["tokens: shortest", *(f"{split.lengths.shortest:,}" for split in splits)])
    rows.append(["tokens: median", *(f"{split.lengths.median:,.0f}" for split in splits)])
    rows.append(["tokens: 95 % up to", *(f"{split.lengths.percentile_95:,.0f}" for split in splits)])
    rows.append(["tokens: longest", *(f"{split.lengths.longest:,}" for split in splits)])
    if summary.kind not in TEXT_KINDS:
        cut = [_count(split.lengths.cut, split.lengths.examples) for split in splits]
        rows.append([f"cut at --max-length {summary.max_length}", *cut])
    rows.append(["unknown tokens", *(f"{100 * split.unknown_share:.2f} %" for split in splits)])
    repeats = "duplicate lines" if summary.kind in ("masked", "causal") else "duplicates"
    rows.append([f"{repeats} of training", *(f"{split.duplicates:,}" for split in splits)])
    if summary.kind not in (*TEXT_KINDS, *EMBEDDING_KINDS):
        rows.append(["  with another label", *(f"{split.contradictions:,}" for split in splits)])
    lines += align(rows)
    lines += [f"note: {note}" for note in summary.notes]
    lines += [format_baseline(baseline) for baseline in summary.baselines]
    return [*lines, *(f"problem: {problem}" for problem in summary.problems)]


def _percent(count: int, whole: int) -> str:
    return f"{100 * count / max(1, whole):.1f} %"


def _count(count: int, whole: int) -> str:
    return f"{count:,} ({_percent(count, whole)})"


def _show(text: str) -> str:
    """Return a name from a file for a line of the terminal: printable, and not longer than 40 characters."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= 40 else f"{text[:37]}..."


def add_baselines(summary: DataSummary, config: TrainConfig, static_model: str = "") -> DataSummary:
    """Return the summary with the metrics of a baseline, of the static model if named, and of an embedding model or
    reranker before training. CpuftError: the static model is unusable; other failures become notes.
    """
    found, notes = list[BaselineLine](), list(summary.notes)
    try:
        if summary.unknown_labels:
            raise CpuftError("validation examples have labels that no training example has")
        found.append(find_baseline(config))
    except CpuftError as error:
        notes.append(f"no baseline: {error}")
    if static_model:
        found.append(find_static_baseline(config, static_model))
    if summary.kind in SENTENCE_TRANSFORMERS_KINDS:
        try:
            found.append(_measure_untrained(config))
        except CpuftError as error:
            notes.append(f"the model is not measured before its training: {error}")
    return replace(summary, baselines=found, notes=notes)


def _measure_untrained(config: TrainConfig) -> BaselineLine:
    # They import torch.
    from cpuft.train.evaluate import compute_outputs
    from cpuft.train.objective.table import make_objective

    start, prepared = time.process_time(), read_prepared(str(prepare(config)))
    objective, tokens = make_objective(config, prepared), prepared.validation[""]
    model = objective.load_model(config).eval()
    outputs = compute_outputs(model, objective, tokens, config.eval_batch_size, 1, "fp32")
    metrics = objective.compute_metrics(objective.reduce_outputs(outputs), tokens)
    return BaselineLine(f"{get_model_name(config)} without training", metrics, time.process_time() - start)


def main() -> None:
    """Print the summary. Arguments: text or json; baseline, or empty; the static model, or empty; and options."""

    def show() -> None:
        form, with_baseline, static_model, *others = sys.argv[1:]
        config = parse_arguments(TrainConfig, others)
        summary = summarize(config)
        if with_baseline:
            summary = add_baselines(summary, config, static_model)
        print(json.dumps(asdict(summary), indent=2) if form == "json" else "\n".join(format_summary(summary)))

    run_as_process(show)


if __name__ == "__main__":
    main()
