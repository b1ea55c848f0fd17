"""Load dataclasses from JSON and YAML texts, and check every text and type: users and other programs edit them."""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_hints = cache(get_type_hints)
_TYPE_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
LAST_PORT = 65535
_MAX_NUMBER = 10**300  # larger integers do not fit into a float, so that arithmetic with floats raises


def is_count(text: str, least: int = 1, most: int = 10**12) -> bool:
    """Return whether a text is a whole number from `least` to `most`, written in fewer than 20 digits 0 to 9 only."""
    return text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most


def to_number(text: str) -> float:
    """Return the number that a text is for Python ("1e3", " 2 ", "inf"), nan if it is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def find_control(text: str, allowed: str = "") -> str:
    """Return the first control character or line separator of `text` that is not in `allowed`; "" if there is none. A
    line break in the value of an option would begin another line of a file for another program, such as ssh_config.
    """
    return next((c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp") and c not in allowed), "")


def parse_json(text: str, make_object: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the value of a JSON text, with NaN and Infinity as floats, and objects as dicts or as what `make_object`
    returns for their (name, value) pairs. Raises ValueError: it is no JSON, or nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def format_json(value: Any) -> str:
    """Return a value as JSON, indented by 2, without a newline at the end, and with null for NaN and infinity."""

    def replace(one: Any) -> Any:
        if isinstance(one, dict):
            return {name: replace(each) for name, each in one.items()}
        if isinstance(one, (list, tuple)):
            return [replace(each) for each in one]
        return None if isinstance(one, float) and not math.isfinite(one) else one

    return json.dumps(replace(value), indent=2)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text: dicts, lists, texts, and None for null or nothing. Numbers, dates and words like
    `yes` stay texts, because the type of the option decides what they mean. Raises ValueError: it is no YAML, has a key
    twice, or an alias of a list or mapping.
    """
    import yaml

    seen: set[int] = set()

    def read(node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return None if node.tag == "tag:yaml.org,2002:null" else node.value
        if id(node) in seen:  # endless, or a few lines that stand for millions of values
            raise ValueError("an alias (*name) stands for a list or mapping: write that out")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [read(item) for item in node.value]
        values: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in values:
                raise ValueError(
                    f"line {key.start_mark.line + 1}: {str(key.value)!r:.60} is there twice, or is not a name"
                )
            values[key.value] = read(value)
        return values

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        return read(tree) if tree else None
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"line {error.problem_mark.line + 1 if error.problem_mark else 1}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def load(kind: type[T], value: Any, where: str = "it") -> T:
    """Return a value of JSON or YAML as an instance of a type, or raise ValueError if a part of it does not fit.

    `kind` is a dataclass, list[T], tuple[T, ...], dict[str, T], str, int, float, bool or Any. Nothing is converted,
    except that a whole number is accepted as a float, and a list becomes a tuple. A boolean is no number, and a
    dataclass takes no other names than its fields. `where` names the value at the begin of error messages.
    """
    made, origin = value, get_origin(kind)
    if dataclasses.is_dataclass(kind):
        made = _load_fields(kind, value, where)
    elif origin is dict:
        items = _check(dict, value, where).items()
        made = {_check(str, key, where): load(get_args(kind)[1], item, f"{where}[{key!r:.60}]") for key, item in items}
    elif origin:
        items = enumerate(_check(list, value, where))
        made = origin(load(get_args(kind)[0], item, f"{where}[{number}]") for number, item in items)
    elif kind is not Any:
        made = _check(kind, value, where)
    return made  # type: ignore[no-any-return]


def _load_fields(kind: Any, value: Any, where: str) -> Any:
    values, hints = _check(dict, value, where), _hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.name not in values]
    needed = [one.name for one in fields if one.default is dataclasses.MISSING is one.default_factory]
    unknown = [name for name in values if name not in hints]
    if needed or unknown:
        raise ValueError(f"{where} has no {needed[0]!r}" if needed else f"{where} has an unknown {unknown[0]!r:.60}")
    return kind(**{name: load(hints[name], item, f"{where}.{name}") for name, item in values.items()})


def _check(kind: Any, value: Any, where: str) -> Any:
    if kind is float and type(value) is int and abs(value) < _MAX_NUMBER:
        return float(value)
    if type(value) is not kind or (kind is int and abs(value) >= _MAX_NUMBER):
        raise ValueError(f"{where} is {reprlib.repr(value)}, and must be {_TYPE_NAMES.get(kind, 'an object')}")
    if kind is str and value != value.encode(errors="replace").decode():
        raise ValueError(f"{where} contains half of a surrogate pair")
    return value
