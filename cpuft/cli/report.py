"""`cpuft report`: recorded runs as a table, as JSON, or as an HTML page."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import click

from cpuft.cli.common import say
from cpuft.cli.options import CONFIG_FILE, Verb, complete_runs
from cpuft.errors import CpuftError


@click.command(
    cls=Verb,
    params=[
        click.Option(["--json"], is_flag=True, help="Print the table as one JSON object"),
        click.Option(["--markdown"], is_flag=True, help="Print the table in Markdown"),
        click.Option(
            ["--html"],
            is_flag=True,
            help="Write a page with plots to report.html: in the folder RUN if there is one RUN, otherwise in the "
            "current folder",
        ),
        click.Option(
            ["--no-examples"],
            is_flag=True,
            help="With --html, leave out the validation examples that a run gets wrong, because their texts may be "
            "private; the run keeps them in its predictions.parquet",
        ),
        click.Option(
            ["--to"],
            default="",
            metavar="LIST",
            help="Send the records to these trackers, separated by commas, instead of showing them: tensorboard, "
            "mlflow, wandb, trackio",
        ),
        click.Option(
            ["--metric"],
            default="",
            metavar="NAME",
            help="Of a sweep, the metric by which its configurations are compared (default: the sweep's own --metric, "
            "or the first one that the task reports)",
        ),
        CONFIG_FILE,
        click.Argument(["runs"], nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs),
    ],
    alternatives=tuple(itertools.combinations(("to", "html", "json", "markdown"), 2)),
)
def report(
    runs: tuple[str, ...],
    json: bool,
    markdown: bool,
    html: bool,
    no_examples: bool,
    to: str,
    metric: str,
    config: str,
) -> None:
    """Show recorded runs side by side, as a table or an HTML page.

    RUN is the folder of a run or of a comparison. The runs must be complete, and must have trained the same model on
    the same data with the same options, apart from the number of ranks and what belongs to it. If RUN is a folder of
    several runs, such as runs, unfinished ones are left out, and there is a table for each group of comparable runs.

    For a single run, the report also shows how sure its metrics are, each class, what is mistaken for what, and how
    the model does by length and by --slice-by, from the file predictions.parquet of the run.

    For two runs RUN, A and B, the report also says whether the difference of their metrics is real or may be chance, if
    they have predicted the same validation rows. Such runs may differ in the model and in any option; then only their
    metrics are compared.

    If RUN is the folder of a sweep, its configurations are shown, sorted by the mean of their metric.
    """
    from cpuft.record import Record, read_record
    from cpuft.report import comparison_tables
    from cpuft.report.comparison import compare, group_jobs
    from cpuft.report.judgement import format_judgement, judge_record
    from cpuft.report.page import find_runs, page_path, write_page
    from cpuft.report.quality import compare_pair
    from cpuft.serialization import format_json
    from cpuft.sweep.results import choose_metric, format_sweep, sweep_to_json, write_sweep_page
    from cpuft.sweep.study import FILE_NAME as SWEEP_FILE
    from cpuft.sweep.study import read_sweep
    from cpuft.trackers import check_trackers, parse_trackers, send_record

    if sweeps := [run for run in runs if Path(run, SWEEP_FILE).is_file()]:
        if len(runs) > 1 or markdown or to:
            raise CpuftError(f"{sweeps[0]} is a sweep: show it alone, as a table, with --json or with --html")
        found_sweep = read_sweep(runs[0])
        if metric:
            choose_metric(found_sweep, metric)
        if html:
            click.echo(f"page: {write_sweep_page(found_sweep, Path(runs[0], 'report.html'))}")
            return
        text = format_json(sweep_to_json(found_sweep)) + "\n" if json else format_sweep(found_sweep)
        click.echo(text, nl=False)
        return
    if metric:
        raise CpuftError("--metric is for the folder of a sweep: leave it out, because other reports show all metrics")
    if no_examples and not html:
        raise CpuftError("--no-examples leaves examples out of the HTML page: give --html as well")
    found, others = find_runs(runs)
    if others:
        say(f"skipped, because there is no record.jsonl in them: {', '.join(others)}")
    if to:
        check_trackers(to, os.environ)
        for run in found:
            send_record(run, parse_trackers(to))
            click.echo(f"sent to {to}: {run}")
        return
    records, unfinished = [read_record(run) for run in found], list[Record]()
    format_comparison = comparison_tables.format_markdown if markdown else comparison_tables.format_text
    if len(runs) == 1 and found != list(runs):
        finished = [record for record in records if record.footer and record.footer.samples]
        if unfinished := [record for record in records if record not in finished]:
            folders = ", ".join(str(Path(record.path).parent) for record in unfinished)
            say(f"skipped, because these runs are not finished: {folders}")
        jobs = group_jobs(finished)
        if len(jobs) > 1 and not (html or json):
            click.echo("\n".join(format_comparison(compare(job)) for job in jobs), nl=False)
            return
        records = finished or records
    quality, judgement = None, None
    if len(runs) == 2 and found == list(runs):
        comparison, quality, problem = compare_pair(*records)
        if problem:
            say(f"metrics are not compared row by row: {problem}")
    else:
        comparison = compare(records)
    if len(records) == 1 and not markdown:
        try:
            judgement = judge_record(records[0])
        except CpuftError as error:
            say(f"where the model fails is not shown: {error}")
    if html:
        path = page_path(runs)
        write_page(records, path, unfinished, judgement, quality, examples=not no_examples)
        click.echo(f"page: {path}")
    elif json:
        told = comparison_tables.to_json(comparison) if comparison else {}
        told |= {"quality": quality.to_json()} if quality else {}
        told |= {"judgement": dataclasses.asdict(judgement)} if judgement else {}
        click.echo(format_json(told))
    else:
        format_quality = comparison_tables.format_quality_markdown if markdown else comparison_tables.format_quality
        texts = [format_comparison(comparison)] if comparison else []
        texts += [format_quality(quality)] if quality else []
        texts += [format_judgement(judgement)] if judgement else []
        click.echo("\n".join(texts), nl=False)
