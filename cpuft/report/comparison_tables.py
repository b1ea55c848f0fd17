"""Write a comparison as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from cpuft.errors import counted
from cpuft.report.comparison import MOST_EFFICIENCY, Comparison, Row, has_equal_cores, shares_cores
from cpuft.report.quality import Quality
from cpuft.report.seeds import describe_seeds, judge_seeds
from cpuft.terminal import WIDTH, format_table

_LEAST_UNLIMITED = 0.8
"""Efficiency of ranks on one host below which sharing the host, rather than cpuft, may be what costs most."""


Table = tuple[list[str], list[list[str]]]
"""Headings, and the cells of each row."""


def make_table(comparison: Comparison) -> Table:
    """Return the table with a row per run, and one of the baseline without a model if known; metrics are last."""
    base, names = comparison.rows[0].np, _metric_names(comparison)
    shows_ideal = any(row.ideal for row in comparison.rows)
    rows = [
        {
            "np": str(row.np),
            "hosts": f"{row.hosts} simulated" if row.simulated else str(row.hosts),
            "cores": str(row.cores),
            "global batch": str(row.global_batch),
            "train seconds": f"{row.train_seconds:.1f}",
            "samples/s": _with_interval(row, "samples_per_second", row.samples_per_second, 1),
            "samples/s per rank": f"{row.samples_per_second_per_rank:.1f}",
            f"speedup vs np {base}": f"{_with_interval(row, 'speedup', row.speedup, 2)}x",
            f"efficiency vs np {base}": f"{_with_interval(row, 'efficiency', row.efficiency, 0, 100)} %",
            **(_ideal_cells(row) if shows_ideal else {}),
            **_metric_cells(row.metrics, names),
        }
        for row in comparison.rows
    ]
    if comparison.baseline:
        metrics = _metric_cells(comparison.baseline.metrics, names)
        rows.append({**dict.fromkeys(rows[0], "-"), "np": "baseline", **metrics})
    return list(rows[0]), [list(cells.values()) for cells in rows]


def _metric_cells(metrics: Mapping[str, float], names: Sequence[str]) -> dict[str, str]:
    return {name.replace("_", " "): f"{metrics[name]:.4f}" if name in metrics else "-" for name in names}


def _with_interval(row: Row, name: str, value: float, digits: int, times: int = 1) -> str:
    """Return the number with half of its interval; the baseline of a ratio is 1 and has no interval."""
    off = row.intervals.get(name, 0.0) * times
    return f"{value * times:.{digits}f}" + (f" ±{off:.{digits}f}" if off else "")


def _ideal_cells(row: Row) -> dict[str, str]:
    if row.ideal is None:
        return {"ideal samples/s": "-", "of the ideal": "-"}
    share = _with_interval(row, "ideal", row.ideal.efficiency, 0, 100)
    return {"ideal samples/s": f"{row.ideal.samples_per_second:.1f}", "of the ideal": f"{share} %"}


def _metric_names(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(name for row in comparison.rows for name in row.metrics))


def make_seed_table(comparison: Comparison) -> Table:
    """Return the table of metrics over seeds, with a row per metric and number of ranks; no rows without seeds."""
    base, rows = comparison.rows[0], list[list[str]]()
    for name in _metric_names(comparison):
        for row in comparison.rows:
            if one := row.seeds.get(name):
                off, interval = one.interval, "-"
                if off is not None:
                    interval = f"{one.difference - off:+.4f} to {one.difference + off:+.4f}"
                compared = ["-"] * 3 if row is base else [f"{one.difference:+.4f}", interval, judge_seeds(one)]
                means = [str(one.seeds), f"{one.mean:.4f}", f"{one.standard_error:.4f}"]
                rows.append([name.replace("_", " "), str(row.np), *means, *compared])
    fixed = ["metric", "np", "seeds", "mean", "standard error"]
    return [*fixed, f"difference from np {base.np}", "95 % interval", "result"], rows


def format_title(comparison: Comparison) -> str:
    """Return the headline, such as "mrpc with bert-base, 3 epochs, bf16, weak scaling"."""
    c = comparison
    kind = "" if c.scaling == "single" else f", {c.scaling} scaling"
    kind += ", simulated hosts" if any(row.simulated for row in c.rows) else ""
    length = f"{c.max_steps} updates" if c.max_steps else f"{c.epochs:g} epochs"
    return f"{c.task} with {c.model}, {length}, {c.precision}{kind}"


def format_verdict(comparison: Comparison) -> str:
    """Return the main result in a few sentences: the run with the most ranks compared with that with the fewest."""
    base, last = comparison.rows[0], comparison.rows[-1]
    sentences = [_judge_speed(base, last)]
    if has_equal_cores(last, base) and _is_clear(last) and last.efficiency <= MOST_EFFICIENCY:
        more = "a second host" if last.np == 2 else counted(last.np - base.np, "more host")
        more += f" of {counted(last.cores // last.np, 'core')}"
        is_limited = last.efficiency < _LEAST_UNLIMITED
        limits = f"The notes say what limits ranks that share a host; {more} may give more."
        sentences.append(limits if is_limited else f"That is about what {more} would give.")
    if comparison.scaling == "weak":
        sentences.append(f"Each update has {last.global_batch} examples instead of {base.global_batch} (weak scaling).")
    if last.seeds and last is not base:
        sentence = describe_seeds(last, base)
        sentences.append(f"{sentence[0].upper()}{sentence[1:]}.")
    return " ".join(sentences)


def _judge_speed(base: Row, last: Row) -> str:
    metrics = "".join(f", {name} {value:.4f}" for name, value in last.metrics.items())
    if last.np == base.np:
        return f"{_name(last)}: {last.samples_per_second:.1f} samples/s{metrics}."
    is_shared = shares_cores(last, base)
    name, other = (_name_cores(last), _name_cores(base)) if has_equal_cores(last, base) else (_name(last), _name(base))
    if not _is_clear(last):
        shared = f" on the same {counted(base.cores, 'core')}" if is_shared else ""
        return f"There is no clear difference in speed between {name} and {other}{shared}."
    off = last.intervals.get("speedup")
    faster = f"{name} are {last.speedup:.2f} {f'± {off:.2f} ' if off else ''}times as fast as {other}"
    ideal = _judge_ideal(last)
    if is_shared:
        shared = counted(base.cores, "core")
        return f"On the same {shared}, {faster}: more ranks, but no more hardware{ideal}."
    return f"{faster}: {last.efficiency:.0%} of {last.np / base.np:g} times{ideal}."


def _is_clear(row: Row) -> bool:
    """Return whether the speed of a row differs from the baseline's by more than its interval."""
    return abs(row.speedup - 1) > row.intervals.get("speedup", -1.0)


