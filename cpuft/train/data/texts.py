"""Texts of the user's own, packed as tokens into examples of one length, on disk: neither has to fit into memory.

A piece is a line of a text file, or a row of a table, such as a CSV file or JSON lines. A document is a text file, or a
row of a table. Blank lines are ignored, unless the texts are for a decoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError, list_names
from cpuft.files import list_files, split_paths
from cpuft.train.data.columnar import Cell, is_columnar
from cpuft.train.data.delimited import TableOptions
from cpuft.train.data.tables import JSON_SUFFIXES, choose_column, get_suffix, read_lines, read_table, split_names

_TEXT_SUFFIXES = (".txt", ".text", ".md")
_TABLE_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv")
MAX_LINE_BYTES = 8 << 20
"""Tokenising a line takes about a hundred times as much memory as the line."""
_BLOCK_PIECES = 64
"""Consecutive pieces that go into one split together: about a page, so that most words keep their context."""
_PIECES_AT_ONCE = 256
_JOINED_CHARACTERS = 1 << 16
_BUFFERED_TOKENS = 1 << 16

WORD_START, WORD_CONTINUATION, NEVER_MASKED = 0, 1, 2
"""Kinds of tokens: the first token of a word, a later one, and one that is never masked."""
_WORD_START_MARKS = ("\u0120", "\u2581")
"""First character of a word's first token, as GPT-2 and SentencePiece mark it. Others mark continuations."""

Piece = tuple[bool, str, bool]
"""Whether a piece is for validation; its text; and whether it does not continue the piece before it in its split."""
Packed = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Token ids of all examples, mapped from a file; and the offsets at which each example begins and the last one ends."""


_DEFAULT = TrainConfig()


@dataclass(frozen=True)
class Corpus:
    """Text files that `scan_texts` has read once."""

    files: tuple[Path, ...]
    columns: tuple[str, ...]
    """Names of the columns of tables whose texts make a piece; empty for the column `text`, or the only one."""
    pieces: int
    checksum: str
    """SHA-256 of all pieces and of each file's kind, 64 hexadecimal digits."""
    exact: bool = False
    """Whether pieces are lines as they are, with indentation and line ends, and blank lines are pieces, too."""
    options: TableOptions = _DEFAULT


def scan_texts(paths: str, columns: str, option: str, exact: bool = False, options: TableOptions = _DEFAULT) -> Corpus:
    """Read all texts once, to check and count them and to take their checksum.

    `paths` are files, patterns and folders, separated by commas; of a folder, all .txt, .text, .md, .json, .jsonl and
    .ndjson files at any depth are taken. The texts of several `columns` of a table, separated by commas, are joined by
    spaces; empty is the column `text`, or the only one. With `exact`, indentation, line ends and blank lines are kept,
    which a decoder learns as well. Raises CpuftError: a file cannot be read, lacks a column or has a line above 8 MB,
    or no text, or no table for `columns`.
    """
    files = tuple(file for name in split_paths(paths) for file in _find_files(Path(name), option))
    names = split_names(columns)
    corpus = Corpus(files, names, 0, "", exact, options)
    digest, pieces, has_text = hashlib.sha256(), 0, False
    if names and not any(map(_is_table, files)):
        raise CpuftError(
            f"--text-columns {columns!r:.60} names columns, and {files[0]} has none: leave it out, or give a table"
        )
    for path in files:
        digest.update(b"json\n" if _is_table(path) else b"text\n")
        for text in _list_texts(path, corpus, option):
            digest.update(text.encode() + b"\n")
            pieces += 1
            has_text = has_text or bool(text.strip())
    if not has_text:
        raise CpuftError(f"{paths} holds no text: give files of text, or of JSON lines, with {option}")
    return replace(corpus, pieces=pieces, checksum=digest.hexdigest())


def read_corpora(config: TrainConfig) -> tuple[Corpus, Corpus | None]:
    """Scan --train-file and --validation-file (None if not given). CpuftError: no --train-file, or one is unusable."""
    if not config.train_file:
        raise CpuftError("--task text needs --train-file: name text files, JSON lines, or a folder of them")

    def scan(paths: str, option: str) -> Corpus:
        return scan_texts(paths, config.text_columns, option, config.causal, config)

    train = scan(config.train_file, "--train-file")
    return train, scan(config.validation_file, "--validation-file") if config.validation_file else None


