"""The head host's part of detached runs: start a command that was moved here, keep it, and tell others about it.

`python -m cpuft.launch.detached_head ACTION` is run over ssh by `cpuft.launch.detached` on the user's machine. The
folder of a detached run, detached/ID, is below this user's private folder: `order.json`, `events.jsonl` with what the
command prints, `alive` with a lock that its keeper holds, `stop` for a request, and `run/NAME`, the run folder.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from cpuft import execute
from cpuft.argv import module_command
from cpuft.errors import CpuftError
from cpuft.files import is_locked, make_private_folder, write_text
from cpuft.hosts.cluster import DETACHED, JOB, WORK_ROOT
from cpuft.hosts.registry import FILE_NAME
from cpuft.launch.lease_renewal import hold_lease
from cpuft.launch.run_state import LATER_START, read_state, read_usable_state
from cpuft.serialization import load, parse_json
from cpuft.transfer import lock_file

MODULE = "cpuft.launch.detached_head"
STARTED, OUTPUT, ERRORS, BEGUN, END = "started", "output", "errors", "begun", "end"
"""Kinds of events: the command was started, wrote to one of its two streams, made its run folder, or has ended."""
LOST, PAST = "lost", "past"
"""Events of `follow` alone: the keeper was killed or the host started again, and all events until now are told."""
RUNNING, ENDED = "running", "ended"
"""States of a detached run, beside LOST."""
_ORDER, _EVENTS, _ALIVE, _STOP, _FETCHED = "order.json", "events.jsonl", "alive", "stop", "fetched"
_START_SECONDS = 15.0
_POLL_SECONDS = 0.2
_KEPT_SECONDS = 30 * 86400.0
"""How long the order and the events of an ended run stay, and longer if nobody has fetched its results."""


@dataclass(frozen=True)
class Order:
    """A command that is moved to this host. It holds no secret."""

    id: str
    """Id of the run and name of the folder of the detached run, 12 random hexadecimal digits."""
    verb: str
    run_dir: str
    arguments: tuple[str, ...]
    """The command line behind `cpuft`."""
    files: dict[str, str] = field(default_factory=dict)
    """Texts of the cluster's entry, hostfile and ssh configuration, by name of the file."""
    cluster: str = ""
    """Name of the cluster's entry; empty if the command finds its hosts by its own options."""
    settings: dict[str, str] = field(default_factory=dict)
    """The user's environment variables that ranks get."""
    names: dict[str, str] = field(default_factory=dict)
    """What the user named on the other machine, by its path here."""
    work_folder: str = ""
    """Where the command starts; empty for the folder of the detached run."""
    host: str = ""
    """Host name, which this host fills in: other hosts may share its disk."""

    @property
    def claimed(self) -> str:
        """ID/NAME of the run as its hosts know it; empty if the run folder here is the user's own."""
        return f"{self.id}/{os.path.basename(self.run_dir)}" if self.cluster else ""


@dataclass(frozen=True)
class Event:
    """One thing that happened in a detached run."""

    kind: str
    text: str = ""
    """What the command wrote, of OUTPUT and ERRORS."""
    code: int = 0
    """Exit code of the command, of END."""


@dataclass(frozen=True)
class Description:
    """What `list` tells about a detached run."""

    order: Order
    state: str
    """RUNNING, ENDED or LOST."""
    phase: str
    """Of the run state; empty while there is none, and if the results have been fetched."""
    seconds: float
    """Since the start, by this host's clock alone."""
    code: int = 0
    has_results: bool = False
    """Whether the run folder is here, to be fetched."""
    fetched: str = ""
    """Where the results were fetched to, as MACHINE:FOLDER; empty if they were not."""


def plan_session(kills: bool, lingers: bool, user: str) -> tuple[str, ...]:
    """Return the words before a command that is to run on after the logout of a user: () or those of systemd-run.
    `kills` says whether logind ends a user's processes at logout (KillUserProcesses), and `lingers` whether it keeps
    this user's service manager. Raises CpuftError: logind ends the processes, and does not keep the service manager.
    """
    if not kills:
        return ()
    if lingers:
        return ("systemd-run", "--user", "--scope", "--quiet", "--")
    raise CpuftError(
        f"host {socket.gethostname()} ends all processes of user {user} at logout (KillUserProcesses of logind): run "
        f"loginctl enable-linger {user} there once, then the same command again"
    )


