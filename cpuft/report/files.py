"""The files of a report: where runs are found, and where the report is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cpuft.files import write_text
from cpuft.record import FILE_NAME
from cpuft.report.comparison import Comparison
from cpuft.report.table import format_markdown, format_text, to_json


def find_runs(paths: Sequence[str]) -> list[str]:
    """Run directories, each once: the named ones, or those one level below a named one that holds no record itself."""
    runs: list[str] = []
    for path in paths:
        below = sorted(str(record.parent) for record in Path(path).glob(f"*/{FILE_NAME}"))
        runs += [path] if (Path(path) / FILE_NAME).exists() or not below else below
    return list({Path(run).resolve(): run for run in runs}.values())


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
