"""One rank of a training run: `python -m cpuft.train --task=mrpc ...`, alone or under any launcher."""

from __future__ import annotations

import sys
import time
import traceback

from cpuft.config.fields import parse_arguments, split_arguments
from cpuft.config.train import TrainConfig, WorkerConfig
from cpuft.errors import RESUMABLE
from cpuft.rank.diagnostics import start_reporting
from cpuft.terminal import protect_streams
from cpuft.train.startup import describe_exit, pause_garbage_collection


def main() -> None:
    """Train as the command line says, and end the process without the cleanup of C libraries; this never returns.

    The exit code is 0, 75 after an interruption with a checkpoint, or as `describe_exit` says, which may mean a
    traceback.
    """
    started = time.perf_counter()
    protect_streams()
    start_reporting()
    pause_garbage_collection()
    try:
        train, worker = parse_worker(sys.argv[1:])
        from cpuft.train.checkpoint.policy import TrainingInterrupted
        from cpuft.train.run import run

        try:
            run(train, worker, started)
            code = 0
        except TrainingInterrupted:
            code = RESUMABLE
    except Exception as error:
        problem, code = describe_exit(error)
        if problem:
            print(f"cpuft: error: {problem}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
    from cpuft.comm.registration import exit_process  # imports torch, so not before garbage collection is paused

    exit_process(code)  # at once: other ranks may hang in a collective, and a normal exit would wait for them


def parse_worker(argv: list[str]) -> tuple[TrainConfig, WorkerConfig]:
    """Return the configurations from `--name=value` arguments, each of which belongs to the class with its option.
    Raises CpuftError: one is unknown or has no valid value.
    """
    own, others = split_arguments(WorkerConfig, argv)
    return parse_arguments(TrainConfig, others), parse_arguments(WorkerConfig, own)


if __name__ == "__main__":
    main()
