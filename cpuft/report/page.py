"""Write reports: an HTML page without external references, and the text, Markdown and JSON files of a comparison."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuft.errors import CpuftError, counted, requires
from cpuft.files import write_text
from cpuft.judge.tables import list_tables
from cpuft.record import FILE_NAME, Record, drop_warm_up, read_record
from cpuft.report import comparison_tables, plots
from cpuft.report.comparison import Comparison, compare, group_repeats, list_settings, order_runs
from cpuft.report.host_drawings import MOST_HOSTS, draw_hosts
from cpuft.report.judgement import has_predictions, read_run_predictions
from cpuft.report.quality import Quality
from cpuft.serialization import format_json

if TYPE_CHECKING:  # imports NumPy, without which most reports are made
    from cpuft.judge.judgement import Judgement

_TEMPLATE = Path(__file__).with_name("page.html")
_OURS = b'<meta name="generator" content="cpuft">'
_MOST_EXAMPLES = 20
"""Of each sort of errors."""


def write_page(
    records: Sequence[Record],
    path: Path,
    unfinished: Sequence[Record] = (),
    judgement: Judgement | None = None,
    quality: Quality | None = None,
    examples: bool = True,
) -> Path:
    """Write the page of these runs and their ideals to `path`, and return `path`. An older page of cpuft is replaced.

    A note names the runs that are `unfinished`. A single run may have a `judgement`, and with `examples` shows some
    that its model gets wrong. Two runs may have their `quality`, which alone is shown if they are not the same job.
    Raises CpuftError: `compare` refuses the runs and there is no `quality`, a run has no steps, or matplotlib or Jinja2
    is missing, or the file at `path` is not a page of cpuft.
    """
    notes, runs, comparison = list[str](), list(records), None
    try:
        comparison = compare(runs)
        runs = [group[0] for group in group_repeats(order_runs([one for one in runs if not one.header.independent]))]
    except CpuftError:
        if not quality:
            raise
    if unfinished:
        named = ", ".join(f"{plots.folder_of(one)} ({counted(len(one.steps), 'step')} recorded)" for one in unfinished)
        notes.append(f"left out, because these runs are not finished: {named}.")
    for run in runs:
        if not run.steps:
            raise CpuftError(f"{run.path} has no steps to draw: leave it out of the page")
    errors = None
    if examples and len(records) == 1:
        try:
            errors = _describe_errors(records[0])
        except Exception as error:  # the page is written without them
            notes.append(f"the model's errors are not shown: {str(error) or type(error).__name__}")

    parts = describe(runs, comparison, quality) | {"errors": errors}
    parts["notes"] = [*parts["notes"], *notes]
    if judgement:
        parts["judged"] = list_tables(judgement)
    return render_page(path, parts)


def render_page(path: Path, parts: Mapping[str, Any]) -> Path:
    """Write a page of these parts, by their names in the template; return `path`. CpuftError: no Jinja2, or another
    file is there.
    """
    with requires("plot", "a page needs matplotlib and Jinja2"):
        from jinja2 import Environment, StrictUndefined
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    if path.is_dir() or (path.exists() and _OURS not in path.read_bytes()):
        raise CpuftError(f"{path} exists and is not a page of cpuft: move it away")
    write_text(path, template.render(**parts))
    return path


def describe(runs: Sequence[Record], comparison: Comparison | None, quality: Quality | None) -> dict[str, Any]:
    """Return what the template page.html needs, by name; `runs` has one record for each row of the comparison.

    A row of `legend` is (label, number of the colour, whether the line is dashed). `figures` has lists of (caption,
    SVG) by heading, and `drawings` the label, the drawings of hosts and the number of other hosts of each run.
    """
    different, special, others = list_settings(runs)
    labels, colours = plots.label_runs(runs), plots.COLOURS
    speed = list[tuple[str, str]]()
    if comparison:
        speed = [*plots.draw_speedup(comparison), *plots.draw_missing_time(comparison)]
        parts: dict[str, Any] = {
            "title": comparison_tables.format_title(comparison),
            "verdict": comparison_tables.format_verdict(comparison),
            **dict(zip(("columns", "rows"), comparison_tables.make_table(comparison))),
            **dict(zip(("seed_columns", "seed_rows"), comparison_tables.make_seed_table(comparison))),
            "notes": comparison.notes,
            "quality": quality,
        }
    else:
        parts = {name: getattr(quality, name) for name in ("title", "verdict", "columns", "rows", "notes")}
    return {
        **parts,
        "legend": [(label, number % colours, number >= colours) for number, label in enumerate(labels)],
        "figures": {
            "Speed": speed,
            "Loss and metric": plots.draw_learning_curves(runs),
            "Where the time of a step goes": [plots.draw_phases(runs)],
        },
        "drawings": list(zip(labels, draw_hosts(runs), [max(0, len(run.header.hosts) - MOST_HOSTS) for run in runs])),
        "hosts": [host_row(run) for run in runs],
        "links": [_link_row(run) for run in runs],
        "settings": [*different, *special],
        "other_settings": others,
    }


def _describe_errors(run: Record) -> dict[str, Any] | None:
    """Return the part of the page about examples that a run gets wrong; None if it keeps no predictions or texts."""
    if not has_predictions(run):
        return None
    predictions = read_run_predictions(run)
    if "text" not in predictions.table.column_names:
        return None
    from cpuft.judge.model_errors import list_errors, list_sections, summarize  # imports NumPy

    found = list_errors(str(Path(run.path).parent), predictions, _MOST_EXAMPLES)
    sections = [(heading, [(one, *texts) for one, texts in examples]) for heading, examples in list_sections(found)]
    return {"summary": summarize(found), "sections": sections}


def host_row(run: Record) -> list[str]:
    """Return a run's cells in the table of hosts: folder, "HOST: RANKS" of 8 hosts, CPU model and flags, precision."""
    header = run.header
    ranks = ", ".join(f"{host}: {sum(one.host == host for one in header.ranks)}" for host in header.hosts[:8])
    more = f" and {len(header.hosts) - 8} more" if len(header.hosts) > 8 else ""
    more += " (simulated)" if header.simulated else ""
    return [plots.folder_of(run), ranks + more, header.cpu_model, " ".join(header.cpu_flags), header.precision]


