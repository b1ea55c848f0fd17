"""Aligned text for a terminal or a log, by rich: one form for every table that cpuft prints."""

from __future__ import annotations

import io
from collections.abc import Sequence

WIDTH = 120


def format_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    notes: Sequence[str] = (),
    left: int = 0,
    width: int = 0,
) -> str:
    """A table, then its notes. The first `left` columns are texts, the others are aligned to the right as numbers."""
    from rich import box  # imports a good deal, and most commands print no table
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    # Wide enough for any number of columns: a log has no width, and a terminal wraps by itself. What rich is told to
    # take for a terminal (FORCE_COLOR), and finds dumb, it gives 80 columns whatever is asked for.
    width = max(WIDTH, 16 * len(columns), width)
    console = Console(file=file, width=width, color_system=None, legacy_windows=False, force_terminal=False)
    console.print(table, markup=False, highlight=False)
    for note in notes:
        console.print(f"* {note}", markup=False, highlight=False, width=WIDTH)
    # rich's box begins with an empty line.
    lines = ([title] if title else []) + file.getvalue().rstrip().splitlines()[0 if title else 1 :]
    return "\n".join(line.rstrip() for line in lines) + "\n"
