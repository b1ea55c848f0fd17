"""What rank 0 shows while it trains: a bar on a terminal, plain lines otherwise. Other ranks show nothing."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from cpuft.errors import counted
from cpuft.record import EvaluationLine, Header, ResumedLine, StepLine

_LINES = 10
"""Plain lines of a whole run."""
_WARM_UP_STEPS = 2
"""Steps in which caches and kernels warm up: left out of the speed that is shown."""
_WINDOW_STEPS = 20
"""Steps whose mean speed is shown."""
_DIVERGED = 10.0
"""A loss of so many times the first one, which counts as 1 at least, is no noise of small batches any more."""


def format_metrics(metrics: Mapping[str, float]) -> str:
    """One line for people and programs."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


class Progress:
    """Shows a run's progress on standard error, and its results on standard output."""

    def __init__(self, style: str, rank: int) -> None:
        self._style, self._shown = style, rank == 0
        self._bar: Any = None
        self._done, self._made = 0, 0
        self._recent = deque[tuple[float, int]](maxlen=_WINDOW_STEPS + 1)
        """When each of the latest steps after the warm-up ended, and its samples. The first one is the start of the
        window."""
        self._first_loss: float | None = None
        self._warned = False

    def begin(self, header: Header, precision_reason: str, backend_reason: str) -> None:
        """Say what is about to be trained, in what precision and over what backend, and why."""
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
        self._made += 1
        if self._made >= _WARM_UP_STEPS:
            self._recent.append((time.perf_counter(), line.samples))
        if self._style == "bar":
            self._show_bar(line, updates)
        elif line.step == updates or line.step % max(1, updates // _LINES) == 0:
            parts = [f"step {line.step}/{updates}", f"loss {line.loss:.4f}"]
            if speed := self._measure_speed():
                rate, seconds = speed
                parts += [f"{rate:.1f} samples/s", f"{seconds * (updates - line.step):.0f} s left"]
            self._say("  ".join(parts))

    def _measure_speed(self) -> tuple[float, float] | None:
        """Samples per second and seconds per step of the latest steps; None before the first step after the warm-up."""
        if len(self._recent) < 2:
            return None
        seconds = max(self._recent[-1][0] - self._recent[0][0], 1e-9)
        samples = sum(count for _, count in list(self._recent)[1:])
        return samples / seconds, seconds / (len(self._recent) - 1)

    def _show_bar(self, line: StepLine, updates: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(
                initial=self._done,
                total=updates,
                unit="step",
                file=sys.stderr,
                dynamic_ncols=False,
                ncols=100,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            )
        told = f"loss {line.loss:.4f}"
        if speed := self._measure_speed():
            rate, seconds = speed
            told += f", {rate:.1f} samples/s, {seconds * (updates - line.step):.0f} s left"
        self._bar.set_postfix_str(told, refresh=False)
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
