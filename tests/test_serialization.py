"""JSON and YAML texts -> dataclasses."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cpuft.plans import RunPlan, Setting, Step
from cpuft.serialization import format_json, load, parse_json, parse_yaml

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@dataclass(frozen=True)
class Leaf:
    """Of every plain type."""

    name: str
    count: int = 0
    share: float = 0.0
    wanted: bool = False


@dataclass(frozen=True)
class Tree:
    """Of every kind of field."""

    leaves: tuple[Leaf, ...]
    texts: list[str] = field(default_factory=list)
    by_name: dict[str, float] = field(default_factory=dict)
    rest: Any = None


LEAVES = st.builds(Leaf, TEXTS, st.integers(), st.floats(allow_nan=False), st.booleans())
TREES = st.builds(
    Tree,
    st.lists(LEAVES, max_size=3).map(tuple),
    st.lists(TEXTS, max_size=3),
    st.dictionaries(TEXTS, st.floats(allow_nan=False), max_size=3),
    st.dictionaries(st.text(), st.integers() | st.none(), max_size=2),
)


@given(TREES)
def test_what_is_written_reads_back(tree: Tree) -> None:
    assert load(Tree, parse_json(json.dumps(asdict(tree)))) == tree


@given(ANYTHING)
def test_anything_else_is_refused_with_a_line(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^tree (is|has) .*$"):
        load(Tree, value, "tree")


@pytest.mark.parametrize(
    "value, message",
    [
        (5, "tree is 5, and must be an object"),
        ({}, "tree has no 'leaves'"),
        ({"leaves": [], "leafs": []}, "tree has an unknown 'leafs'"),
        ({"leaves": {}}, "tree.leaves is {}, and must be a list"),
        ({"leaves": [{"name": 3}]}, "tree.leaves[0].name is 3, and must be a text"),
        ({"leaves": [{"name": "a", "count": True}]}, "tree.leaves[0].count is True, and must be a whole number"),
        ({"leaves": [{"name": "a", "count": 10**300}]}, "0000, and must be a whole number"),
        ({"leaves": [{"name": "a", "count": 1.0}]}, "tree.leaves[0].count is 1.0, and must be a whole number"),
        ({"leaves": [{"name": "a", "share": 10**400}]}, "0000, and must be a number"),
        ({"leaves": [{"name": "a", "wanted": 1}]}, "tree.leaves[0].wanted is 1, and must be true or false"),
        ({"leaves": [{"name": "\ud800"}]}, "tree.leaves[0].name contains half of a surrogate pair"),
        ({"leaves": [], "by_name": {"x": None}}, "tree.by_name['x'] is None, and must be a number"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        load(Tree, value, "tree")


@pytest.mark.parametrize("parse", [parse_json, parse_yaml])
@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a": [', '"\ud800'])
def test_texts_that_are_none(parse: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parse(text)


def test_json_has_no_numbers_that_are_none() -> None:
    text = format_json({"a": [1.5, math.nan], "b": {"c": (math.inf, -math.inf)}, "d": "NaN", "e": 10**400})
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": [1.5, None],
        "b": {"c": [None, None]},
        "d": "NaN",
        "e": 10**400,
    }


def test_json_of_too_many_digits() -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parse_json("1" * 5000)


@pytest.mark.parametrize(
    "text", ["2026-13-01", "!!timestamp x", "1" * 5000, "yes", "0x1F", "!!int ''", "1e999", "3.10"]
)
def test_yaml_scalars_are_as_they_are_written(text: str) -> None:
    written = text.split(" ")[-1].strip("'")
    assert parse_yaml(f"a: {text}\nb: [{text}]\n") == {"a": written, "b": [written]}


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: 'a' is there twice, or is not a name"),
        ("? [x]\n: 1\n", "line 1: "),
        ("a: &x [*x]\n", "an alias (*name) stands for a list or mapping: write that out"),
        ("a: &x [1]\nb: [*x, *x]\n", "an alias (*name) stands for a list or mapping: write that out"),
        ("a: b: c\n", "line 1: mapping values are not allowed here"),
        ("\0", "unacceptable character"),
    ],
)
def test_yaml_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        parse_yaml(text)
    assert str(error.value).startswith(message)


@given(st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS) | st.dictionaries(TEXTS, TEXTS) | st.none()))
def test_yaml_reads_what_yaml_writes(values: dict[str, Any]) -> None:
    assert parse_yaml(yaml.safe_dump(values)) == values


STEPS = st.builds(Step, TEXTS, st.lists(TEXTS).map(tuple), st.lists(st.builds(Setting, *[TEXTS] * 3)).map(tuple))


@given(st.lists(st.lists(STEPS, max_size=2).map(tuple), max_size=2).map(tuple), st.lists(TEXTS).map(tuple))
def test_plans_read_back(stages: tuple[tuple[Step, ...], ...], notes: tuple[str, ...]) -> None:
    plan = RunPlan(prepare=stages, notes=notes)
    assert load(RunPlan, parse_json(json.dumps(asdict(plan)))) == plan
