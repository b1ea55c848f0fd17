"""`cpuft export RUN`: the model of a run in the format of a serving runtime, made on this machine. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cpuft.cli.common import find_model_folder, plan_module, run_or_print
from cpuft.cli.options import CONFIG_FILE, DRY_RUN_HERE, Verb, complete_runs, make_options, pick
from cpuft.config.export import ExportConfig
from cpuft.config.fields import format_arguments
from cpuft.errors import CpuftError

if TYPE_CHECKING:
    from cpuft.record import Header


@click.command(
    cls=Verb,
    params=[
        *make_options(ExportConfig, "run"),
        DRY_RUN_HERE,
        CONFIG_FILE,
        click.Argument(["run"], metavar="RUN", shell_complete=complete_runs),
    ],
)
def export(dry_run: bool, **values: Any) -> None:
    """Export the model of a finished run to ONNX or OpenVINO.

    RUN is the folder of the run. Runs of --task text and chat are not exported. The new folder holds the exported
    model, its tokenizer, and its configuration with the names of the labels. The outputs of the exported model are
    compared with those of the run's model before the folder gets its name. With --validate, a table shows metrics and
    speed of both on the validation examples of the run; it is also written to validation.json in the new folder.
    """
    from cpuft.record import read_record

    asked = pick(ExportConfig, values)
    check_export(asked, read_record(asked.run).header)
    step = plan_module(f"export the model of {asked.run}", "cpuft.train.export", format_arguments(asked))
    run_or_print(step, dry_run)


def check_export(asked: ExportConfig, header: Header) -> None:
    """Raise CpuftError if the run is of task text or chat or has no model, or an option needs --validate."""
    if header.task in ("text", "chat"):
        raise CpuftError(f"{asked.run} is of --task {header.task}, whose model predicts no labels: give another run")
    for flag, value in (("--data-dir", asked.data_dir), ("--batch-size", asked.batch_size)):
        if value and not asked.validate:
            raise CpuftError(f"{flag} is for --validate: add it, or leave {flag} out")
    find_model_folder(asked.run)
