"""Reading texts, and packing their tokens into examples of one length."""

from __future__ import annotations

import json
import tempfile
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.config.train import TrainConfig
from cpuft.errors import CpuftError
from cpuft.train.data.texts import (
    MAX_LINE_BYTES,
    NEVER_MASKED,
    WORD_CONTINUATION,
    WORD_START,
    Corpus,
    Packer,
    Piece,
    classify_tokens,
    join_pieces,
    list_pieces,
    pack,
    scan_texts,
    split_texts,
)


def write(**files: str | bytes) -> None:
    """Files by their names, in which _ stands for a dot."""
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        Path(name.replace("_", ".")).write_bytes(data)


def pieces_of(paths: str, columns: str = "") -> list[tuple[str, bool]]:
    return list(list_pieces(scan_texts(paths, columns, "--train-file")))


def test_lines_of_a_text_are_pieces_of_one_document() -> None:
    write(a_txt="\ufeffOne.\r\n\n  Two.  \n", b_txt="Three.")
    assert pieces_of("a.txt,b.txt") == [("One.", True), ("Two.", False), ("Three.", True)]


def test_rows_of_json_lines_are_documents() -> None:
    write(a_jsonl='{"text": "One.", "n": 1}\n{"text": "Two.", "n": 2}\n')
    assert pieces_of("a.jsonl") == [("One.", True), ("Two.", True)]
    assert pieces_of("a.jsonl", "text,n") == [("One. 1", True), ("Two. 2", True)]


def test_objects_without_texts_are_named_whatever_the_name_of_their_file() -> None:
    write(**{"x.csv": '{"a": {}}\n{"a": {}}\n'})
    with pytest.raises(CpuftError, match=r"x.csv has no column 'text' \(it has none\)"):
        pieces_of("x.csv")


def test_a_folder_stands_for_its_texts_in_their_order() -> None:
    Path("c/d").mkdir(parents=True)
    write(**{"c/b_txt": "b", "c/d/a_txt": "d", "c/a_jsonl": '{"text": "a"}', "c/x_bin": "\0"})
    assert [text for text, _ in pieces_of("c")] == ["a", "b", "d"]


def test_texts_in_a_folder_behind_a_link_are_read() -> None:
    """On hosts with disks of their own the link is a folder, and ranks there must train on the same texts."""
    Path("far").mkdir()
    Path("near").mkdir()
    write(**{"far/a_txt": "far", "near/b_txt": "near"})
    Path("near/linked").symlink_to(Path("far").absolute())
    assert [text for text, _ in pieces_of("near")] == ["near", "far"]


def test_a_file_may_have_a_comma_in_its_name() -> None:
    write(**{"a,b_txt": "One."})
    assert pieces_of("a,b.txt") == [("One.", True)]


@pytest.mark.parametrize("change", [{"a_txt": "other"}, {"b_txt": "more"}, {"a_txt": "same\n\nb"}])
def test_other_texts_have_another_checksum(change: dict[str, str]) -> None:
    write(a_txt="same\n", b_txt="b")
    before = scan_texts("a.txt,b.txt", "", "-").checksum
    assert scan_texts("a.txt,b.txt", "", "-").checksum == before
    write(**change)
    assert scan_texts("a.txt,b.txt", "", "-").checksum != before


@pytest.mark.parametrize(
    "files, paths, message",
    [
        ({}, "a.txt", "there is no file a.txt: check --train-file"),
        ({"a_txt": " \n\n"}, "a.txt", "a.txt holds no text: give files of text, or of JSON lines, with --train-file"),
        ({"a_txt": b"one\nt\0o\n"}, "a.txt", "a.txt, line 2 has a null byte, so that it is not text: give other files"),
        (
            {"a_txt": b"one\n\xff\xfe"},
            "a.txt",
            "a.txt, line 2 is not UTF-8 text (byte 0xff): correct that line; or, if the file comes from",
        ),
        (
            {"a_txt": b"a" * (MAX_LINE_BYTES + 1)},
            "a.txt",
            "a.txt, line 1 is longer than 8 MB: split it into several lines",
        ),
        ({"a_csv": ""}, ".", "folder . holds no .txt, .text, .md, .json, .jsonl, .ndjson: give other files with"),
        ({"a_jsonl": '{"text": "a"}\n["b"]'}, "a.jsonl", "a.jsonl, line 2 is not a JSON object"),
        (
            {"a_jsonl": '{"text": "a"}\n{"t": "a"}'},
            "a.jsonl",
            "a.jsonl, line 2 has no 'text': correct it, or name the texts with --text-columns (it has t)",
        ),
    ],
)
def test_what_is_no_text_is_named(files: dict[str, str | bytes], paths: str, message: str) -> None:
    write(**files)
    with pytest.raises(CpuftError) as error:
        pieces_of(paths)
    assert str(error.value).startswith(message)


