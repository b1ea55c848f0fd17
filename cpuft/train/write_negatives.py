"""Hard negatives of the rows of a file: `python -m cpuft.train.write_negatives --file=...`, started by `cpuft mine`.

The texts are in memory, because equal texts have to be found; their embeddings are in files, which are mapped.
Importing this module imports no torch (see `cpuft.train.write_embeddings`).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpuft.config.fields import parse_arguments
from cpuft.config.mine import MineConfig
from cpuft.config.predict import PredictConfig
from cpuft.errors import CpuftError, counted
from cpuft.train.data.embedding_pairs import choose_pair_columns
from cpuft.train.data.sources import get_text
from cpuft.train.data.tables import choose_column, find_column, read_tables
from cpuft.train.data.write_tables import Column, check_output, write_table
from cpuft.train.embedding_form import find_embedding_model, read_form
from cpuft.train.startup import run_as_process
from cpuft.train.write_embeddings import (
    Computer,
    Window,
    make_progress,
    open_npy,
    read_windows,
    start_computing,
    write_all,
)

if TYPE_CHECKING:
    from cpuft.train.embedder import Embeddings
    from cpuft.train.mine import MiningTask, Negatives

_COLUMNS = ("anchor", "positive")
"""Names of the first columns that are written, by which --task pairs finds them."""
_ROWS_AT_ONCE = 4096


def _read_anchors(request: MineConfig) -> tuple[list[str], list[str]]:
    """Return all rows' anchors and positives of --file. Raises CpuftError: a column, a text or all rows are missing."""
    table = read_tables(request.file, "--file", request)
    columns = choose_pair_columns(table, request.text_columns, True)[:2]
    for name in columns:
        find_column(table.columns, name, table.source)
    anchors, positives = list[str](), list[str]()
    for where, cells in table.rows:
        for name, texts in zip(columns, (anchors, positives)):
            texts.append(get_text(cells, name, where, may_be_blank=False))
    if not anchors:
        raise CpuftError(f"{table.source} has no rows: give a file with pairs of texts")
    return anchors, positives


def _read_corpus(request: MineConfig) -> list[str] | None:
    """Return the documents of --corpus without blank ones; None without it. Raises CpuftError: it cannot be read."""
    if not request.corpus:
        return None
    table = read_tables(request.corpus, "--corpus", request)
    column = choose_column(table, request.corpus_column, "--corpus-column")
    return [text for window in read_windows(table, column) for text in window.texts if text.strip()]


def _embed_into(path: Path, texts: Sequence[str], prompt: str, dimensions: int, compute: Computer) -> Embeddings:
    """Write the embeddings of texts, with a prompt in front, to a .npy file, and return it mapped into memory."""
    starts = range(0, len(texts), _ROWS_AT_ONCE)
    windows = (Window([prompt + text for text in texts[start : start + _ROWS_AT_ONCE]], []) for start in starts)
    with open_npy(path, dimensions) as write:
        write_all(write, compute(windows))
    embeddings: Embeddings = np.load(path, mmap_mode="r")
    return embeddings


def _list_rows(task: MiningTask, found: Negatives) -> Iterator[tuple[str, ...]]:
    """Yield (anchor, positive, *negatives) of each positive of each anchor with all negatives (`found.complete`)."""
    for place in np.flatnonzero(found.complete):
        negatives = [task.documents[number] for number in found.numbers[place]]
        for positive in task.positives[place]:
            yield (task.anchors[place], task.documents[positive], *negatives)


def write_negatives(request: MineConfig) -> None:
    """Write the rows of a file with their negatives to --output, or nothing at an error, and print the name of that
    file, whose folder is made. Raises CpuftError: file, model or output cannot be used, or no anchor has enough
    negatives.
    """
    path = Path(request.output)
    check_output(path, request.overwrite, request.file, request.corpus)
    anchors, positives = _read_anchors(request)
    corpus = _read_corpus(request)
    form = read_form(find_embedding_model(request.model))
    model = PredictConfig(
        model=request.model, precision=request.precision, batch_size=request.batch_size, np=request.np
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as name,
        start_computing(model) as (dimensions, compute),
    ):
        from cpuft.train.mine import check_rules, make_mining_task, search_negatives  # imports torch

        task, folder = make_mining_task(anchors, positives, corpus), Path(name)
        check_rules(task, request)
        queries = _embed_into(folder / "anchors.npy", task.anchors, form.query_prompt, dimensions, compute)
        documents = _embed_into(folder / "documents.npy", task.documents, form.document_prompt, dimensions, compute)
        total = counted(len(task.anchors), "anchor")
        tell = make_progress(lambda done, speed: f"negatives of {done} of {total} searched, {speed:.1f} anchors/s")
        found = search_negatives(queries, documents, task, request, tell)
        tell(len(task.anchors), is_end=True)
    left_out = len(found.complete) - int(found.complete.sum())
    why = f"{left_out} of {total} left out, with fewer than {request.negatives} negatives"
    if left_out == len(task.anchors):
        raise CpuftError(f"{why}: loosen --max-score, --min-score or the margins, or lower --negatives")
    columns = [*_COLUMNS, *(f"negative_{number}" for number in range(1, request.negatives + 1))]
    rows = list(_list_rows(task, found))
    write_table(path, [Column(name) for name in columns], rows, guards=False)
    print(f"negatives: {path} ({counted(len(rows), 'row')} of {counted(request.negatives, 'negative')}; {why})")


if __name__ == "__main__":
    run_as_process(lambda: write_negatives(parse_arguments(MineConfig, sys.argv[1:])))
