"""Draw the figures of the report page as SVG: speedup, missing time, learning, phases."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpuft.errors import requires
from cpuft.record import STEP_PHASES, Record, drop_warm_up
from cpuft.report.comparison import MISSING_TIME, Comparison

COLOURS = 8
"""Number of colours in the stylesheet of the page (--c0, --c1, ...)."""
_INK = "#010203"
_MOST_POINTS = 150
_MOST = 1e100
"""Numbers beyond this are left out of a plot."""
_WIDTH = 4.5
"""Width of a figure in inches, so that a point is about a pixel on a phone."""
_SETTINGS = {
    "svg.fonttype": "none",  # the page's own font, and words that can be found
    "text.parse_math": False,  # names may hold a dollar
    "font.size": 11,
    "legend.fontsize": 9.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
}


@dataclass(frozen=True)
class Line:
    """One line of a plot."""

    label: str
    x: list[float]
    y: list[float]
    off: list[float] | None = None
    """Half the width of the interval at each point, drawn as an error bar; None for no intervals."""
    dashed: bool = False
    colour: int = -1
    """Number of the colour (modulo COLOURS); -1 for the colour of the text."""


@dataclass(frozen=True)
class Panel:
    """One plot of lines."""

    caption: str
    """What the plot shows, as a sentence."""
    name: str
    """The same for screen readers; not drawn."""
    axes: tuple[str, str]
    lines: list[Line]
    """Values beyond 1e100 and NaN leave a gap."""
    marker: str = ""
    """matplotlib's marker for each point, such as "o"; lines with intervals always have "o"."""
    counts: bool = False
    """x counts things: both axes begin at 0, each x has a tick, and the labels of the lines stand in a legend."""
    ticks: Mapping[float, str] = field(default_factory=dict)
    """x -> its label; empty for numbers that matplotlib chooses. With some, up to `COLOURS` lines get a legend."""


def _colour(number: int) -> str:
    """Return a placeholder colour that does not occur elsewhere in an SVG; the stylesheet's colour replaces it."""
    return _INK if number < 0 else f"#0102f{number % COLOURS:x}"


