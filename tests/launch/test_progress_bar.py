"""The progress bar on a terminal: one bar, with other lines above it, and the plain lines of a log file."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from cpuft.launch.progress_bar import choose_progress, format_seconds, format_values, show_progress
from cpuft.rank.progress import ProgressEvent, format_event

DRAWS = """
import sys
from cpuft.launch.progress_bar import choose_progress, show_progress
from cpuft.rank.progress import ProgressEvent, format_event
with show_progress(choose_progress()):
    print("before", file=sys.stderr)
    for update in (1, 2, 3):
        sys.stderr.write(format_event(ProgressEvent(update, 4, 0.5, 8.0, 4.0 - update, "accuracy 0.75")) + "\\n")
        if update == 2:
            print("above", file=sys.stderr)
            sys.stderr.write("in two ")
            print("from stdout")
            sys.stderr.write("parts\\n")
    last = format_event(ProgressEvent(4, 4, 0.25, 8.0, 0.0, "accuracy 0.75", is_last=True)) + "\\n"
    sys.stderr.write(last[:10])
    sys.stderr.write(last[10:])
    print("after", file=sys.stderr)
"""


def run_on_terminal(*command: str, seconds: float = 120.0, columns: int = 100) -> tuple[int, str]:
    """Run a command on a terminal of its own; return its exit code and all that it wrote there."""
    main, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child)
    os.close(child)
    found = b""
    try:
        while select.select([main], [], [], seconds)[0]:
            try:
                block = os.read(main, 1 << 16)
            except OSError:  # Linux reports the end of a terminal so
                break
            if not block:
                break
            found += block
        return process.wait(seconds), found.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(main)


def show_screen(text: str) -> list[str]:
    """Return the lines that a terminal shows in the end: a carriage return overwrites, and the cursor is not moved."""
    screen = []
    for line in text.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            assert "\x1b[A" not in part
            shown = part + shown[len(part) :]
        screen.append(shown.rstrip())
    return screen


def test_lines_stand_above_one_bar() -> None:
    code, text = run_on_terminal(sys.executable, "-c", DRAWS)
    screen = show_screen(text)
    bar = [line for line in screen if line.startswith("update ")]
    assert (code, len(bar)) == (0, 1), text
    assert re.fullmatch(r"update 4/4 \|█+\| 8.0 samples/s, loss 0.2500, accuracy 0.75, 0 s left", bar[0])
    others = ["before", "above", "from stdout", "in two parts", bar[0], "after", ""]
    assert screen == others


def test_in_a_log_there_is_no_bar() -> None:
    done = subprocess.run([sys.executable, "-c", DRAWS], capture_output=True, text=True, check=True)
    assert "\r" not in done.stderr
    assert "samples/s" not in done.stderr.replace("samples_per_second", "")


def test_the_style_follows_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    assert choose_progress() == "lines"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert choose_progress() == "bar"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_progress() == "lines"


def test_the_bar_of_a_run_that_failed_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("bar"):
        sys.stderr.write(format_event(ProgressEvent(1, 4, 0.5)) + "\n")
        sys.stderr.write("without an end")
    screen = show_screen(capsys.readouterr().err)
    assert screen == ["without an end"]


@pytest.mark.parametrize(
    "event, text",
    [
        (ProgressEvent(1, 4, 0.5), "loss 0.5000"),
        (ProgressEvent(1, 4, 0.5, 64.04, 8.0), "64.0 samples/s, loss 0.5000, 8 s left"),
        (
            ProgressEvent(1, 4, 0.5, 64.0, 200.0, "f1 0.9012"),
            "64.0 samples/s, loss 0.5000, f1 0.9012, 3 min left",
        ),
    ],
)
def test_values_behind_the_bar(event: ProgressEvent, text: str) -> None:
    assert format_values(event) == text


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (59.6, "60 s"), (119.4, "119 s"), (3599.7, "60 min"), (7500, "2 h 05 min")]
)
def test_times_for_a_person(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.proof
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_a_run_on_a_terminal_shows_one_bar_and_its_log_no_more_than_events(tmp_path: Path) -> None:
    demo = ("--task", "demo", "--max-train-samples", "128", "--max-steps", "4", "--batch-size", "16")
    words = ("launch", "--np", "2", "--run-dir", "run", *demo, "--no-save-model")
    code, text = run_on_terminal(sys.executable, "-m", "cpuft", *words)
    assert code == 0, text
    screen = show_screen(text)
    (bar,) = (line for line in screen if "|█" in line)
    assert re.match(r"update 4/4 \|█+\| [\d.]+ samples/s, loss \d\.\d{4}, 0 s left$", bar), bar
    assert "cpuft-progress" not in text
    assert "hostname of the client socket" not in text
    assert [line for line in screen if line][-1] == f"run: {tmp_path}/run"
    assert "\r" not in (tmp_path / "run/logs/rank-0.err").read_text()
