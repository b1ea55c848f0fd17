"""Random texts and files: good ones, good ones with something wrong in them, and noise."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

AWKWARD = [
    *(
        "",
        " ",
        "\n",
        "\r",
        "\t",
        "\0",
        "\x0c",
        "\x1b[2J",
        "\x85",
        "\u2028",
        "\ufeff",
        "\u0130",
        "\ud800",
        "\udcff",
        "é",
    ),
    *(
        ".",
        "..",
        "/",
        "../v",
        "../../v",
        "../../../v",
        "/var/tmp/v",
        "~",
        "-",
        "--",
        "-oX",
        ":",
        "=",
        ",",
        ";",
        "#",
        "%r",
    ),
    *("a 0", 'a"=0"', "a'; echo foo", "$HOME", "`id`", "'", '"', "\\", "a..b", "a" * 64, "a" * 300, "a/" * 2500),
    *("0", "-1", "1", "٣", "1_0", "0x1F", "1e999", "1e308", "nan", "inf", "-inf", "9" * 19, "9" * 400, "9" * 5000),
    *(
        "null",
        "true",
        "no",
        "[",
        "{",
        "[]",
        "{}",
        "[" * 3000,
        '{"a":' * 3000,
        "&a [*a]",
        "*a",
        "!!timestamp x",
        "!!int ''",
    ),
    *(
        "2026-13-01",
        "<<: *a",
        "? [a]",
        "\\u0000",
        "\\ud800",
        "localhost",
        "127.0.0.1",
        "slots=" + "9" * 5000,
        "port=99999",
    ),
]
"""What somebody's program choked on once."""

TEXTS = st.sampled_from(AWKWARD) | st.text(max_size=8)
WORDS = TEXTS.filter(lambda text: "\0" not in text and "\ud800" not in text)
"""What a command line can hold: the kernel ends words at null, and what is no UTF-8 comes as U+DC80 and above."""

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([10**18, 10**4000, 1e300]) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def damaged(draw: st.DrawFn, examples: Sequence[str]) -> str:
    """One of the examples with up to three places overwritten, cut or filled; now and then something else."""
    text = draw(st.sampled_from(examples))
    for _ in range(draw(st.sampled_from([0, 1, 1, 2, 3]))):
        start = draw(st.integers(0, len(text)))
        end = start + draw(st.sampled_from([0, 0, 1, 4, 20, 1000]))
        text = text[:start] + draw(TEXTS) + text[end:]
    return text


@st.composite
def damaged_json(draw: st.DrawFn, example: Any) -> str:
    """A JSON text of `example` with up to two values, wherever they are, replaced or left out."""
    values = copy.deepcopy(example)
    for _ in range(draw(st.sampled_from([0, 1, 1, 2]))):
        holder = draw(st.sampled_from(_list_holders(values)))
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw(st.sampled_from(keys))
        how = draw(st.sampled_from(["replace", "replace", "remove", "more"]))
        if how == "replace":
            holder[key] = draw(ANYTHING)
        elif how == "remove":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(TEXTS)] = draw(ANYTHING)
        if not values:
            break
    text = dump(values)
    return draw(damaged([text])) if draw(st.sampled_from([True, False, False])) else text


def dump(values: Any) -> str:
    """As json.dumps, numbers of more digits than it writes included."""
    try:
        return json.dumps(values)
    except ValueError:
        return "9" * 5000


def _list_holders(value: Any) -> list[Any]:
    """All lists and objects in a JSON value that are not empty."""
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    return ([value] if inner else []) + [holder for item in inner for holder in _list_holders(item)]


def lines(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A text of lines, each made of `parts`, with various ends."""
    return st.lists(st.tuples(*parts, st.sampled_from(["\n", "\n", "\r\n", "\r", ""])).map("".join), max_size=5).map(
        "".join
    )


def as_bytes(text: str) -> bytes:
    """As a file that may be no UTF-8."""
    return text.encode("utf-8", "surrogatepass")
