"""Texts of the user's own -> full rows of tokens on a disk, in pieces: neither needs to fit into memory.

A piece is a line of a text, or a row of JSON lines; a document is a text file, or such a row. Blank lines are nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpuft.errors import CpuftError
from cpuft.files import split_paths
from cpuft.train.data.sources import describe_encoding, parse_json_row

_JSON, _PLAIN = (".json", ".jsonl", ".ndjson"), (".txt", ".text", ".md")
MOST_BYTES = 8 << 20
"""Of a line. To cut it into tokens takes about a hundred times as much memory."""
_BLOCK = 64
"""Pieces that are held out together, of many: about a page, so that most words keep their context."""
_PIECES, _TOKENS = 256, 1 << 16
"""Cut into tokens at once, and kept before rows are made of them."""

BEGINS, GOES_ON, NEVER = 0, 1, 2
"""A token that begins a word, one that goes on with it, and one that is never masked."""
_MARKS = ("\u0120", "\u2581")
"""What words begin with, by tokenizers of GPT-2's kind and by SentencePiece's; others mark tokens that go on."""

Piece = tuple[bool, str, bool]
"""Whether it is held out, its text, and whether it begins anew: not where the one before it in its part ends."""
Packed = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Token numbers of all rows, mapped from a file; and where each row begins, and the last ends."""


@dataclass(frozen=True)
class Corpus:
    """Files that were looked through once."""

    files: tuple[Path, ...]
    columns: tuple[str, ...]
    """Texts of a row of JSON lines."""
    pieces: int
    checksum: str


def survey(paths: str, columns: str, option: str) -> Corpus:
    """Look through the files, and folders of files, that an option names with commas between.

    Raises CpuftError: there are none, nothing is in them, or something is no text.
    """
    files = tuple(file for word in split_paths(paths) for file in _find_files(Path(word), option))
    names = tuple(name.strip() for name in columns.split(",")) if columns else ("text",)
    digest, pieces = hashlib.sha256(), 0
    for path in files:
        digest.update(b"json\n" if path.suffix in _JSON else b"text\n")
        for text in _list_texts(path, names, option):
            digest.update(text.encode() + b"\n")
            pieces += 1
    if not pieces:
        raise CpuftError(f"{paths} holds no text: name files of text, or of JSON lines, with {option}")
    return Corpus(files, names, pieces, digest.hexdigest())


def _find_files(path: Path, option: str) -> list[Path]:
    found = [path] if not path.is_dir() else sorted(one for one in path.rglob("*") if one.suffix in (*_JSON, *_PLAIN))
    if not found:
        raise CpuftError(f"folder {path} holds no {', '.join((*_PLAIN, *_JSON))}: name other files with {option}")
    return found


def _list_texts(path: Path, columns: tuple[str, ...], option: str) -> Iterator[str]:
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(MOST_BYTES + 1):
                number += 1
                if len(line) > MOST_BYTES:
                    raise CpuftError(f"{path}, line {number} is longer than {MOST_BYTES >> 20} MB: break it into lines")
                if b"\0" in line:
                    raise CpuftError(f"{path}, line {number} holds a null byte, so it is no text: name other files")
                if text := line.decode("utf-8-sig" if number == 1 else "utf-8").strip():
                    yield _join_cells(text, columns, path, number) if path.suffix in _JSON else text
    except FileNotFoundError:
        raise CpuftError(f"there is no file {path}: check {option}") from None
    except OSError as error:
        raise CpuftError(f"{path} cannot be read ({error.strerror}): check {option}") from None
    except UnicodeDecodeError as error:
        raise CpuftError(describe_encoding(path, number, error)) from None


def _join_cells(line: str, columns: tuple[str, ...], path: Path, number: int) -> str:
    where = f"{path}, line {number}"
    _, cells = parse_json_row(line, where, number)
    for name in columns:
        if name not in cells:
            has = f"it has {', '.join(cells) or 'nothing'}"
            raise CpuftError(f"{where} has no {name!r}: correct it, or name the texts with --text-columns ({has})")
    found = (cells[name] for name in columns)
    return " ".join(cell if isinstance(cell, str) else " ".join(cell) for cell in found)


