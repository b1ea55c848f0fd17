"""What every node of an AWS Batch job does; all but the main one serve commands until that one tells them to end."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial

import paramiko

from cpuft.errors import AGAIN, CpuftError
from cpuft.schedulers.aws_batch import meeting
from cpuft.schedulers.aws_batch.server import PROOF_SECONDS, Server, run_command
from cpuft.schedulers.aws_batch.variables import TOKEN, Keys, Node, parse_node, passing
from cpuft.terminal import notice_silence

PORT = 7077
"""Of the main node; the others take any."""
_POLL_SECONDS, _AGAIN_SECONDS = 0.05, 0.5


def run_node(words: Sequence[str], environ: Mapping[str, str], port: int = PORT) -> int:
    """A node's part in a job, from its start to its end; the exit code, which is the command's on all nodes.

    `words`: the folder to work in, which is made; and the command that the main node runs.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        if len(words) < 2:
            raise CpuftError("name a folder and a command: python -m cpuft.schedulers.aws_batch FOLDER COMMAND...")
        node = parse_node(environ)
        _enter(words[0])
        rest = {name: value for name, value in environ.items() if name != TOKEN}
        if node.count == 1:
            return meeting.run(words[1:], rest, _say)
        return meeting.lead(node, port, words[1:], rest, _say) if node.index == node.main else _follow(node, rest, port)
    except CpuftError as error:
        _say(f"cpuft: error: {error}")
        return AGAIN if error.passes else 2


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _enter(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        raise CpuftError(f"{folder} cannot be worked in ({error.strerror}): name another folder") from None


def _follow(node: Node, environ: Mapping[str, str], port: int) -> int:
    """Any other node's part. Raises CpuftError: it does not find the main node, or loses it."""
    keys = Keys(node)
    told: list[int] = []
    connection, transport = _dial(node, port, keys)
    with transport:
        server = Server((connection.getsockname()[0], 0), keys, partial(run_command, environ), _say)
        try:
            channel = transport.open_session(timeout=PROOF_SECONDS)
            sees = "yes" if os.path.exists(keys.mark) else "no"
            channel.exec_command(f"meet {node.index} {server.port} {sees}")
            signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
            while not channel.exit_status_ready():
                if told and not channel.eof_sent:
                    channel.shutdown_write()
                time.sleep(_POLL_SECONDS)
        except (OSError, EOFError, paramiko.SSHException):
            pass  # the main node is gone
        finally:
            code = channel.exit_status
            transport.close()
            server.end()
    if code < 0:
        raise passing(f"node {node.index} has lost the main node {node.address}: see the log there")
    return code


def _dial(node: Node, port: int, keys: Keys) -> tuple[socket.socket, paramiko.Transport]:
    """A session with the main node, which may start later than this one.

    Raises CpuftError: it is not there in time, or has another secret.
    """
    end, other = time.monotonic() + node.seconds, f"node {node.index} and the main node have different secrets"
    while True:
        try:
            connection = socket.create_connection((node.address, port), timeout=PROOF_SECONDS)
            notice_silence(connection)
            transport = paramiko.Transport(connection)
            transport.start_client(timeout=PROOF_SECONDS)
            if transport.get_remote_server_key() != keys.server:
                transport.close()
                raise CpuftError(f"{other}: give all nodes the same {TOKEN}")
            transport.auth_publickey("cpuft", keys.client)
            return connection, transport
        except paramiko.AuthenticationException:
            raise CpuftError(f"{other}: give all nodes the same {TOKEN}") from None
        except (OSError, EOFError, paramiko.SSHException) as error:
            if time.monotonic() > end:
                raise passing(
                    f"node {node.index} did not reach the main node {node.address} port {port} within {node.seconds} s "
                    f"({error}): see the log there, and let the job's security group reach itself"
                ) from None
        time.sleep(_AGAIN_SECONDS)
