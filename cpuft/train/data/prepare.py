"""Rows -> token numbers, once for a run and before any rank starts; checks all input while it is at it.

    python -m cpuft.train.data.prepare OUTPUT --host-memory=... --task=... (all training options)

writes OUTPUT, a NumPy archive. What was prepared once is kept under the user's cache directory, by checksum.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config import TrainConfig, parse_arguments, split_run_memory
from cpuft.errors import CpuftError, counted, describe_disk
from cpuft.files import cache_folder, take_sent, written_beside
from cpuft.tasks import TASKS, Task
from cpuft.train.data.archive import EMPTY, UNKNOWN, UNTAGGED, Prepared, Tokens, read_prepared, write_prepared
from cpuft.train.data.sources import Data, Rows, first_rows, read_data
from cpuft.train.data.texts import Packer, divide, pack, sort_words, survey
from cpuft.train.data.tokenizer import (
    check_tokenizer,
    choose_pad_id,
    choose_tokenizer,
    count_words,
    digest_tokenizer,
    is_checked,
    name_tokenizer,
)
from cpuft.train.engines import check_engine
from cpuft.train.lora import check_lora
from cpuft.train.memory import check_fit
from cpuft.train.model import check_positions, check_untrained, check_weights, find_model, load_settings, name_model

FORMAT = 6
MOST_UNKNOWN = 0.05
"""Share of the training texts' tokens that may be unknown without a warning."""
_MOST_NAMED = 10
"""Classes whose names and counts `describe_data` lists."""


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
    write_prepared(path, meta, splits, {})
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
        splits = {name: Tokens(ids, EMPTY, offsets, EMPTY) for name, (ids, offsets) in packed.items()}
        if not all(map(len, splits.values())):
            too_few = f"of {counted(corpus.pieces, 'line')} of {config.train_file} none can be held out"
            raise CpuftError(f"{too_few}: name more texts, or --validation-file")
        meta = _describe(config, TASKS["text"], tokenizer, made, checksum, splits) | {"cut": 0}
        write_prepared(path, meta, splits, {"word_kinds": sort_words(tokenizer)})
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
    """OptimizerShards of token ids that may be more than memory holds."""
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


def main() -> None:
    """Prepare, see whether the training fits, and put a copy where the run wants it."""
    try:
        rooms, words = split_run_memory(sys.argv[2:])
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
