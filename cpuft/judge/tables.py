"""A judgement in words and tables, for the end of a run, for reports and for their page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuft.errors import escape_controls
from cpuft.terminal import align

if TYPE_CHECKING:  # a report without predictions is also made where NumPy is not installed
    from cpuft.judge.judgement import ClassScore, Judgement, Part
    from cpuft.judge.resampling import MetricEstimate

_MOST_LINES = 6
_LONGEST_NAME = 24
_NAMES = {
    "f1": "F1",
    "f1_macro": "macro F1",
    "f1_micro": "micro F1",
    "f1_weighted": "weighted F1",
    "root_mean_squared_error": "RMSE",
}


@dataclass(frozen=True)
class JudgementTable:
    """A table of what validation rows say about a model."""

    heading: str
    text: str
    columns: list[str]
    rows: list[list[str]]
    shades: list[list[float]] | None = None
    """How dark each cell is, from 0 to 1; None for a table without shades."""


def describe_judgement(judgement: Judgement, is_run: bool = True) -> list[str]:
    """Return lines, or none, on metrics with intervals, classes with most mistakes, and the worst quarter by label.

    `is_run` tells that the rows are the validation rows of a run.
    """
    lines = _describe_metrics(judgement, "validation " * is_run)
    classes = judgement.classes
    worst = sorted(classes, key=_count_missed, reverse=True)
    if judgement.kind == "class" and len(classes) <= 2:
        missed = [one for one in worst if one.mistaken]
        lines += ["; ".join(map(_describe_mistake, missed))] if missed else []
    elif len(classes) > 1 and any(one.rows != one.predicted or _count_missed(one) for one in classes):
        rows = [_list_cells(judgement, one) for one in worst[:_MOST_LINES]]
        lines += _align_texts([[*rows[0]], *([*cells.values()] for cells in rows)])
        if more := len(classes) - _MOST_LINES:
            lines += [f"and {more} more{', which cpuft report shows' * is_run}"] if more > 0 else []
        if worst[0].mistaken and judgement.kind == "class":
            lines.append(f"the most frequent mistake: {_describe_mistake(max(classes, key=lambda one: one.mistaken))}")
    if ranges := [one for one in judgement.ranges if math.isfinite(one.metrics["mean_absolute_error"].value)]:
        lines.append(_describe_range(ranges))
    return lines


def _describe_metrics(judgement: Judgement, of: str) -> list[str]:
    """Return a line with the first metrics that have intervals, such as "accuracy 0.5977 (0.523 to 0.668)"."""
    several = len(judgement.classes) > 2
    parts = [
        f"{_name_metric(name)} {_format(one.value)} ({_format_interval(one)})"
        for name, one in judgement.metrics.items()
        if math.isfinite(one.low)
        and name not in ("f1_weighted", "mean_error")
        and not (several and name in ("precision", "recall"))
    ]
    return [f"95 % intervals with {judgement.rows:,} {of}{judgement.of_rows}: {', '.join(parts[:3])}"] if parts else []


def _count_missed(one: ClassScore) -> int:
    return round(one.rows * (1 - one.recall)) if one.rows else 0


def _describe_mistake(one: ClassScore) -> str:
    name, found = _shorten(one.name), _shorten(one.mistaken_for)
    return f"{one.mistaken:,} of {one.rows:,} rows of {name} are predicted as {found}"


def _describe_range(ranges: Sequence[Part]) -> str:
    worst = max(ranges, key=lambda one: one.metrics["mean_absolute_error"].value)
    error, off = (worst.metrics[name].value for name in ("mean_absolute_error", "mean_error"))
    side = "high" if off > 0 else "low"
    return (
        f"worst where the label is {worst.name}: the mean absolute error is {error:.4g}, and predictions are "
        f"{abs(off):.4g} too {side} on average"
    )


def _name_metric(name: str) -> str:
    return _NAMES.get(name, name.replace("_", " "))


def _shorten(name: str) -> str:
    text = escape_controls(name) or "(empty)"
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 3]}..."


def _format(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "-"


def _format_interval(one: MetricEstimate) -> str:
    return f"{one.low:.3f} to {one.high:.3f}" if math.isfinite(one.low) else "-"


def _align_texts(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line for each row: the first and the last column aligned to the left, the others to the right."""
    width = max(len(row[-1]) for row in rows)
    return [line.rstrip() for line in align([[*row[:-1], f"{row[-1]:<{width}}"] for row in rows])]


def _list_cells(judgement: Judgement, one: ClassScore, has_interval: bool = False) -> dict[str, str]:
    what = {"entities": "entity", "words": "tag"}.get(judgement.unit, "class")
    cells = {what: _shorten(one.name), judgement.unit: f"{one.rows:,}", "predicted": f"{one.predicted:,}"}
    cells |= {"precision": _format(one.precision), "recall": _format(one.recall), "F1": _format(one.f1.value)}
    if has_interval:
        cells["95 % interval of F1"] = _format_interval(one.f1)
    if judgement.kind != "labels":
        mistaken = f"{_shorten(one.mistaken_for)} ({one.mistaken:,})" if one.mistaken else "-"
        cells["most often mistaken for"] = mistaken
    return cells


