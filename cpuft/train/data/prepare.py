"""Rows -> token numbers, once for a run and before any rank starts; checks all input while it is at it.

    python -m cpuft.train.data.prepare OUTPUT --task=... (all training options)

writes OUTPUT, a NumPy archive. What was prepared once is kept under the user's cache directory, by checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.errors import CpuftError, describe_disk
from cpuft.files import cache_folder, take_sent, written_beside
from cpuft.loader import load, parse_json
from cpuft.options.fields import TrainConfig
from cpuft.options.flags import parse_arguments
from cpuft.train.data.rows import read_data
from cpuft.train.data.tasks import Data, Rows, Task, first_rows
from cpuft.train.engines import check_engine
from cpuft.train.lora import check_lora
from cpuft.train.model import find_model, load_tokenizer

FORMAT = 2
UNTAGGED = -100
"""The label of a token that has none: torch's cross entropy leaves it out."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt")


@dataclass(frozen=True)
class Tokens:
    """Tokenised rows of one split, one after another."""

    ids: NDArray[np.int32]
    """Token numbers, shape (all tokens,)."""
    types: NDArray[np.int8]
    """0 in a row's first text, 1 in its second; shape (all tokens,), or (0,) where the model takes none."""
    offsets: NDArray[np.int64]
    """Row i is ids[offsets[i] : offsets[i + 1]]; shape (rows + 1,)."""
    labels: NDArray[Any]
    """What the task's kind needs: class numbers or scores, shape (rows,); of several labels, 1 for those that a row
    has, shape (rows, classes); of tags, class numbers of words' first tokens, else UNTAGGED, shape (all tokens,)."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, shape (rows,)."""
        return np.diff(self.offsets)

    def places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the tokens of these rows stand among all, one row after another."""
        return np.concatenate([np.arange(self.offsets[row], self.offsets[row + 1]) for row in rows])


@dataclass(frozen=True)
class Prepared:
    """All a rank needs of the data."""

    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    checksum: str
    """Of rows, labels, tokenizer and lengths: equal checksums mean the same data."""
    pad_id: int
    train: Tokens
    validation: dict[str, Tokens]
    kind: str = "class"
    """What is learned: the task's kind, by which `make_objective` chooses."""


def checksum_rows(data: Data, config: TrainConfig) -> str:
    """SHA-256 of everything that decides the token numbers, cut to 16 hexadecimal digits."""
    digest = hashlib.sha256()
    task = data.task
    for part in (FORMAT, config.max_length, config.max_train_samples, task.kind, task.labels, task.metrics):
        digest.update(repr(part).encode())
    folder = Path(find_model(config.model))
    digest.update(config.model.encode() if not folder.is_dir() else b"")
    for name in _TOKENIZER_FILES:
        digest.update((folder / name).read_bytes() if (folder / name).exists() else b"-")
    for rows in (data.train, *data.validation.values()):
        digest.update(json.dumps([rows.texts, rows.labels]).encode())
    return digest.hexdigest()[:16]


def tokenize(rows: Rows, tokenizer: Any, max_length: int, task: Task) -> Tokens:
    """Token numbers of all rows, each cut to `max_length`, not padded. Raises CpuftError: it cannot take words."""
    words = task.kind == "tags"
    if words and not tokenizer.is_fast:
        raise CpuftError("this model's tokenizer does not tell which words its tokens are of: name another --model")
    texts = [[list(row) for row in rows.texts]] if words else [list(column) for column in zip(*rows.texts)]
    encoded = tokenizer(*texts, truncation=True, max_length=max_length, padding=False, is_split_into_words=words)
    ids = encoded["input_ids"]
    types = encoded.get("token_type_ids", [])
    return Tokens(
        np.concatenate([np.asarray(row, np.int32) for row in ids]),
        np.concatenate([np.asarray(row, np.int8) for row in types]) if types else np.zeros(0, np.int8),
        np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64),
        _label_tokens(rows, encoded) if words else _label_rows(rows, task),
    )


def _label_rows(rows: Rows, task: Task) -> NDArray[np.float32]:
    if task.kind != "labels":
        return np.asarray(rows.labels, np.float32)
    has = np.zeros((len(rows.labels), len(task.labels)), np.float32)
    for row, numbers in zip(has, rows.labels):
        row[list(numbers)] = 1
    return has


def _label_tokens(rows: Rows, encoded: Any) -> NDArray[np.int32]:
    """Each word's number on its first token. A word without any, of what the tokenizer leaves out, goes unseen."""
    found = []
    for row, numbers in enumerate(rows.labels):
        words = encoded.word_ids(row)
        firsts = (word is not None and word != before for before, word in zip([None, *words], words))
        found += [numbers[word] if first else UNTAGGED for word, first in zip(words, firsts)]
    return np.asarray(found, np.int32)


def prepare(config: TrainConfig) -> Path:
    """Path of the prepared archive in the user's cache; made now unless it is there.

    Raises CpuftError: anything wrong with the task, the data, the model's tokenizer or the cache.
    """
    data = read_data(config)
    data = Data(data.task, first_rows(data.train, config.max_train_samples), data.validation)
    checksum = checksum_rows(data, config)
    path = cache_folder(os.environ) / f"{data.task.name}-{checksum}.npz"
    if path.exists():
        return path
    tokenizer = load_tokenizer(config.model, data.task.kind == "tags")
    meta = {
        "kind": data.task.kind,
        "labels": data.task.labels,
        "metrics": data.task.metrics,
        "checksum": checksum,
        "pad_id": tokenizer.pad_token_id or 0,
        "validation": list(data.validation),
    }
    arrays: dict[str, Any] = {"meta": np.asarray(json.dumps(meta))}
    for key, rows in [("train", data.train), *((f"validation{k}", rows) for k, rows in data.validation.items())]:
        tokens = tokenize(rows, tokenizer, config.max_length, data.task)
        arrays |= {f"{key}.{name}": value for name, value in vars(tokens).items()}
    try:
        with written_beside(path) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        said = f"cannot take the rows ({error.strerror}): make room there, or set XDG_CACHE_HOME"
        raise CpuftError(f"the cache folder {path.parent} {said} to another") from None
    return path


def read_prepared(path: str) -> Prepared:
    """The archive at `path`. Raises CpuftError when it is none of ours."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            meta = load(dict[str, Any], parse_json(str(archive["meta"])))
            splits = {
                key: Tokens(*(archive[f"{key}.{name}"] for name in ("ids", "types", "offsets", "labels")))
                for key in ("train", *(f"validation{name}" for name in meta["validation"]))
            }
        validation = {name: splits[f"validation{name}"] for name in meta["validation"]}
        labels, metrics, kind = tuple(meta["labels"]), tuple(meta["metrics"]), meta["kind"]
        return Prepared(labels, metrics, meta["checksum"], meta["pad_id"], splits["train"], validation, kind)
    except Exception as error:  # zipfile and NumPy raise whatever their layers raise
        raise CpuftError(f"{path} is no prepared data ({error!r}): remove it, and start again") from None


def main() -> None:
    """Prepare, and put a copy where the run wants it."""
    try:
        output, config = sys.argv[1], parse_arguments(TrainConfig, sys.argv[2:])
        os.environ.update(take_sent(os.environ, "prepare"))
        check_engine(config)
        check_lora(config)
        find_model(config.model)
        with written_beside(Path(output)) as beside:
            shutil.copyfile(prepare(config), beside)
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        said = describe_disk(error) or f"{error}: name another place with --run-dir"
        print(f"cpuft: error: {said}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
