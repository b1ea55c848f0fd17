"""Rows -> token numbers, once for a run and before any rank starts; checks all input while it is at it.

    python -m cpuft.train.data.prepare OUTPUT --rooms=... --task=... (all training options)

writes OUTPUT, a NumPy archive. What was prepared once is kept under the user's cache directory, by checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config import TrainConfig, parse_arguments, take_rooms
from cpuft.errors import CpuftError, counted, describe_disk
from cpuft.files import cache_folder, take_sent, written_beside
from cpuft.serialization import load, parse_json
from cpuft.train.data.rows import read_data
from cpuft.train.data.tasks import TASKS, Data, Rows, Task, first_rows
from cpuft.train.data.texts import Packer, divide, pack, sort_words, survey
from cpuft.train.data.vocabulary import choose_tokenizer, count_words, digest_tokenizer, is_checked, name_tokenizer
from cpuft.train.engines import check_engine
from cpuft.train.lora import check_lora
from cpuft.train.model import (
    check_positions,
    check_tokenizer,
    check_untrained,
    check_weights,
    choose_pad_id,
    find_model,
    load_settings,
    name_model,
)

FORMAT = 6
_NONE: NDArray[Any] = np.zeros(0, np.int8)
UNKNOWN = -1
MOST_UNKNOWN = 0.05
"""Share of the training texts' tokens that may be unknown without a warning."""
_MOST_NAMED = 10
"""Classes whose names and counts `describe_data` lists."""
UNTAGGED = -100
"""The label of a token that has none: torch's cross entropy leaves it out."""


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
    has, shape (rows, classes); of tags, class numbers of words' first tokens, else UNTAGGED, shape (all tokens,);
    of texts nothing, shape (0,)."""

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
    mask_id: int = 0
    word_kinds: NDArray[np.int8] = field(default_factory=lambda: _NONE)
    """What each word is to who masks some, by `sort_words`; of texts only."""
    words: int = 0
    """Of the tokenizer."""
    tokenizer: str = ""
    """One that was made here, as JSON."""
    texts: tuple[str, ...] = ()
    """Names of the columns that hold the texts."""
    label: str = ""
    """Name of the column that holds the label; empty where there is none."""
    cut: int = UNKNOWN
    """Training examples that were longer than the maximum length and lost their ends, or UNKNOWN."""
    unknown: float = 0.0
    """Share of the training texts' tokens that the tokenizer does not know."""


def checksum_rows(data: Data, config: TrainConfig) -> str:
    """SHA-256 of everything that decides the token numbers, cut to 16 hexadecimal digits."""
    digest = hashlib.sha256()
    task = data.task
    sizes = (FORMAT, config.max_length, config.max_train_samples)
    for part in (*sizes, task.kind, task.labels, task.metrics, task.texts, task.label):
        digest.update(repr(part).encode())
    digest.update(digest_tokenizer(config))
    for rows in (data.train, *data.validation.values()):
        digest.update(json.dumps([rows.texts, rows.labels]).encode())
    return digest.hexdigest()[:16]


def tokenize(rows: Rows, tokenizer: Any, max_length: int, task: Task) -> Tokens:
    """Token numbers of all rows, each cut to `max_length`, not padded. Raises CpuftError: it cannot take words."""
    return tokenize_and_count(rows, tokenizer, max_length, task)[0]


def tokenize_and_count(rows: Rows, tokenizer: Any, max_length: int, task: Task) -> tuple[Tokens, int]:
    """Tokens as `tokenize` returns them, and the number of rows that were cut, UNKNOWN with a slow tokenizer."""
    words = task.kind == "tags"
    if words and not tokenizer.is_fast:
        raise CpuftError("this model's tokenizer does not tell which words its tokens are of: name another --model")
    texts = [[list(row) for row in rows.texts]] if words else [list(column) for column in zip(*rows.texts)]
    encoded = tokenizer(*texts, truncation=True, max_length=max_length, padding=False, is_split_into_words=words)
    ids = encoded["input_ids"]
    types = encoded.get("token_type_ids", [])
    cut = sum(bool(row.overflowing) for row in encoded.encodings) if encoded.encodings else UNKNOWN
    tokens = Tokens(
        np.concatenate([np.asarray(row, np.int32) for row in ids]),
        np.concatenate([np.asarray(row, np.int8) for row in types]) if types else np.zeros(0, np.int8),
        np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64),
        _label_tokens(rows, encoded) if words else _label_rows(rows, task),
    )
    return tokens, cut


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
    check_untrained(config)
    if config.task == "text":
        return _prepare_texts(config)
    data = read_data(config)
    check_positions(config)
    data = Data(data.task, first_rows(data.train, config.max_train_samples), data.validation)
    checksum = checksum_rows(data, config)
    path = cache_folder(os.environ) / f"{data.task.name}-{checksum}.npz"
    if path.exists():
        return _check_fit(config, path)
    tokenizer, made = choose_tokenizer(config, data.train.list_texts, checksum, data.task.kind == "tags")
    parts = {"train": data.train, **{f"validation{name}": rows for name, rows in data.validation.items()}}
    found = {key: tokenize_and_count(rows, tokenizer, config.max_length, data.task) for key, rows in parts.items()}
    splits = {key: tokens for key, (tokens, _) in found.items()}
    meta = _describe(config, data.task, tokenizer, made, checksum, splits) | {"cut": found["train"][1]}
    _write(path, meta, splits, {})
    return path


