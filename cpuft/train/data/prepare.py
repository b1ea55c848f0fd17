"""Prepare a run's data: tokenise the examples once before any rank starts, and check all input on the way.

`python -m cpuft.train.data.prepare OUTPUT --host-memory=... --task=... (all training options)` writes the archive
OUTPUT (see `archive.py`). Archives stay in the user's cache folder under their checksum, so that the same data is
prepared only once.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config.fields import parse_arguments
from cpuft.config.train import TrainConfig
from cpuft.errors import IO_ERROR, CpuftError, counted, describe_path_error
from cpuft.files import cache_folder, hash_text, write_atomically
from cpuft.host_memory import split_run_memory
from cpuft.judge.metrics import LEAST_RELEVANT
from cpuft.secret_variables import take_secrets
from cpuft.tasks import EMBEDDING_KINDS, LABEL_KINDS, TASKS, TEXT_KINDS, Task, find_task
from cpuft.trackers import check_trackers
from cpuft.train.data.archive import (
    EMPTY,
    ROW_ARRAYS,
    UNKNOWN,
    UNTAGGED,
    Prepared,
    Tokens,
    count_repeated,
    explain_cache_failures,
    read_prepared,
    write_prepared,
)
from cpuft.train.data.chat import (
    choose_validation,
    describe_chats,
    encode_chats,
    join_examples,
    read_chat_template,
    scan_chats,
    set_chat_template,
)
from cpuft.train.data.embedding_pairs import RetrievalExamples, read_pairs
from cpuft.train.data.recipe import check_recipe
from cpuft.train.data.relevance import read_relevance
from cpuft.train.data.sources import MISSING, SCORE_KINDS, Examples, FileExamples, TaskData, is_blank, read_data
from cpuft.train.data.texts import (
    Packer,
    classify_tokens,
    find_document_marks,
    join_pieces,
    pack,
    scan_texts,
    split_texts,
)
from cpuft.train.data.tokenizer import (
    check_tokenizer,
    choose_pad_id,
    choose_tokenizer,
    digest_tokenizer,
    get_tokenizer_name,
    get_vocab_size,
    may_mismatch_model,
)
from cpuft.train.data.validation_rows import TextBeginnings, checksum_rows, read_slices
from cpuft.train.engines import check_engine
from cpuft.train.lora import check_lora
from cpuft.train.memory_estimate import check_fit
from cpuft.train.model import (
    check_positions,
    check_trainable,
    check_untrained,
    check_weights,
    choose_lora,
    find_model,
    get_model_name,
    load_config,
)

FORMAT = 8
"""Part of the checksum: to be raised when the same input gives other tokens, so that older archives are not reused."""
_ROWS_FORMAT = 1
"""To be raised when more is kept of validation rows. It is no part of the checksum, by which runs are compared."""
_MOST_TEXTS = 100_000
"""Number of validation rows, the first ones of a split, whose texts are kept."""
MAX_UNKNOWN_SHARE = 0.05
"""Share of the training texts' tokens that may be unknown without a warning."""
_SECONDS_BETWEEN_LINES = 10
MAX_BLANK_SHARE = 0.9
"""Share of the examples whose text in a column may be missing."""
_MAX_LISTED_LABELS = 10


def checksum_data(data: TaskData, config: TrainConfig) -> str:
    """Return 16 hexadecimal digits for all that decides token ids and labels. Raises CpuftError: there is no model."""
    digest = hashlib.sha256()
    task = data.task
    sizes = (FORMAT, config.max_length, config.max_train_samples)
    for part in (*sizes, task.kind, task.labels, task.metrics, task.texts, task.label):
        digest.update(repr(part).encode())
    digest.update(digest_tokenizer(config))
    for examples in (data.train, *data.validation.values()):
        digest.update(examples.checksum.encode())
    return digest.hexdigest()[:16]


