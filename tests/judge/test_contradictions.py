"""Similar texts with different labels."""

from __future__ import annotations

from typing import Any

import pytest

from cpuft.judge.contradictions import find_contradictions
from tests.judge.predicted import make_predictions

FILM = "The film was a great pleasure from its beginning to its end, and I would see it again"
LONG = "The museum stands in the old town, and has been open every day but Monday since it was founded in 1912. "
OPEN = "Is the museum open on Mondays, on Tuesdays and on public holidays?"
OTHERS = [
    f"Something else, number {number}, {word}" for number, word in enumerate(("rain", "wind", "snow", "fog", "ice"))
]


def find(texts: list[list[str]], labels: list[Any], wrong: list[int], kind: str = "class") -> list[tuple[int, int]]:
    """Find contradictions among these rows and some others, and check their order."""
    rows, named = [*texts, *([text] * len(texts[0]) for text in OTHERS)], [*labels, *[labels[0]] * len(OTHERS)]
    found = find_contradictions(make_predictions(kind, (), text=rows, label=named), wrong)
    similarities = [similarity for *_, similarity in found]
    assert similarities == sorted(similarities, reverse=True)
    assert all(0.9 <= one <= 1 for one in similarities)
    return [(first, second) for first, second, _ in found]


def test_equal_texts_come_first_and_each_pair_once() -> None:
    texts = [[FILM], [FILM + "."], [f"  {FILM.upper()}\n"], ["A bad evening"], [FILM]]
    assert find(texts, ["good", "bad", "bad", "bad", "good"], [1, 2, 0, 3]) == [(0, 2), (0, 1)]
    assert find(texts, ["good"] * 5, [0, 1]) == []


def test_near_identical_texts_are_searched_for_wrong_rows() -> None:
    texts = [[FILM], [FILM + "."]]
    assert find(texts, ["good", "bad"], [1]) == [(0, 1)]
    assert find(texts, ["good", "bad"], []) == []


def test_a_long_equal_text_does_not_hide_that_the_short_ones_differ() -> None:
    texts = [[LONG * 4, OPEN], [LONG * 4, "Who founded it?"]]
    assert find(texts, ["yes", "no"], [0, 1]) == []
    assert find([texts[0], [LONG * 4 + "!", OPEN.lower() + "?"]], ["yes", "no"], [0]) == [(0, 1)]


@pytest.mark.parametrize(
    "kind, labels, count",
    [("labels", [["a", "b"], ["a"]], 1), ("tags", [["O", "PER"], ["O", "O"]], 1), ("score", [1.0, 4.0], 0)],
)
def test_kinds_with_lists_of_labels(kind: str, labels: list[Any], count: int) -> None:
    assert len(find([[FILM], [FILM]], labels, [0], kind)) == count


def test_texts_that_are_cut_or_missing_are_not_compared() -> None:
    assert find([["x" * 500], ["x" * 500]], ["a", "b"], [0]) == []
    assert find_contradictions(make_predictions("class", (), text=[[], []], label=["a", "b"]), [0]) == []
    assert find_contradictions(make_predictions("class", (), label=["a", "b"]), [0]) == []
    assert find_contradictions(make_predictions("class", (), text=[[""], [""]], label=["a", "b"]), [0, 1]) == [
        (0, 1, 1.0)
    ]