def _is_table(path: Path) -> bool:
    with suppress(OSError):
        return get_suffix(path) in _TABLE_SUFFIXES or is_columnar(path)
    return False


def _find_files(path: Path, option: str) -> list[Path]:
    if not path.is_dir() or is_columnar(path):
        return [path]
    suffixes = (*_TEXT_SUFFIXES, *JSON_SUFFIXES)
    found = sorted(one for one in list_files(path) if one.suffix in suffixes)
    if not found:
        raise CpuftError(f"folder {path} holds no {', '.join(suffixes)}: give other files with {option}")
    return found


def _list_texts(path: Path, corpus: Corpus, option: str) -> Iterator[str]:
    encoding = corpus.options.encoding
    if _is_table(path):
        table = read_table(path, option, corpus.options)
        columns = corpus.columns or (choose_column(table, "", usual=("text",)),)
        for where, row in table.rows:
            yield _check_length(_join_cells(row, columns, where), where)
        return
    # One character more than the longest line, so that a longer one is noticed.
    for number, line in enumerate(read_lines(path, option, "\n", encoding, MAX_LINE_BYTES + 1), start=1):
        text = line if corpus.exact else line.strip()
        if text:
            yield _check_length(text, f"{path}, line {number}")


def _check_length(text: str, where: str) -> str:
    if len(text) > MAX_LINE_BYTES:
        raise CpuftError(f"{where} is longer than {MAX_LINE_BYTES >> 20} MB: split it into several lines")
    return text


def _join_cells(cells: dict[str, Cell], columns: tuple[str, ...], where: str) -> str:
    for name in columns:
        if name not in cells:
            has = f"it has {list_names([*cells]) or 'nothing'}"
            raise CpuftError(f"{where} has no {name!r}: correct it, or name the texts with --text-columns ({has})")
    found = (cells[name] for name in columns)
    return " ".join(cell if isinstance(cell, str) else " ".join(cell) for cell in found)


def list_pieces(corpus: Corpus) -> Iterator[tuple[str, bool]]:
    """Yield each piece, and whether it begins a document. Raises CpuftError: a file can no longer be read."""
    for path in corpus.files:
        is_table = _is_table(path)
        for number, text in enumerate(_list_texts(path, corpus, "--train-file")):
            yield text, is_table or not number


