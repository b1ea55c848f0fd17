"""The progress bar of a training, in the process that the user looks at: a terminal, or the kernel of a notebook.

Rank 0, on whichever host, prints the lines of `cpuft.rank.progress`, which end in this process's standard error.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from cpuft.rank.progress import PROGRESS_MARK, ProgressEvent, parse_event

_FORMAT = "update {n_fmt}/{total_fmt} |{bar}| {desc}"


def is_notebook() -> bool:
    """Return whether this process is the IPython kernel of a notebook."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return hasattr(get_ipython() if get_ipython else None, "kernel")


def choose_progress() -> str:
    """Return "bar" if standard error is a terminal, or in a notebook, and tqdm is installed; else "lines"."""
    is_watched = sys.stderr.isatty() or is_notebook()
    return "bar" if is_watched and importlib.util.find_spec("tqdm") else "lines"


class ProgressBar:
    """A progress bar of tqdm that follows the events of rank 0. Nothing is shown before the first event."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.shown: Any = None
        """tqdm's bar while it is on the screen, else None."""

    def update(self, event: ProgressEvent) -> None:
        """Show an event. The last event of a training leaves the bar on the screen and ends it."""
        if self.shown is None or self.shown.total != event.updates:
            self.close()
            self.shown = self._make(event)
        self.shown.n = event.update
        self.shown.set_description_str(format_values(event), refresh=True)
        if event.is_last:
            self.shown.leave = True
            self.shown.total = event.update  # a training that stopped early has not failed
            self.close()

    def _make(self, event: ProgressEvent) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm warns where a notebook has no ipywidgets, and uses text
            from tqdm.auto import tqdm
        look: dict[str, Any] = {"bar_format": _FORMAT, "dynamic_ncols": True, "mininterval": 0.0, "leave": False}
        return tqdm(file=self._stream, total=event.updates, initial=event.update, desc=format_values(event), **look)

    def close(self) -> None:
        """End the bar. The bar of a training that has not reached its last event is removed from a terminal."""
        if self.shown is not None:
            self.shown.close()
            self.shown = None


def format_values(event: ProgressEvent) -> str:
    """Return what stands behind the bar, such as "64.0 samples/s, loss 0.5312, accuracy 0.8603, 12 s left".
    Speed and time are left out while the run warms up, and the metric before the first evaluation.
    """
    parts = [f"{event.samples_per_second:.1f} samples/s"] if event.samples_per_second else []
    parts.append(f"loss {event.loss:.4f}")
    metric = "".join(filter(str.isprintable, event.metric))  # it may come from another host
    parts += [metric] if metric else []
    parts += [f"{format_seconds(event.seconds_left)} left"] if event.samples_per_second else []
    return ", ".join(parts)


def format_seconds(seconds: float) -> str:
    """Return a time for a person: "95 s" below 120 s, "12 min" below 120 min, else "2 h 05 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


class StreamAboveBar:
    """A text stream whose lines appear above a progress bar. All streams of the same bar share one `lock`."""

    def __init__(self, stream: TextIO, bar: ProgressBar, lock: threading.RLock) -> None:
        self._stream, self._bar, self._lock = stream, bar, lock
        self._rest = ""

    def write(self, text: str) -> int:
        """Print lines above the bar; those with events move the bar instead. Return the number of characters. While the
        bar is shown, a line without its end is held back, because the bar would be drawn behind it.
        """
        with self._lock:
            lines = (self._rest + text).splitlines(keepends=True)
            self._rest = lines.pop() if lines and self._is_held_back(lines[-1]) else ""
            shown: list[str] = []
            for line in lines:
                event = parse_event(line)
                if event is None:
                    shown.append(line)
                    continue
                self._print(shown)
                self._bar.update(event)
                shown = []
            self._print(shown)
        return len(text)

    def _is_held_back(self, line: str) -> bool:
        may_be_event = line.startswith(PROGRESS_MARK) or PROGRESS_MARK.startswith(line)
        return not line.endswith("\n") and (self._bar.shown is not None or may_be_event)

    def _print(self, lines: list[str]) -> None:
        if not lines:
            return
        if (bar := self._bar.shown) is not None:
            bar.clear()
        self._stream.write("".join(lines))
        self._stream.flush()
        if bar is not None:
            bar.refresh()

    def finish(self) -> None:
        """Print what was held back. Call this when the bar has been closed."""
        with self._lock:
            rest, self._rest = self._rest, ""
            if rest:
                self._stream.write(rest)
                self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def show_progress(style: str) -> Iterator[None]:
    """Show a progress bar inside the `with` block if `style` is "bar", and print other lines above it.
    For that time sys.stderr is replaced, and sys.stdout as well if it is a terminal or a notebook.
    """
    if style != "bar":
        yield
        return
    output, errors, lock = sys.stdout, sys.stderr, threading.RLock()
    bar = ProgressBar(errors)
    shared = [StreamAboveBar(errors, bar, lock)]
    sys.stderr = cast(TextIO, shared[0])
    if output.isatty() or is_notebook():
        shared.append(StreamAboveBar(output, bar, lock))
        sys.stdout = cast(TextIO, shared[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = output, errors
        with lock:
            bar.close()
        for stream in shared:
            stream.finish()
