"""JSON and YAML texts -> dataclasses, with every type checked: a file holds whatever its last editor left in it."""

from __future__ import annotations

import dataclasses
import json
import reprlib
import unicodedata
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_hints = cache(get_type_hints)
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
_MOST = 10**300  # larger ones fit into no float: arithmetic on them raises


def find_control(text: str, allowed: str = "") -> str:
    """First control character or line separator of `text` that is not among `allowed`; empty when there is none.

    Values of options, hostfiles, registry entries and recipes become lines of other programs' files (ssh_config,
    known_hosts, container files): a line break in a value would begin a line of its own there.
    """
    return next((c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp") and c not in allowed), "")


def parse_json(text: str) -> Any:
    """What a JSON text holds. Raises ValueError: it is none, is nested too deep, or has a number of too many digits."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_yaml(text: str) -> Any:
    """What a YAML text holds: mappings, lists, and scalars as the texts that are written there; only null is None.

    Numbers, dates and words like `yes` stay texts: the field that they are for says what they must be.

    Raises ValueError: no YAML, nested too deep, a key twice (with the line), or an alias of more than a text.
    """
    import yaml

    seen: set[int] = set()

    def plain(node: yaml.Node) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return None if node.tag == "tag:yaml.org,2002:null" else node.value
        if id(node) in seen:  # a circle, or a few lines that stand for millions of values
            raise ValueError("an alias (*name) stands for a list or mapping: write that out")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [plain(item) for item in node.value]
        values: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value in values:
                raise ValueError(
                    f"line {key.start_mark.line + 1}: {str(key.value)!r:.60} is there twice, or is no name"
                )
            values[key.value] = plain(value)
        return values

    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        return plain(tree) if tree else None
    except yaml.MarkedYAMLError as error:
        raise ValueError(f"line {error.problem_mark.line + 1 if error.problem_mark else 1}: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def load(kind: type[T], value: Any, where: str = "it") -> T:
    """`value`, as JSON and YAML have it, as a `kind`: a dataclass, or a list, tuple or dict of a kind, a type, or Any.

    Raises ValueError: a field is unknown, or missing without a default, or something is of another type, named from
    `where`.
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
    """`value` if it is of the plain type `kind`, or a whole number where any number does."""
    if kind is float and type(value) is int and abs(value) < _MOST:
        return float(value)
    if type(value) is not kind or (kind is int and abs(value) >= _MOST):
        raise ValueError(f"{where} is {reprlib.repr(value)}, and must be {_WORDS.get(kind, 'an object')}")
    if kind is str and value != value.encode(errors="replace").decode():
        raise ValueError(f"{where} holds half a character")
    return value
