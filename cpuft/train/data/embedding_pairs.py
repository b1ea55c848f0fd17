"""Examples of embedding models: texts that belong together, pairs of texts with a score, and retrieval sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, list_names
from cpuft.tasks import Task
from cpuft.train.data.archive import EMPTY
from cpuft.train.data.hard_negatives import NEGATIVE, add_hard_negatives, name_negatives
from cpuft.train.data.retrieval import RetrievalSet, make_retrieval_set, read_beir
from cpuft.train.data.sources import (
    Examples,
    FileExamples,
    TaskData,
    check_columns,
    drop_unlabelled,
    read_both_files,
    scan_rows,
)
from cpuft.train.data.tables import Row, Rows, Table, split_names, split_table
from cpuft.train.embedding_form import EmbeddingForm, choose_form

_QUERIES = ("anchor", "query", "question", "sentence1", "text1")
_DOCUMENTS = ("positive", "answer", "document", "passage", "sentence2", "text2", "text")
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
    retrieval set, in which the anchors look for their positives. Raises CpuftError: a file, column, row or option does
    not fit the task, or all positives are the same text.
    """
    form, is_scored = choose_form(config), task.kind == "similarity"
    is_folder = not is_scored and _is_beir_folder(config.validation_file)
    train, validation = read_both_files(replace(config, validation_file="") if is_folder else config, "pairs of texts")
    task = replace(task, texts=choose_pair_columns(train, config.text_columns, has_negatives=not is_scored))
    if config.hard_negatives and len(task.texts) > 2:
        raise CpuftError(
            f"{train.source} has negatives ({task.texts[2]}), which --hard-negatives finds: leave that option out"
        )
    if is_scored:
        task = replace(task, label=_choose_score_column(train, config.label_column))
    for table in filter(None, (train, validation)):
        check_columns(table, task, _NAME_PAIRS, _NAME_SCORES)
    if is_scored and config.skip_unlabelled:
        train = drop_unlabelled(train, task.label)
        validation = validation and drop_unlabelled(validation, task.label)
    notes = (*train.notes, *(validation.notes if validation else ()))
    if not validation and not is_folder:
        # All rows of a query are kept for validation together, or the model has learned some of its documents.
        train, validation = split_table(train, config.validation_split, () if is_scored else task.texts[:1])
    names = task.texts
    if config.hard_negatives:
        train = add_hard_negatives(train, names[0], names[1], config, every_row=True)
        names = (*names, *name_negatives(config.hard_negatives))
    if not is_scored:
        train = _add_prompts(train, names, form)
    learned, _ = scan_rows(train, replace(task, texts=names))
    if not is_scored:
        _refuse_equal_positives(learned)
    if not validation:
        retrieval = read_beir(config.validation_file, "--validation-file")
    else:
        validated, _ = scan_rows(validation, task)
        if is_scored:
            return TaskData(task, learned, {"": validated}, notes)
        retrieval = make_retrieval_set(validated.load().texts)
    return TaskData(learned.task, learned, {"": _make_retrieval_examples(retrieval, form)}, notes)


def _is_beir_folder(path: str) -> bool:
    return any(Path(path, name).exists() for name in ("corpus.jsonl", "corpus.jsonl.gz", "queries.jsonl", "qrels"))


def choose_pair_columns(table: Table, wanted: str, has_negatives: bool) -> tuple[str, ...]:
    """Return the names in `wanted`, separated by commas, whether the table has them or not; for "", the first column
    of anchor, query, question, sentence1 or text1, the first one of positive, answer, document, passage, sentence2,
    text2 or text and, with `has_negatives`, all columns that begin with "negative". Raises CpuftError: `wanted` has one
    name, equal ones, or without `has_negatives` more than two; or there are no such columns.
    """
    if names := split_names(wanted):
        if len(names) < 2 or (len(names) > 2 and not has_negatives) or len(set(names)) < len(names):
            most = "the columns of anchor, positive and perhaps negatives" if has_negatives else "two columns"
            raise CpuftError(f"--text-columns {wanted!r:.80} is not valid: name {most}, with commas between them")
        return names
    query, document = (next((name for name in usual if name in table.columns), "") for usual in (_QUERIES, _DOCUMENTS))
    if not query or not document:
        has = list_names(table.columns)
        raise CpuftError(f"{table.source} has no columns anchor and positive, nor a usual pair ({has}): {_NAME_PAIRS}")
    others = [name for name in table.columns if name.startswith(NEGATIVE)] if has_negatives else []
    return (query, document, *others)


def _choose_score_column(table: Table, wanted: str) -> str:
    """Return `wanted`, or a usual name where that is the default and missing."""
    if wanted != "label" or wanted in table.columns:
        return wanted
    return next((name for name in _USUAL_SCORES if name in table.columns), wanted)


def _add_prompts(table: Table, names: Sequence[str], form: EmbeddingForm) -> Table:
    """Return the table with the model's prompts in front of the texts of these columns; empty texts stay empty."""

    def read() -> Iterator[Row]:
        for where, cells in table.rows:
            prefixed = dict(cells)
            for name, prompt in zip(names, (form.query_prompt, *[form.document_prompt] * len(names))):
                if isinstance(text := cells.get(name), str) and text.strip():
                    prefixed[name] = prompt + text
            yield where, prefixed

    return replace(table, rows=Rows(read)) if form.query_prompt or form.document_prompt else table


def _refuse_equal_positives(examples: FileExamples) -> None:
    first = ""
    for batch in examples.batches():
        for _, positive, *_ in batch.texts:
            first = first or positive
            if positive != first:
                return
    raise CpuftError(f"{examples.table.source} has one text in {examples.task.texts[1]!r}: give different positives")


def _make_retrieval_examples(retrieval: RetrievalSet, form: EmbeddingForm) -> RetrievalExamples:
    def list_rows(query_prompt: str, document_prompt: str) -> list[tuple[str, ...]]:
        queries = [(query_prompt + text,) for text in retrieval.queries]
        return [*queries, *((document_prompt + text,) for text in retrieval.documents)]

    labels = [0.0] * (len(retrieval.queries) + len(retrieval.documents))
    plain = RetrievalExamples(list_rows("", ""), labels, False, retrieval.relevant, tuple(retrieval.queries))
    return replace(plain, texts=list_rows(form.query_prompt, form.document_prompt), rows_checksum=plain.checksum)
