"""Texts of the user's own, packed as tokens into examples of one length, on disk: neither has to fit into memory.

Texts are read in pieces: a piece is a line of a text file, or a row of a table, such as a CSV file or JSON lines. A
document is a text file, or a row of a table. Blank lines are ignored, unless the texts are for a decoder.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.config import TableOptions, TrainConfig
from cpuft.errors import CpuftError, list_names
from cpuft.files import list_files, split_paths
from cpuft.train.data.columnar import Cell, is_columnar
from cpuft.train.data.tables import JSON_SUFFIXES, Table, find_longest_column, get_suffix, read_lines, read_table

_TEXT_SUFFIXES = (".txt", ".text", ".md")
_TABLE_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv")
_USUAL_COLUMN = "text"
MAX_LINE_BYTES = 8 << 20
"""Tokenising a line takes about a hundred times as much memory as the line."""
_BLOCK_PIECES = 64
"""Number of consecutive pieces that go into the validation split together, about a page, so that most words keep their
context."""
_PIECES_AT_ONCE = 256
"""Number of pieces that are tokenised together."""
_JOINED_CHARACTERS = 1 << 16
"""Largest number of characters of pieces that are joined before they are tokenised."""
_BUFFERED_TOKENS = 1 << 16
"""Number of tokens that are collected before they are written as examples."""

WORD_START, WORD_CONTINUATION, NEVER_MASKED = 0, 1, 2
"""Kinds of tokens: the first token of a word, a later one, and one that is never masked."""
_WORD_START_MARKS = ("\u0120", "\u2581")
"""The first character of a word's first token, in tokenizers like GPT-2's and in SentencePiece. Others mark
continuations."""

Piece = tuple[bool, str, bool]
"""Whether the piece belongs to the validation split; its text; and whether it is not the continuation of the piece
before it in its split."""
Packed = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Token ids of all examples, mapped from a file; and the offsets at which each example begins and the last one ends."""


_DEFAULT = TrainConfig()


@dataclass(frozen=True)
class Corpus:
    """Text files that `scan_texts` has read once."""

    files: tuple[Path, ...]
    """The files in the order in which they are read."""
    columns: tuple[str, ...]
    """Names of the columns of tables whose texts make a piece; empty for the column `text`, or the only one."""
    pieces: int
    """Number of pieces: lines of text files and rows of tables, without blank lines."""
    checksum: str
    """SHA-256 of all pieces and of each file's kind, 64 hexadecimal digits."""
    exact: bool = False
    """Whether pieces are lines as they are, with indentation and line ends, and blank lines are pieces, too."""
    options: TableOptions = _DEFAULT
    """Delimiter, quoting and encoding of the files."""


