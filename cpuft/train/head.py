"""The outputs of a classifier's head that was trained before: each stays with the name of its label."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cpuft.errors import CpuftError
from cpuft.train.data.labels import find_value

_MAX_NAMED = 8
"""Number of labels that a message names."""


def match_labels(stored: Sequence[str], labels: Sequence[str]) -> list[int]:
    """Return for each label the number of the output that a head with the labels `stored` has for it, or -1.

    Names are equal if they differ only in case, spaces, -, _ and a prefix LABEL_, or are forms of one number (see
    `find_value`). If one side has only numbers, or LABEL_0, and the other as many other labels, both are taken to be in
    the same order, where numbers are sorted by value.
    """
    old, new = _make_keys(stored), _make_keys(labels)
    if len(old) == len(new) and {*old} != {*new} and any(map(_read_numbers, (stored, labels))):
        places = dict(zip(_list_in_order(labels), _list_in_order(stored)))
        return [places[place] for place in range(len(labels))]
    return [old.index(key) if key in old else -1 for key in new]


def _make_keys(names: Sequence[str]) -> list[str]:
    keys = [re.sub(r"[ _-]+", "_", _strip_prefix(name)).casefold() for name in names]
    return keys if len({*keys}) == len(keys) else list(names)


def _strip_prefix(name: str) -> str:
    return find_value(re.sub(r"^label[ _-]", "", name.strip(), flags=re.IGNORECASE))


def _read_numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers that labels are; empty if not all are whole numbers."""
    try:
        return [int(_strip_prefix(name)) for name in names]
    except ValueError:
        return []


def _list_in_order(names: Sequence[str]) -> list[int]:
    """Return the places of labels: of numbers in the order of their values."""
    numbers = _read_numbers(names)
    return sorted(range(len(names)), key=lambda place: numbers[place] if numbers else place)


def match_head(stored: Any, head: Mapping[str, Any]) -> list[int]:
    """Return what `match_labels` does for the labels of a model's configuration and the "id2label" of its new head. []
    if these are the same in the same order; or are not equally many, and no label has an output by its name, which
    LABEL_0 is not.
    """
    old, labels = _list_labels(stored.id2label), _list_labels(head.get("id2label", {}))
    rows = match_labels(old, labels)
    has_names = not all(name.startswith("LABEL_") for name in old)  # transformers' own, also without any head
    is_usable = len(old) == len(labels) or (has_names and any(row >= 0 for row in rows))
    return rows if old != labels and is_usable else []


def _list_labels(id2label: Mapping[Any, str]) -> list[str]:
    return [str(id2label[number]) for number in sorted(id2label, key=int)]


def follow_labels(model: Any, source: str, rows: Sequence[int], head: Mapping[str, Any], new: Collection[str]) -> None:
    """Give a loaded model the settings `head`, and an output for each label in them, and say on rank 0 what was done.

    `rows` is what `match_labels` returns; where it is -1, the output is untrained. `source` is what the model was
    loaded from, and `new` has the names of parameters that were not loaded: nothing is said of a head among them.
    Raises CpuftError: no linear layer of the head has an output for each stored label.
    """
    import torch

    stored, labels = _list_labels(model.config.id2label), _list_labels(head["id2label"])
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and module.out_features == len(stored)
        and not name.startswith(f"{model.base_model_prefix}.")
    ]
    if not linears:
        raise CpuftError(f"the head of {source} cannot get the labels {_join(labels)}: give a model without it")
    name, old = linears[-1]
    if list(rows) != list(range(len(stored))):
        layer = torch.nn.Linear(old.in_features, len(labels), old.bias is not None)
        model._init_weights(layer)
        for into, where in zip(layer.parameters(), old.parameters()):
            for place, row in enumerate(rows):
                if row >= 0:
                    into.data[place] = where.data[row]
        model.set_submodule(name, layer)
    for key, value in head.items():
        setattr(model.config, key, value)
    model.num_labels = len(labels)
    if f"{name}.weight" not in new and os.environ.get("RANK", "0") == "0":
        print(_describe(source, stored, labels, rows), file=sys.stderr, flush=True)


def _describe(source: str, stored: list[str], labels: list[str], rows: Sequence[int]) -> str:
    known = [(stored[row], label) for label, row in zip(labels, rows) if row >= 0]
    untrained = [label for label, row in zip(labels, rows) if row < 0]
    unused = [name for number, name in enumerate(stored) if number not in rows]
    parts = []
    if known:
        parts.append("its outputs for {} are taken for {}".format(*map(_join, zip(*known))))
    if untrained:
        parts.append(f"its outputs for {_join(untrained)} are new and untrained")
    if unused:
        parts.append(f"its outputs for {_join(unused)} are left out")
    return f"the head of {source} follows the labels: {'; '.join(parts)}"


def _join(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMED]) + f" and {len(names) - _MAX_NAMED} others" * (len(names) > _MAX_NAMED)
