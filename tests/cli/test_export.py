"""`cpuft export`: what is refused at once, and the process that exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpuft.cli.export import check_export
from cpuft.config.export import ExportConfig
from cpuft.config.fields import parse_arguments
from cpuft.errors import CpuftError
from cpuft.record import read_record
from tests.conftest import find_arguments, run_cpuft
from tests.records import make_record
from tests.report.test_comparison import write_record


def make_run(folder: Path, task: str = "mrpc") -> ExportConfig:
    """A run with a record and the configuration of a model."""
    write_record(make_record(1, task=task), folder)
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    return ExportConfig(run=str(folder))


@pytest.mark.parametrize(
    "task, asked, message",
    [
        (
            "text",
            ExportConfig(),
            "is of --task text, whose model predicts no labels: give another run",
        ),
        (
            "mrpc",
            ExportConfig(data_dir="glue"),
            "--data-dir is for --validate: add it, or leave",
        ),
        (
            "mrpc",
            ExportConfig(batch_size=8),
            "--batch-size is for --validate: add it, or leave",
        ),
    ],
)
def test_requests_that_fit_no_run(task: str, asked: ExportConfig, message: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", task)
    with pytest.raises(CpuftError) as error:
        check_export(replace(asked, run=run.run), read_record(run.run).header)
    assert message in str(error.value)


def test_a_run_without_a_model_is_refused(tmp_path: Path) -> None:
    write_record(make_record(1), tmp_path / "bare")
    done = run_cpuft("export", "bare")
    wanted = "bare has no folder model, as the run is unfinished or had --no-save-model: give another"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"cpuft: error: {wanted}\n")


def test_the_plan_is_the_process_that_is_started(tmp_path: Path) -> None:
    asked = replace(make_run(tmp_path / "a 'run"), format="openvino", precision="int8", validate=True)
    done = run_cpuft("export", asked.run, "--format=openvino", "--precision=int8", "--validate", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert parse_arguments(ExportConfig, find_arguments(done.stdout, "cpuft.train.export")) == asked
    assert [path.name for path in Path(asked.run).iterdir() if path.name not in ("record.jsonl", "model")] == []
