"""Tokens of texts as full rows on a disk."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cpuft.train.data.texts import Packer, Piece, pack

BEGIN, END = 1, 2
WORDS = st.lists(st.integers(10, 500), max_size=30)
PIECES = st.lists(st.tuples(st.booleans(), WORDS, st.booleans()), max_size=30)


def cut(texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
    """A tokenizer whose texts are the numbers of their tokens."""
    assert options["add_special_tokens"] is False
    return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def pack_rows(pieces: list[Piece], length: int, most: int = 0) -> list[list[list[int]]]:
    """The rows of both parts."""
    with tempfile.TemporaryDirectory() as folder:
        packers = [Packer(Path(folder, name), length, BEGIN, END) for name in "ab"]
        pack(pieces, cut, packers)
        packed = [packers[0].finish(most), packers[1].finish()]
        return [[ids[start:end].tolist() for start, end in pairwise(offsets)] for ids, offsets in packed]


def said(words: list[int]) -> str:
    return " ".join(map(str, words))


@given(PIECES, st.integers(3, 20))
def test_nothing_is_lost_and_all_rows_are_full_but_the_last(
    pieces: list[tuple[bool, list[int], bool]], length: int
) -> None:
    parts = pack_rows([(held, said(words), begins) for held, words, begins in pieces], length)
    for part, rows in enumerate(parts):
        wanted = [word for held, words, _ in pieces if held == bool(part) for word in words]
        assert [word for row in rows for word in row if word not in (BEGIN, END)] == wanted
        assert all((row[0], row[-1]) == (BEGIN, END) for row in rows)
        assert all(BEGIN not in row[1:] for row in rows)
        assert [len(row) for row in rows[:-1]] == [length] * (len(rows) - 1)
        assert all(3 <= len(row) <= length for row in rows)


def test_what_begins_anew_stands_behind_an_end() -> None:
    pieces = [(False, "10 11", True), (False, "12", False), (False, "", True), (False, "13", False)]
    assert pack_rows(pieces, 9) == [[[BEGIN, 10, 11, 12, END, 13, END]], []]


def test_as_many_rows_as_asked_for() -> None:
    text = said(list(range(10, 40)))
    assert pack_rows([(False, text, True)], 7, most=2)[0] == [[BEGIN, *range(a, a + 5), END] for a in (10, 15)]
    assert len(pack_rows([(False, text, True)], 7, most=100)[0]) == 6


def test_many_tokens_come_out_as_they_went_in() -> None:
    words = np.random.default_rng(0).integers(10, 30000, 200_000).tolist()
    pieces = [(False, said(words[start : start + 1000]), start == 0) for start in range(0, len(words), 1000)]
    rows, _ = pack_rows(pieces, 128)
    assert [word for row in rows for word in row[1:-1]] == words
