"""Tables as text."""

from __future__ import annotations

import pytest

from cpuft.terminal import format_table


def test_a_terminal_that_rich_takes_for_small_cuts_nothing() -> None:
    columns, row = [f"column {number}" for number in range(9)], ["a longer text"] * 9
    before = format_table(columns, [row])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "40"}.items():
            patch.setenv(name, value)
        assert format_table(columns, [row]) == before
    assert before.count("a longer text") == 9