def list_tables(judgement: Judgement, most: int = 50) -> list[JudgementTable]:
    """Return the tables that there is data for, metrics first; of more than `most` classes, those most mistaken."""
    tables = [_tabulate_metrics(judgement)]
    if judgement.classes:
        tables.append(_tabulate_classes(judgement, most))
    if judgement.confusions:
        tables.append(_tabulate_confusions(judgement))
    if found := judgement.calibration:
        text = (
            f"The mean probability of the predictions is {found.confidence:.4f}, and {found.accuracy:.4f} of them are "
            f"right. Expected calibration error: {found.error:.4f}, the mean distance of the two columns, weighted by "
            f"rows; 0 is best."
        )
        bins = [[f"{one.rows:,}", _format(one.confidence), _format(one.accuracy)] for one in found.bins]
        columns = ["rows", "probability", "share that is right"]
        tables.append(JudgementTable("How sure the model is", text, columns, bins))
    values = f"The {len(judgement.slices)} most frequent of the {judgement.values:,} values of this column."
    if judgement.values == len(judgement.slices):
        values = "Rows by their value in this column, the most frequent ones first."
    for heading, what, parts, text in (
        ("By length", "tokens", judgement.lengths, "Quarters of the rows by their number of tokens."),
        ("By label", "label", judgement.ranges, "Quarters of the rows by their label."),
        (f"By {_shorten(judgement.slice_by)}", _shorten(judgement.slice_by), judgement.slices, values),
    ):
        if parts:
            tables.append(JudgementTable(heading, text, *_list_parts(what, parts, judgement.of_rows)))
    return tables


def _tabulate_metrics(judgement: Judgement) -> JudgementTable:
    text = (
        f"Another sample of {judgement.rows:,} such {judgement.of_rows} would mostly give metrics in these intervals. "
        "They say nothing about another seed."
    )
    rows = [[_name_metric(name), _format(one.value), _format_interval(one)] for name, one in judgement.metrics.items()]
    return JudgementTable("How sure the metrics are", text, ["metric", "value", "95 % interval"], rows)


def _tabulate_classes(judgement: Judgement, most: int) -> JudgementTable:
    unit, classes = judgement.unit, judgement.classes
    text = (
        f"Precision: the share of the {unit} predicted as this class that have it. Recall: the share of the {unit} "
        f"that have it which are predicted as it. F1 is high only if both are."
    )
    if len(classes) > most:
        text += f" These are the {most} of {len(classes):,} classes with the most mistakes."
        classes = sorted(classes, key=_count_missed, reverse=True)[:most]
    has_interval = any(math.isfinite(one.f1.low) for one in classes)
    rows = [_list_cells(judgement, one, has_interval) for one in classes]
    return JudgementTable("Each class", text, [*rows[0]], [[*cells.values()] for cells in rows])


def _tabulate_confusions(judgement: Judgement) -> JudgementTable:
    heading = "What is mistaken for what"
    unit = "words" if judgement.kind == "tags" else "rows"
    cells = {(one.label, one.prediction): one.rows for one in judgement.confusions}
    if all(label != prediction for label, prediction in cells):
        text = f"The most frequent mistakes, by number of {unit}."
        rows = [[_shorten(label), _shorten(found), f"{count:,}"] for (label, found), count in cells.items()]
        return JudgementTable(heading, text, ["label", "predicted as", unit], rows)
    names = sorted({name for pair in cells for name in pair})
    sums = {label: sum(cells.get((label, found), 0) for found in names) for label in names}
    counts = [[cells.get((label, found), 0) for found in names] for label in names]
    return JudgementTable(
        heading,
        f"Number of {unit} with the label on the left that are predicted as the class above. The diagonal is right.",
        ["label", *map(_shorten, names)],
        [[_shorten(label), *(f"{count:,}" for count in row)] for label, row in zip(names, counts)],
        [[0.0, *(count / max(1, sums[label]) for count in row)] for label, row in zip(names, counts)],
    )


def _list_parts(what: str, parts: Sequence[Part], of_rows: str) -> tuple[list[str], list[list[str]]]:
    columns = [text for name in parts[0].metrics for text in (_name_metric(name), "95 % interval")]
    cells = (
        [text for one in part.metrics.values() for text in (_format(one.value), _format_interval(one))]
        for part in parts
    )
    rows = [[_shorten(part.name), f"{part.rows:,}", *own] for part, own in zip(parts, cells)]
    return [what, of_rows, *columns], rows