def test_a_line_may_be_as_long_as_it_is_said() -> None:
    write(a_txt=b"a" * MAX_LINE_BYTES)
    assert scan_texts("a.txt", "", "-").pieces == 1


def test_a_decoder_gets_lines_as_they_are() -> None:
    write(a_txt="\ufeffif x:\n\n    y  \nz", b_jsonl='{"text": " a\\nb "}\n\n')
    corpus = scan_texts("a.txt,b.jsonl", "", "-", exact=True)
    assert list(list_pieces(corpus)) == [
        ("if x:\n", True),
        ("\n", False),
        ("    y  \n", False),
        ("z", False),
        (" a\nb ", True),
    ]
    assert corpus.pieces == 5
    assert corpus.checksum != scan_texts("a.txt,b.jsonl", "", "-").checksum
    write(a_txt=" \n\n")
    with pytest.raises(CpuftError, match=r"a\.txt holds no text"):
        scan_texts("a.txt", "", "-", exact=True)


@given(st.lists(st.tuples(st.booleans(), st.text("ab\n", max_size=9), st.booleans()), max_size=200))
def test_pieces_that_continue_each_other_are_joined(pieces: list[Piece]) -> None:
    joined = list(join_pieces(pieces))
    for part in (False, True):
        assert "".join(text for held, text, _ in joined if held == part) == "".join(
            text for held, text, _ in pieces if held == part
        )
    starts = [begins or number == 0 or pieces[number - 1][0] != held for number, (held, _, begins) in enumerate(pieces)]
    assert len(joined) >= sum(starts)
    assert sum(begins for _, _, begins in joined) == sum(begins for _, _, begins in pieces)
    longest = max((len(list(group)) for group in split_at(starts)), default=0)
    assert (len(joined) == sum(starts)) == (longest <= 64)


def split_at(starts: list[bool]) -> list[list[bool]]:
    """The runs of pieces that continue each other."""
    runs: list[list[bool]] = []
    for start in starts:
        runs += [[]] if start else []
        runs[-1].append(start)
    return runs


def test_very_long_lines_are_not_joined() -> None:
    lines = [(False, "a" * 60_000, number == 0) for number in range(3)]
    assert list(join_pieces(lines)) == lines


def parts_of(corpus: Corpus, share: float) -> list[bool]:
    return [held for held, _, _ in split_texts(corpus, share, None)]


