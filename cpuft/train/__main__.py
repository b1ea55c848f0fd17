"""One rank of a training run: `python -m cpuft.train --task=mrpc ...`, alone or under any launcher."""

from __future__ import annotations

import sys
import time

from cpuft.config.fields import parse_arguments, split_arguments
from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.errors import RESUMABLE
from cpuft.rank.diagnostics import start_reporting
from cpuft.terminal import protect_streams
from cpuft.train.startup import pause_garbage_collection, report_error


def main() -> None:
    """Train as the command line says, and end the process without the cleanup of C libraries; this never returns.

    The exit code is 0 after a whole run, 75 after an interruption with a checkpoint, else that of `report_error`.
    """
    started = time.perf_counter()
    protect_streams()
    start_reporting()
    pause_garbage_collection()
    try:
        train, worker = parse_worker(sys.argv[1:])
        from cpuft.train.checkpoint.timing import TrainingInterrupted
        from cpuft.train.run import run

        try:
            run(train, worker, started)
            code = 0
        except TrainingInterrupted:
            code = RESUMABLE
    except Exception as error:
        code = report_error(error)
    from cpuft.comm.registration import exit_process  # imports torch, so not before garbage collection is paused

    exit_process(code)  # at once: other ranks may hang in a collective, and a normal exit would wait for them


def parse_worker(argv: list[str]) -> tuple[TrainConfig, WorkerConfig]:
    """Return both configurations from `--name=value` arguments in any order; options that are not given have their
    defaults. Raises CpuftError: an option is unknown, or its value is not valid.
    """
    own, others = split_arguments(WorkerConfig, argv)
    return parse_arguments(TrainConfig, others), parse_arguments(WorkerConfig, own)


if __name__ == "__main__":
    main()
