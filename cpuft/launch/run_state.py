"""The run state: one document, RUN/state.json, that says where a run stands. Figures come from the record instead.

The process that supervises the ranks replaces it as a whole on the head host. The launcher's run folder has a copy, and
each host with a disk of its own has that of the last start beside its run folder. The newest whole one counts.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cpuft.errors import RESUMABLE, CpuftError
from cpuft.execute import SSH_FAILED
from cpuft.files import hash_text, write_atomically
from cpuft.hosts.cluster import STATE_FILE, Cluster
from cpuft.serialization import load, parse_json
from cpuft.transfer import sync

SENDING, PREPARING, TRAINING, SAVING = "sending", "preparing", "training", "saving"
"""Phases of an active run: files are sent to the hosts, examples are prepared, ranks work, rank 0 saves the model."""
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"
"""Phases of a run that has ended: its results are whole, it can be resumed, or it failed."""
PHASES = (SENDING, PREPARING, TRAINING, SAVING, FINISHED, INTERRUPTED, FAILED)
LATER_START = 213
"""Exit code of a step or supervisor that knows a start of the run with a higher number. No signal has the number 85."""
WAIT_FOR_OTHER = "wait until that one has ended, or stop it, and resume the run"
UNSAVED_MODEL = "model.[0-9]*.tmp"
"""Folder in the run folder that rank 0 writes the model to; it is renamed when it is complete."""


class LaterStartError(CpuftError):
    """Another launcher has started the run again. Nothing of it may be removed, and this start must not go on."""

    exit_code = LATER_START


@dataclass(frozen=True)
class RunState:
    """Where a run stands. Each start of the run has a higher `owner`, and each state of a start a higher `sequence`."""

    id: str
    """12 hexadecimal digits, made at random when the run was started first."""
    name: str = "run"
    """Name of the run folder. On hosts with disks of their own the folder is ID/NAME below the user's folder."""
    owner: int = 1
    """Number of the start (attempt) of the run."""
    sequence: int = 0
    start: str = ""
    """8 random hexadecimal digits, which tell apart two launchers that make a start of the same number at once."""
    phase: str = SENDING
    reason: str = ""
    """Empty unless the run was interrupted or failed."""
    exit_code: int = -1
    """-1 while the supervisor of the ranks is active, and if it was lost."""
    ranks: int = 0
    """Number of ranks of the first start."""
    hosts: tuple[str, ...] = ()
    """Name of each rank's host, as in the hostfile."""
    unreachable: tuple[str, ...] = ()
    """Hosts that did not answer at the end of the attempt."""
    leaving: tuple[str, ...] = ()
    """Hosts that had received an interruption notice."""
    checkpoints: dict[str, int] = field(default_factory=dict)
    """Update of the newest checkpoint on each host that has one."""
    seconds: float = 0.0
    """Time used by all starts until this state was written, with the preparation."""


def newest(states: Iterable[RunState]) -> RunState | None:
    """Return the state with the highest owner and, within it, the highest sequence number; None if there is none."""
    return max(states, key=lambda state: (state.owner, state.sequence), default=None)


def format_state(state: RunState) -> str:
    """Return a state as a line of JSON with a checksum, which shows whether somebody has changed the line."""
    values = asdict(state)
    return json.dumps(values | {"checksum": _checksum(values)}) + "\n"


def parse_state(text: str, place: str) -> RunState:
    """Return the state of a JSON text; CpuftError, which names `place`: it is damaged, was edited or is too new."""
    try:
        values = load(dict[str, Any], parse_json(text))
        if values.pop("checksum", "") != _checksum(values):
            raise ValueError("it is damaged or was edited")
        state = load(RunState, values)
        if not re.fullmatch("[0-9a-f]{12}", state.id) or state.phase not in PHASES:
            raise ValueError(f"it has the id {state.id!r:.40} and the phase {state.phase!r:.40}")
    except ValueError as error:
        raise CpuftError(
            f"the run state {place} cannot be used, because {error}: use the version of cpuft that wrote it, or put "
            f"a whole copy in its place, such as the {STATE_FILE} that hosts have of the run"
        ) from None
    return state


def _checksum(values: dict[str, Any]) -> str:
    return hash_text(json.dumps(values, sort_keys=True))