def scan_texts(paths: str, columns: str, option: str, exact: bool = False, options: TableOptions = _DEFAULT) -> Corpus:
    """Read all texts once, to check and count them and to take their checksum.

    Parameters
    ----------
    paths: files, and folders of files, separated by commas. In a folder and those below, files that end in .txt, .text,
        .md, .json, .jsonl or .ndjson are taken, in alphabetical order; a file that is named may have any ending. CSV,
        TSV, JSON lines, Parquet and Arrow files are tables, all others text.
    columns: names of the columns of tables, separated by commas, whose texts are joined by spaces; empty for the column
        `text`, or the only one.
    option: the option that names the paths, for messages.
    exact: keep indentation, line ends and blank lines, which a decoder learns as well.
    options: delimiter, quoting and encoding.

    Raises CpuftError: a file is missing or cannot be read, a folder has no such files, all files are empty, or a line
    is not UTF-8, has a null byte, is longer than 8 MB, is no JSON object or lacks a column; the message names the line.
    Also raised for columns of files that are no tables.
    """
    files = tuple(file for name in split_paths(paths) for file in _find_files(Path(name), option))
    names = tuple(name.strip() for name in columns.split(",")) if columns else ()
    corpus = Corpus(files, names, 0, "", exact, options)
    digest, pieces, has_text = hashlib.sha256(), 0, False
    if names and not any(map(_is_table, files)):
        raise CpuftError(
            f"--text-columns {columns!r:.60} names columns, and {files[0]} is a text without columns: leave it out, or "
            f"give a file that ends in .csv, .tsv or .jsonl"
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


def _is_table(path: Path) -> bool:
    """Return whether a file has columns, by its name or its first bytes."""
    with suppress(OSError):
        return get_suffix(path) in _TABLE_SUFFIXES or is_columnar(path)
    return False


def _find_files(path: Path, option: str) -> list[Path]:
    found = (
        [path]
        if not path.is_dir() or is_columnar(path)
        else sorted(one for one in list_files(path) if one.suffix in (*JSON_SUFFIXES, *_TEXT_SUFFIXES))
    )
    if not found:
        raise CpuftError(
            f"folder {path} holds no {', '.join((*_TEXT_SUFFIXES, *JSON_SUFFIXES))}: give other files with {option}"
        )
    return found


def _list_texts(path: Path, corpus: Corpus, option: str) -> Iterator[str]:
    encoding = corpus.options.encoding
    if _is_table(path):
        table = read_table(path, option, corpus.options)
        columns = corpus.columns or _choose_column(table, path)
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


def _choose_column(table: Table, path: Path) -> tuple[str]:
    """Return the column `text`, or the only one; a row of JSON lines that lacks the column is named later."""
    if _USUAL_COLUMN in table.columns or not table.columns or get_suffix(path) in JSON_SUFFIXES:
        return (_USUAL_COLUMN,)
    if len(table.columns) > 1:
        raise CpuftError(
            f"{path} is a table (it has the columns {list_names(table.columns)}), and none of the columns is named "
            f"{_USUAL_COLUMN}: name the column of the texts with --text-columns, for example --text-columns "
            f"{shlex.quote(find_longest_column(table, table.columns))}"
        )
    return (table.columns[0],)


def _join_cells(cells: dict[str, Cell], columns: tuple[str, ...], where: str) -> str:
    for name in columns:
        if name not in cells:
            has = f"it has {list_names([*cells]) or 'nothing'}"
            raise CpuftError(f"{where} has no {name!r}: correct it, or name the texts with --text-columns ({has})")
    found = (cells[name] for name in columns)
    return " ".join(cell if isinstance(cell, str) else " ".join(cell) for cell in found)


def list_pieces(corpus: Corpus) -> Iterator[tuple[str, bool]]:
    """Read the files of a corpus again; yield the text of each piece, and whether it begins a document.

    Texts have no spaces at their ends, unless the corpus is exact. The first piece of a text file and each row of a
    table begin a document.

    Raises CpuftError: a file has vanished, cannot be read, or has a line that is not valid text or JSON any more.
    """
    for path in corpus.files:
        is_table = _is_table(path)
        for number, text in enumerate(_list_texts(path, corpus, "--train-file")):
            yield text, is_table or not number


def split_texts(corpus: Corpus, share: float, validation: Corpus | None) -> Iterator[Piece]:
    """Yield all pieces as (is in the validation split, text, does not continue the piece before it in its split).

    With a `validation` corpus, all its pieces follow those of `corpus`, and only they are in the validation split.
    Without it, about `share` (0 to 1) of the pieces are: blocks of up to 64 consecutive pieces, evenly spread over the
    corpus, always the same ones. Files are read as the pieces are taken.

    Raises CpuftError: a file has vanished or cannot be read any more.
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
    """Join each piece with those that continue it, up to 64 pieces or 65,536 characters together.

    A tokenizer then sees line ends within a text, as it does where the model is used.
    """
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
    """Writes tokens to a file as examples of one length.

    An example has the tokens of the prefix ([CLS]), as many tokens as fit, and those of the suffix ([SEP]). Only the
    last example may be shorter.

    Parameters
    ----------
    path: the file, int32 without a header; it is created, or emptied if it exists.
    length: tokens of an example with prefix and suffix, at least one more than these have.
    prefix, suffix: token ids at the begin and the end of each example.
    separator: token ids between two documents.
    begin, end: token ids before the first document and after the last one.
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
        self._room = length - len(prefix) - len(suffix)
        self._buffer: list[int] = list(begin)
        self._is_empty, self._begins = True, False
        self._file = path.open("w+b")

    def add(self, tokens: list[int], begins: bool) -> None:
        """Append the tokens of a piece, behind a separator if it `begins` a document or otherwise continues nothing.

        The very first piece gets no separator. For an empty piece that begins a document, the next one gets it. Tokens
        are written to the file some 65,000 at a time.
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
        """Write the tokens that are left as a last, possibly shorter example, close the file and return its content.

        Parameters
        ----------
        max_examples: return only the first ones, up to this number; 0 returns all. The file holds all in any case.

        Returns
        -------
        The token ids of all examples, int32, mapped from the file, which must stay; and their offsets, int64, one more
        than examples: example i is ids[offsets[i] : offsets[i + 1]]. Without any tokens, ids are empty and offsets are
        [0].
        """
        self._buffer = [] if self._is_empty else [*self._buffer, *self.end]
        self._write()
        with self._file as file:
            if self._buffer:
                file.write(np.asarray([*self.prefix, *self._buffer, *self.suffix], np.int32).tobytes())
            size = file.tell() // 4
            ids = np.memmap(file, np.int32, "r") if size else np.zeros(0, np.int32)
        offsets = np.append(np.arange(0, size, self.length), size).astype(np.int64)[
            : max_examples + 1 if max_examples else None
        ]
        return ids[: offsets[-1]], offsets


def pack(pieces: Iterable[Piece], tokenizer: Any, packers: Sequence[Packer]) -> None:
    """Tokenise pieces, 256 at a time and without special tokens, and add them to the packers.

    Pieces of the validation split go to the second packer, the others to the first. The packers are not finished.
    """
    remaining = iter(pieces)
    while batch := list(islice(remaining, _PIECES_AT_ONCE)):
        without = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        ids = tokenizer([text for _, text, _ in batch], verbose=False, **without)["input_ids"]
        for (validates, _, begins), tokens in zip(batch, ids, strict=True):
            packers[validates].add(tokens, begins)


def find_document_marks(tokenizer: Any) -> tuple[list[int], int | None]:
    """Return the ids of the tokens that a decoder's tokenizer puts before a text, and the id that ends a text.

    The second one is None if the tokenizer has no such token.
    """
    end = next((one for one in (tokenizer.eos_token_id, tokenizer.sep_token_id) if one is not None), None)
    return [one for one in tokenizer("")["input_ids"] if one != end], end


def classify_tokens(tokenizer: Any) -> NDArray[np.int8]:
    """Return the kind of each token id, int8: WORD_START, WORD_CONTINUATION or NEVER_MASKED; shape (largest id + 1,).

    Special tokens, and ids without a token, are never masked. If more than a tenth of the tokens begin with the mark of
    GPT-2's or SentencePiece's word starts, the others are continuations; else tokens that begin with ## are.
    """
    vocabulary = tokenizer.get_vocab()
    marks_starts = sum(token.startswith(_WORD_START_MARKS) for token in vocabulary) > len(vocabulary) // 10
    kinds = np.full(1 + max(vocabulary.values()), NEVER_MASKED, np.int8)
    for token, number in vocabulary.items():
        continues = not token.startswith(_WORD_START_MARKS) if marks_starts else token.startswith("##")
        kinds[number] = WORD_CONTINUATION if continues else WORD_START
    kinds[tokenizer.all_special_ids] = NEVER_MASKED
    return kinds
