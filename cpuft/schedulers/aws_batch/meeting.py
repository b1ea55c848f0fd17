"""The main node of an AWS Batch job: where the others meet, which command they serve, and how they end."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import paramiko

from cpuft import execute
from cpuft.errors import AGAIN, CpuftError
from cpuft.files import write_text
from cpuft.hosts import facts
from cpuft.hosts.cluster import JOB
from cpuft.hosts.ssh_files import Member, format_inside
from cpuft.schedulers.aws_batch.server import Say, Server
from cpuft.schedulers.aws_batch.variables import SECONDS, Keys, Node, choose_address, passing

_MEET = re.compile(r"meet (0|[1-9][0-9]{0,4}) ([1-9][0-9]{0,4}) (yes|no)", re.ASCII)
_POLL_SECONDS = 0.05
_INTERRUPT_SECONDS = 30.0
"""Within which a launch ends after Ctrl-C."""
_LEAVE_SECONDS = 5.0
_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the way there is the way out."""


@dataclass(frozen=True)
class Guest:
    """Another node, once it has come."""

    address: str
    port: int
    """Of its server."""
    shares: bool
    """Whether it sees the main node's folder."""
    channel: paramiko.Channel
    """Open while it lives; the other end's is closed when it has been told to go."""


def parse_meet(line: str) -> tuple[int, int, bool]:
    """What a node says when it comes: its index, its server's port, and whether it sees the main node's folder.

    Raises CpuftError: it says something else.
    """
    found = _MEET.fullmatch(line)
    if not found or int(found[2]) > 65_535:
        raise CpuftError(f"{line[:80]!r} is nothing that a node of this job says: start one image on all nodes")
    return int(found[1]), int(found[2]), found[3] == "yes"


class Meeting:
    """Who has come, who is gone, and who has been told to go. Raises OSError where it cannot listen."""

    def __init__(self, node: Node, keys: Keys, place: tuple[str, int], say: Say) -> None:
        self._node, self._say = node, say
        self.guests: dict[int, Guest] = {}
        self.asked: set[int] = set()
        """Those that were told to go, and are still there."""
        self._server = Server(place, keys, self._greet, say)
        self.port = self._server.port

    def _greet(self, channel: paramiko.Channel, line: str) -> None:
        try:
            index, port, shares = parse_meet(line)
            if index in self.guests or index == self._node.main or index >= self._node.count:
                raise CpuftError(f"node {index} is here already, or none of this job's {self._node.count}")
            self.guests[index] = Guest(channel.getpeername()[0], port, shares, channel)
        except CpuftError as error:
            self._say(f"cpuft: refused a node: {error}")
            _dismiss(channel, 2)

    def look(self) -> list[int]:
        """Who is gone."""
        self.asked = {index for index, guest in self.guests.items() if guest.channel.eof_received}
        return [index for index, guest in sorted(self.guests.items()) if guest.channel.closed]

    def wait(self) -> None:
        """Until all have come; then the meeting is closed. Raises CpuftError that names those who did not."""
        end = time.monotonic() + self._node.seconds
        while missing := sorted(set(range(self._node.count)) - {self._node.main, *self.guests}):
            if gone := self.look():
                raise passing(f"{_name(gone)} went before all had come: see the log there")
            if time.monotonic() > end:
                raise passing(
                    f"{_name(missing)} did not come within {self._node.seconds} s: see the log there, "
                    f"or set {SECONDS} in the job's definition to more"
                )
            time.sleep(_POLL_SECONDS)
        self._server.close()

    def end(self, code: int) -> None:
        """Tell all the exit code, and wait a little for them to go."""
        transports = [guest.channel.get_transport() for guest in self.guests.values()]
        for guest in self.guests.values():
            _dismiss(guest.channel, code)
        end = time.monotonic() + _LEAVE_SECONDS
        while any(transport.is_active() for transport in transports) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        self._server.end()


def _dismiss(channel: paramiko.Channel, code: int) -> None:
    with suppress(OSError, EOFError, paramiko.SSHException):
        channel.send_exit_status(code)
        channel.close()


def _name(indexes: Sequence[int]) -> str:
    return f"node{'s' * (len(indexes) > 1)} {', '.join(map(str, indexes))}"


def lead(node: Node, port: int, command: Sequence[str], environ: Mapping[str, str], say: Say) -> int:
    """The main node's part: wait for the others, run the command, tell all its exit code.

    Raises CpuftError: not all have come, or there is no such command.
    """
    address = node.address or choose_address(facts.read_interfaces(), facts.read_route(_ELSEWHERE))
    keys, code = Keys(node), AGAIN
    mark = Path(keys.mark).absolute()
    try:
        mark.touch()
        meeting = Meeting(node, keys, (address, port), say)
    except OSError as error:
        raise CpuftError(f"nodes cannot meet at {address} port {port} ({error.strerror}): see what is there") from None
    try:
        meeting.wait()
        with tempfile.TemporaryDirectory(prefix="cpuft-") as root:
            write_cluster(keys, address, meeting.guests, f"{root}/job")
            code = run(command, {**environ, JOB: f"{root}/job"}, say, meeting)
        return code
    finally:
        meeting.end(code)
        mark.unlink(missing_ok=True)


def write_cluster(keys: Keys, address: str, guests: Mapping[int, Guest], folder: str) -> None:
    """The nodes as a cluster that this one is the master of: what `cpuft.hosts.registry` reads, and ssh."""
    members = [Member(address, address, "", key=keys.server_line)]
    members += [Member(one.address, one.address, "", one.port, keys.server_line) for _, one in sorted(guests.items())]
    shares = all(guest.shares for guest in guests.values())
    files = format_inside(members, folder, sys.executable, shares_files=shares)
    for name, text in (files | {"id_ed25519": keys.client_file}).items():
        write_text(Path(folder, name), text)
    os.chmod(f"{folder}/id_ed25519", 0o600)


def run(command: Sequence[str], environ: Mapping[str, str], say: Say, meeting: Meeting | None = None) -> int:
    """Run the command to its end; its exit code. Signals go on to it, as Ctrl-C does when a node is gone.

    Raises CpuftError: there is no such command.
    """
    try:
        process = execute.start(command, environ)
    except OSError as error:
        raise CpuftError(f"{command[0]} cannot be started ({error.strerror}): is it in the image?") from None
    sent: set[int] = set()

    def send(number: int, frame: FrameType | None = None) -> None:
        """Once: Batch tells all nodes at the same time, and a second SIGTERM would leave no time for a checkpoint."""
        if number not in sent:
            sent.add(number)
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, send)
    end, gone = 0.0, list[int]()
    while process.poll() is None and not (end and time.monotonic() > end):
        gone = meeting.look() if meeting else []
        if gone and not end:
            say(f"cpuft: {_name(gone)} of the job is gone, and with it the job: another attempt goes on")
            send(signal.SIGINT)
            end = time.monotonic() + _INTERRUPT_SECONDS
        elif meeting and meeting.asked and signal.SIGTERM not in sent:
            say(f"cpuft: {_name(sorted(meeting.asked))} of the job was told to go")
            send(signal.SIGTERM)
        time.sleep(_POLL_SECONDS)
    execute.end([process])
    code = execute.exit_code(process)
    return AGAIN if code and gone else code