def _prepare_texts(config: TrainConfig) -> Path:
    """The same of texts, in pieces."""
    if not config.train_file:
        raise CpuftError("--task text needs --train-file: name text files, JSON lines, or a folder of them")
    corpus, other = survey(config.train_file, config.text_columns, "--train-file"), config.validation_file
    held_out = survey(other, config.text_columns, "--validation-file") if other else None
    check_positions(config)
    key = f"{corpus.checksum} {held_out.checksum if held_out else config.validation_split}"
    told = repr((FORMAT, key, config.max_length, config.max_train_samples)).encode()
    checksum = hashlib.sha256(told + digest_tokenizer(config)).hexdigest()[:16]
    path = cache_folder(os.environ) / f"text-{checksum}.npz"
    if path.exists():
        return _check_fit(config, path)
    pieces = partial(divide, corpus, config.validation_split, held_out)
    tokenizer, made = choose_tokenizer(config, lambda: (text for held, text, _ in pieces() if not held), key)
    if None in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id):
        raise CpuftError(f"{name_tokenizer(config)} has no [CLS], [SEP] or [MASK], as encoders have: name another")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="texts-") as folder:
        form = (config.max_length, tokenizer.cls_token_id, tokenizer.sep_token_id)
        train, validation = (Packer(Path(folder, name), *form) for name in ("train", "held-out"))
        pack(pieces(), tokenizer, (train, validation))
        packed = {"train": train.finish(config.max_train_samples), "validation": validation.finish()}
        splits = {name: Tokens(ids, _NONE, offsets, _NONE) for name, (ids, offsets) in packed.items()}
        if not all(map(len, splits.values())):
            too_few = f"of {counted(corpus.pieces, 'line')} of {config.train_file} none can be held out"
            raise CpuftError(f"{too_few}: name more texts, or --validation-file")
        meta = _describe(config, TASKS["text"], tokenizer, made, checksum, splits) | {"cut": 0}
        _write(path, meta, splits, {"word_kinds": sort_words(tokenizer)})
    return path


def _check_fit(config: TrainConfig, path: Path) -> Path:
    """What was prepared for any model, where it fits this one. Raises CpuftError: it does not."""
    if is_checked(config):
        check_tokenizer(config, read_prepared(str(path)).words)
    return path


def _describe(
    config: TrainConfig, task: Task, tokenizer: Any, made: str, checksum: str, splits: dict[str, Tokens]
) -> dict[str, Any]:
    """What the archive has beside the rows. Raises CpuftError: the model cannot take these tokens."""
    words = count_words(tokenizer)
    most, largest = load_settings(config, {}, words).vocab_size, max(_find_largest(one.ids) for one in splits.values())
    if largest >= most:
        raise CpuftError(
            f"the tokenizer makes tokens with ids up to {largest}, and {name_model(config)} embeds the ids from 0 to "
            f"{most - 1} only: name the tokenizer that the model was made with by --tokenizer"
        )
    unknown = _find_unknown(splits["train"].ids, tokenizer)
    if unknown == 1:
        raise CpuftError(
            f"the tokenizer of {name_tokenizer(config)} knows no token of the training texts: name the tokenizer that "
            f"the model was made with by --tokenizer"
        )
    validation = [key.removeprefix("validation") for key in splits if key != "train"]
    ids = {"pad_id": choose_pad_id(config, tokenizer, words), "mask_id": tokenizer.mask_token_id or 0}
    told = {"kind": task.kind, "labels": task.labels, "metrics": task.metrics, "validation": validation}
    told |= {"texts": task.texts, "label": task.label}
    return {**told, **ids, "unknown": unknown, "checksum": checksum, "words": words, "tokenizer": made}


