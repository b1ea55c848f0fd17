"""What keeps a detached command, without any host."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.launch import detached_head
from cpuft.launch.detached_head import BEGUN, END, ERRORS, LOST, OUTPUT, PAST, STARTED, Event, Order, plan_session
from cpuft.launch.run_state import LATER_START, RunState, write_state

ORDER = Order("0123456789ab", "launch", "", (), cluster="lab")
KEEP = """
import sys
from pathlib import Path
from cpuft.launch import detached_head
detached_head.module_command = lambda python, module: (sys.executable, "-c")
detached_head._keep(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "kills, lingers, before",
    [(False, False, ()), (False, True, ()), (True, True, ("systemd-run", "--user", "--scope", "--quiet", "--"))],
)
def test_a_command_survives_logout(kills: bool, lingers: bool, before: tuple[str, ...]) -> None:
    assert plan_session(kills, lingers, "ada") == before


def test_where_it_would_not_the_command_that_helps_is_named() -> None:
    with pytest.raises(CpuftError, match="run loginctl enable-linger ada there once"):
        plan_session(True, False, "ada")


def keep(folder: Path, program: str) -> subprocess.Popen[bytes]:
    """Start the keeper of a Python program in a folder, and wait until it has begun to write events."""
    folder.mkdir()
    order = replace(ORDER, run_dir=str(folder / "run" / "x"), arguments=(program,))
    (folder / "order.json").write_text(json.dumps(asdict(order)))
    keeper = subprocess.Popen([sys.executable, "-c", KEEP, str(folder)], cwd=folder)
    limit = time.monotonic() + 30
    while not (folder / "events.jsonl").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    return keeper


def events_of(folder: Path, position: int = 0) -> list[Event]:
    return [Event(**json.loads(line)) for _, line in detached_head._follow(folder, position, False)]


def test_events_are_what_the_command_writes_its_begin_and_its_end(tmp_path: Path) -> None:
    program = "import os, sys; print('metric'); print('step', file=sys.stderr); os.makedirs('run/x'); import time; "
    keeper = keep(tmp_path / "a", program + "time.sleep(1); sys.exit(3)")
    found = [(event.kind, event.text, event.code) for event in events_of(tmp_path / "a")]
    assert found[0] == (STARTED, "", 0)
    assert sorted(found[1:-1]) == sorted([(OUTPUT, "metric\n", 0), (ERRORS, "step\n", 0), (BEGUN, "", 0)])
    assert found[-1] == (END, "", 3)
    assert keeper.wait(10) == 0


@pytest.mark.parametrize(
    "folder, code, is_kept", [("run/x", 1, True), ("run/x", LATER_START, False), ("run", 1, False)]
)
def test_nothing_stays_of_a_run_that_has_no_results_or_was_started_elsewhere(
    folder: str, code: int, is_kept: bool, tmp_path: Path
) -> None:
    keeper = keep(tmp_path / "a", f"import os, sys; os.makedirs('{folder}'); sys.exit({code})")
    assert events_of(tmp_path / "a")[-1] == Event(END, code=code)
    assert (tmp_path / "a" / "run").exists() == is_kept
    keeper.wait(10)


@pytest.mark.parametrize("theirs, is_elsewhere", [(None, False), (2, False), (3, True)])
def test_a_script_may_exit_with_the_code_of_a_later_start(
    theirs: int | None, is_elsewhere: bool, tmp_path: Path
) -> None:
    order, state = replace(ORDER, run_dir=str(tmp_path / "detached/x")), RunState("0123456789ab", owner=2)
    for folder, number in ((order.run_dir, 2), (tmp_path / order.claimed, theirs)):
        if number:
            Path(folder).mkdir(parents=True)
            write_state(str(folder), replace(state, owner=number))
    assert detached_head._is_continued_elsewhere(order, tmp_path) == is_elsewhere
    Path(order.run_dir, "state.json").write_text("damaged")
    assert not detached_head._is_continued_elsewhere(order, tmp_path)


def test_a_request_to_stop_reaches_the_command_and_is_consumed(tmp_path: Path) -> None:
    program = "import time\ntry: print('on', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: print('stopped')"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    keeper = keep(tmp_path / "a", program)
    signal.signal(signal.SIGINT, before)
    while "on" not in (tmp_path / "a" / "events.jsonl").read_text():
        time.sleep(0.05)
    (tmp_path / "a" / "stop").touch()
    assert [event.text for event in events_of(tmp_path / "a")] == ["", "on\n", "stopped\n", ""]
    assert not (tmp_path / "a" / "stop").exists()
    keeper.wait(10)


def test_a_keeper_that_was_killed_ends_the_events(tmp_path: Path) -> None:
    """Its command ends with it. A line that was cut off is left out."""
    keeper = keep(tmp_path / "a", "import time\nprint('on', flush=True)\ntime.sleep(60)\nprint('never')")
    while "on" not in (tmp_path / "a" / "events.jsonl").read_text():
        time.sleep(0.05)
    keeper.kill()
    keeper.wait(10)
    with (tmp_path / "a" / "events.jsonl").open("a") as file:
        file.write('{"kind": "outp')
    assert [event.kind for event in events_of(tmp_path / "a")] == [STARTED, OUTPUT, LOST]


def test_a_viewer_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(asdict(Event(OUTPUT, text))) + "\n" for text in "ab"))
    first, _ = next(detached_head._follow(tmp_path, 0, False))
    assert [event.text for event in events_of(tmp_path, first)] == ["b", ""]


def test_a_full_disk_does_not_stop_the_command() -> None:
    detached_head._EventLog(Path("/dev/full")).copy(OUTPUT, io.BytesIO(b"a\nb\n"))


def test_what_was_printed_until_now_has_an_end(tmp_path: Path) -> None:
    """Else a viewer could not tell it from a connection that broke."""
    (tmp_path / "events.jsonl").write_text(json.dumps(asdict(Event(OUTPUT, "a"))) + "\n" + '{"kind": "outp')
    found = [json.loads(line)["kind"] for _, line in detached_head._follow(tmp_path, 0, True)]
    assert found == [OUTPUT, PAST]


def test_old_runs_are_removed_unless_they_have_results_that_nobody_has_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fetched", "waiting"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "events.jsonl").touch()
    (tmp_path / "waiting" / "run" / "x").mkdir()
    monkeypatch.setattr(detached_head, "_KEPT_SECONDS", -1.0)
    detached_head._remove_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["waiting"]


def test_the_first_of_two_viewers_that_fetch_the_results_at_once_is_noted(tmp_path: Path) -> None:
    """The second one may have come too late, and have nothing."""
    (tmp_path / "run/x").mkdir(parents=True)
    detached_head._note_fetched(tmp_path, "m:/x")
    with pytest.raises(CpuftError, match="another cpuft attach has fetched the results"):
        detached_head._note_fetched(tmp_path, "n:/x")
    assert [path.name for path in tmp_path.iterdir()] == ["fetched"]
    assert (tmp_path / "fetched").read_text() == "m:/x"