def tokenize(examples: Examples, tokenizer: Any, max_length: int, task: Task) -> Tokens:
    """Tokenise examples, each cut to `max_length` tokens, with special tokens and without padding. Raises CpuftError:
    the tokenizer does not tell words apart for the kind tags, or makes no token of a text for embedding models.
    """
    return _tokenize_and_count(examples, tokenizer, max_length, task)[0]


def _tokenize_and_count(examples: Examples, tokenizer: Any, max_length: int, task: Task) -> tuple[Tokens, int]:
    """Return what `tokenize` does, and the number of examples that were cut, or UNKNOWN if it is not a fast one."""
    if task.kind in EMBEDDING_KINDS:
        return _tokenize_separately(examples, tokenizer, max_length)
    in_words = task.kind == "tags"
    if in_words and not tokenizer.is_fast:
        raise CpuftError("this model's tokenizer does not tell which word a token belongs to: give another --model")
    texts = [list(map(list, examples.texts))] if in_words else [list(column) for column in zip(*examples.texts)]
    encoded = tokenizer(
        *texts,
        truncation=True,
        max_length=max_length,
        padding=False,
        is_split_into_words=in_words,
        return_attention_mask=False,
    )
    ids = encoded["input_ids"]
    types = encoded.get("token_type_ids", [])
    truncated = sum(bool(one.overflowing) for one in encoded.encodings) if encoded.encodings else UNKNOWN
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    count = int(offsets[-1])
    tokens = Tokens(
        np.fromiter(chain.from_iterable(ids), np.int32, count),
        np.fromiter(chain.from_iterable(types), np.int8, count) if types else EMPTY,
        offsets,
        _label_tokens(examples, encoded) if in_words else _label_examples(examples, task),
    )
    return tokens, truncated


def _tokenize_separately(examples: Examples, tokenizer: Any, max_length: int) -> tuple[Tokens, int]:
    """Return what `_tokenize_and_count` does, for embedding models: each text is tokenised by itself."""
    encoded = [
        tokenizer(list(column), truncation=True, max_length=max_length, padding=False, return_attention_mask=False)
        for column in zip(*examples.texts)
    ]
    texts = [ids for example in zip(*(column["input_ids"] for column in encoded)) for ids in example]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    if not lengths.all():
        raise CpuftError(
            "the tokenizer makes no token of some of the texts: correct or remove the rows whose texts hold nothing "
            "but spaces or characters that cannot be printed"
        )
    count = len(encoded)
    truncated = UNKNOWN
    if all(column.encodings for column in encoded):
        cut = (any(part.overflowing for part in parts) for parts in zip(*(column.encodings for column in encoded)))
        truncated = sum(cut)
    tokens = Tokens(
        np.fromiter(chain.from_iterable(texts), np.int32, int(lengths.sum())),
        np.repeat(np.tile(np.arange(count, dtype=np.int8), len(examples)), lengths) if count > 1 else EMPTY,
        np.append(0, lengths.reshape(-1, count).sum(1).cumsum()),
        np.asarray(examples.labels, np.float32) if examples.has_labels else EMPTY,
    )
    return tokens, truncated


