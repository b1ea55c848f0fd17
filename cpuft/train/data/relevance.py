"""Examples of rerankers: a query, a document, and how relevant the document is to the query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cpuft.config.predict import PredictConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.judge.metrics import LEAST_RELEVANT
from cpuft.serialization import to_number
from cpuft.tasks import Task
from cpuft.train.data.columnar import Cell
from cpuft.train.data.embedding_pairs import choose_pair_columns
from cpuft.train.data.hard_negatives import NEGATIVE, add_hard_negatives, name_negatives, split_cell
from cpuft.train.data.labels import BOOLEANS, read_decimal_comma
from cpuft.train.data.sources import (
    Examples,
    FileExamples,
    TaskData,
    check_rows,
    drop_unlabelled,
    has_label,
    make_examples,
    merge_options,
    read_both_files,
    scan_rows,
)
from cpuft.train.data.tables import Row, Rows, Table, find_column, read_tables, split_names, split_table

_USUAL_LABELS = ("label", "score", "relevance")
_MADE_LABEL = "relevant"
"""Name of the label column of rows that have none, but relevant and irrelevant documents."""
_MOST_NAMED = 2
"""Number of columns of negatives that are named one by one."""
_NAME_COLUMNS = "name the columns of query and document with --text-columns, for example --text-columns question,answer"


@dataclass(frozen=True)
class RelevanceColumns:
    """The columns of a table of queries and documents."""

    query: str
    document: str
    """The column of the document that `label` is about; without `label`, of a relevant document."""
    negatives: tuple[str, ...]
    """The columns of irrelevant documents; empty if there is a `label`."""
    label: str
    """The column of the scores; empty if there is none."""


def read_relevance(task: Task, config: TrainConfig) -> TaskData:
    """Read --train-file and --validation-file for a task of the kind relevance.

    An example is a query, a document and a score from 0 to 1, from a row's label, or from a row of a relevant document
    and irrelevant ones, given or from --hard-negatives. Labels of the validation split are pairs of a score and the
    number of the query. Raises CpuftError: a file, column, row or score does not fit, all training scores are equal, or
    no validation query has both relevant and irrelevant documents.
    """
    train, validation = read_both_files(config, "queries, documents and labels")
    columns = others = _choose_columns(train, config.text_columns, config.label_column)
    if validation:
        others = _choose_columns(validation, config.text_columns, config.label_column)
        if config.skip_unlabelled and others.label:
            validation = drop_unlabelled(validation, others.label)
    if config.skip_unlabelled and columns.label:
        train = drop_unlabelled(train, columns.label)
    notes = (*train.notes, *(validation.notes if validation else ()))
    if not validation:
        train, validation = split_table(train, config.validation_split, (columns.query,))
    if config.hard_negatives:
        if found := _find_irrelevant(train, columns):
            raise CpuftError(
                f"--hard-negatives finds irrelevant documents for rows without any, and {train.source} has some "
                f"({found}): leave --hard-negatives out, or give rows of queries and relevant documents only"
            )
        corpus = ((train, columns.document),)
        train, columns = _mine(train, columns, config)
        if not _find_irrelevant(validation, others):
            validation, others = _mine(validation, others, config, corpus)
    for table, its in ((train, columns), (validation, others)):
        if not its.label and not its.negatives:
            raise CpuftError(
                f"{table.source} has neither a column of labels nor columns of irrelevant documents, whose names begin "
                f"with {NEGATIVE}: name them with --label-column or --text-columns, or find irrelevant documents with "
                f"--hard-negatives 5"
            )
    learned, _ = scan_rows(*_list_examples(train, columns, task))
    _refuse_equal_scores(learned)
    made, validated = _list_examples(validation, others, task)
    examples = _keep_first(make_examples(check_rows(made, validated), validated))
    _refuse_unordered(examples, validation.source)
    return TaskData(learned.task, learned, {"": number_queries(examples)}, notes)


def _choose_columns(table: Table, texts: str, label: str) -> RelevanceColumns:
    """Return the columns by --text-columns and --label-column (label, its default: also score, relevance or none)."""
    if label != "label":
        find_column(table.columns, label, table.source, "give the name of the column of the labels with --label-column")
    found = label if label != "label" else next((name for name in _USUAL_LABELS if name in table.columns), "")
    query, document, *negatives = choose_pair_columns(table, texts, has_negatives=True)
    for name in (query, document, *negatives) if texts else ():
        find_column(table.columns, name, table.source, _NAME_COLUMNS)
    if not texts:
        # A score beside negatives is that of a teacher for all of them, unless its column was named.
        negatives = [name for name in negatives if name != found] if label == "label" else []
    return RelevanceColumns(query, document, tuple(negatives), "" if negatives else found)


def _list_examples(table: Table, columns: RelevanceColumns, task: Task) -> tuple[Table, Task]:
    """Return a table of a row for each query, document and score, and the task with the names of these columns."""
    negatives = columns.negatives
    if len(negatives) > _MOST_NAMED:
        negatives = (f"{negatives[0]} to {negatives[-1]}",)
    document, label = ", ".join((columns.document, *negatives)), columns.label or _MADE_LABEL

    def read() -> Iterator[Row]:
        for where, row in table.rows:
            cell, found = row.get(columns.document, ""), list[tuple[Cell, str]]()
            if columns.label:
                found = [(cell, _check_score(row.get(columns.label, ""), where))]
            elif found := [(text, "1") for text in split_cell(cell)]:
                found += [(text, "0") for name in columns.negatives for text in split_cell(row.get(name, ""))]
            else:
                raise CpuftError(f"{where} has no {columns.document!r}: correct or remove that line")
            for text, score in found:
                yield where, {**row, columns.query: row.get(columns.query, ""), document: text, label: score}

    made = Table(table.source, [columns.query, document, label], Rows(read))
    return made, replace(task, texts=(columns.query, document), label=label)


def _check_score(cell: Cell, where: str) -> str:
    """Return the score in a cell as text. Raises CpuftError: it is a number, but not from 0 to 1."""
    text = cell.strip() if isinstance(cell, str) else ""
    text = BOOLEANS.get(text.lower(), read_decimal_comma(text))
    try:
        fits = not text or 0 <= float(text) <= 1
    except ValueError:
        return text  # the message is that of other scores
    if not fits:
        raise CpuftError(
            f"{where}: the score {text:.40} is not from 0 to 1: divide all scores by the largest one, so that 1 is "
            f"relevant and 0 is not, or learn them as they are with --task files --label-type number"
        )
    return text


def _find_irrelevant(table: Table, columns: RelevanceColumns) -> str:
    """Return where a table has irrelevant documents: the name of a column, or a line; empty if it has none."""
    if columns.negatives:
        return columns.negatives[0]
    if not columns.label:
        return ""
    scores = ((where, _check_score(row.get(columns.label, ""), where)) for where, row in table.rows)
    return next((where for where, score in scores if to_number(score) < LEAST_RELEVANT), "")


def _mine(
    table: Table, columns: RelevanceColumns, config: TrainConfig, others: Sequence[tuple[Table, str]] = ()
) -> tuple[Table, RelevanceColumns]:
    found = add_hard_negatives(table, columns.query, columns.document, config, others)
    return found, replace(columns, negatives=name_negatives(config.hard_negatives), label="")


def _refuse_equal_scores(examples: FileExamples) -> None:
    scores = {str(row[examples.task.label]) for _, row in examples.table.rows}
    if len(set(map(float, scores))) < 2:
        raise CpuftError(
            f"all rows of {examples.table.source} have one label: find irrelevant documents with --hard-negatives 5"
        )


def _keep_first(examples: Examples) -> Examples:
    """Return each query and document once, with the highest score: a relevant document is nowhere a negative."""
    scores: dict[tuple[str, ...], float] = {}
    for texts, score in zip(examples.texts, examples.labels):
        scores[texts] = max(score, scores.get(texts, 0.0))
    return replace(examples, texts=list(scores), labels=list(scores.values()))


def number_queries(examples: Examples) -> Examples:
    """Return examples whose labels are pairs: the score, and the number of the query (0.0 is the first query)."""
    numbers: dict[str, int] = {}
    labels = [
        (score, float(numbers.setdefault(query, len(numbers))))
        for (query, *_), score in zip(examples.texts, examples.labels)
    ]
    return replace(examples, labels=labels)


def _refuse_unordered(examples: Examples, source: str) -> None:
    scores, numbers = np.asarray(number_queries(examples).labels).T
    relevant = np.bincount(numbers.astype(int), scores >= LEAST_RELEVANT)
    if not ((relevant > 0) & (relevant < np.bincount(numbers.astype(int)))).any():
        raise CpuftError(f"no validation query in {source} has both relevant and irrelevant documents: give more rows")


def read_documents_to_predict(task: Task, config: PredictConfig, train: TrainConfig) -> tuple[Task, Examples]:
    """Read the examples of `cpuft predict` for a run of the kind relevance, from --file or the validation data; return
    also the task with the columns.

    Labels are pairs of a score and the number of the query; a file without irrelevant documents and without a score in
    each row has none. Raises CpuftError: a file, column or row does not fit.
    """
    if not config.file:
        data = read_relevance(task, train)
        return data.task, data.validation[""].load()
    table = read_tables(config.file, "--file", merge_options(config, train), "test")
    label = config.label_column or (train.label_column if train.label_column in table.columns else "label")
    wanted = config.text_columns or train.text_columns
    if not config.text_columns and not set(split_names(wanted)) <= set(table.columns):
        wanted = ",".join(wanted.split(",")[:2])
    columns = _choose_columns(table, wanted, label)
    if config.id_column:
        find_column(table.columns, config.id_column, table.source)
    is_scored = columns.label and all(has_label(row.get(columns.label, ""), task) for _, row in table.rows)
    if columns.negatives or is_scored:
        made, task = _list_examples(table, columns, task)
        return task, number_queries(make_examples(check_rows(made, task), task, True, config.id_column))
    task = replace(task, texts=(columns.query, columns.document), label="")
    return task, make_examples(check_rows(table, task, False), task, False, config.id_column)
