"""Prepare a run's data: tokenise the examples once before any rank starts, and check all input on the way.

`python -m cpuft.train.data.prepare OUTPUT --host-memory=... --task=... (all training options)` writes the archive
OUTPUT (see `archive.py`). Archives stay in the user's cache folder, so that the same data is prepared only once.
"""

from __future__ import annotations

import hashlib
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
from cpuft.errors import CpuftError, counted
from cpuft.files import cache_folder, hash_text, write_atomically
from cpuft.host_memory import split_run_memory
from cpuft.judge.simple_models import mark_classes
from cpuft.secret_variables import take_secrets
from cpuft.tasks import EMBEDDING_KINDS, LABEL_KINDS, TASKS, Task, find_task
from cpuft.trackers import check_trackers
from cpuft.train.data.archive import (
    EMPTY,
    UNKNOWN,
    UNTAGGED,
    Tokens,
    count_repeated,
    explain_cache_failures,
    read_prepared,
    write_prepared,
)
from cpuft.train.data.chat import (
    describe_chats,
    encode_chats,
    join_examples,
    read_chat_template,
    read_chats,
    set_chat_template,
)
from cpuft.train.data.embedding_pairs import RetrievalExamples, read_pairs
from cpuft.train.data.recipe import check_recipe
from cpuft.train.data.relevance import read_relevance
from cpuft.train.data.sources import Examples, FileExamples, TaskData, read_data
from cpuft.train.data.tables import is_blank
from cpuft.train.data.texts import (
    Packer,
    classify_tokens,
    find_document_marks,
    join_pieces,
    pack,
    read_corpora,
    split_texts,
)
from cpuft.train.data.tokenizer import (
    choose_pad_id,
    choose_tokenizer,
    digest_tokenizer,
    get_tokenizer_name,
    get_vocab_size,
)
from cpuft.train.data.validation_rows import checksum_rows, keep_beginnings, make_validation_rows, read_slices
from cpuft.train.engines import check_engine
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
from cpuft.train.startup import describe_exit

_FORMAT = 8
"""Part of the checksum: to be raised when the same input gives other tokens, so that older archives are not reused."""
_ARCHIVE_FORMAT = 3
"""To be raised when archives hold something else. It is no part of the checksum, by which runs are compared."""
_MOST_TEXTS = 100_000
"""Number of validation rows, the first ones of a split, whose texts are kept."""
MAX_UNKNOWN_SHARE = 0.05
"""Share of the training texts' tokens that may be unknown without a warning."""
_SECONDS_BETWEEN_LINES = 10
MAX_BLANK_SHARE = 0.9
"""Share of the examples whose text in a column may be missing."""


def checksum_data(data: TaskData, config: TrainConfig) -> str:
    """Return a checksum, 16 hexadecimal digits, of what decides token ids and labels. CpuftError: there is no model."""
    digest = hashlib.sha256()
    task = data.task
    sizes = (_FORMAT, config.max_length, config.max_train_samples)
    for part in (*sizes, task.kind, task.labels, task.metrics, task.texts, task.label):
        digest.update(repr(part).encode())
    digest.update(digest_tokenizer(config))
    for examples in (data.train, *data.validation.values()):
        digest.update(examples.checksum.encode())
    return digest.hexdigest()[:16]


def tokenize(examples: Examples, tokenizer: Any, max_length: int, task: Task) -> Tokens:
    """Tokenise examples, each, or of embedding models each text, cut to `max_length` tokens, with special tokens.
    CpuftError: the tokenizer makes no token of a text, for embedding models, or does not tell words apart, for tags.
    """
    return _tokenize_and_count(examples, tokenizer, max_length, task)[0]


def _tokenize_and_count(examples: Examples, tokenizer: Any, max_length: int, task: Task) -> tuple[Tokens, int]:
    """Return what `tokenize` does, and the number of examples that were cut, or UNKNOWN if it is not a fast one."""
    in_words, separately = task.kind == "tags", task.kind in EMBEDDING_KINDS
    if in_words and not tokenizer.is_fast:
        raise CpuftError("this model's tokenizer does not tell which word a token belongs to: give another --model")
    texts = [list(column) for column in zip(*examples.texts)]
    parts = 1  # number of texts of an example that are tokenised by themselves
    if in_words:
        texts = [list(map(list, examples.texts))]
    elif separately:
        parts, texts = len(texts), [list(examples.list_texts())]
    encoded = tokenizer(
        *texts,
        truncation=True,
        max_length=max_length,
        padding=False,
        is_split_into_words=in_words,
        return_attention_mask=False,
    )
    ids, types, given_types = encoded["input_ids"], EMPTY, encoded.get("token_type_ids", [])
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    if separately and not lengths.all():
        raise CpuftError("the tokenizer makes no token of some texts: remove the rows whose texts cannot be printed")
    if parts > 1:
        types = np.repeat(np.tile(np.arange(parts, dtype=np.int8), len(examples)), lengths)
    elif given_types and not separately:
        types = np.fromiter(chain.from_iterable(given_types), np.int8, int(lengths.sum()))
    is_cut = [bool(one.overflowing) for one in encoded.encodings or ()]
    tokens = Tokens(
        np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum())),
        types,
        np.append(0, lengths.reshape(-1, parts).sum(1).cumsum()),
        _label_tokens(examples, encoded) if in_words else _label_examples(examples, task),
    )
    return tokens, int(np.reshape(is_cut, (-1, parts)).any(1).sum()) if is_cut else UNKNOWN


