"""The one error a user is meant to see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuft.errors import CpuftError


@given(st.text(st.characters()))
def test_every_message_is_one_printable_line(text: str) -> None:
    assert str(CpuftError(text)).isprintable()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("there is no 'é 中': write \\n", "there is no 'é 中': write \\n"),
        ("a\nb\r", "a\\nb\\r"),
        ("\x1b[2J\u2028", "\\x1b[2J\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_what_would_end_the_line_is_escaped(text: str, shown: str) -> None:
    assert str(CpuftError(text)) == shown
