"""One rank of a training run: `python -m cpuft.train --task=mrpc ...`, alone or under any launcher."""

from __future__ import annotations

import sys
import time
import traceback
from typing import NoReturn

from cpuft.config import TrainConfig, WorkerConfig, option_names, parse_arguments
from cpuft.errors import AGAIN, CpuftError, describe_disk, find_full_disk
from cpuft.rank.diagnostics import start_reporting
from cpuft.terminal import keep_streams
from cpuft.train.startup import hurry


def main() -> None:
    """Train; exit 2 with one line for bad input, 74 for a full disk."""
    started = time.perf_counter()
    keep_streams()
    start_reporting()
    hurry()
    try:
        train, worker = parse_worker(sys.argv[1:])
        from cpuft.train.interruption import Stopped
        from cpuft.train.run import run

        try:
            run(train, worker, started)
            _leave(0)
        except Stopped:
            _leave(AGAIN)
    except CpuftError as error:
        _refuse(str(error), error.exit_code)
    except OSError as error:
        if full := find_full_disk(error):
            _refuse(str(full), full.exit_code)
        if said := describe_disk(error):
            _refuse(said)
        _fail()
    except Exception:
        _fail()


def parse_worker(words: list[str]) -> tuple[TrainConfig, WorkerConfig]:
    """Both configurations from the worker's command line: each takes the options that are its own."""
    names = {"--" + name.replace("_", "-") for name in option_names(WorkerConfig)}
    own = [word for word in words if word.partition("=")[0] in names]
    others = [word for word in words if word.partition("=")[0] not in names]
    return parse_arguments(TrainConfig, others), parse_arguments(WorkerConfig, own)


def _fail() -> NoReturn:
    """Say what was raised and end at once, for the reasons of `cpuft.comm.leave` and of `_refuse`."""
    traceback.print_exc()
    _leave(1)


def _refuse(line: str, code: int = 2) -> NoReturn:
    """Say it and end at once: other ranks may hang in a collective, and tearing down would wait for them."""
    print(f"cpuft: error: {line}", file=sys.stderr, flush=True)
    _leave(code)


def _leave(code: int) -> NoReturn:
    from cpuft.comm.registration import leave  # with torch: not before `hurry`

    leave(code)


if __name__ == "__main__":
    main()