def _tokenize_to_files(
    examples: Examples | FileExamples,
    tokenizer: Any,
    max_length: int,
    task: Task,
    folder: Path,
    beginnings: TextBeginnings | None,
) -> tuple[Tokens, int, int]:
    """Return what `_tokenize_and_count` does, mapped from files in `folder`, and how many examples have no text. Adds
    the texts to `beginnings`.
    """
    if beginnings and isinstance(examples, RetrievalExamples):
        beginnings.add((query,) for query in examples.queries)
        beginnings = None
    folder.mkdir()
    offsets, truncated, done, next_line = [np.zeros(1, np.int64)], 0, 0, time.monotonic() + _SECONDS_BETWEEN_LINES
    parts = {name: (folder / name).open("wb") for name in ("ids", "types", "labels")}
    empty: dict[str, NDArray[Any]] = {}
    blanks, blank_texts = 0, Counter[str]()
    with ExitStack() as files:
        for part in parts.values():
            files.enter_context(part)
        for batch in examples.batches():
            tokens, cut = _tokenize_and_count(batch, tokenizer, max_length, task)
            for name, part in parts.items():
                array = getattr(tokens, name)
                part.write(array.tobytes())
                empty[name] = array[:0]
            offsets.append(tokens.offsets[1:] + offsets[-1][-1])
            truncated = truncated + cut if cut != UNKNOWN else UNKNOWN
            done += len(batch)
            if beginnings:
                beginnings.add(batch.texts, are_words=task.kind == "tags")
            blank = list_blank(batch, task)
            blanks += sum(map(bool, blank))
            blank_texts.update(chain.from_iterable(blank))
            if time.monotonic() >= next_line:
                next_line += _SECONDS_BETWEEN_LINES
                share = f"{done / len(examples):.0%}".replace("%", " %")
                print(f"tokenised {done:,} of {len(examples):,} examples ({share})", file=sys.stderr, flush=True)
    for name, count in blank_texts.items():
        if count > MAX_BLANK_SHARE * done:
            raise CpuftError(describe_blank(name, count, done))
    mapped = {name: _map_file(folder / name, array) for name, array in empty.items()}
    return Tokens(mapped["ids"], mapped["types"], np.concatenate(offsets), mapped["labels"]), truncated, blanks


def list_blank(examples: Examples, task: Task) -> list[list[str]]:
    """Return for each example the names of the columns in which it has no text; none for words."""
    names = task.texts if task.kind != "tags" else ()
    return [[name for name, text in zip(names, texts) if is_blank(text)] for texts in examples.texts]


def describe_blank(name: str, count: int, examples: int) -> str:
    """Return the message that nearly all examples have no text in a column."""
    return (
        f"{count:,} of {examples:,} examples have no text in {name!r} (it is empty, nan or null): name the column of "
        f"the texts with --text-columns, or correct the file"
    )


def _map_file(path: Path, empty: NDArray[Any]) -> NDArray[Any]:
    """Map a file of rows that have the element type, and all axes but the first, of an empty array."""
    if not path.stat().st_size:
        return empty
    return np.memmap(path, empty.dtype, "r").reshape(-1, *empty.shape[1:])


def _label_examples(examples: Examples, task: Task) -> NDArray[np.float32]:
    if task.kind != "labels":
        return np.asarray(examples.labels, np.float32)
    has_label = np.zeros((len(examples.labels), len(task.labels)), np.float32)
    for row, numbers in zip(has_label, examples.labels):
        row[list(numbers)] = 1
    return has_label


def _label_tokens(examples: Examples, encoded: Any) -> NDArray[np.int32]:
    """Give each word's tag to its first token. A word that the tokenizer drops, or that was cut off, is left out."""
    labels = []
    for number, tags in enumerate(examples.labels):
        words = encoded.word_ids(number)
        is_first = (word is not None and word != before for before, word in zip([None, *words], words))
        labels += [tags[word] if first else UNTAGGED for word, first in zip(words, is_first)]
    return np.asarray(labels, np.int32)