def _find_session() -> tuple[str, ...]:
    manager = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")
    answer = execute.run_command(("busctl", "get-property", *manager, "KillUserProcesses"), 5.0)
    user = getpass.getuser()
    kills = answer.output.strip() == "b true" and os.geteuid() != 0  # logind leaves root's processes alone
    return plan_session(kills, Path("/var/lib/systemd/linger", user).exists(), user)


def _start(given: IO[str], root: Path) -> None:
    """Start the keeper of a command, and return when it runs. Standard input is an Order and the secrets, as JSON."""
    values = parse_json(given.read())
    order, secrets = load(Order, values["order"]), load(dict[str, str], values["secrets"])
    session = _find_session()
    make_private_folder(root.parent, "remove it")
    _remove_old(root)
    folder = root / order.id
    umask = os.umask(0o077)
    (folder / "run").mkdir(parents=True)
    for name, text in order.files.items():
        write_text(folder / order.cluster / name, text)
    write_text(folder / _ORDER, json.dumps(dataclasses.asdict(replace(order, host=socket.gethostname()))))
    os.umask(umask)
    environ = {**os.environ, **order.settings, **secrets}
    if order.cluster:
        environ[JOB] = str(folder / order.cluster)
    if session:
        environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}")
    log = folder / "keeper.log"
    command = (*session, *module_command(sys.executable, MODULE), "keep", order.id)
    keeper = execute.start_with_log(command, environ, str(log), order.work_folder or str(folder), stays=True)
    end = time.monotonic() + _START_SECONDS
    while not (folder / _EVENTS).exists():
        if keeper.poll() is not None or time.monotonic() > end:
            execute.stop_processes([keeper])
            raise CpuftError(f"the command could not be started ({log.read_text()[-300:].strip()}): check {folder}")
        time.sleep(0.02)


def _remove_old(root: Path) -> None:
    for folder in root.glob("*/"):
        with suppress(OSError):
            is_old = time.time() - (folder / _EVENTS).stat().st_mtime > _KEPT_SECONDS
            if is_old and not is_locked(folder / _ALIVE) and not any(folder.glob("run/*")):
                shutil.rmtree(folder, ignore_errors=True)


class _EventLog:
    """Appends events to a file, from several threads. Those that a full disk does not take are lost."""

    def __init__(self, path: Path) -> None:
        self._file, self._lock = path.open("ab", buffering=0), threading.Lock()

    def write(self, kind: str, text: str = "", code: int = 0) -> None:
        line = json.dumps(dataclasses.asdict(Event(kind, text, code))) + "\n"
        with self._lock, suppress(OSError):
            size = os.fstat(self._file.fileno()).st_size
            if self._file.write(line.encode()) != len(line):
                self._file.truncate(size)

    def copy(self, kind: str, stream: IO[bytes]) -> None:
        """Write an event for each line of a stream, until its end."""
        for line in stream:
            self.write(kind, line.decode(errors="replace"))


def _keep(folder: Path) -> None:
    order = _read_order(folder)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # scripts start what runs in the background with SIGINT ignored
    with (folder / _ALIVE).open("w") as lock:
        lock_file(lock, waits=True)
        log = _EventLog(folder / _EVENTS)
        log.write(STARTED)
        command = (*module_command(sys.executable, "cpuft"), *order.arguments)
        process = execute.start_process(command, os.environ, execute.PIPE)
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.close()
        streams = (OUTPUT, process.stdout), (ERRORS, process.stderr)
        copiers = [threading.Thread(target=log.copy, args=pair, daemon=True) for pair in streams]
        for copier in copiers:
            copier.start()
        has_begun = False
        while process.poll() is None:
            if not has_begun and Path(order.run_dir).exists():
                has_begun = True
                log.write(BEGUN)
            with suppress(FileNotFoundError):
                (folder / _STOP).unlink()
                process.send_signal(signal.SIGINT)
            time.sleep(_POLL_SECONDS)
        for copier in copiers:
            copier.join(_START_SECONDS)
        code = execute.exit_code_of(process)
        if code == LATER_START and _is_continued_elsewhere(order, folder.parent.parent):
            shutil.rmtree(folder / "run", ignore_errors=True)
        with suppress(OSError):  # it holds results, or is gone
            (folder / "run").rmdir()
        log.write(END, code=code)
    hold_lease(folder, load(str, parse_json(order.files.get(FILE_NAME, "{}")).get("renewal", "")))