def list_pieces(corpus: Corpus) -> Iterator[tuple[str, bool]]:
    """The text of each piece, and whether it begins a document."""
    for path in corpus.files:
        for number, text in enumerate(_list_texts(path, corpus.columns, "--train-file")):
            yield text, not number or path.suffix in _JSON


def divide(corpus: Corpus, share: float, held_out: Corpus | None) -> Iterator[Piece]:
    """All pieces. Where nothing else is `held_out`, about `share` of them are, evenly spread, the same whenever it is
    asked; together with their neighbours where there are enough."""
    size, before = min(_BLOCK, max(1, corpus.pieces // 100)), None
    for number, (text, begins) in enumerate(list_pieces(corpus)):
        block = number // size
        held = held_out is None and int((block + 1) * share) > int(block * share)
        yield held, text, begins or held != before
        before = held
    if held_out:
        yield from ((True, text, begins) for text, begins in list_pieces(held_out))


class Packer:
    """Writes tokens to a file as rows of one length: the token that begins a row, as many as fit, and the one that ends
    it. Only the last row may be shorter."""

    def __init__(self, path: Path, length: int, begin: int, end: int) -> None:
        self.length, self.begin, self.end = length, begin, end
        self._waiting: list[int] = []
        self._rows, self._begins = 0, False
        self._file = path.open("w+b")

    def add(self, tokens: list[int], begins: bool) -> None:
        """Append a piece's tokens; one that begins anew stands behind the token that ends a row."""
        self._begins = begins or self._begins
        if tokens and self._begins:
            self._waiting += [self.end] * bool(self._waiting or self._rows)
            self._begins = False
        self._waiting += tokens
        if len(self._waiting) >= _TOKENS:
            self._write()

    def _write(self) -> None:
        count = len(self._waiting) // (self.length - 2)
        full = np.asarray(self._waiting[: count * (self.length - 2)], np.int32).reshape(count, self.length - 2)
        self._file.write(np.pad(full, ((0, 0), (1, 1)), constant_values=(self.begin, self.end)).tobytes())
        del self._waiting[: full.size]
        self._rows += count

    def finish(self, most: int = 0) -> Packed:
        """All rows, or the first `most` of them unless that is 0. Closes the file."""
        self._write()
        with self._file as file:
            if self._waiting:
                file.write(np.asarray([self.begin, *self._waiting, self.end], np.int32).tobytes())
            size = file.tell() // 4
            ids = np.memmap(file, np.int32, "r") if size else np.zeros(0, np.int32)
        offsets = np.append(np.arange(0, size, self.length), size).astype(np.int64)[: most + 1 if most else None]
        return ids[: offsets[-1]], offsets


def pack(pieces: Iterable[Piece], tokenizer: Any, packers: Sequence[Packer]) -> None:
    """Cut pieces into tokens, and give those that are held out to the second packer."""
    waiting = iter(pieces)
    while batch := list(islice(waiting, _PIECES)):
        without = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        cut = tokenizer([text for _, text, _ in batch], verbose=False, **without)["input_ids"]
        for (held, _, begins), tokens in zip(batch, cut, strict=True):
            packers[held].add(tokens, begins)


def sort_words(tokenizer: Any) -> NDArray[np.int8]:
    """What each token is: BEGINS, GOES_ON or NEVER, shape (words,)."""
    words = tokenizer.get_vocab()
    marked = sum(word.startswith(_MARKS) for word in words) > len(words) // 10
    kinds = np.full(1 + max(words.values()), NEVER, np.int8)
    for word, number in words.items():
        goes_on = not word.startswith(_MARKS) if marked else word.startswith("##")
        kinds[number] = GOES_ON if goes_on else BEGINS
    kinds[tokenizer.all_special_ids] = NEVER
    return kinds