def _link_row(run: Record) -> list[str]:
    """Return the row of a run in the table of links: backend, MB per step, and seconds of waiting."""
    steady = drop_warm_up(run.steps)
    sent = statistics.fmean(line.bytes_sent for line in steady)
    waited = statistics.fmean(line.communication_seconds for line in steady)
    step = statistics.fmean(line.step_seconds for line in steady)
    share = f"{waited / step:.0%}" if step > 0 else "-"
    return [plots.folder_of(run), run.header.backend, f"{sent / 1e6:.1f}", f"{waited:.3f}", share]


def find_runs(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (folders of runs, paths without a record), where runs may be one level below the given folders.

    A path that does not exist, and a file that ends in .jsonl, counts as a run. If there is no run, the first path is
    one: reading it explains what is wrong.
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
    """Return report.html in the only one of `paths` if that is a folder, else report.html in the current folder."""
    return (Path(paths[0]) if len(paths) == 1 and Path(paths[0]).is_dir() else Path()) / "report.html"


def write_report(comparison: Comparison, run_dir: str) -> Path:
    """Write report.txt, report.md and report.json into a folder, and return the path of report.md."""
    texts = {
        "txt": comparison_tables.format_text(comparison),
        "md": comparison_tables.format_markdown(comparison),
        "json": format_json(comparison_tables.to_json(comparison)) + "\n",
    }
    for ending, text in texts.items():
        write_text(Path(run_dir) / f"report.{ending}", text)
    return Path(run_dir) / "report.md"


def write_all(runs: Sequence[str], run_dir: str) -> Iterator[str]:
    """Write the report and the page of runs into a folder; yield what to show, without newlines at the ends.

    As this is a generator, nothing is written and no CpuftError is raised before its first line is taken.
    """
    records = [read_record(run) for run in runs]
    comparison = compare(records)
    path = write_report(comparison, run_dir)
    yield comparison_tables.format_text(comparison).rstrip("\n")
    try:
        yield f"page: {write_page(records, path.with_suffix('.html'))}"
    except CpuftError as error:
        yield f"no page: {error}"
    yield f"report: {path}"
