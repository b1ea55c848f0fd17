"""Renew the leases of rented hosts while a launch lasts, because these hosts shut down when their lease ends."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cpuft import execute
from cpuft.errors import CpuftError
from cpuft.execute import Answer
from cpuft.hosts.cluster import Access
from cpuft.hosts.transport import SshTransport, try_hosts
from cpuft.serialization import is_count

RENEWAL_SECONDS = 300.0
"""Time between two renewals. Each moves the end of the lease to 15 minutes from then."""
_ANSWER_SECONDS = 20.0
_HELD_SECONDS = 3600.0
"""How long a rented host keeps itself for results that nobody has fetched."""
_POLL_SECONDS = 0.2


@contextmanager
def renew_leases(access: Access, say: Callable[[str], None]) -> Iterator[None]:
    """Inside, a thread renews all hosts' leases, if they have any, every 5 min; `say` gets their end and failures."""
    command, is_over, said = tuple(shlex.split(access.entry.renewal)), threading.Event(), set[str]()
    # With sessions of its own: the main thread may close those that it keeps at any moment.
    transport, known = SshTransport(access.transport.config, access.transport.here), access.transport

    def renew() -> None:
        while not is_over.is_set():
            hosts = [host for name, host in list(known.hosts.items()) if name not in known.unreachable]
            try:
                answers = try_hosts(lambda host: transport.run(host, command, seconds=_ANSWER_SECONDS), hosts)
                lines = [_describe_renewal(host.name, answer) for host, answer in zip(hosts, answers)]
            except Exception as error:  # such as no more threads: the next time may go well, and hosts end without it
                lines = [f"leases could not be renewed ({error!r}): check them with cpuft provision status"]
            for line in lines:
                if line not in said and not is_over.is_set():
                    said.add(line)
                    say(f"cpuft: {line}")
            is_over.wait(RENEWAL_SECONDS)

    if command:
        threading.Thread(target=renew, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _describe_renewal(host: str, answer: Answer | CpuftError) -> str:
    """Return the latest end of the lease, which is the same for all hosts of a cluster, or why it was not renewed."""
    words = [] if isinstance(answer, CpuftError) else answer.output.partition("\n")[0].split()
    if isinstance(answer, Answer) and not answer.exit_code and len(words) == 2 and is_count(words[1]):
        limit = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(int(words[1])))
        return f"the lease of the hosts is renewed while the run lasts, until {limit} at the latest"
    error = str(answer) if isinstance(answer, CpuftError) else answer.text.strip()[-200:]
    return f"the lease of host {host} could not be renewed ({error}): check it with cpuft provision status"


def hold_lease(folder: Path, renewal: str) -> None:
    """Renew this host's lease by the shell line `renewal` ("": it has none) for an hour, or until nothing is in
    `folder/run`: the results that the host holds are fetched then.
    """
    begun = time.monotonic()
    renewed = begun - RENEWAL_SECONDS
    while renewal and any(folder.glob("run/*")) and time.monotonic() - begun < _HELD_SECONDS:
        if time.monotonic() - renewed >= RENEWAL_SECONDS:
            renewed = time.monotonic()
            execute.run_command(shlex.split(renewal), _ANSWER_SECONDS)
        time.sleep(_POLL_SECONDS)
