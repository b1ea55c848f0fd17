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


def find_runs(paths: Sequence[str]) -> list[str]:
    """Run directories, each once: the named ones, or those one level below a named one that holds no record itself."""
    runs: list[str] = []
    for path in paths:
        below = sorted(str(record.parent) for record in Path(path).glob(f"*/{FILE_NAME}"))
        runs += [path] if (Path(path) / FILE_NAME).exists() or not below else below
    return list({Path(run).resolve(): run for run in runs}.values())


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