def prepare(config: TrainConfig) -> Path:
    """Return the path of the prepared data in the user's cache folder, where it is written if it is not there. Prints
    the progress to stderr. Raises CpuftError: the examples, options, tokenizer and model do not fit each other, or the
    disk is full.
    """
    check_untrained(config)
    check_trainable(config)
    if config.task == "text":
        return _prepare_texts(config)
    if config.task == "chat":
        return _prepare_chats(config)
    data = read_task_data(config)
    data = replace(data, train=data.train.first(config.max_train_samples))
    checksum = checksum_data(data, config)
    slices = {name: read_slices(split, config.slice_by) for name, split in data.validation.items()}
    rows_key = repr(
        (_ROWS_FORMAT, config.examples, [(numbers.tobytes(), values) for numbers, values in slices.values()])
    )
    path = cache_folder(os.environ) / f"{data.task.name}-{checksum}-{hash_text(rows_key, 8)}.npz"
    if path.exists():
        return _check_cached(config, path)
    check_positions(config)
    tokenizer, trained = choose_tokenizer(config, data.train.list_texts, checksum, data.task.kind == "tags")
    splits = {"train": data.train, **{f"validation{name}": split for name, split in data.validation.items()}}
    beginnings = {key: TextBeginnings(_MOST_TEXTS if config.examples else 0) for key in splits if key != "train"}
    with explain_cache_failures(path.parent), tempfile.TemporaryDirectory(dir=path.parent, prefix="tokens-") as folder:
        found = {
            key: _tokenize_to_files(
                split, tokenizer, config.max_length, data.task, Path(folder, key), beginnings.get(key)
            )
            for key, split in splits.items()
        }
        tokens = {key: tokens for key, (tokens, *_) in found.items()}
        _, cut, blanks = found["train"]
        notes = [f"{blanks:,} of {len(data.train):,} examples have no text (empty, nan or null)"] if blanks else []
        for key, split in splits.items():
            if isinstance(split, RetrievalExamples):
                tokens[key] = replace(tokens[key], labels=split.relevant)
        meta = _make_meta(config, data.task, tokenizer, trained, checksum, tokens)
        repeated = 0
        if data.task.kind in LABEL_KINDS:
            repeated = sum(count_repeated(tokens["train"], split) for key, split in tokens.items() if key != "train")
        meta |= {"cut": cut, "note": "; ".join((*data.notes, *notes)), "repeated": repeated}
        kept = {name: beginnings[f"validation{name}"].finish(values) for name, values in slices.items()}
        meta |= {"rows": checksum_rows(data), "slice_values": {name: rows.slice_values for name, rows in kept.items()}}
        arrays = {f"validation{name}.{part}": getattr(kept[name], part) for name in kept for part in ROW_ARRAYS}
        write_prepared(path, meta, tokens, arrays)
    return path


def read_task_data(config: TrainConfig, check_labels: bool = True) -> TaskData:
    """Read the training and validation examples of a task that is neither text nor chat. Raises CpuftError: they cannot
    be read, or do not fit the task.
    """
    task = TASKS[config.task]
    if task.kind in EMBEDDING_KINDS:
        return read_pairs(task, config)
    return read_relevance(task, config) if task.kind == "relevance" else read_data(config, check_labels)


def _prepare_texts(config: TrainConfig) -> Path:
    """Return what `prepare` does, for --task text. Texts are read and written piece by piece."""
    if not config.train_file:
        raise CpuftError("--task text needs --train-file: name text files, JSON lines, or a folder of them")
    columns, exact, other = config.text_columns, config.causal, config.validation_file
    corpus = scan_texts(config.train_file, columns, "--train-file", exact, config)
    validation = scan_texts(other, columns, "--validation-file", exact, config) if other else None
    key = f"{corpus.checksum} {validation.checksum if validation else config.validation_split}"
    sizes = repr((FORMAT, key, config.max_length, config.max_train_samples, *(("causal",) * exact))).encode()
    checksum = hashlib.sha256(sizes + digest_tokenizer(config)).hexdigest()[:16]
    path = cache_folder(os.environ) / f"text-{checksum}.npz"
    if path.exists():
        return _check_cached(config, path)
    check_positions(config)
    pieces = partial(split_texts, corpus, config.validation_split, validation)
    tokenizer, trained = choose_tokenizer(
        config, lambda: (text for validates, text, _ in pieces() if not validates), key
    )
    layout = _choose_block_layout(config, tokenizer) if exact else _choose_masked_layout(config, tokenizer)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="texts-") as folder:
        packers = [Packer(Path(folder, name), config.max_length, *layout) for name in ("train", "validation")]
        pack(join_pieces(pieces()) if exact else pieces(), tokenizer, packers)
        packed = {"train": packers[0].finish(config.max_train_samples), "validation": packers[1].finish()}
        tokens = {name: Tokens(ids, EMPTY, offsets, EMPTY) for name, (ids, offsets) in packed.items()}
        if not all(map(len, tokens.values())):
            raise CpuftError(
                f"{config.train_file} has {counted(corpus.pieces, 'line')}, too few to take some for validation: name "
                f"more texts, or other texts with --validation-file"
            )
        task = find_task(config.task, config.causal)
        meta = _make_meta(config, task, tokenizer, trained, checksum, tokens) | {"cut": 0}
        write_prepared(path, meta, tokens, {} if exact else {"word_kinds": classify_tokens(tokenizer)})
    return path