def _judge_ideal(row: Row) -> str:
    if row.ideal is None:
        return ""
    if abs(row.ideal.efficiency - 1) <= row.intervals.get("ideal", -1.0):
        return ", with no clear difference from the ideal"
    return f", and {row.ideal.efficiency:.0%} of the ideal"


def _name(row: Row) -> str:
    return f"{counted(row.np, 'rank')} on {counted(row.hosts, 'simulated host' if row.simulated else 'host')}"


def _name_cores(row: Row) -> str:
    return f"{counted(row.np, 'rank')} on {counted(row.cores, 'core')}"


def format_text(comparison: Comparison) -> str:
    """Return the comparison as text that ends with a newline: the title, the verdict, the tables and the notes."""
    title = f"{format_title(comparison)}\n{textwrap.fill(format_verdict(comparison), WIDTH)}"
    columns, rows = make_table(comparison)
    columns = [column.replace(" ", "\n", 1) for column in columns]
    headings, over_seeds = make_seed_table(comparison)
    if not over_seeds:
        return format_table(columns, rows, title, comparison.notes)
    headings = [column.replace("standard ", "standard\n").replace("from", "\nfrom") for column in headings]
    below = format_table(headings, over_seeds, "metrics over seeds", comparison.notes, left=1)
    return format_table(columns, rows, title) + "\n" + below


def format_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: a heading, the verdict, the tables and a list of the notes."""
    tables = [table for table in (make_table(comparison), make_seed_table(comparison)) if table[1]]
    return _format_markdown(format_title(comparison), format_verdict(comparison), tables, comparison.notes)


def format_quality(quality: Quality) -> str:
    """Return title, verdict, table and notes of the comparison of two runs' metrics; a newline ends the text."""
    title = f"{quality.title}\n{textwrap.fill(quality.verdict, WIDTH)}"
    return format_table(quality.columns, quality.rows, title, quality.notes, left=1)


def format_quality_markdown(quality: Quality) -> str:
    """Return the comparison of two runs' metrics as Markdown: a heading, the verdict, the table and the notes."""
    return _format_markdown(quality.title, quality.verdict, [(list(quality.columns), quality.rows)], quality.notes)


def _format_markdown(title: str, verdict: str, tables: Sequence[Table], notes: Sequence[str]) -> str:
    lines = [f"## {_escape(title)}", "", f"**{_escape(verdict)}**"]
    for columns, rows in tables:
        lines += ["", _format_cells(columns), "|" + " ---: |" * len(columns), *map(_format_cells, rows)]
    return "\n".join([*lines, "", *(f"- {_escape(note)}" for note in notes)]) + "\n"


def _format_cells(cells: list[str]) -> str:
    return f"| {' | '.join(map(_escape, cells))} |"


def _escape(text: str) -> str:
    """Return the text on one line, escaped where Markdown would see HTML or the end of a cell."""
    return html.escape(" ".join(text.split()), quote=False).replace("\\", "\\\\").replace("|", "\\|")


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as one JSON object with the fields of `Comparison`, in which `rows` is called `runs`."""
    values = dataclasses.asdict(comparison)
    values["runs"] = list(values.pop("rows"))
    values["notes"] = list(values["notes"])
    return values
