"""Where a recorded run fails, as text and as parts of the page."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from cpuft.errors import CpuftError, requires
from cpuft.judge.predictions import FILE_NAME, RunPredictions, explain_damage, read_predictions
from cpuft.judge.tables import list_tables
from cpuft.record import Record
from cpuft.terminal import WIDTH, format_table

if TYPE_CHECKING:  # a report without predictions is also made where NumPy is not installed
    from cpuft.judge.judgement import Judgement


def has_predictions(record: Record) -> bool:
    """Return whether the predictions of a run are beside its record; a run of --task text or chat has none."""
    return Path(record.path).with_name(FILE_NAME).is_file()


def read_run_predictions(record: Record) -> RunPredictions:
    """Read the predictions of a run; CpuftError: there are none, or not those whose metrics the record has."""
    predictions = read_predictions(str(Path(record.path).parent))
    if str(predictions.about.metrics) != str(record.metrics):
        raise CpuftError(
            f"{Path(record.path).with_name(FILE_NAME)} is of another evaluation than the metrics in {record.path}: "
            "fetch the run again"
        )
    return predictions


def judge_record(record: Record) -> Judgement | None:
    """Return what a run's predictions say about its model, None without any; CpuftError: they cannot be judged."""
    if not has_predictions(record):
        return None
    predictions = read_run_predictions(record)
    with requires("train", "predictions are judged with NumPy and SciPy"):
        from cpuft.judge.judgement import judge
    with explain_damage(str(Path(record.path).parent)):
        return judge(predictions)


def format_judgement(judgement: Judgement) -> str:
    """Return the tables of a judgement with their headings, an empty line between them; a newline ends the text."""
    return "\n".join(
        format_table(table.columns, table.rows, f"{table.heading}\n{textwrap.fill(table.text, WIDTH)}", left=1)
        for table in list_tables(judgement, most=20)
    )