@given(st.integers(10, 3000), st.sampled_from([0.05, 0.1, 0.25, 0.5]))
def test_the_share_that_is_held_out_is_spread_evenly(count: int, share: float) -> None:
    write(a_txt="".join(f"{number}\n" for number in range(count)))
    corpus = scan_texts("a.txt", "", "-")
    held = parts_of(corpus, share)
    assert held == parts_of(corpus, share)
    # To within a block of neighbours, which is a hundredth of a small corpus.
    assert abs(sum(held) - share * count) <= max(1, min(64, count // 100)) + 1
    half = held[: count // 2]
    assert abs(sum(half) - share * len(half)) <= max(1, min(64, count // 100)) + 1


def test_neighbours_are_held_out_together_and_seams_are_told() -> None:
    write(a_txt="".join(f"{number}\n" for number in range(1000)), b_jsonl=json.dumps({"text": "x"}))
    found = list(split_texts(scan_texts("a.txt,b.jsonl", "", "-"), 0.1, None))
    assert [int(text) for held, text, _ in found if held] == [
        number for block in range(90, 1000, 100) for number in range(block, block + 10)
    ]
    begins = [text for _, text, begins in found if begins]
    assert begins == [*(str(start + after) for start in range(0, 1000, 100) for after in (0, 90)), "x"]


def test_texts_of_their_own_are_held_out_instead() -> None:
    write(a_txt="".join(f"{number}\n" for number in range(30)), b_txt="x\ny\n")
    held_out = scan_texts("b.txt", "", "-")
    found = list(split_texts(scan_texts("a.txt", "", "-"), 0.5, held_out))
    assert [held for held, _, _ in found] == [False] * 30 + [True] * 2
    assert found[-2:] == [(True, "x", True), (True, "y", False)]


@pytest.mark.parametrize(
    "words, kinds",
    [
        (
            ["[PAD]", "[MASK]", "play", "##ing", "."],
            [NEVER_MASKED, NEVER_MASKED, WORD_START, WORD_CONTINUATION, WORD_START],
        ),
        (
            ["<pad>", "<mask>", "\u0120play", "ing", "\u0120the"],
            [NEVER_MASKED, NEVER_MASKED, WORD_START, WORD_CONTINUATION, WORD_START],
        ),
        (
            ["<pad>", "<mask>", "\u2581play", "ing", "\u2581the"],
            [NEVER_MASKED, NEVER_MASKED, WORD_START, WORD_CONTINUATION, WORD_START],
        ),
    ],
)
def test_words_and_their_parts(words: list[str], kinds: list[int]) -> None:
    numbers = {word: number for number, word in enumerate(words)}
    assert classify_tokens(SimpleNamespace(get_vocab=lambda: numbers, all_special_ids=[0, 1])).tolist() == kinds


def test_a_number_that_no_word_has_is_never_masked() -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 3}, all_special_ids=[])
    assert classify_tokens(tokenizer).tolist() == [WORD_START, NEVER_MASKED, NEVER_MASKED, WORD_START]


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
        packers = [Packer(Path(folder, name), length, [BEGIN], [END], [END]) for name in "ab"]
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


TABLE = "id,body\n" + "".join(f"{number},word {number}\n" for number in range(3))


def test_a_column_of_a_table_is_learned_and_not_its_lines() -> None:
    pandas.read_csv(StringIO(TABLE)).to_parquet("x.parquet")
    write(x_csv=TABLE, x_tsv=TABLE.replace(",", "\t"), y_csv="body\nword 0\nword 1\nword 2\n")
    wanted = [(f"word {number}", True) for number in range(3)]
    for name, columns in (("x.csv", "body"), ("x.tsv", "body"), ("x.parquet", "body"), ("y.csv", "")):
        assert pieces_of(name, columns) == wanted


@pytest.mark.parametrize(
    "name, columns, problem",
    [
        (
            "x.csv",
            "txt",
            "x.csv, line 2 has no 'txt': correct it, or name the texts with --text-columns (it has id, body)",
        ),
        (
            "x.csv",
            "",
            "x.csv has no column 'text' (it has id, body): name the one of the texts with --text-columns",
        ),
        (
            "x.txt",
            "body",
            "--text-columns 'body' names columns, and x.txt has none: leave it out, or give a table",
        ),
    ],
)
def test_columns_that_are_not_there(name: str, columns: str, problem: str) -> None:
    write(**{name.replace(".", "_"): TABLE})
    with pytest.raises(CpuftError) as error:
        pieces_of(name, columns)
    assert str(error.value) == problem


def test_texts_of_other_encodings() -> None:
    Path("a.txt").write_bytes("\u00e9\n".encode("utf-16"))
    assert pieces_of("a.txt") == [("\u00e9", True)]
    Path("a.txt").write_bytes("\u00e9\n".encode("latin-1"))
    corpus = scan_texts("a.txt", "", "--train-file", options=TrainConfig(encoding="latin-1"))
    assert list(list_pieces(corpus)) == [("\u00e9", True)]