def _tokenize_to_files(
    examples: Examples | FileExamples,
    tokenizer: Any,
    max_length: int,
    task: Task,
    folder: Path,
    kept: list[list[str]],
    most: int,
) -> tuple[Tokens, int, int]:
    """Return what `_tokenize_and_count` does, as maps of files, and how many examples lack a text; keep beginnings."""
    if isinstance(examples, RetrievalExamples):
        keep_beginnings(kept, ((query,) for query in examples.queries), most)
        most = 0
    folder.mkdir()
    offsets, truncated, done, next_line = [np.zeros(1, np.int64)], 0, 0, time.monotonic() + _SECONDS_BETWEEN_LINES
    empty: dict[str, NDArray[Any]] = {}
    blanks, blank_texts = 0, Counter[str]()
    with ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("wb")) for name in ("ids", "types", "labels")}
        for batch in examples.batches():
            tokens, cut = _tokenize_and_count(batch, tokenizer, max_length, task)
            for name, file in files.items():
                array = getattr(tokens, name)
                file.write(array.tobytes())
                empty[name] = array[:0]
            offsets.append(tokens.offsets[1:] + offsets[-1][-1])
            truncated = truncated + cut if cut != UNKNOWN else UNKNOWN
            done += len(batch)
            keep_beginnings(kept, batch.texts, most, are_words=task.kind == "tags")
            blank = list_blank(batch, task)
            blanks += sum(map(bool, blank))
            blank_texts.update(chain.from_iterable(blank))
            if time.monotonic() >= next_line:
                next_line += _SECONDS_BETWEEN_LINES
                share = f"{100 * done / len(examples):.0f} %"
                print(f"tokenised {done:,} of {len(examples):,} examples ({share})", file=sys.stderr, flush=True)
    for name, count in blank_texts.items():
        if count > MAX_BLANK_SHARE * done:
            raise CpuftError(describe_blank(name, count, done))
    mapped = {name: _map_file(folder / name, array) for name, array in empty.items()}
    return Tokens(**mapped, offsets=np.concatenate(offsets)), truncated, blanks


def list_blank(examples: Examples, task: Task) -> list[list[str]]:
    """Return for each example a list of the columns without text, by `is_blank`; [] for each of the kind tags."""
    names = task.texts if task.kind != "tags" else ()
    return [[name for name, text in zip(names, texts) if is_blank(text)] for texts in examples.texts]


def describe_blank(name: str, count: int, examples: int) -> str:
    """Return the message that nearly all examples have no text in a column."""
    return f"{count:,} of {examples:,} examples have no text in {name!r}: name another column with --text-columns"


def _map_file(path: Path, empty: NDArray[Any]) -> NDArray[Any]:
    """Map a file of rows that have the element type, and all axes but the first, of an empty array."""
    if not path.stat().st_size:
        return empty
    return np.memmap(path, empty.dtype, "r").reshape(-1, *empty.shape[1:])


def _label_examples(examples: Examples, task: Task) -> NDArray[Any]:
    if task.kind in EMBEDDING_KINDS and not examples.has_labels:
        return EMPTY
    if task.kind != "labels":
        return np.asarray(examples.labels, np.float32)
    return mark_classes(examples.labels, len(task.labels))


def _label_tokens(examples: Examples, encoded: Any) -> NDArray[np.int32]:
    """Give each word's tag to its first token. A word that the tokenizer drops, or that was cut off, is left out."""
    labels = []
    for number, tags in enumerate(examples.labels):
        words = encoded.word_ids(number)
        is_first = (word is not None and word != before for before, word in zip([None, *words], words))
        labels += [tags[word] if first else UNTAGGED for word, first in zip(words, is_first)]
    return np.asarray(labels, np.int32)