def _prepare_chats(config: TrainConfig) -> Path:
    if not config.train_file:
        raise CpuftError("--task chat needs --train-file: name JSON lines files of conversations")
    chats, other = scan_chats(config.train_file, "--train-file"), config.validation_file
    validation = scan_chats(other, "--validation-file") if other else None
    template = read_chat_template(config.chat_template) if config.chat_template else ""
    own = Path(find_model(get_tokenizer_name(config)), "chat_template.jinja")
    own_template = own.read_bytes() if own.exists() else b""
    key = (chats.checksum, validation.checksum if validation else config.validation_split, template, own_template)
    sizes = repr((FORMAT, key, config.max_length, config.max_train_samples, config.pack)).encode()
    checksum = hashlib.sha256(sizes + digest_tokenizer(config)).hexdigest()[:16]
    path = cache_folder(os.environ) / f"chat-{checksum}.npz"
    if path.exists():
        return _check_cached(config, path)
    check_positions(config)
    tokenizer, trained = choose_tokenizer(config, lambda: iter(()), "")
    set_chat_template(tokenizer, config.chat_template, get_tokenizer_name(config))
    if validation:
        parts = [(chats, np.ones(len(chats.checksums), bool)), (validation, np.ones(len(validation.checksums), bool))]
    else:
        is_kept = choose_validation(chats, config.validation_split)
        parts = [(chats, ~is_kept), (chats, is_kept)]
    found = [
        encode_chats(islice(some.list_conversations(chosen), most), tokenizer, config.max_length)
        for (some, chosen), most in zip(parts, (config.max_train_samples or None, None))
    ]
    tokens = {
        name: join_examples(encoded, config.max_length, config.pack)
        for name, encoded in zip(("train", "validation"), found)
    }
    note = describe_chats(found[0], tokens["train"], config.max_length)
    more = {"cut": found[0].cut, "note": note}
    write_prepared(path, _make_meta(config, TASKS["chat"], tokenizer, trained, checksum, tokens) | more, tokens, {})
    return path


def _choose_masked_layout(config: TrainConfig, tokenizer: Any) -> tuple[list[int], ...]:
    """Return prefix, suffix and separator of `Packer` for masked language modelling: [CLS], [SEP] and [SEP]."""
    if None in (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id):
        raise CpuftError(
            f"the tokenizer of {get_tokenizer_name(config)} lacks [CLS], [SEP] or [MASK], which --task text needs: "
            f"name the model or tokenizer of an encoder, or add --causal to train a decoder"
        )
    return [tokenizer.cls_token_id], [tokenizer.sep_token_id], [tokenizer.sep_token_id]


def _choose_block_layout(config: TrainConfig, tokenizer: Any) -> tuple[list[int], ...]:
    """Return the arguments of `Packer` for decoders: no prefix and suffix, and special tokens around documents."""
    begin, end = find_document_marks(tokenizer)
    if end is None:
        raise CpuftError(
            f"the tokenizer of {get_tokenizer_name(config)} has no token that ends a text: set eos_token in its "
            f"tokenizer_config.json"
        )
    return [], [], [end, *begin], begin, [end]


def _check_cached(config: TrainConfig, path: Path) -> Path:
    """Return the path of an archive, which may have been made for another model, if its tokenizer fits."""
    # The checksum contains the positions that `check_positions` has checked, so that transformers, whose import takes
    # seconds, is not needed here.
    if may_mismatch_model(config):
        check_tokenizer(config, read_prepared(str(path)).vocab_size)
    return path