def _render(name: str, height: float, fill: Callable[[Any], None]) -> str:
    """Return a matplotlib figure, after `fill` has drawn into it, as SVG for a page."""
    with requires("plot", "a page needs matplotlib and Jinja2"):
        import matplotlib.figure
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure = matplotlib.figure.Figure(figsize=(_WIDTH, height), layout="constrained")
        fill(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(file.getvalue(), name)


def _for_page(svg: str, name: str) -> str:
    """Return the SVG for a page with other SVGs: no prologue, metadata or fixed size, and unique identifiers."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r" *<metadata>.*?</metadata>\n", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'<svg (.*?)width="[^"]*pt" (.*?)height="[^"]*pt"', r"<svg \1\2", svg, count=1, flags=re.DOTALL)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)
    svg = re.sub(r" *<style .*?</style>\n| font-family: [^;\"]*;", "", svg)
    svg = re.sub(r"#0102f([0-9a-f])", r"var(--c\1)", svg)
    # A number of its own for what is black by default, too.
    return svg.replace(_INK, "currentColor").replace("#000000", "currentColor")


def thin(values: Sequence[float], most: int = _MOST_POINTS) -> list[float]:
    """Return at most `most` values, each the mean of the finite ones of equally many neighbours, or NaN without any."""
    size = max(1, math.ceil(len(values) / most))
    parts = [[v for v in values[at : at + size] if math.isfinite(v)] for at in range(0, len(values), size)]
    return [sum(part) / len(part) if part else math.nan for part in parts]


def draw(panel: Panel) -> tuple[str, str]:
    """Return (caption, SVG) of a panel, for an HTML page with the colours --c0, --c1 ...; CpuftError: no matplotlib."""
    return panel.caption, _render(panel.name, 3.2, lambda figure: _draw_panel(figure.subplots(), panel, _colour))


def _draw_panel(drawn: Any, panel: Panel, colour: Callable[[int], str]) -> None:
    for line in panel.lines:
        style = {"color": colour(line.colour), "linestyle": "--" if line.dashed else "-", "linewidth": 1.6}
        y = [value if abs(value) < _MOST else math.nan for value in line.y]
        if line.off is None:
            drawn.plot(line.x, y, label=line.label, marker=panel.marker, **style)
        else:
            drawn.errorbar(line.x, y, yerr=line.off, label=line.label, marker="o", capsize=4, **style)
    drawn.set(xlabel=panel.axes[0], ylabel=panel.axes[1])
    if panel.ticks:
        drawn.set_xticks([*panel.ticks], [*panel.ticks.values()])
        if 1 < len(panel.lines) <= COLOURS:
            drawn.legend()
    if panel.counts:
        drawn.set_xticks(sorted({x for line in panel.lines for x in line.x}))
        drawn.set_ylim(bottom=0)
        drawn.set_xlim(left=0)
        drawn.legend()
    elif not panel.ticks:
        drawn.locator_params(axis="x", nbins=5)  # more labels of six digits would overlap


def make_figure(panels: Sequence[Panel]) -> Any:
    """Return a matplotlib figure of panels side by side, titled by their captions; CpuftError without matplotlib."""
    with requires("plot", "a figure needs matplotlib"):
        import matplotlib.figure
    settings = {name: value for name, value in _SETTINGS.items() if value != _INK and "svg" not in name}
    with matplotlib.rc_context(settings):
        figure = matplotlib.figure.Figure(figsize=(_WIDTH * len(panels), 3.4), layout="constrained")
        for panel, drawn in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0]):
            _draw_panel(drawn, panel, lambda number: "0.4" if number < 0 else f"C{number}")
            drawn.set_title(panel.caption.rstrip("."))
            if len(panel.lines) > 1:
                drawn.legend()
    return figure


def _draw_bars(name: str, axis: str, labels: Sequence[str], parts: dict[str, list[float]]) -> str:
    """Return an SVG with a stacked bar per label, from top to bottom; `parts` has each part's lengths in all bars."""

    def fill(figure: Any) -> None:
        panel = figure.subplots()
        places, left = range(len(labels)), [0.0] * len(labels)
        for number, (part, values) in enumerate(parts.items()):
            panel.barh(places, values, left=left, label=part, color=_colour(number), height=0.75)
            left = [start + value for start, value in zip(left, values)]
        panel.set_yticks(places, labels, fontsize=9)
        panel.margins(y=0.01)
        panel.invert_yaxis()
        panel.set(xlabel=axis)
        panel.grid(axis="y", visible=False)
        figure.legend(loc="outside upper left", ncols=3)

    return _render(name, 1.3 + 0.24 * len(labels), fill)


_MOST_BARS = 40


def draw_speedup(comparison: Comparison) -> list[tuple[str, str]]:
    """Return [(caption, SVG)] of the speedup by ranks; [] for one or two numbers of ranks."""
    if len({row.np for row in comparison.rows}) < 3:
        return []
    return [draw(panel) for panel in list_speedup_panels(comparison)]


def list_speedup_panels(comparison: Comparison) -> list[Panel]:
    """Return a list of the panel with the speedup over the number of ranks; [] if all runs have the same number."""
    rows, base = comparison.rows, comparison.rows[0]
    if rows[-1].np == base.np:
        return []
    ranks = [float(row.np) for row in rows]
    off = [row.intervals.get("speedup", 0.0) for row in rows]
    lines = [
        Line("measured", ranks, [row.speedup for row in rows], off if any(off) else None, colour=0),
        Line("linear speedup", ranks, [row.np / base.np for row in rows], dashed=True),
    ]
    ideals = [(float(row.np), row.speedup / row.ideal.efficiency) for row in rows if row.ideal]
    if ideals:
        lines.append(Line("ideal", [x for x, _ in ideals], [y for _, y in ideals], colour=2))
    axes = ("ranks", f"times as fast as np {base.np}")
    told = " The ideal: as many independent ranks at the same time." if ideals else ""
    return [Panel(f"Speedup, with intervals if there are repeats.{told}", "Speedup", axes, lines, "o", counts=True)]


def draw_missing_time(comparison: Comparison) -> list[tuple[str, str]]:
    """Return [(caption, SVG)] of the ideal's step and the missing time above 0; [] if no run has parts of an ideal."""
    rows = [(row, row.ideal) for row in comparison.rows if row.ideal and row.ideal.parts]
    if not rows:
        return []
    parts = {"ideal": [ideal.ideal_seconds for _, ideal in rows]}
    parts |= {name: [max(0.0, ideal.parts[name]) for _, ideal in rows] for name in MISSING_TIME}
    figure = _draw_bars("Compared with the ideal", "seconds of a step", [f"np {row.np}" for row, _ in rows], parts)
    return [("The step of the ideal, and where the missing time of each run went.", figure)]


def draw_learning_curves(runs: Sequence[Record]) -> list[tuple[str, str]]:
    """Return (caption, SVG) of each of `list_learning_panels`, without panels whose lines are single points."""
    panels = list_learning_panels(runs)
    return [draw(panel) for panel in panels if any(len(set(line.x)) > 1 for line in panel.lines)]


def list_learning_panels(runs: Sequence[Record]) -> list[Panel]:
    """Return two panels, over seconds and over examples, of the loss, and then of each of the first two metrics."""
    panels, labels = [], label_runs(runs)
    seconds = [[0.0, *itertools.accumulate(line.step_seconds for line in run.steps)] for run in runs]
    samples = [[0.0, *itertools.accumulate(float(line.samples) for line in run.steps)] for run in runs]
    losses = [thin([line.loss for line in run.steps]) for run in runs]
    for what, x in (("seconds of training", seconds), ("examples", samples)):
        lines = [
            Line(label, thin(place[1:]), loss, dashed=number >= COLOURS, colour=number)
            for number, (label, place, loss) in enumerate(zip(labels, x, losses))
        ]
        panels.append(Panel(f"Loss over {what}.", f"Loss over {what}", (what, "loss"), lines))
    names = list(dict.fromkeys(name for run in runs for line in run.evaluations for name in line.metrics))
    for name in names[:2]:
        for what, x in (("seconds of training", seconds), ("examples", samples)):
            lines = [
                _metric_line(label, name, run, place, number)
                for number, (label, run, place) in enumerate(zip(labels, runs, x))
            ]
            caption = f"{name.replace('_', ' ')} over {what}"
            panels.append(Panel(f"{caption}.", caption, (what, name), lines, "o"))
    return panels


def _metric_line(label: str, name: str, run: Record, place: Sequence[float], colour: int) -> Line:
    found = [line for line in run.evaluations if name in line.metrics]
    x = [place[min(max(line.step, 0), len(place) - 1)] for line in found]
    return Line(label, x, [line.metrics[name] for line in found], dashed=colour >= COLOURS, colour=colour)


def label_runs(runs: Sequence[Record]) -> list[str]:
    """Return a label for each run: "np 4", or "np 4, FOLDER" for all if two have the same number of ranks."""
    sizes = [run.header.world_size for run in runs]
    labels = [f"np {size}" for size in sizes]
    twice = len(set(sizes)) < len(sizes)
    return [f"{label}, {folder_of(run)}" if twice else label for label, run in zip(labels, runs)]


def folder_of(run: Record) -> str:
    """Return the last 24 characters of the name of a run's folder."""
    path = Path(run.path)
    return (path.parent if path.suffix == ".jsonl" else path).name[-24:]


def draw_phases(runs: Sequence[Record]) -> tuple[str, str]:
    """Return (caption, SVG) with up to 40 bars: one for each rank, or for the fastest and the slowest of each run,
    which must have steps.
    """
    bars: list[tuple[str, dict[str, float]]] = []
    few = sum(run.header.world_size for run in runs) <= _MOST_BARS
    for label, run in zip(label_runs(runs), runs):
        ranks = list(enumerate(phases_of(run)))
        if not few and len(ranks) > 2:
            ordered = sorted(ranks, key=lambda one: sum(one[1].values()) - one[1].get("communication", 0.0))
            ranks = [ordered[0], ordered[-1]]
        bars += [(f"{label}, rank {rank}", phases) for rank, phases in ranks]
    bars = bars[:_MOST_BARS]
    parts = {name: [phases.get(name, 0.0) for _, phases in bars] for name in STEP_PHASES}
    said = "Mean seconds of a step by phase and rank" + ("." if few else ": the fastest and the slowest of each run.")
    return said, _draw_bars("Phases of a step", "seconds", [label for label, _ in bars], parts)


def phases_of(run: Record) -> list[dict[str, float]]:
    """Return each rank's mean seconds of a step, by phase ("data", "forward", "backward", "communication", "update"),
    without the first tenth of the steps; only rank 0's without a footer.
    """
    if run.footer and run.footer.phases:
        return run.footer.phases
    steady = drop_warm_up(run.steps)
    return [{name: statistics.fmean(getattr(line, f"{name}_seconds") for line in steady) for name in STEP_PHASES}]