def prepare(config: TrainConfig) -> Path:
    """Return the path of the prepared data in the cache folder, where it is written if it is not there. Raises
    CpuftError: examples, options, tokenizer and model do not fit each other, or the disk is full.
    """
    check_untrained(config)
    check_trainable(config)
    if config.task == "text":
        return _prepare_texts(config)
    if config.task == "chat":
        return _prepare_chats(config)
    data = read_task_data(config)
    checksum = checksum_data(data, config)
    slices = {name: read_slices(split, config.slice_by) for name, split in data.validation.items()}
    rows_key = repr(
        (_ARCHIVE_FORMAT, config.examples, [(numbers.tobytes(), values) for numbers, values in slices.values()])
    )
    path = cache_folder(os.environ) / f"{data.task.name}-{checksum}-{hash_text(rows_key, 8)}.npz"
    if _is_prepared(path, config):
        return path
    tokenizer, trained = choose_tokenizer(config, data.train.list_texts, checksum, data.task.kind == "tags")
    splits = {"train": data.train, **{f"validation{name}": split for name, split in data.validation.items()}}
    beginnings, most = {key: list[list[str]]() for key in splits}, _MOST_TEXTS if config.examples else 0
    with explain_cache_failures(path.parent), tempfile.TemporaryDirectory(dir=path.parent, prefix="tokens-") as folder:
        tokens, truncated, blanks = dict[str, Tokens](), dict[str, int](), dict[str, int]()
        for key, split in splits.items():
            tokens[key], truncated[key], blanks[key] = _tokenize_to_files(
                split,
                tokenizer,
                config.max_length,
                data.task,
                Path(folder, key),
                beginnings[key],
                most * (key != "train"),
            )
            if isinstance(split, RetrievalExamples):
                tokens[key] = replace(tokens[key], labels=split.relevant)
        notes, repeated = [*data.notes], 0
        if count := blanks["train"]:
            notes.append(f"{count:,} of {len(data.train):,} examples have no text (empty, nan or null)")
        if data.task.kind in LABEL_KINDS:
            repeated = sum(count_repeated(tokens["train"], split) for key, split in tokens.items() if key != "train")
        more = {"note": "; ".join(notes), "repeated": repeated, "rows": checksum_rows(data)}
        meta = _make_meta(config, data.task, tokenizer, trained, checksum, tokens, truncated["train"])
        rows = {name: make_validation_rows(beginnings[f"validation{name}"], one) for name, one in slices.items()}
        write_prepared(path, meta | more, tokens, rows)
    return path


def read_task_data(config: TrainConfig, check_labels: bool = True) -> TaskData:
    """Read a task that is neither text nor chat, with up to --max-train-samples (0: all) examples for training. Raises
    CpuftError: the examples cannot be read, or do not fit the task. Without `check_labels`, one label is enough in
    files, and validation examples may have labels of their own.
    """
    task = TASKS[config.task]
    if task.kind in EMBEDDING_KINDS:
        data = read_pairs(task, config)
    else:
        data = read_relevance(task, config) if task.kind == "relevance" else read_data(config, check_labels)
    return replace(data, train=data.train.first(config.max_train_samples))


def _prepare_texts(config: TrainConfig) -> Path:
    exact, (corpus, validation) = config.causal, read_corpora(config)
    key = f"{corpus.checksum} {validation.checksum if validation else config.validation_split}"
    checksum, path = _choose_archive(config, key, *(("causal",) * exact))
    if _is_prepared(path, config):
        return path
    pieces = partial(split_texts, corpus, config.validation_split, validation)
    tokenizer, trained = choose_tokenizer(
        config, lambda: (text for validates, text, _ in pieces() if not validates), key
    )
    layout = _choose_block_layout(config, tokenizer) if exact else _choose_masked_layout(config, tokenizer)
    with explain_cache_failures(path.parent), tempfile.TemporaryDirectory(dir=path.parent, prefix="texts-") as folder:
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
        meta = _make_meta(config, task, tokenizer, trained, checksum, tokens, 0)
        write_prepared(path, meta, tokens, {}, EMPTY if exact else classify_tokens(tokenizer))
    return path


def _choose_archive(config: TrainConfig, *parts: Any) -> tuple[str, Path]:
    """Return checksum and path of the archive of a task whose examples have no labels; `parts` tell the texts."""
    sizes = repr((_FORMAT, parts[0], config.max_length, config.max_train_samples, *parts[1:])).encode()
    checksum = hashlib.sha256(sizes + digest_tokenizer(config)).hexdigest()[:16]
    return checksum, cache_folder(os.environ) / f"{config.task}-{checksum}-{_ARCHIVE_FORMAT}.npz"


