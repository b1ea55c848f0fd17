"""What rank 0 shows while it trains: a bar on a terminal, plain lines otherwise. Other ranks show nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from cpuft.errors import counted
from cpuft.record import EvaluationLine, Header, ResumedLine, StepLine

_LINES = 10
"""Plain lines of a whole run."""


def format_metrics(metrics: Mapping[str, float]) -> str:
    """One line for people and programs."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


class Progress:
    """Shows a run's progress on standard error, and its results on standard output."""

    def __init__(self, style: str, rank: int) -> None:
        self._style, self._shown = style, rank == 0
        self._bar: Any = None
        self._start, self._samples, self._done = 0.0, 0, 0

    def begin(self, header: Header, precision_reason: str, backend_reason: str) -> None:
        """Say what is about to be trained, in what precision and over what backend, and why."""
        self._start = time.perf_counter()
        if self._shown:
            ranks = f"{counted(header.world_size, 'rank')} on {', '.join(header.hosts)}"
            self._say(f"{header.task} with {header.model}, {ranks}, {header.precision}: {precision_reason}")
        if self._shown and header.world_size > 1:
            over = f"gradients over {header.backend}: {backend_reason}"
            self._say("each rank trains for itself, all at the same time: the ideal" if header.apart else over)

    def note(self, text: str) -> None:
        """Say what else was decided."""
        if self._shown:
            self._say(text)

    def resumed(self, line: ResumedLine, updates: int) -> None:
        """Say where the run goes on, and what is lost."""
        self._done = line.step
        if self._shown:
            what = f"resumed after update {line.step} of {updates} on {counted(line.world_size, 'rank')}"
            again = f", {counted(line.repeated, 'update')} made again" if line.repeated else ""
            self._say(f"{what}{again}{f'; begins anew: {line.reset}' if line.reset else ''}")

    def step(self, line: StepLine, updates: int) -> None:
        """Show a finished step."""
        if not self._shown:
            return
        self._samples += line.samples
        seconds = time.perf_counter() - self._start
        if self._style == "bar":
            self._show_bar(line, updates)
        elif line.step == updates or line.step % max(1, updates // _LINES) == 0:
            eta = seconds / (line.step - self._done) * (updates - line.step)
            rate = self._samples / seconds
            self._say(f"step {line.step}/{updates}  loss {line.loss:.4f}  {rate:.1f} samples/s  {eta:.0f} s left")

    def _show_bar(self, line: StepLine, updates: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                initial=self._done, total=updates, unit="step", file=sys.stderr, dynamic_ncols=False, ncols=100
            )
        rate = self._samples / (time.perf_counter() - self._start)
        self._bar.set_postfix_str(f"loss {line.loss:.4f}, {rate:.1f} samples/s", refresh=False)
        self._bar.update()

    def evaluating(self, rows: int) -> None:
        """Say that evaluation begins: it may take a while."""
        self._close()
        if self._shown:
            self._say(f"evaluating on {counted(rows, 'row')}")

    def evaluated(self, line: EvaluationLine) -> None:
        """Show metrics."""
        self._close()
        if self._shown:
            print(format_metrics(line.metrics), flush=True)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
