"""The run state: the newest whole one counts, and one that was damaged or edited is refused with the next step."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cpuft.errors import CpuftError
from cpuft.files import hash_text
from cpuft.launch.run_state import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    SAVING,
    TRAINING,
    LaterStartError,
    RunState,
    StateWriter,
    find_end,
    format_state,
    newest,
    parse_state,
    read_state,
    write_state,
)
from tests.records import make_state

STATE = make_state("a", "b", owner=3, sequence=7, phase=TRAINING, checkpoints={"a": 12}, seconds=4.5)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert parse_state(format_state(STATE), "it") == STATE
    assert read_state(str(tmp_path)) is None
    write_state(str(tmp_path), STATE)
    assert read_state(str(tmp_path)) == STATE
    write_state(str(tmp_path / "none"), STATE)
    assert not (tmp_path / "none").exists()


TEXT = format_state(STATE)
VALUES = {**asdict(STATE), "place": "moon"}
NEWER = json.dumps(VALUES | {"checksum": hash_text(json.dumps(VALUES, sort_keys=True))})


@pytest.mark.parametrize(
    "text, why",
    [
        (TEXT.replace("training", "finished"), "it is damaged or was edited"),
        (TEXT.replace('"owner": 3', '"owner": 4'), "it is damaged or was edited"),
        (TEXT[:100], "Expecting|Unterminated"),
        ("", "Expecting value"),
        ("[]", "must be an object"),
        (NEWER, "it has an unknown 'place'"),
        (format_state(replace(STATE, id="../../etc")), "it has the id '../../etc'"),
        (format_state(replace(STATE, phase="resting")), "the phase 'resting'"),
    ],
)
def test_a_state_that_cannot_be_used_is_refused_with_the_next_step(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(
        CpuftError, match=f"^the run state {tmp_path}/state.json cannot be used, because .*{why}.*: use"
    ):
        read_state(str(tmp_path))
    assert find_end(str(tmp_path), 3) is None


def test_the_highest_owner_counts_and_then_the_last_state() -> None:
    states = [replace(STATE, owner=owner, sequence=number) for owner, number in ((1, 9), (2, 1), (2, 2))]
    for order in itertools.permutations(states):
        assert newest(order) == states[2]
    assert newest([]) is None


@pytest.mark.parametrize(
    "code, phase, kept", [(0, FINISHED, 0), (75, INTERRUPTED, 75), (143, INTERRUPTED, 143), (1, FAILED, 1)]
)
def test_the_end_of_a_start_is_that_of_no_other(code: int, phase: str, kept: int, tmp_path: Path) -> None:
    writer = StateWriter(str(tmp_path), STATE)
    writer.write(phase=TRAINING)
    assert find_end(str(tmp_path), 3) is None
    writer.note(unreachable=("b",))
    assert writer.end(code, "why") == code
    ended = find_end(str(tmp_path), 3)
    assert ended
    assert (ended.phase, ended.exit_code, ended.unreachable) == (phase, kept, ("b",))
    assert (ended.reason, ended.sequence) == ("why", STATE.sequence + 2)
    assert ended.checkpoints == (STATE.checkpoints if code else {})
    assert STATE.seconds <= ended.seconds < STATE.seconds + 60
    assert find_end(str(tmp_path), 2) is find_end(str(tmp_path), 4) is None


def test_an_error_that_ends_the_supervisor_is_in_the_state(tmp_path: Path) -> None:
    error = CpuftError("no such rows: name others")
    with pytest.raises(CpuftError, match=r"^no such rows"), StateWriter(str(tmp_path), STATE):
        raise error
    ended = find_end(str(tmp_path), 3)
    assert ended
    assert (ended.phase, ended.exit_code, ended.reason) == (FAILED, error.exit_code, "no such rows: name others")


def test_rank_0_is_seen_to_save_the_model(tmp_path: Path) -> None:
    writer = StateWriter(str(tmp_path), STATE)
    writer.check()
    assert writer.state.phase == TRAINING
    (tmp_path / "model.12.tmp").mkdir()
    writer.check()
    state = read_state(str(tmp_path))
    assert state
    assert state.phase == SAVING


def test_a_start_ends_when_a_later_one_has_begun(tmp_path: Path) -> None:
    """The next launcher writes beside the run folder before ranks start, and the next supervisor into it."""
    work = tmp_path / "run"
    work.mkdir()
    writer = StateWriter(str(work), STATE)
    writer.write()
    for state in (replace(STATE, owner=2, start="before"), STATE, replace(STATE, owner=4, id="ba9876543210")):
        write_state(str(tmp_path), state)
        writer.refuse_later_start()
    for owner, start in ((4, "later"), (3, "other")):
        write_state(str(tmp_path), replace(STATE, owner=owner, start=start))
        said = f"^another launcher has begun start {owner} of the run, so this one, start 3, was ended: wait until"
        with pytest.raises(LaterStartError, match=said):
            writer.refuse_later_start()
    write_state(str(work), replace(STATE, owner=4))
    writer.end(213, "it was ended")
    assert read_state(str(work)) == replace(STATE, owner=4)


def test_a_disk_that_is_full_does_not_end_the_run() -> None:
    writer = StateWriter("/proc/self", RunState("0123456789ab"))
    writer.write(phase=TRAINING)
    assert writer.state.phase == TRAINING
