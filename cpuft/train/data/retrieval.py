"""Validation sets for search, read in the form of the BEIR benchmark (Thakur et al. 2021) or made of training pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.serialization import to_number
from cpuft.train.data.tables import Table, find_column, read_table

Judgements = NDArray[np.int32]
"""Shape (judgements, 3): query number, document number and relevance. Relevance above 0 means relevant."""

_MAX_RELEVANCE = 1_000_000
_JUDGEMENT_FILES = ("test", "dev")
_QUERY, _DOCUMENT, _RELEVANCE = "query-id", "corpus-id", "score"
_FORM = "a folder with corpus.jsonl, queries.jsonl and qrels/test.tsv or qrels/dev.tsv, as the BEIR benchmark has them"


@dataclass(frozen=True)
class RetrievalSet:
    """Queries, documents, and the judgements that say which documents are relevant to which query."""

    queries: list[str]
    """Texts of the queries. Each has at least one relevant document."""
    documents: list[str]
    """Texts of the documents. Where two score the same for a query, the one with the smaller number comes first."""
    relevant: Judgements
    """Judgements with a relevance above 0; no query and document are judged twice."""


def read_beir(folder: str, option: str) -> RetrievalSet:
    """Read a folder in BEIR's form: corpus.jsonl, queries.jsonl, and qrels/test.tsv or else qrels/dev.tsv.

    A document's text is its title, a space and its text, as the package beir joins them. Documents are in the order of
    their ids, by which sentence-transformers ranks equal scores. Judgements of 0 or less, and queries without others,
    are left out. Raises CpuftError: a file is missing, a line is not valid, or no judgement is above 0.
    """
    place = Path(folder)
    if not place.is_dir():
        raise CpuftError(f"{option} {folder}: there is no such folder: give {_FORM}")
    judged = _find_file(place, [f"qrels/{stem}.tsv" for stem in _JUDGEMENT_FILES], option)
    corpus = _read_texts(_find_file(place, ["corpus.jsonl"], option), option, has_titles=True)
    queries = _read_texts(_find_file(place, ["queries.jsonl"], option), option)
    for query, text in queries.items():
        if not text.strip():
            raise CpuftError(f"the query {query!r:.60} in {place}/queries.jsonl has no text: correct or remove it")
    found = list(_read_judgements(read_table(judged, option), queries.keys(), corpus.keys()))
    if not found:
        raise CpuftError(f"no judgement in {judged} has a score above 0: give judgements of relevant documents")
    asked = {query for query, _, _ in found}
    query_numbers = {query: number for number, query in enumerate(query for query in queries if query in asked)}
    document_numbers = {document: number for number, document in enumerate(sorted(corpus))}
    relevant = [(query_numbers[query], document_numbers[document], score) for query, document, score in found]
    return RetrievalSet(
        [queries[query] for query in query_numbers],
        [corpus[document] for document in document_numbers],
        np.asarray(relevant, np.int32),
    )


def _find_file(folder: Path, names: Sequence[str], option: str) -> Path:
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
                return path
    raise CpuftError(f"{option} {folder}: there is no file {' or '.join(names)}: give {_FORM}")


def _read_texts(path: Path, option: str, has_titles: bool = False) -> dict[str, str]:
    texts: dict[str, str] = {}
    for where, row in read_table(path, option).rows:
        name, text, title = row.get("_id", ""), row.get("text", ""), row.get("title", "") if has_titles else ""
        if not isinstance(name, str) or not name:
            raise CpuftError(f"{where} has no '_id': give each line the keys _id and text, as in BEIR's files")
        if "text" not in row or not isinstance(text, str) or not isinstance(title, str):
            raise CpuftError(f"{where} has no text in 'text': give each line the keys _id and text, as in BEIR's files")
        if name in texts:
            raise CpuftError(f"{where}: the _id {name!r:.60} is there twice: give each line an _id of its own")
        texts[name] = f"{title} {text}".strip()
    return texts


def _read_judgements(table: Table, queries: Iterable[str], documents: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Yield query id, document id and relevance of each judgement above 0; equal judgements once."""
    advice = f"give it a header line with {_QUERY}, {_DOCUMENT} and {_RELEVANCE}, separated by tabs"
    for name in (_QUERY, _DOCUMENT, _RELEVANCE):
        find_column(table.columns, name, table.source, advice)
    known_queries, known_documents = set(queries), set(documents)
    seen: dict[tuple[str, str], int] = {}
    for where, row in table.rows:
        query, document = str(row[_QUERY]), str(row[_DOCUMENT])
        score = _parse_relevance(str(row[_RELEVANCE]), where)
        is_new = (query, document) not in seen
        if seen.setdefault((query, document), score) != score:
            raise CpuftError(f"{where} judges query {query!r:.60} and document {document!r:.60} again: keep one line")
        if score <= 0 or not is_new:
            continue
        if query not in known_queries:
            raise CpuftError(f"{where}: the query {query!r:.60} is not in queries.jsonl: add it, or remove that line")
        if document not in known_documents:
            raise CpuftError(
                f"{where}: the relevant document {document!r:.60} is not in corpus.jsonl: add it, or remove that line"
            )
        yield query, document, score


def _parse_relevance(text: str, where: str) -> int:
    if (score := to_number(text)).is_integer() and abs(score) <= _MAX_RELEVANCE:
        return int(score)
    raise CpuftError(f"{where}: the score {text!r:.60} is not a whole number: correct that line")


def make_retrieval_set(examples: Iterable[Sequence[str]]) -> RetrievalSet:
    """Make a retrieval set of anchors (queries), positives (relevance 1) and negatives, each text once, in order."""
    queries: dict[str, int] = {}
    documents: dict[str, int] = {}
    relevant: dict[tuple[int, int], None] = {}
    for anchor, *others in examples:
        query = queries.setdefault(anchor, len(queries))
        numbers = [documents.setdefault(text, len(documents)) for text in others]
        relevant[query, numbers[0]] = None
    rows = [(query, document, 1) for query, document in relevant]
    return RetrievalSet(list(queries), list(documents), np.asarray(rows, np.int32).reshape(-1, 3))