def _prepare_chats(config: TrainConfig) -> Path:
    chats = dict(zip(("train", "validation"), read_chats(config)))
    validation = chats["validation"].checksum if config.validation_file else config.validation_split
    template = read_chat_template(config.chat_template) if config.chat_template else ""
    own = Path(find_model(get_tokenizer_name(config)), "chat_template.jinja")
    own_template = own.read_bytes() if own.exists() else b""
    key = (chats["train"].checksum, validation, template, own_template)
    checksum, path = _choose_archive(config, key, config.pack)
    if _is_prepared(path, config):
        return path
    tokenizer, trained = choose_tokenizer(config, lambda: iter(()), "")
    set_chat_template(tokenizer, config.chat_template, get_tokenizer_name(config))
    conversations = {name: some.list_conversations() for name, some in chats.items()}
    conversations["train"] = islice(conversations["train"], config.max_train_samples or None)
    found = {name: encode_chats(some, tokenizer, config.max_length) for name, some in conversations.items()}
    tokens = {name: join_examples(some, config.max_length, config.pack) for name, some in found.items()}
    meta = _make_meta(config, TASKS["chat"], tokenizer, trained, checksum, tokens, found["train"].cut)
    note = describe_chats(found["train"], tokens["train"], config.max_length)
    write_prepared(path, meta | {"note": note}, tokens, {})
    return path


def _choose_masked_layout(config: TrainConfig, tokenizer: Any) -> tuple[list[int], ...]:
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
            f"the tokenizer of {get_tokenizer_name(config)} has no eos_token: set it in its tokenizer_config.json"
        )
    return [], [], [end, *begin], begin, [end]


def _is_prepared(path: Path, config: TrainConfig) -> bool:
    """Return whether an archive is there, whose checksum contains what is checked of the model, or check it now."""
    if not path.exists():
        check_positions(config)
    return path.exists()


def _make_meta(
    config: TrainConfig,
    task: Task,
    tokenizer: Any,
    trained: str,
    checksum: str,
    splits: dict[str, Tokens],
    truncated: int,
) -> dict[str, Any]:
    vocab_size = get_vocab_size(tokenizer)
    embedded = load_config(config, {}, vocab_size).vocab_size
    largest = max(int(tokens.ids.max(initial=0)) for tokens in splits.values())
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
        "texts": task.texts,
        "label": task.label,
        "pad_id": choose_pad_id(config, tokenizer, vocab_size),
        "mask_id": tokenizer.mask_token_id or 0,
        "unknown_share": unknown_share,
        "checksum": checksum,
        "vocab_size": vocab_size,
        "tokenizer": trained,
        "truncated": truncated,
    }


def find_unknown_share(ids: NDArray[np.int32], tokenizer: Any) -> float:
    """Return the share (0 to 1) of unknown tokens among those not special; 0 if the tokenizer has no unknown token, or
    uses it as pad, bos, eos, cls or sep, too.
    """
    unknown = tokenizer.unk_token_id
    others = (getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos", "cls", "sep"))
    if unknown is None or unknown in others:  # GPT-2's unknown token is its end of text; it knows all bytes
        return 0.0
    special = sorted({*tokenizer.all_special_ids} - {unknown})
    parts = [ids[start : start + 2**24] for start in range(0, len(ids), 2**24)]  # all may not fit into memory
    count = sum(np.isin(part, special, invert=True).sum() for part in parts)
    return float(sum((part == unknown).sum() for part in parts) / max(1, count))


def main() -> None:
    """Prepare the data, check that training fits into the hosts' memory, and copy the archive to the path OUTPUT."""
    try:
        memory, arguments = split_run_memory(sys.argv[2:])
        output, config = sys.argv[1], parse_arguments(TrainConfig, arguments)
        os.environ.update(take_secrets(os.environ, "prepare"))
        check_engine(config)
        check_trackers(config.report_to, os.environ)
        if not config.from_config:
            check_weights(find_model(config.model))
        config, _ = choose_lora(config)
        path = prepare(config)
        prepared = read_prepared(str(path))
        check_recipe(config, prepared)
        if memory:
            check_fit(config, prepared, memory)
        with write_atomically(Path(output)) as beside:
            shutil.copyfile(path, beside)
    except (CpuftError, OSError) as error:
        problem, exit_code = describe_exit(error)
        print(f"cpuft: error: {problem or f'{error}: give another place with --run-dir'}", file=sys.stderr)
        sys.exit(exit_code if problem else 2)


if __name__ == "__main__":
    main()
