"""What a run leaves when its training is complete: model, predictions, end of the record, and how good the model is."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from cpuft.config.train import WorkerConfig
from cpuft.errors import describe_error
from cpuft.files import write_text
from cpuft.judge.predictions import FILE_NAME, read_predictions
from cpuft.judge.tables import describe_judgement
from cpuft.rank.other_load import OtherLoad
from cpuft.record import Header, format_baseline
from cpuft.tasks import SENTENCE_TRANSFORMERS_KINDS
from cpuft.train.baseline_process import BaselineProcess
from cpuft.train.checkpoint.final_model import MODEL_DIR, save_model
from cpuft.train.checkpoint.model_card import format_model_card
from cpuft.train.checkpoint.writer_thread import wait_for_disks
from cpuft.train.ranks import gather
from cpuft.train.reporter import Progress, RunReporter, TrainingResult, make_footer
from cpuft.train.result_warnings import find_last_warning
from cpuft.train.saved_predictions import save_predictions
from cpuft.train.setup import TrainingSetup


def save_results(
    setup: TrainingSetup,
    reporter: RunReporter,
    worker: WorkerConfig,
    header: Header,
    result: TrainingResult,
    baseline: BaselineProcess | None,
    load: OtherLoad,
    started: float,
) -> None:
    """Save model and predictions, end the record, wait for the baseline, and show how good the model is. Collective."""
    config, prepared, objective, folder = setup.config, setup.prepared, setup.objective, Path(worker.run_dir)
    progress, record, evaluation = reporter.progress, reporter.record, result.evaluation
    unit = 1024 if sys.platform == "linux" else 1  # getrusage(2) of macOS counts bytes
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, load.measure_share()
    peak_memory, other_load = map(max, zip(*gather(own)))
    with wait_for_disks():  # the other ranks also wait here until rank 0 has judged the model
        with setup.exchange.full_weights():
            if record and config.save_model and not worker.independent:
                source = config.tokenizer or config.model
                # sentence-transformers loads whole models.
                merged = config.lora_merge or prepared.kind in SENTENCE_TRANSFORMERS_KINDS
                save_model(setup.model, source, worker.run_dir, merged, prepared.tokenizer, objective.finish_folder)
        found = None
        if record:
            if evaluation and result.predictions:
                warning = save_predictions(folder, config, prepared, evaluation, result.predictions)
                if warning:
                    progress.show(warning)
            footer = make_footer(result, peak_memory, other_load, time.perf_counter() - started)
            record.write(footer)
            found = baseline.finish() if baseline else None
            if found:
                progress.show_result(format_baseline(found))
                record.write(found)
            if (folder / MODEL_DIR).is_dir() and evaluation:
                card = format_model_card(header, evaluation, footer, found)
                write_text(folder / MODEL_DIR / "README.md", card)
            show_judgement(folder, progress)
        if reporter.watch:
            simple = found.metrics if found else None
            if warning := find_last_warning(reporter.watch, objective, evaluation, result.predictions, simple):
                progress.show(warning)


def show_judgement(folder: Path, progress: Progress) -> None:
    """Show where the saved model fails, if the run's folder has predictions; if that fails, show a warning only."""
    if not (folder / FILE_NAME).is_file():
        return
    try:
        from cpuft.judge.judgement import judge  # imports SciPy, for which no rank should wait at its start

        for line in describe_judgement(judge(read_predictions(str(folder)))):
            progress.show_result(line)
    except Exception as error:
        reason = describe_error(error)
        progress.show(f"warning: the errors of the model could not be analysed ({reason}): the run is complete")
