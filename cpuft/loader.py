"""JSON and YAML texts -> dataclasses, with every type checked: a file holds whatever its last editor left in it."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_MOST = 10**300
"""Larger numbers fit into no float: arithmetic on them raises."""


def parse_json(text: str) -> Any:
    """What a JSON text holds. Raises ValueError: it is none, is nested too deep, or has a number of too many digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_yaml(text: str) -> Any:
    """What a YAML text holds: mappings, lists, and scalars as the texts that are written there; only null is None.

    Numbers, dates and words like `yes` stay texts: the field that they are for says what they must be.

    Raises
    ------
    ValueError: no YAML, nested too deep, a key twice, an alias of more than a text; with the line.
    """
    import yaml

    seen: set[int] = set()

    def plain(node: yaml.Node) -> Any:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            return None if node.tag == "tag:yaml.org,2002:null" else node.value
        if id(node) in seen:  # a circle, or a few lines that stand for millions of values
            raise ValueError(f"line {line}: only a text can have an alias")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        values: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {key.start_mark.line + 1}: a list or mapping stands where a name must")
            if key.value in values:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value[:60]!r} is there twice")
            values[key.value] = plain(value)
        return values

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        return plain(tree) if tree else None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"line {line}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def is_count(text: str, least: int = 1, most: int = 10**12) -> bool:
    """Whether a text is a whole number from `least` to `most`, in plain digits; of thousands of them int raises."""
    return text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most


def load(kind: type[T], value: Any, where: str = "it") -> T:
    """`value`, as JSON and YAML have it, as a `kind`: a dataclass, or a list, tuple or dict of a kind, a type, or Any.

    Fields that have a default may be missing.

    Raises
    ------
    ValueError: a field is missing or unknown, or something is of another type; `where` is the name of the whole.
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
    needed = [field.name for field in dataclasses.fields(kind) if _is_needed(field) and field.name not in values]
    unknown = [name for name in values if name not in hints]
    if needed or unknown:
        raise ValueError(f"{where} has no {needed[0]!r}" if needed else f"{where} has an unknown {unknown[0]!r:.60}")
    return kind(**{name: load(hints[name], item, f"{where}.{name}") for name, item in values.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _check(kind: Any, value: Any, where: str) -> Any:
    """`value` if it is of the plain type `kind`, or a whole number where any number does."""
    if kind is float and type(value) is int and abs(value) < _MOST:
        return float(value)
    if type(value) is not kind or (kind is int and abs(value) >= _MOST):
        raise ValueError(f"{where} is {reprlib.repr(value)}, and must be {_WORDS.get(kind, 'an object')}")
    if kind is str and value != value.encode(errors="replace").decode():
        raise ValueError(f"{where} holds half a character")
    return value