def _split(ids: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Parts of token ids that may be more than memory holds."""
    return [ids[start : start + 2**24] for start in range(0, len(ids), 2**24)]


def _find_largest(ids: NDArray[np.int32]) -> int:
    return max((int(part.max()) for part in _split(ids)), default=0)


def _find_unknown(ids: NDArray[np.int32], tokenizer: Any) -> float:
    """The share of tokens that the tokenizer does not know, among all that stand for a text."""
    unknown, named = tokenizer.unk_token_id, tokenizer
    others = {named.pad_token_id, named.bos_token_id, named.eos_token_id, named.cls_token_id, named.sep_token_id}
    if unknown is None or unknown in others:  # GPT-2 takes the end of a text for it, and knows all bytes
        return 0.0
    special = np.asarray(sorted({*tokenizer.all_special_ids} - {unknown}), np.int32)
    texts = sum(np.count_nonzero(~np.isin(part, special)) for part in _split(ids))
    return sum(np.count_nonzero(part == unknown) for part in _split(ids)) / max(1, texts)


def _write(path: Path, meta: dict[str, Any], splits: dict[str, Tokens], others: dict[str, Any]) -> None:
    arrays = {"meta": np.asarray(json.dumps(meta)), **others}
    for key, tokens in splits.items():
        arrays |= {f"{key}.{name}": value for name, value in vars(tokens).items()}
    try:
        with written_beside(path) as beside, beside.open("wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        said = f"cannot take the rows ({error.strerror}): make room there, or set XDG_CACHE_HOME"
        raise CpuftError(f"the cache folder {path.parent} {said} to another") from None


def read_prepared(path: str) -> Prepared:
    """The archive at `path`. Rows are read as they are looked at: they may be more than memory holds.

    Raises CpuftError when it is none of ours.
    """
    try:
        meta, arrays = map_archive(path)
        splits = {
            key: _check_tokens(Tokens(*(arrays[f"{key}.{name}"] for name in ("ids", "types", "offsets", "labels"))))
            for key in ("train", *(f"validation{name}" for name in meta["validation"]))
        }
        validation = {name: splits[f"validation{name}"] for name in meta["validation"]}
        values = (tuple(meta["labels"]), tuple(meta["metrics"]), meta["checksum"], meta["pad_id"], splits["train"])
        told = (meta["kind"], meta["mask_id"], arrays.get("word_kinds", _NONE), meta["words"], meta["tokenizer"])
        return Prepared(*values, validation, *told, tuple(meta["texts"]), meta["label"], meta["cut"], meta["unknown"])
    except Exception as error:  # zipfile and NumPy raise whatever their layers raise
        raise CpuftError(f"{path} is no prepared data ({error!r}): remove it, and start again") from None


def describe_data(prepared: Prepared, config: TrainConfig) -> str:
    """Say in one line what was understood of the data: the examples, the labels, the columns, what was cut."""
    validation = " and ".join(f"{len(tokens):,}" for tokens in prepared.validation.values())
    count = len(prepared.train)
    parts = [f"training on {count:,} example{'s' * (count != 1)}, validating on {validation}"]
    if prepared.kind == "masked":
        parts.append(f"each example is a piece of text of up to {config.max_length} tokens, no labels are needed")
    else:
        parts += [_describe_labels(prepared, config), f"columns: {', '.join(prepared.texts)} -> {prepared.label}"]
    if prepared.kind != "masked" and prepared.cut != UNKNOWN:
        # A share that rounds to 0.0 % is not none: it says "1 example".
        share = prepared.cut / max(1, count)
        some = f"{share:.1%}".replace("%", " %") if share >= 0.001 else f"{prepared.cut}"
        parts.append(f"{some if prepared.cut else 'none'} of the examples cut at --max-length {config.max_length}")
    return "; ".join(parts)


def warn_of_unknown(prepared: Prepared) -> str:
    """Warn that the tokenizer does not know many of the training texts' tokens; empty where it knows enough."""
    if prepared.unknown <= MOST_UNKNOWN:
        return ""
    return (
        f"warning: {prepared.unknown:.0%} of the tokens of the training texts are unknown to the tokenizer (more than "
        f"{MOST_UNKNOWN:.0%}): the model cannot tell them apart; name a tokenizer for these texts by --tokenizer, or a "
        f"--model that was made for them"
    )


def _describe_labels(prepared: Prepared, config: TrainConfig) -> str:
    """What is learned of each training example."""
    labels = prepared.train.labels
    if prepared.kind == "score":
        from_to = f"{float(labels.min()):g} to {float(labels.max()):g}"
        others = " (--label-type class learns them as classes)" if config.task == "files" else ""
        return f"labels: numbers from {from_to}, learned by regression{others}"
    if prepared.kind == "labels":
        counts, what = labels.sum(0).astype(int).tolist(), "classes, of which an example may have several"
    else:
        known = labels[labels != UNTAGGED].astype(int)
        counts = np.bincount(known, minlength=len(prepared.labels)).tolist()
        what = "tags of words" if prepared.kind == "tags" else "classes"
    common = sorted(zip(prepared.labels, counts), key=lambda one: -one[1])[:_MOST_NAMED]
    shown = prepared.labels if len(prepared.labels) <= _MOST_NAMED else [label for label, _ in common]
    named = ", ".join(f"{label} ({count:,})" for label, count in zip(prepared.labels, counts) if label in shown)
    rest = f" and {len(prepared.labels) - len(shown)} rarer ones" if len(shown) < len(prepared.labels) else ""
    whole = prepared.kind == "class" and config.task == "files" and all(map(_is_number, prepared.labels))
    others = " (the labels are numbers: --label-type number learns them by regression)" * whole
    return f"labels: {len(prepared.labels)} {what}, {named}{rest}{others}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


_KINDS: dict[str, tuple[tuple[type[np.generic], int], ...]] = {
    "ids": ((np.int32, 1),),
    "types": ((np.int8, 1),),
    "offsets": ((np.int64, 1),),
    "labels": ((np.float32, 1), (np.float32, 2), (np.int32, 1), (np.int8, 1)),
    "word_kinds": ((np.int8, 1),),
}
"""Type and number of axes that arrays of an archive may have, by the last part of their names."""


def _check_tokens(tokens: Tokens) -> Tokens:
    """The tokens, when their arrays fit each other. Raises ValueError: they do not."""
    offsets, size = tokens.offsets, len(tokens.ids)
    if not len(offsets) or offsets[0] or offsets[-1] != size or (np.diff(offsets) < 0).any():
        raise ValueError("the examples' offsets do not fit the token ids")
    if len(tokens.types) not in (0, size) or len(tokens.labels) not in (0, size, len(tokens)):
        raise ValueError("token types or labels are not as many as tokens or examples")
    return tokens


def map_archive(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What JSON holds in the array `meta`, and all others, mapped. Raises whatever NumPy, zipfile and JSON do."""
    with np.load(path, allow_pickle=False) as archive:
        meta = load(dict[str, Any], parse_json(str(archive["meta"])))
        return meta, {name: _map(path, archive, name) for name in archive if name != "meta"}


def _map(path: str, archive: Any, name: str) -> Any:
    """An array where it lies in the file, which is not compressed. NumPy maps none in an archive by itself."""
    with open(path, "rb") as file:
        file.seek(archive.zip.getinfo(f"{name}.npy").header_offset)
        # A file in an archive begins with 30 bytes, the last four of which say how long the two texts after them are.
        file.seek(sum(struct.unpack("<26xHH", file.read(30))), os.SEEK_CUR)
        np.lib.format.read_magic(file)
        shape, by_columns, kind = np.lib.format.read_array_header_1_0(file)
        # A memory map would take an object array's bytes for pointers, and packed ones for numbers.
        kinds = _KINDS.get(name.rpartition(".")[2], ())
        if not any(kind == allowed and len(shape) == axes for allowed, axes in kinds):
            raise ValueError(f"array {name!r:.60} of type {kind!s:.60} and {len(shape)} axes is none of ours")
        if by_columns or archive.zip.getinfo(f"{name}.npy").compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"array {name!r:.60} is compressed, or not stored row by row")
        return np.memmap(path, kind, "r", file.tell(), shape) if np.prod(shape) else np.zeros(shape, kind)


def main() -> None:
    """Prepare, see whether the training fits, and put a copy where the run wants it."""
    from cpuft.train.memory import check_fit  # it reads what is prepared here

    try:
        rooms, words = take_rooms(sys.argv[2:])
        output, config = sys.argv[1], parse_arguments(TrainConfig, words)
        os.environ.update(take_sent(os.environ, "prepare"))
        check_engine(config)
        check_lora(config)
        if not config.from_config:
            check_weights(find_model(config.model))
        path = prepare(config)
        if rooms:
            check_fit(config, read_prepared(str(path)), rooms)
        with written_beside(Path(output)) as beside:
            shutil.copyfile(path, beside)
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        said = describe_disk(error) or f"{error}: name another place with --run-dir"
        print(f"cpuft: error: {said}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