def _make_meta(
    config: TrainConfig, task: Task, tokenizer: Any, trained: str, checksum: str, splits: dict[str, Tokens]
) -> dict[str, Any]:
    """Return the JSON of the archive, after checking that the model embeds all of these tokens."""
    vocab_size = get_vocab_size(tokenizer)
    embedded = load_config(config, {}, vocab_size).vocab_size
    largest = max(_find_largest(tokens.ids) for tokens in splits.values())
    if largest >= embedded:
        raise CpuftError(
            f"the tokenizer makes tokens with ids up to {largest}, and {get_model_name(config)} embeds the ids from 0 "
            f"to {embedded - 1} only: name the tokenizer that the model was made with by --tokenizer"
        )
    unknown_share = find_unknown_share(splits["train"].ids, tokenizer)
    if unknown_share == 1:
        raise CpuftError(
            f"the tokenizer of {get_tokenizer_name(config)} knows no token of the training texts: name the tokenizer "
            f"that the model was made with by --tokenizer"
        )
    return {
        "kind": task.kind,
        "labels": task.labels,
        "metrics": task.metrics,
        "validation": [key.removeprefix("validation") for key in splits if key != "train"],
        "texts": task.texts,
        "label": task.label,
        "pad_id": choose_pad_id(config, tokenizer, vocab_size),
        "mask_id": tokenizer.mask_token_id or 0,
        "unknown": unknown_share,
        "checksum": checksum,
        "words": vocab_size,
        "tokenizer": trained,
    }


