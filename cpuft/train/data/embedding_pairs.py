"""Examples of embedding models: texts that belong together, pairs of texts with a score, and retrieval sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.tasks import Task
from cpuft.train.data.archive import EMPTY
from cpuft.train.data.hard_negatives import NEGATIVE, add_hard_negatives, name_negatives
from cpuft.train.data.retrieval import RetrievalSet, make_retrieval_set, read_beir
from cpuft.train.data.sources import Examples, FileExamples, TaskData, drop_unlabelled, scan_rows
from cpuft.train.data.tables import Row, Rows, Table, find_column, read_tables, split_table
from cpuft.train.embedding_form import EmbeddingForm, choose_form

_USUAL_PAIRS = (
    ("anchor", "positive"),
    ("query", "positive"),
    ("question", "answer"),
    ("query", "document"),
    ("query", "passage"),
    ("sentence1", "sentence2"),
    ("text1", "text2"),
)
_USUAL_SCORES = ("score", "similarity", "label")
_NAME_PAIRS = "name the columns of the texts with --text-columns, for example --text-columns question,answer"

_NAME_SCORES = "name the column of the scores with --label-column, or learn from pairs without scores by --task pairs"


@dataclass(frozen=True)
class RetrievalExamples(Examples):
    """The texts of a retrieval set as examples of one text each: the queries, then the documents."""

    relevant: NDArray[np.int32] = field(default_factory=lambda: EMPTY)
    """Query number, document number (both counted from 0) and relevance of each judgement; shape (judgements, 3)."""
    queries: tuple[str, ...] = ()
    """The queries without a prompt."""
    rows_checksum: str = ""
    """`checksum` of the set without prompts."""

    @property
    def checksum(self) -> str:
        """Checksum of texts and judgements, 64 hexadecimal digits."""
        return hashlib.sha256(super().checksum.encode() + self.relevant.tobytes()).hexdigest()


def read_pairs(task: Task, config: TrainConfig) -> TaskData:
    """Read --train-file and --validation-file for a task of the kind pairs or similarity.

    For the kind pairs, texts have the prompts of the model or of the options in front, and the validation split is a
    retrieval set, in which the anchors look for their positives. Raises CpuftError: a file, column or row does not fit
    the task, or all positives are the same text.
    """
    if not config.train_file:
        raise CpuftError(
            f"--task {task.name} needs --train-file: give a CSV, TSV, JSON lines, Parquet or Arrow file with pairs of "
            f"texts"
        )
    form = choose_form(config)
    train = read_tables(config.train_file, "--train-file", config)
    task = replace(task, texts=choose_pair_columns(train, config.text_columns, task.kind == "pairs"))
    if config.hard_negatives and len(task.texts) > 2:
        raise CpuftError(
            f"--hard-negatives finds negatives for rows without any, and {train.source} has some ({task.texts[2]}): "
            f"leave --hard-negatives out, or name two columns with --text-columns"
        )
    is_folder = task.kind == "pairs" and _is_beir_folder(config.validation_file)
    validation = None
    if config.validation_file and not is_folder:
        validation = read_tables(config.validation_file, "--validation-file", config, "validation")
    notes = train.notes
    if task.kind == "similarity":
        task = replace(task, label=_choose_score_column(train, config.label_column))
        if config.skip_unlabelled:
            for table in filter(None, (train, validation)):
                _check_columns(table, task)
            train = drop_unlabelled(train, task.label)
            validation = validation and drop_unlabelled(validation, task.label)
            notes = (*train.notes, *(validation.notes if validation else ()))
    if not validation and not is_folder:
        # All rows of a query are kept for validation together, or the model has learned some of its documents.
        names = task.texts[:1] if task.kind == "pairs" else ()
        train, validation = split_table(train, config.validation_split, names)
    learned = task
    if config.hard_negatives:
        _check_columns(train, task)
        train = add_hard_negatives(train, task.texts[0], task.texts[1], config, every_row=True)
        learned = replace(task, texts=(*task.texts, *name_negatives(config.hard_negatives)))
    prompts = dict.fromkeys(learned.texts, form.document_prompt) | {task.texts[0]: form.query_prompt}
    found = [
        _check(table, its_task)
        for table, its_task in (
            (_add_prompts(train, prompts if task.kind == "pairs" else {}), learned),
            (validation, task),
        )
        if table
    ]
    if task.kind == "similarity":
        return TaskData(task, found[0], {"": found[1]}, notes)
    _refuse_equal_positives(found[0])
    retrieval = (
        read_beir(config.validation_file, "--validation-file")
        if is_folder
        else make_retrieval_set(found[1].load().texts)
    )
    return TaskData(learned, found[0], {"": _make_retrieval_examples(retrieval, form)}, notes)


def _is_beir_folder(path: str) -> bool:
    """Return whether this is a folder in the form of the BEIR benchmark, by its corpus, queries or judgements."""
    return any(Path(path, name).exists() for name in ("corpus.jsonl", "corpus.jsonl.gz", "queries.jsonl", "qrels"))


def _check_columns(table: Table, task: Task) -> None:
    for name in task.texts:
        find_column(table.columns, name, table.source, _NAME_PAIRS)
    if task.label:
        find_column(table.columns, task.label, table.source, _NAME_SCORES)


def _check(table: Table, task: Task) -> FileExamples:
    _check_columns(table, task)
    scan = scan_rows(table, task)
    return FileExamples(table, task, scan.count, scan.checksum)


def choose_pair_columns(table: Table, wanted: str, has_negatives: bool) -> tuple[str, ...]:
    """Return the names of the columns of the texts: `wanted`, else a usual pair, then those of negatives. `wanted` has
    names with commas between them, which are not looked up in the table. Raises CpuftError: these are too few, too many
    or not different, or the table has no usual pair.
    """
    if wanted:
        names = tuple(name.strip() for name in wanted.split(","))
        if len(names) < 2 or (len(names) > 2 and not has_negatives) or len(set(names)) < len(names):
            most = "the columns of anchor, positive and perhaps negatives" if has_negatives else "two columns"
            raise CpuftError(f"--text-columns {wanted!r:.80} is not valid: name {most}, with commas between them")
        return names
    for names in _USUAL_PAIRS:
        if set(names) <= set(table.columns):
            others = [name for name in table.columns if name.startswith(NEGATIVE)] if has_negatives else []
            return (*names, *others)
    raise CpuftError(
        f"{table.source} has no columns anchor and positive, nor another usual pair (it has "
        f"{', '.join(table.columns)}): {_NAME_PAIRS}"
    )


def _choose_score_column(table: Table, wanted: str) -> str:
    """Return `wanted`, or a usual name where that is the default and missing."""
    if wanted != "label" or wanted in table.columns:
        return wanted
    return next((name for name in _USUAL_SCORES if name in table.columns), wanted)


def _add_prompts(table: Table, prompts: Mapping[str, str]) -> Table:
    """Return the table with the prompt of each column in front of its texts; empty texts stay empty."""
    needed = {name: prompt for name, prompt in prompts.items() if prompt}
    return replace(table, rows=Rows(partial(_prefix_rows, table, needed))) if needed else table


def _prefix_rows(table: Table, prompts: Mapping[str, str]) -> Iterator[Row]:
    for where, cells in table.rows:
        prefixed = {
            name: prompt + text
            for name, prompt in prompts.items()
            if isinstance(text := cells.get(name), str) and text.strip()
        }
        yield where, {**cells, **prefixed}


def _refuse_equal_positives(examples: FileExamples) -> None:
    """Raise CpuftError if all examples have the same positive, from which nothing can be learned."""
    first = ""
    for batch in examples.batches():
        for _, positive, *_ in batch.texts:
            first = first or positive
            if positive != first:
                return
    raise CpuftError(
        f"all rows of {examples.table.source} have the same text in {examples.task.texts[1]!r}: give pairs with "
        f"different positives, or name other columns with --text-columns"
    )


def _make_retrieval_examples(retrieval: RetrievalSet, form: EmbeddingForm) -> RetrievalExamples:
    """Return the texts of a retrieval set with the prompts of a model in front: the queries, then the documents."""
    plain: list[tuple[str, ...]] = [(text,) for text in (*retrieval.queries, *retrieval.documents)]
    labels, queries = [0.0] * len(plain), tuple(retrieval.queries)
    rows_checksum = RetrievalExamples(plain, labels, False, retrieval.relevant).checksum
    prompts = [form.query_prompt] * len(queries) + [form.document_prompt] * len(retrieval.documents)
    texts: list[tuple[str, ...]] = [(prompt + text,) for prompt, (text,) in zip(prompts, plain)]
    return RetrievalExamples(texts, labels, False, retrieval.relevant, queries, rows_checksum)
