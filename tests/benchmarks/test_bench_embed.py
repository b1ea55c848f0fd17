"""The texts of scripts/bench-embed, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from scripts.benchmarks.bench_embed import format_ratios, read_texts


def test_texts_come_from_all_files_in_equal_parts(tmp_path: Path) -> None:
    table, book = tmp_path / "rows.tsv", tmp_path / "book.txt"
    table.write_text("sentence\tlabel\n" + "".join(f"a sentence with the number {n}\t0\n" for n in range(30)))
    book.write_text("short\n\n" + "\n\n".join(f"a paragraph\nwith the number {n}" for n in range(10)))
    texts = read_texts([table, book], 10)
    assert sorted(text.split(" with")[0] for text in texts) == ["a paragraph"] * 5 + ["a sentence"] * 5
    assert texts == read_texts([table, book], 10)
    with pytest.raises(CpuftError, match=r"book.txt has 10 texts: give more files, or a smaller --count"):
        read_texts([table, book], 40)


def test_a_ratio_has_its_range() -> None:
    assert format_ratios("texts per second", [1.5, 1.2, 1.9]) == (
        "texts per second: 1.50 times (from 1.20 to 1.90, 3 rounds)"
    )
