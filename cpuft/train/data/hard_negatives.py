"""Hard negatives for training data: irrelevant documents that an embedding model takes for relevant ones."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cpuft.config.mine import MineConfig
from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, counted
from cpuft.files import cache_folder, hash_file, list_files, write_text
from cpuft.serialization import load, parse_json
from cpuft.train.data.archive import explain_cache_failures
from cpuft.train.data.columnar import Cell
from cpuft.train.data.tables import Row, Rows, Table
from cpuft.train.embedding_form import has_form
from cpuft.train.model import find_model

NEGATIVE = "negative"
"""How the names of the columns of negatives begin."""
RELATIVE_MARGIN = 0.05
"""A negative's similarity to the query must be at least this share below that of the positive. Documents above it are
often relevant themselves (Moreira and others 2024, arXiv:2407.15831, section 4.1)."""

_FORMAT = 1
"""Part of the checksum: to be raised when the same texts get other negatives."""


def name_negatives(count: int) -> tuple[str, ...]:
    """Return the names of the columns of `count` negatives: negative_1, negative_2 and so on."""
    return tuple(f"{NEGATIVE}_{number}" for number in range(1, count + 1))


def add_hard_negatives(
    table: Table,
    query: str,
    document: str,
    config: TrainConfig,
    others: Sequence[tuple[Table, str]] = (),
    every_row: bool = False,
) -> Table:
    """Return the table with columns negative_1, negative_2 and so on: --hard-negatives irrelevant documents of each
    query, the most similar first, that --mining-model or --model finds among the documents of all rows and of `others`
    (tables and their columns). Says on stderr what it does; keeps what is found in the cache folder.

    With `every_row`, each row gets them, and rows whose query has fewer are left out; otherwise only the first row of
    each query does, and all other cells are "". Raises CpuftError: there are no rows or too few documents, or the model
    is no embedding model.
    """
    pairs = [
        (asked, text)
        for _, row in table.rows
        if isinstance(asked := row.get(query, ""), str) and asked.strip()
        for text in split_cell(row.get(document, ""))
    ]
    corpus = [text for other, name in others for _, row in other.rows for text in split_cell(row.get(name, ""))]
    if not pairs:
        raise CpuftError(f"{table.source} has no rows with {query!r} and {document!r}: give rows of both")
    found = _mine(pairs, corpus, config, table.source)
    names = name_negatives(config.hard_negatives)
    if few := sum(len(texts) < len(names) for texts in found.values()):
        what = "their rows are left out" if every_row else "they get those that there are"
        have = f"{few:,} have fewer than {counted(len(names), 'hard negative')}"
        print(f"of {_counted_queries(len(found))}, {have}: {what}", file=sys.stderr, flush=True)
    kept = {asked: texts for asked, texts in found.items() if len(texts) == len(names) or not every_row}

    def read() -> Iterator[Row]:
        seen = set[str]()
        for where, row in table.rows:
            asked = str(row.get(query, ""))
            if every_row and asked.strip() and asked not in kept:
                continue
            texts = kept.get(asked, []) if every_row or asked not in seen else []
            seen.add(asked)
            yield where, {**row, **dict.fromkeys(names, ""), **dict(zip(names, texts))}

    return replace(table, columns=[*(name for name in table.columns if name not in names), *names], rows=Rows(read))


def split_cell(cell: Cell) -> list[str]:
    """Return the texts in a cell, which may be a list, without empty and blank ones."""
    return [text for text in ([cell] if isinstance(cell, str) else cell) if text.strip()]


def _mine(
    pairs: Sequence[tuple[str, str]], corpus: Sequence[str], config: TrainConfig, source: str
) -> dict[str, list[str]]:
    """Return the negatives of each query, the most similar ones first; from the cache if they are there."""
    model = _find_mining_model(config)
    pooling = "" if config.mining_model or config.pooling == "auto" else config.pooling
    documents, count = {*corpus, *(text for _, text in pairs)}, config.hard_negatives
    own = Counter(asked for asked, _ in set(pairs))
    if len(documents) - min(own.values()) < count:
        raise CpuftError(
            f"{source} has {counted(len(documents), 'different document')}, too few for --hard-negatives {count}: give "
            f"more rows, or a smaller number"
        )
    key = _digest(model, (pairs, corpus, count, RELATIVE_MARGIN, pooling))
    path = cache_folder(os.environ) / f"negatives-{key}.json"
    with suppress(OSError, ValueError):  # it is not there, or is damaged
        return load(dict[str, list[str]], parse_json(path.read_text(encoding="utf-8")))
    from cpuft.train.embedder import Embedder
    from cpuft.train.mine import mine_negatives  # imports torch

    name = config.mining_model or config.model
    where = f"{_counted_queries(len(own))} among {counted(len(documents), 'document')}"
    print(f"finding hard negatives for {where} with {name}", file=sys.stderr, flush=True)
    rules = MineConfig(negatives=count, relative_margin=RELATIVE_MARGIN)
    asked, positives = zip(*pairs)
    found = mine_negatives(Embedder(model, pooling=pooling), asked, positives, corpus, rules)
    with explain_cache_failures(path.parent):
        write_text(path, json.dumps(found))
    return found


def _counted_queries(number: int) -> str:
    return f"{number:,} {'query' if number == 1 else 'queries'}"


def _find_mining_model(config: TrainConfig) -> str:
    if config.mining_model:
        name = Path(config.mining_model, "model")
        # The folder of a run holds its model.
        try:
            return find_model(str(name) if (name / "config.json").exists() else config.mining_model)
        except CpuftError as error:
            raise CpuftError(str(error).replace("--model", "--mining-model")) from None
    model = "" if config.from_config else find_model(config.model)
    if not model or not has_form(model):
        raise CpuftError(
            f"--hard-negatives needs an embedding model, and {config.from_config or config.model} is none (the files "
            f"of sentence-transformers beside it have no pooling): name one, for example --mining-model minilm"
        )
    return model


def _digest(model: str, parts: object) -> str:
    """Return 16 hexadecimal digits of a checksum of the model's files, or of a hub name, and of other values."""
    found = list_files(Path(model)) if Path(model).exists() else []
    files = sorted(path for path in found if path.suffix in _MODEL_FILES)
    named = [(path.name, hash_file(path)) for path in files] or model
    return hashlib.sha256(json.dumps([_FORMAT, named, parts]).encode()).hexdigest()[:16]


_MODEL_FILES = (".json", ".safetensors", ".bin", ".txt", ".model")