def read_state(run_dir: str) -> RunState | None:
    """Return the state in a run folder on this machine; None if there is none. Raises CpuftError: it cannot be used."""
    path = Path(run_dir, STATE_FILE)
    try:
        return parse_state(path.read_text(encoding="utf-8", errors="replace"), str(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CpuftError(f"the run state {path} cannot be read ({error.strerror}): check this file") from None


def read_usable_state(run_dir: str | Path) -> RunState | None:
    """Return the state in a run folder on this machine; None if there is none that can be used."""
    with suppress(CpuftError):
        return read_state(str(run_dir))
    return None


def write_state(run_dir: str, state: RunState) -> None:
    """Replace the state in a run folder, if the folder exists. Raises OSError: the disk does not take it."""
    if Path(run_dir).is_dir():
        with write_atomically(Path(run_dir, STATE_FILE)) as beside:
            beside.write_text(format_state(state), encoding="utf-8")
            with suppress(OSError):  # a file system that cannot
                sync(str(beside))


def note_state(run_dir: str, **changes: Any) -> None:
    """Change fields of the state in a run folder on this machine. A missing state and any error are ignored."""
    with suppress(OSError, CpuftError):
        if state := read_state(run_dir):
            write_state(run_dir, replace(state, sequence=state.sequence + 1, **changes))


def begin_state(cluster: Cluster, run_dir: str, owner: int) -> RunState:
    """Return the first state of the start number `owner` of a run, with id, name, ranks, checkpoints and seconds of the
    state in the run folder on this machine, if it has one. Raises CpuftError: that state cannot be used.
    """
    identity, _, name = cluster.name_folder(run_dir).partition("/")
    earlier = read_state(run_dir) or RunState(identity, name)
    return RunState(
        earlier.id,
        earlier.name,
        owner,
        start=secrets.token_hex(4),
        ranks=earlier.ranks or cluster.ranks,
        hosts=cluster.rank_hosts,
        checkpoints=earlier.checkpoints,
        seconds=earlier.seconds,
    )


def find_end(run_dir: str, owner: int) -> RunState | None:
    """Return the state in a run folder if it says how start number `owner` of the run ended; None otherwise."""
    state = read_usable_state(run_dir)
    return state if state and state.owner == owner and state.exit_code >= 0 else None


class StateWriter:
    """Keeps the state of a run on the head host up to date, and stores the error that ends its `with` block."""

    def __init__(self, run_dir: str, state: RunState) -> None:
        self.state = state
        self._run_dir, self._begun = run_dir, time.monotonic() - state.seconds

    def __enter__(self) -> StateWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error:
            self.end(getattr(error, "exit_code", 1), str(error))

    def check(self) -> None:
        """Write phase SAVING if rank 0 has begun to save the model. Raises LaterStartError: a later start began."""
        self.refuse_later_start()
        if self.state.phase == TRAINING and any(Path(self._run_dir).glob(UNSAVED_MODEL)):
            self.write(phase=SAVING)

    def refuse_later_start(self) -> None:
        """Raise LaterStartError if the host knows a start with a higher number, or another one with this number."""
        own = self.state.owner, self.state.start
        for there in map(read_usable_state, (self._run_dir, os.path.dirname(self._run_dir))):
            if there and there.id == self.state.id and there.owner >= own[0] and (there.owner, there.start) != own:
                other = f"another launcher has begun start {there.owner} of the run"
                raise LaterStartError(f"{other}, so this one, start {own[0]}, was ended: {WAIT_FOR_OTHER}")

    def note(self, **changes: Any) -> None:
        """Change fields of the state, which the next `write` stores."""
        self.state = replace(self.state, **changes)

    def write(self, **changes: Any) -> None:
        """Change fields of the state and store it. Errors of the disk are ignored; a later start's state stays."""
        self.note(sequence=self.state.sequence + 1, seconds=time.monotonic() - self._begun, **changes)
        with suppress(OSError, CpuftError):
            self.refuse_later_start()
            write_state(self._run_dir, self.state)

    def end(self, code: int, reason: str = "") -> int:
        """Store how the attempt ended: FINISHED for 0, INTERRUPTED for 75 and 128 + N, else FAILED. Return `code`."""
        phase = FINISHED if not code else INTERRUPTED if code == RESUMABLE or code > 128 else FAILED
        if phase == FINISHED:
            self.note(checkpoints={})
        self.write(phase=phase, exit_code=min(code, SSH_FAILED - 1), reason=reason)
        return code
