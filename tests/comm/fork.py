"""Started by tests.comm.ranks.fork_ranks: forks ranks, which find torch, transformers and cpuft imported.

It reads a request from each line of its standard input, a JSON object with the fields of `run`, and answers with a line
[exit code, whether the time was over]. It ends with its standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any, NoReturn
from unittest import mock

from cpuft.rank import script
from cpuft.rank.diagnostics import RECORDER, start_reporting
from cpuft.rank.interruption import handle_interruption

_MODULES = ("transformers.models.bert.modeling_bert", "cpuft.train.run", "cpuft.train.embed_on_hosts")
_GRACE_SECONDS = 6.0
"""How long ranks may take to notice that one of them has failed."""


def _become(rank: int, ranks: int, words: list[str], environ: dict[str, str], folder: str, output: str) -> NoReturn:
    """Do in a new process what `python -m cpuft.rank.script WORDS` does that mpirun has started."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(os.devnull, "rb") as nothing, open(output, "ab") as file:
        os.dup2(nothing.fileno(), 0)
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    places = {"PMI_RANK": rank, "PMI_SIZE": ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": ranks}
    os.environ.clear()
    os.environ.update(environ | {name: str(value) for name, value in places.items()} | dict([RECORDER]))
    os.chdir(folder)
    start_reporting(reports_waits=True)
    handle_interruption(is_script=True)
    script.end_process(script.run_script(words))


def run(ranks: int, seconds: float, output: str, **more: Any) -> tuple[int, bool]:
    """Run ranks, whose output goes to a file; when one has failed, the others have some seconds to notice."""
    running = set[int]()
    for rank in range(ranks):
        process = os.fork()
        if not process:
            try:
                _become(rank, ranks, output=output, **more)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(99)
        running.add(process)
    end, code, is_late, asks = time.monotonic() + seconds, 0, False, os.getppid()
    while running:
        if time.monotonic() > end or os.getppid() != asks:
            is_late = is_late or not code
            for process in running:
                os.kill(process, signal.SIGKILL)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if not ended:
            time.sleep(0.01)
            continue
        running.remove(ended)
        found = os.waitstatus_to_exitcode(status)
        if found and not code:
            code, end = found, min(end, time.monotonic() + _GRACE_SECONDS)
    return code, is_late


def main() -> None:
    """Import, and then run what is asked for."""
    gc.disable()
    with mock.patch.object(script, "start_reporting"):  # each rank has a thread of its own
        script.prepare_torch()
    for name in _MODULES:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
