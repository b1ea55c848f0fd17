"""Standard streams that are closed, that nobody reads, or whose disk is full; and tables as text."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from cpuft.execute import run_step
from cpuft.plans import Step
from cpuft.record import Writer, read_record
from cpuft.terminal import detect_dead_peer, format_table, protect_streams
from tests.conftest import run_shell
from tests.records import make_record
from tests.train.tiny import save_tiny

WRITES = """
import os, sys
from cpuft.terminal import check_stdout, protect_streams
protect_streams()
with open("file", "w") as file:
    print(file.fileno() > 2, file=file)
    for _ in range(3):
        print("x" * 100_000)
        print("y" * 100_000, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os.system("echo child; echo child >&2; cat")
    print("whole" + str(sys.stdin.read()), file=file)
check_stdout()
"""


@pytest.mark.parametrize(
    "streams", [">&-", "2>&-", "<&-", "<&- >&- 2>&-", "| true", "2>&1 >/dev/null | true", "2>/dev/full"]
)
def test_who_writes_goes_on(streams: str, tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(WRITES)
    done = run_shell(f"python writes.py {streams}")
    assert done.returncode == 0
    assert "Error" not in done.stderr
    assert Path("file").read_text() == "True\nwhole\n"


@pytest.mark.parametrize(
    "verb",
    ["doctor --list", "env", "launch --np 1 --dry-run", "compare --np 1 --dry-run", "provision --help", "report run"],
)
@pytest.mark.parametrize("streams", [">&-", "| true", "2>&- | true", "<&- | true"])
def test_no_verb_complains_of_a_reader_that_has_gone(verb: str, streams: str, tmp_path: Path) -> None:
    record = make_record()
    with Writer(str(tmp_path / "run")) as writer:
        for line in (record.header, *record.steps, *record.evaluations, record.footer):
            assert line
            writer.write(line)
    done = run_shell(f"cpuft {verb} {streams}")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize("verb", ["doctor --list", "launch --np 1 --dry-run"])
def test_what_did_not_fit_is_said(verb: str) -> None:
    said = "cpuft: error: standard output could not be written (No space left on device): "
    said += "make room on the disk it goes to\n"
    done = run_shell(f"cpuft {verb} >/dev/full")
    assert (done.stdout, done.stderr, done.returncode) == ("", said, 2)


class Console(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_console_of_windows_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console()
    monkeypatch.setattr(sys, "platform", "win32")
    for name in ("stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, console)
    protect_streams()
    assert sys.stdout is console


@pytest.mark.parametrize("locale", ["C", "POSIX", "de_DE.ISO-8859-1"])
def test_a_name_that_the_locale_cannot_write_ends_nothing(locale: str) -> None:
    settings = {"LC_ALL": locale, "PYTHONIOENCODING": "latin-1"}
    done = run_shell("cpuft launch --dry-run --run-dir 'ran\u200b\u4e00'", **settings)
    assert done.returncode == 0, done.stderr
    assert "ran\\u200b\\u4e00" in done.stdout


def test_lines_of_tables_are_hyphens_where_the_encoding_has_no_others() -> None:
    done = run_shell("cpuft runs", PYTHONIOENCODING="cp1252")
    assert (done.returncode, set(done.stdout.splitlines()[1])) == (0, {" ", "-"}), done.stdout


def test_under_nohup_a_hangup_ends_nothing() -> None:
    signal_before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hang_up = Step("hang up", ("sh", "-c", f"kill -HUP {os.getpid()}; sleep 0.2"))
        assert run_step(hang_up, os.environ, None, lambda: None) == 0
    finally:
        signal.signal(signal.SIGHUP, signal_before)


DEMO = {"task": "demo", "max-train-samples": "128", "max-steps": "4", "max-length": "16", "save-model": "false"}
UNHEARD = pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>&1 | head -1"])


@pytest.mark.parametrize("streams", [pytest.param("<&- >&- 2>&-", marks=pytest.mark.proof), "2>&1 | head -1"])
def test_a_run_that_nobody_listens_to_goes_on(streams: str) -> None:
    words = " ".join(f"--{name} {value}" for name, value in DEMO.items() if name != "save-model")
    words += f" --model {save_tiny(Path('tiny'))}"
    done = run_shell(f"cpuft launch --no-save-model --run-dir run {words} {streams}")
    assert done.returncode == 0, [path.read_text() for path in Path("run/logs").iterdir()]
    assert read_record("run").footer is not None
    assert "accuracy" in Path("run/logs/rank-0.out").read_text()


@pytest.mark.proof
@UNHEARD
def test_a_worker_by_itself_that_nobody_listens_to_goes_on(streams: str) -> None:
    words = " ".join(f"--{name}={value}" for name, value in DEMO.items())
    done = run_shell(f"python -m cpuft.train --run-dir=run {words} {streams}")
    assert done.returncode == 0
    assert read_record("run").footer is not None


def test_a_terminal_that_rich_takes_for_small_cuts_nothing() -> None:
    columns, row = [f"column {number}" for number in range(9)], ["a longer text"] * 9
    before = format_table(columns, [row])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "40"}.items():
            patch.setenv(name, value)
        assert format_table(columns, [row]) == before
    assert before.count("a longer text") == 9


def test_a_table_shows_no_control_characters_of_a_record() -> None:
    shown = format_table(["acc\x1b[2J"], [["0.8\x07"]], title="acc\x1b[2J", notes=["run-1\x1b[0m"])
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "acc\\x1b[2J" in shown


@pytest.mark.parametrize(("asked", "seconds"), [(7, 7), (70, 70), (71, 77)])
def test_a_silent_peer_is_detected_after_a_multiple_of_seven_seconds(asked: float, seconds: int) -> None:
    with socket.socket() as connection:
        detect_dead_peer(connection, asked)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        idle, interval, limit = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    assert idle + 4 * interval == seconds == limit / 1000
