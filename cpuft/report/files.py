"""The files of a report: where runs are found, and where the report is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpuft.errors import CpuftError
from cpuft.files import write_text
from cpuft.record import FILE_NAME, read_record
from cpuft.report.comparison import Comparison, compare
from cpuft.report.page import write_page
from cpuft.report.table import format_markdown, format_text, to_json


def find_runs(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Find the runs in directories, or one level below a directory that holds no record itself.

    Returns
    -------
    tuple[list[str], list[str]]
        The run directories, each once, and those of several `paths` that are files or directories without a record, as
        a shell's DIR/* names them. A path that does not exist is returned as a run, and so is a path that is the only
        one: reading its record says what is wrong.
    """
    runs: list[str] = []
    others: list[str] = []
    for path in paths:
        below = sorted(str(record.parent) for record in Path(path).glob(f"*/{FILE_NAME}"))
        is_run = (Path(path) / FILE_NAME).exists() or Path(path).suffix == ".jsonl" or not Path(path).exists()
        if is_run or below:
            runs += [path] if is_run else below
        else:
            others.append(path)
    if not runs:
        return list(paths[:1]), []
    return list({Path(run).resolve(): run for run in runs}.values()), others


def page_path(paths: Sequence[str]) -> Path:
    """Where a page of these goes: into the one folder that was named, else where you are."""
    return (Path(paths[0]) if len(paths) == 1 and Path(paths[0]).is_dir() else Path()) / "report.html"


def write_report(comparison: Comparison, run_dir: str) -> Path:
    """Write report.txt, report.md and report.json; the path of the Markdown one."""
    texts = {
        "txt": format_text(comparison),
        "md": format_markdown(comparison),
        "json": json.dumps(to_json(comparison), indent=2) + "\n",
    }
    for ending, text in texts.items():
        write_text(Path(run_dir) / f"report.{ending}", text)
    return Path(run_dir) / "report.md"


def write_all(runs: Sequence[str], run_dir: str) -> Iterator[str]:
    """Report on a comparison that has just ended: its table and where all of it was written, to be shown."""
    records = [read_record(run) for run in runs]
    comparison = compare(records)
    path = write_report(comparison, run_dir)
    yield format_text(comparison).rstrip("\n")
    try:
        yield f"page: {write_page(records, path.with_suffix('.html'))}"
    except CpuftError as error:
        yield f"no page: {error}"
    yield f"report: {path}"
