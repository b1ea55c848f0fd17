"""Write a comparison as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

from cpuft.report.comparison import Comparison, Row
from cpuft.terminal import format_table


def table_columns(comparison: Comparison) -> list[str]:
    """Return the headings of the table in their order, each with its unit or its baseline.

    np, hosts, cores, global batch, train seconds, samples/s, samples/s per rank, speedup vs np N, efficiency vs np N;
    then ideal samples/s and "of the ideal" if a row has an ideal; then the names of all metrics.
    """
    base = comparison.rows[0].np
    fixed = ["np", "hosts", "cores", "global batch", "train seconds", "samples/s", "samples/s per rank"]
    metrics = [name.replace("_", " ") for name in _metric_names(comparison)]
    ideal = ["ideal samples/s", "of the ideal"] if any(row.ideal for row in comparison.rows) else []
    return [*fixed, f"speedup vs np {base}", f"efficiency vs np {base}", *ideal, *metrics]


def table_rows(comparison: Comparison) -> list[list[str]]:
    """Return the cells of the table as texts, one list per run in the order of `table_columns`.

    A number with an interval is "410.2 ±3.1". Speedups end with x, efficiencies are in percent. What a run does not
    have is "-".
    """
    names = _metric_names(comparison)
    ideals = any(row.ideal for row in comparison.rows)
    return [
        [
            str(row.np),
            str(row.hosts),
            str(row.cores),
            str(row.global_batch),
            f"{row.train_seconds:.1f}",
            _with_interval(row, "samples_per_second", row.samples_per_second, 1),
            f"{row.samples_per_second_per_rank:.1f}",
            f"{_with_interval(row, 'speedup', row.speedup, 2)}x",
            f"{_with_interval(row, 'efficiency', row.efficiency, 0, 100)} %",
            *(_ideal_cells(row) if ideals else ()),
            *(f"{row.metrics[name]:.4f}" if name in row.metrics else "-" for name in names),
        ]
        for row in comparison.rows
    ]


def _with_interval(row: Row, name: str, value: float, digits: int, times: int = 1) -> str:
    """Return the number with half of its interval; the baseline of a ratio is 1 and has no interval."""
    off = row.intervals.get(name, 0.0) * times
    return f"{value * times:.{digits}f}" + (f" ±{off:.{digits}f}" if off else "")


def _ideal_cells(row: Row) -> list[str]:
    if row.ideal is None:
        return ["-", "-"]
    share = _with_interval(row, "ideal", row.ideal.efficiency, 0, 100)
    return [f"{row.ideal.samples_per_second:.1f}", f"{share} %"]


def _metric_names(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(name for row in comparison.rows for name in row.metrics))


def format_title(comparison: Comparison) -> str:
    """Return the headline: "mrpc with bert-base, 3 epochs, bf16, weak scaling".

    A limit of updates replaces the epochs ("200 updates"). Without several numbers of ranks, there is no kind of
    scaling.
    """
    c = comparison
    kind = "" if c.scaling == "single" else f", {c.scaling} scaling"
    length = f"{c.max_steps} updates" if c.max_steps else f"{c.epochs:g} epochs"
    return f"{c.task} with {c.model}, {length}, {c.precision}{kind}"


def format_text(comparison: Comparison) -> str:
    """Return the comparison as text for a terminal: the title, the table and the notes, with a newline at the end."""
    columns = [column.replace(" ", "\n", 1) for column in table_columns(comparison)]
    return format_table(columns, table_rows(comparison), format_title(comparison), comparison.notes)


def format_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown: a heading, the table and a list of the notes, with a newline at the end."""
    columns = table_columns(comparison)
    lines = [f"## {_escape(format_title(comparison))}", "", _format_cells(columns), "|" + " ---: |" * len(columns)]
    lines += [_format_cells(row) for row in table_rows(comparison)]
    return "\n".join([*lines, "", *(f"- {_escape(note)}" for note in comparison.notes)]) + "\n"


def _format_cells(cells: list[str]) -> str:
    return f"| {' | '.join(map(_escape, cells))} |"


def _escape(text: str) -> str:
    """Return the text on one line, with the characters escaped that Markdown takes for HTML or for the end of a
    cell."""
    return html.escape(" ".join(text.split()), quote=False).replace("\\", "\\\\").replace("|", "\\|")


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as one JSON object with the fields of `Comparison`, in which `rows` is called `runs`.

    Each of the `runs` has the fields of `Row`; its `ideal` has those of `IdealComparison`, or is null.
    """
    values = dataclasses.asdict(comparison)
    values["runs"] = list(values.pop("rows"))
    values["notes"] = list(values["notes"])
    return values