def _split_ids(ids: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Views of token ids, which may be more than fit into memory, in parts of 2**24."""
    return [ids[start : start + 2**24] for start in range(0, len(ids), 2**24)]


def _find_largest(ids: NDArray[np.int32]) -> int:
    return max((int(part.max()) for part in _split_ids(ids)), default=0)


def find_unknown_share(ids: NDArray[np.int32], tokenizer: Any) -> float:
    """Return the share (0 to 1) of tokens that the tokenizer does not know, among those that are not special tokens."""
    unknown, known = tokenizer.unk_token_id, tokenizer
    others = {known.pad_token_id, known.bos_token_id, known.eos_token_id, known.cls_token_id, known.sep_token_id}
    if unknown is None or unknown in others:  # GPT-2's unknown token is its end of text; it knows all bytes
        return 0.0
    special = np.asarray(sorted({*tokenizer.all_special_ids} - {unknown}), np.int32)
    count = sum(np.count_nonzero(~np.isin(part, special)) for part in _split_ids(ids))
    return sum(np.count_nonzero(part == unknown) for part in _split_ids(ids)) / max(1, count)


def describe_data(prepared: Prepared, config: TrainConfig) -> str:
    """Return one line on how the data was understood, whose parts are separated by `; `.

    For example: `training on 3,668 examples, validating on 408; labels: 2 classes, 0 (1,194), 1 (2,474); columns:
    sentence1, sentence2 -> label; 1.2 % of the examples cut at --max-length 128`.
    """
    validation = " and ".join(f"{len(tokens):,}" for tokens in prepared.validation.values())
    if prepared.kind == "pairs":
        tokens = prepared.validation[""]
        queries = int(tokens.labels[:, 0].max()) + 1
        validation = f"{queries:,} {'query' if queries == 1 else 'queries'} among {len(tokens) - queries:,} documents"
    count = len(prepared.train)
    parts = [f"training on {count:,} example{'s' * (count != 1)}, validating on {validation}"]
    if prepared.kind == "pairs":
        parts += ["labels: none, each anchor belongs to its positive", f"columns: {', '.join(prepared.texts)}"]
    elif prepared.kind == "chat":
        said = int((prepared.train.labels == 1).sum())
        parts += [
            prepared.note,
            f"the assistant says {said:,} of {len(prepared.train.ids):,} tokens, which are learned",
        ]
    elif prepared.kind in ("masked", "causal"):
        parts.append(f"each example is a piece of text of up to {config.max_length} tokens, no labels are needed")
    else:
        parts += [_describe_labels(prepared, config), f"columns: {', '.join(prepared.texts)} -> {prepared.label}"]
    if prepared.kind not in TEXT_KINDS and prepared.truncated != UNKNOWN:
        # A share that would round to 0.0 % is written as the number of examples.
        share = prepared.truncated / max(1, count)
        some = f"{share:.1%}".replace("%", " %") if share >= 0.001 else f"{prepared.truncated or 'none'}"
        parts.append(f"{some} of the examples cut at --max-length {config.max_length}")
    if prepared.note and prepared.kind != "chat":
        parts.append(prepared.note)
    return "; ".join(parts)


def _describe_labels(prepared: Prepared, config: TrainConfig) -> str:
    """Say what the model learns to predict for each training example."""
    labels = prepared.train.labels
    if prepared.kind in SCORE_KINDS:
        bounds = f"{float(labels.min()):g} to {float(labels.max()):g}"
        if prepared.kind == "relevance":
            count = int((labels >= LEAST_RELEVANT).sum())
            return f"labels: scores from {bounds}, {count:,} examples of {len(labels):,} with relevant documents"
        hint = " (--label-type class learns them as classes)" if config.task == "files" else ""
        learned = (
            "compared with the similarity of embeddings" if prepared.kind == "similarity" else "learned by regression"
        )
        return f"labels: numbers from {bounds}, {learned}{hint}"
    if prepared.kind == "labels":
        counts, what = labels.sum(0).astype(int).tolist(), "classes, of which an example may have several"
    else:
        known = labels[labels != UNTAGGED].astype(int)
        counts = np.bincount(known, minlength=len(prepared.labels)).tolist()
        what = "tags of words" if prepared.kind == "tags" else "classes"
    common = sorted(zip(prepared.labels, counts), key=lambda one: -one[1])[:_MAX_LISTED_LABELS]
    shown = prepared.labels if len(prepared.labels) <= _MAX_LISTED_LABELS else [label for label, _ in common]
    named = ", ".join(f"{label} ({count:,})" for label, count in zip(prepared.labels, counts) if label in shown)
    rest = f" and {len(prepared.labels) - len(shown)} rarer ones" if len(shown) < len(prepared.labels) else ""
    if missing := [label for label in prepared.labels if label in MISSING]:
        rest += f" ({missing[0]} may stand for rows without a label, which --skip-unlabelled leaves out)"
    are_numbers = prepared.kind == "class" and config.task == "files" and all(map(_is_number, prepared.labels))
    hint = " (the labels are numbers: --label-type number learns them by regression)" * are_numbers
    return f"labels: {len(prepared.labels)} {what}, {named}{rest}{hint}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def main() -> None:
    """Prepare the data, check that training fits into the hosts' memory, and copy the archive to the path OUTPUT.

    Exits with code 2 for bad input and too little memory, or 74 for a full disk.
    """
    try:
        memory, arguments = split_run_memory(sys.argv[2:])
        output, config = sys.argv[1], parse_arguments(TrainConfig, arguments)
        os.environ.update(take_secrets(os.environ, "prepare"))
        check_engine(config)
        check_trackers(config.report_to, os.environ)
        if not config.from_config:
            check_weights(find_model(config.model))
        config, _ = choose_lora(config)
        check_lora(config)
        path = prepare(config)
        prepared = read_prepared(str(path))
        check_recipe(config, prepared)
        if memory:
            check_fit(config, prepared, memory)
        with write_atomically(Path(output)) as beside:
            shutil.copyfile(path, beside)
    except CpuftError as error:
        print(f"cpuft: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        reason = describe_path_error(error) or f"{error}: give another place with --run-dir"
        print(f"cpuft: error: {reason}", file=sys.stderr)
        sys.exit(IO_ERROR if error.errno in (errno.ENOSPC, errno.EDQUOT) else 2)


if __name__ == "__main__":
    main()