def split_texts(corpus: Corpus, share: float, validation: Corpus | None) -> Iterator[Piece]:
    """Yield all pieces; those of a `validation` corpus come last, and then only they are for validation.

    Without one, about `share` (0 to 1) of the pieces are: blocks of up to 64 consecutive ones, evenly spread over the
    corpus, always the same. Raises CpuftError: a file can no longer be read.
    """
    size, before = min(_BLOCK_PIECES, max(1, corpus.pieces // 100)), None
    for number, (text, begins) in enumerate(list_pieces(corpus)):
        block = number // size
        validates = validation is None and int((block + 1) * share) > int(block * share)
        yield validates, text, begins or validates != before
        before = validates
    if validation:
        yield from ((True, text, begins) for text, begins in list_pieces(validation))


def join_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join up to 64 pieces, of up to 65,536 characters, that continue each other: a tokenizer must see line ends."""
    parts: list[str] = []
    size, validates, begins = 0, False, False
    for its_split, text, its_begin in pieces:
        is_full = len(parts) == _BLOCK_PIECES or size + len(text) > _JOINED_CHARACTERS
        if parts and (its_split != validates or its_begin or is_full):
            yield validates, "".join(parts), begins
            parts, size = [], 0
        if not parts:
            validates, begins = its_split, its_begin
        parts.append(text)
        size += len(text)
    if parts:
        yield validates, "".join(parts), begins


class Packer:
    """Writes tokens to a file as examples of `length` tokens, int32; only the last one may be shorter.

    An example has the tokens of the prefix ([CLS]), as many tokens as fit, and those of the suffix ([SEP]). Those of
    `separator` come between two documents, those of `begin` before the first and those of `end` after the last one.
    """

    def __init__(
        self,
        path: Path,
        length: int,
        prefix: Sequence[int],
        suffix: Sequence[int],
        separator: Sequence[int],
        begin: Sequence[int] = (),
        end: Sequence[int] = (),
    ) -> None:
        self.prefix, self.suffix, self.separator, self.end = prefix, suffix, separator, end
        self.length = length
        self._room = length - len(prefix) - len(suffix)  # has to be 1 or more
        self._buffer: list[int] = list(begin)
        self._is_empty, self._begins = True, False
        self._file = path.open("w+b")

    def add(self, tokens: list[int], begins: bool) -> None:
        """Append a piece's token ids. With `begins`, a separator comes before them (if there are none, before the next
        piece that has some), unless they are the packer's first ones.
        """
        self._begins = begins or self._begins
        if tokens and self._begins:
            self._buffer += [] if self._is_empty else self.separator
            self._begins = False
        self._is_empty = self._is_empty and not tokens
        self._buffer += tokens
        if len(self._buffer) >= _BUFFERED_TOKENS:
            self._write()

    def _write(self) -> None:
        count = len(self._buffer) // self._room
        full = np.asarray(self._buffer[: count * self._room], np.int32).reshape(count, self._room)
        first, last = (np.tile(np.asarray(one, np.int32), (count, 1)) for one in (self.prefix, self.suffix))
        self._file.write(np.concatenate([first, full, last], 1).tobytes())
        del self._buffer[: full.size]

    def finish(self, max_examples: int = 0) -> Packed:
        """Write the last example; return the ids of the first `max_examples` (0: all), mapped from the file, which must
        stay, and the offsets, int64, at which each of them begins and the last one ends.
        """
        self._buffer = [] if self._is_empty else [*self._buffer, *self.end]
        self._write()
        with self._file as file:
            if self._buffer:
                file.write(np.asarray([*self.prefix, *self._buffer, *self.suffix], np.int32).tobytes())
            size = file.tell() // 4
            ids = np.memmap(file, np.int32, "r") if size else np.zeros(0, np.int32)
        offsets = np.append(np.arange(0, size, self.length), size).astype(np.int64)
        offsets = offsets[: max_examples + 1] if max_examples else offsets
        return ids[: offsets[-1]], offsets


def pack(pieces: Iterable[Piece], tokenizer: Any, packers: Sequence[Packer]) -> None:
    """Tokenise pieces without special tokens, and add those for validation to the second packer, else to the first."""
    remaining = iter(pieces)
    while batch := list(islice(remaining, _PIECES_AT_ONCE)):
        without = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        ids = tokenizer([text for _, text, _ in batch], verbose=False, **without)["input_ids"]
        for (validates, _, begins), tokens in zip(batch, ids, strict=True):
            packers[validates].add(tokens, begins)


def find_document_marks(tokenizer: Any) -> tuple[list[int], int | None]:
    """Return the ids that a decoder's tokenizer puts before a text, without any that is the id of a text's end, and
    that id: eos, else sep, else None.
    """
    end = next((one for one in (tokenizer.eos_token_id, tokenizer.sep_token_id) if one is not None), None)
    return [one for one in tokenizer("")["input_ids"] if one != end], end


def classify_tokens(tokenizer: Any) -> NDArray[np.int8]:
    """Return each token id's kind, int8, (largest id + 1,): 0 (WORD_START), 1 (WORD_CONTINUATION) or, for special
    tokens and unused ids, 2 (NEVER_MASKED).
    """
    vocabulary = tokenizer.get_vocab()
    marks_starts = sum(token.startswith(_WORD_START_MARKS) for token in vocabulary) > len(vocabulary) // 10
    kinds = np.full(1 + max(vocabulary.values()), NEVER_MASKED, np.int8)
    for token, number in vocabulary.items():
        continues = not token.startswith(_WORD_START_MARKS) if marks_starts else token.startswith("##")
        kinds[number] = WORD_CONTINUATION if continues else WORD_START
    kinds[tokenizer.all_special_ids] = NEVER_MASKED
    return kinds
