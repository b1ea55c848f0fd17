"""The results of each class of CPU, in one file each, and the tables that README and the guide make from them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from cpuft.files import write_text
from cpuft.hardware import CLASSES

BASE = "cpuft"
OWN = (BASE, "trainer-accelerated")
"""Contestants that use the fast path."""
MODELS = {"minilm": "MiniLM (22 M)", "bert-base": "BERT-base-sized (110 M)"}
SHARES = ("products", "attention", "norms and activations", "optimizer")
"""Parts of a step that have a column of their own, by their names in a record of scripts/bench-train."""
LEAST_ROUNDS = 3
"""Contestants of a run whose results are kept."""
PATTERN = "bench-train-{}.json"


def read_figures(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of each class of CPU in `folder`, by model: `header`, `summary` and `breakdown`."""
    paths = {name: folder / PATTERN.format(name) for name in CLASSES}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def keep_figures(folder: Path, name: str, model: str, found: dict[str, Any]) -> None:
    """Put a model's last run into the file of a class; the other model's stays. A CPU that was limited to a class does
    not stand for it once a real one does; nor does a run of few rounds."""
    kept = read_figures(folder).get(name, {})
    replaces = model not in kept or not _is_limited(found) or _is_limited(kept[model])
    if not replaces or int(found["header"]["options"]["rounds"]) < LEAST_ROUNDS:
        return
    kept[model] = found
    write_text(folder / PATTERN.format(name), json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _is_limited(found: dict[str, Any]) -> bool:
    return bool(found["header"]["options"]["isa"])


def format_figures(kept: dict[str, dict[str, Any]]) -> str:
    """Return the table of README: how much faster cpuft is than the fastest Trainer on each measured class of CPU."""
    lines = [["CPU with", *MODELS.values(), "measured on two cores of"], ["---"] * (2 + len(MODELS))]
    for name in (one for one in CLASSES if one in kept):
        found = kept[name]
        headers = [found[model]["header"] for model in MODELS if model in found]
        days = [time.strftime("%Y-%m-%d", time.gmtime(header["time"])) for header in headers]
        machines = dict.fromkeys(f"{header['cpu']}, {day}" for header, day in zip(headers, days))
        lines.append([CLASSES[name], *(_format_ratio(found.get(model)) for model in MODELS), " and ".join(machines)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_contestants(kept: dict[str, dict[str, Any]]) -> str:
    """Return the table of all contestants: samples/s, ratio and peak memory."""
    lines = [["CPU with", "model", "contestant", "samples/s", "cpuft's speed / this speed", "peak MB"]]
    lines.append(["---"] * len(lines[0]))
    for label, model, found in _list_runs(kept):
        for one in found["summary"]:
            own = one["contestant"] == BASE
            where = [label if own else "", model if own else "", one["contestant"]]
            ratio = "" if own else f"{one['ratio']:.2f} ({one['ratio_least']:.2f} to {one['ratio_most']:.2f})"
            lines.append([*where, f"{one['samples_per_second']:.1f}", ratio, str(one["peak_megabytes"] or "")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_shares(kept: dict[str, dict[str, Any]]) -> str:
    """Return the table of where the time of cpuft's step goes."""
    lines = [["CPU with", "model", "step, ms", *SHARES, "everything else"]]
    lines.append(["---"] * len(lines[0]))
    for label, model, found in _list_runs(kept):
        seconds = found["breakdown"]["kinds"]
        shares = [seconds[name] / sum(seconds.values()) for name in SHARES]
        cells = [f"{share:.0%}" for share in [*shares, 1 - sum(shares)]]
        lines.append([label, model, f"{1e3 * found['breakdown']['seconds']:.0f}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list_runs(kept: dict[str, dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the description of the CPU's class, that of the model, and the results: the fastest class first."""
    order = [(name, model) for name in CLASSES for model in MODELS if model in kept.get(name, {})]
    return [(CLASSES[name], MODELS[model], kept[name][model]) for name, model in order]


def _format_ratio(found: dict[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    peer = min((line for line in found["summary"] if line["contestant"] not in OWN), key=lambda line: line["ratio"])
    return f"**{peer['ratio']:.2f} times** ({peer['ratio_least']:.2f} to {peer['ratio_most']:.2f})"
