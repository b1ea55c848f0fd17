"""Copies of a run's newest checkpoint on the launcher's machine: made while the ranks run, and sent to other hosts.

With --copy-checkpoints, a thread of the launcher copies each new checkpoint from the head host into `checkpoints` of
the run folder here, where `cpuft launch --resume` finds it if the head host is lost.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cpuft import execute
from cpuft.argv import module_command
from cpuft.errors import IO_ERROR
from cpuft.execute import Say
from cpuft.hosts.cluster import Cluster
from cpuft.launch.inputs import Bundle
from cpuft.launch.resume import BEST, CHECKPOINTS, HostCopy, find_checkpoint_here, find_newest_update
from cpuft.plans import Plan, Step

MOST_SECONDS = 30.0
_LEAST_SECONDS = 1.0
_POLL_SECONDS = 0.1
_PAUSE_SHARE = 4.0
"""After a look the copier waits at least so many times as long as the look and the copy took."""
_CHECK_SECONDS = 600.0
_MOST_FAILURES = 3
"""After so many failed copies in a row the user is told."""


def choose_copy_seconds(checkpoint_every: float) -> float:
    """Return the seconds between two looks for a new checkpoint: `checkpoint_every`, but 1 to 30; 30 for 0 or less."""
    return min(MOST_SECONDS, max(_LEAST_SECONDS, checkpoint_every)) if checkpoint_every > 0 else MOST_SECONDS


def pack_checkpoints(cluster: Cluster, work: str, run_dir: str, host_copies: Iterable[HostCopy]) -> tuple[Bundle, ...]:
    """Return bundles for the head host, whose run folder is `work`, of the newest checkpoint here and of the best one;
    () if the ranks work in this machine's folders, or a host of the cluster has a checkpoint as new as the newest here.
    """
    newest = max([0, *(copy.checkpoint_update for copy in host_copies if copy.host.name in cluster.hosts)])
    if not cluster.works_remotely or find_newest_update(run_dir) <= newest:
        return ()
    bundles = []
    for part in ("", BEST):
        if folder := find_checkpoint_here(run_dir, part):
            files = sorted(folder.iterdir(), reverse=True)
            nbytes = sum(file.stat().st_size for file in files)
            bundles.append(Bundle(tuple(files), posixpath.join(work, CHECKPOINTS, part, folder.name), nbytes, True))
    return tuple(bundles)


def check_copy(run_dir: str) -> tuple[int, str]:
    """Return (update of the newest checkpoint here, "") if its files have the right checksums, else (0, the reason).
    Another process reads all of them, for ten minutes at most.
    """
    folder = find_checkpoint_here(run_dir)
    if folder is None:
        return 0, "no checkpoint had been copied yet"
    command = (*module_command(sys.executable, "cpuft.train.checkpoint.folders"), str(folder))
    answer = execute.run_command(command, _CHECK_SECONDS)
    if answer.exit_code:
        reason = " ".join(answer.errors.split())[-200:]
        return 0, f"the copy of its checkpoint of update {int(folder.stem)} is damaged ({reason})"
    return int(folder.stem), ""


class CheckpointCopier:
    """Copies new checkpoints of a run from its head host, with `every` seconds or more between two looks."""

    def __init__(self, cluster: Cluster, run_dir: str, every: float, say: Say) -> None:
        self._cluster, self._every, self._say = cluster, every, say
        self._run_dir, self._work = run_dir, cluster.work_dir(run_dir)
        self._root = Path(run_dir, CHECKPOINTS)
        self._failures, self._has_warned = 0, False

    def plan_copy(self) -> Step:
        """Return the step that stores the head host's newest and best checkpoints here, unless they are here."""
        have = [str(path.relative_to(self._root)) for path in self._list_copies()]
        command = (*module_command(sys.executable, "cpuft.launch.results"), str(self._root))
        head = self._cluster.head
        send = self._cluster.transfer_on(head, "send-checkpoints", f"{self._work}/{CHECKPOINTS}", *have)
        return Step(f"copy the newest checkpoint from {head}", (*command, *send))

    def _list_copies(self) -> list[Path]:
        found = [find_checkpoint_here(self._run_dir, part) for part in ("", BEST)]
        return [path for path in found if path]

    def _remove_older(self) -> None:
        for newest in self._list_copies():
            for path in newest.parent.iterdir():
                if path.is_dir() and path != newest and path.name != BEST:
                    old = path.with_name(f"{path.name}.old")
                    with suppress(OSError):
                        path.rename(old)  # a half of a checkpoint must not look complete
                    shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def keep_copying(self) -> Iterator[None]:
        """Inside, a thread copies each new checkpoint. A copy that is not complete at the end is given up."""
        is_over = threading.Event()
        thread = threading.Thread(target=self._copy_until, args=(is_over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _copy_until(self, is_over: threading.Event) -> None:
        pause = self._every
        while not is_over.wait(pause):
            begun = time.monotonic()
            step = self.plan_copy()
            with execute.start_process(step.command, os.environ, execute.PIPE) as process:
                while process.poll() is None and not is_over.wait(_POLL_SECONDS):
                    pass
                execute.stop_processes([process])
                errors = process.stderr.read().decode(errors="replace") if process.stderr else ""
            self._note_end(execute.exit_code_of(process), errors, is_over.is_set())
            # A copy that failed is tried again soon: the next checkpoint may be there already.
            pause = self._every if self._failures else max(self._every, _PAUSE_SHARE * (time.monotonic() - begun))

    def copy_last(self) -> None:
        """Copy the newest checkpoint now, in the main thread only. A copy that fails raises nothing."""
        (answer,) = execute.run_stage(Plan(), [self.plan_copy()], 0.0, lambda line: self._say(f"cpuft: {line}"))
        self._note_end(answer.exit_code, answer.output, is_over=False)

    def _note_end(self, code: int, output: str, is_over: bool) -> None:
        if not code:
            self._failures = 0
            self._remove_older()
        elif not is_over:
            self._failures += 1
            # A connection may fail now and then, and a full disk stays full.
            if (code == IO_ERROR or self._failures >= _MOST_FAILURES) and not self._has_warned:
                self._has_warned = True
                reason = " ".join(output.split()).removeprefix("cpuft: error: ")[-200:]
                self._say(
                    f"cpuft: checkpoints cannot be copied to {self._root} ({reason}): training continues without copies"
                )