def _is_continued_elsewhere(order: Order, root: Path) -> bool:
    """Return whether a later start by another launcher will have the results. A script may exit with the same code."""
    try:
        own, theirs = read_state(order.run_dir), read_state(str(root / order.claimed))
    except CpuftError:  # nobody can tell: the results stay
        return False
    return own is None or (theirs is not None and theirs.owner > own.owner)


def _read_order(folder: Path) -> Order:
    return load(Order, parse_json((folder / _ORDER).read_text(encoding="utf-8")))


def _follow(folder: Path, position: int, only_past: bool) -> Iterator[tuple[int, str]]:
    """Yield (position behind it, JSON) for each event from a position on; with `only_past`, without waiting for any."""
    with (folder / _EVENTS).open("rb") as file:
        file.seek(position)
        while True:
            is_alive = is_locked(folder / _ALIVE)  # first: the keeper writes its last event while it lives
            line = file.readline()
            if line.endswith(b"\n"):
                position += len(line)
                yield position, line.decode().rstrip()
                if json.loads(line)["kind"] == END:
                    return
                continue
            file.seek(position)
            if only_past or not is_alive:
                yield position, json.dumps(dataclasses.asdict(Event(PAST if only_past else LOST)))
                return
            time.sleep(_POLL_SECONDS)


def _describe(folder: Path) -> Description:
    order, text = _read_order(folder), (folder / _EVENTS).read_text(encoding="utf-8")
    events = text[: text.rfind("\n") + 1].splitlines()  # the last line may be written at this moment
    last = load(Event, parse_json(events[-1])) if events else Event("")
    is_alive, fetched = is_locked(folder / _ALIVE), folder / _FETCHED
    state = read_usable_state(folder.parent.parent / order.claimed) or read_usable_state(order.run_dir)
    return Description(
        order,
        ENDED if last.kind == END else RUNNING if is_alive else LOST,
        state.phase if state else "",
        time.time() - (folder / _ORDER).stat().st_mtime,
        last.code,
        bool(order.claimed) and Path(order.run_dir).is_dir(),
        fetched.read_text(encoding="utf-8") if fetched.exists() else "",
    )


def _list(root: Path) -> Iterator[str]:
    for path in sorted(root.glob(f"*/{_ORDER}"), key=lambda path: path.stat().st_mtime):
        with suppress(OSError, ValueError):  # removed or damaged meanwhile
            if _read_order(path.parent).host == socket.gethostname():
                yield json.dumps(dataclasses.asdict(_describe(path.parent)))


def _note_fetched(folder: Path, where: str) -> None:
    try:  # as a whole: another viewer that lists the folder now must not take a part of it for all results
        (folder / "run").rename(folder / "removed")
    except FileNotFoundError:
        raise CpuftError("another cpuft attach has fetched the results") from None
    write_text(folder / _FETCHED, where)
    shutil.rmtree(folder / "removed", ignore_errors=True)


def main() -> None:
    """Carry out the action in `sys.argv`: start (an Order and secrets are on standard input, as JSON), list, or keep,
    follow, fetched, stop or forget with a detached run's id and perhaps a word. Exits with 2 after a CpuftError.
    """
    action, *words = sys.argv[1:]
    root = Path(WORK_ROOT, f"cpuft-{os.geteuid()}", DETACHED)
    acts: dict[str, Callable[..., object]] = {"keep": _keep, "fetched": _note_fetched}
    acts |= {"stop": lambda folder: (folder / _STOP).touch(), "forget": shutil.rmtree}
    try:
        if action == "start":
            _start(sys.stdin, root)
        elif action == "list":
            for line in _list(root):
                print(line)
        elif action == "follow":
            from cpuft.rank.process import end_with_parent

            end_with_parent(signal.SIGTERM)
            for position, line in _follow(root / words[0], int(words[1]), "past" in words[2:]):
                print(position, line, flush=True)
        else:
            acts[action](root / words[0], *words[1:])
    except CpuftError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
