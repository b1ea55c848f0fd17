"""How a rank learns that its run must stop: from the launcher, or from an interruption notice on its host.

`cpuft.rank` watches for both beside its worker, so that no training step waits for it. It then sends the worker SIGUSR1
once, as soon as the worker catches that signal. A program that does not catch it continues undisturbed.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType

from cpuft.rank.world import World

REQUEST_FILE = "logs/interrupt"
"""File in the run's folder with which the launcher asks all ranks to stop, because mpirun forwards no signal. It holds
the name of the signal that the launcher received."""
HEARTBEAT_FILE = "logs/mpirun.log"
"""File in the run's folder that the first rank of each host touches regularly. On a shared file system, the launcher
sees by its time that some rank is alive."""
NOTICE_VARIABLE = "CPUFT_NOTICE"
"""Environment variable with the file or URL of --interruption-notice."""
SIGNAL = getattr(signal, "SIGUSR1", signal.SIGTERM)  # Windows, which has no ranks, lacks it
"""Signal by which `cpuft.rank` tells its worker to stop."""
_POLL_SECONDS = 1.0
_FEWER_POLLS = 5
"""A heartbeat is given, and the notice checked, at every fifth poll. EC2 announces an interruption 2 min before it."""
_ANSWER_SECONDS = 2.0
_METADATA = "/latest/meta-data/"
"""Beginning of the paths in EC2's metadata service, which wants a token (version 2 of the service)."""
_is_requested = threading.Event()
_is_polled = threading.Event()
"""Set once this program has called `is_interrupted`: only then can it end by itself."""


def handle_interruption(is_script: bool = False) -> None:
    """Let SIGUSR1, or a request that is there already, set the flag that `is_interrupted` returns. In a user's script
    (`is_script`) that never called `is_interrupted`, SIGUSR1 also raises KeyboardInterrupt if the request says SIGINT.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        _is_requested.set()
        is_silent = is_script and not _is_polled.is_set()
        if is_silent and _read_request(_find(os.environ, REQUEST_FILE)) == signal.SIGINT.name:
            raise KeyboardInterrupt

    signal.signal(SIGNAL, interrupt)
    signal.siginterrupt(SIGNAL, False)  # system calls of libraries are restarted
    if os.path.exists(_find(os.environ, REQUEST_FILE)):
        _is_requested.set()
    if sys.platform != "linux":  # `catches_signal` does not know there whether this process does
        threading.Thread(target=_wait_for_request, daemon=True).start()


def _wait_for_request() -> None:
    while not os.path.exists(_find(os.environ, REQUEST_FILE)):
        time.sleep(_POLL_SECONDS)
    if callable(signal.getsignal(SIGNAL)):  # else the script has taken the handler away, and the signal would end it
        os.kill(os.getpid(), SIGNAL)


def is_interrupted() -> bool:
    """Return whether this process was told to stop; from then on, SIGUSR1 raises no KeyboardInterrupt in a script."""
    _is_polled.set()
    return _is_requested.is_set()


def describe_cause(environ: Mapping[str, str]) -> str:
    """Return what told this rank to stop: the signal's name that the request holds, such as "SIGTERM", else "the notice
    PLACE on HOST" if a notice is set up, else "SIGUSR1 on HOST".
    """
    if request := _read_request(_find(environ, REQUEST_FILE)):
        return request
    notice = environ.get(NOTICE_VARIABLE, "")
    return f"{f'the notice {notice}' if notice else SIGNAL.name} on {socket.gethostname()}"


def _read_request(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read().strip()
    return ""


def is_host_leaving(environ: Mapping[str, str]) -> bool:
    """Return for a rank that was told to stop whether its host leaves: a notice is set up, and there is no request."""
    return bool(environ.get(NOTICE_VARIABLE)) and not os.path.exists(_find(environ, REQUEST_FILE))


def _find(environ: Mapping[str, str], name: str) -> str:
    return os.path.join(environ.get("CPUFT_RUN_DIR") or "/nowhere", name)


def start_host_watch(child: int, world: World, environ: Mapping[str, str]) -> threading.Event:
    """Start a thread that looks for a request every second and for a notice every 5 s, and then sends SIGUSR1 to the
    child process once, when the child catches it. Only a host's first rank looks for notices and gives heartbeats.
    The caller sets the event when the child has ended.
    """
    ended = threading.Event()
    is_first = world.local_rank == 0
    notice = InterruptionNotice(environ.get(NOTICE_VARIABLE, "") if is_first else "")

    def watch() -> None:
        must_stop = is_sent = False
        for poll in itertools.count():
            is_fifth = is_first and poll % _FEWER_POLLS == 0
            if is_fifth:
                with suppress(OSError):
                    os.utime(_find(environ, HEARTBEAT_FILE))
            must_stop = must_stop or os.path.exists(_find(environ, REQUEST_FILE)) or (is_fifth and notice.has_arrived())
            if must_stop and not is_sent and catches_signal(child):
                is_sent = True
                with suppress(ProcessLookupError):
                    os.kill(child, SIGNAL)
            if ended.wait(_POLL_SECONDS):
                return

    threading.Thread(target=watch, daemon=True).start()
    return ended


def catches_signal(process: int) -> bool:
    """Return whether a process catches SIGUSR1, or blocks it to handle it later; False if there is no such process."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigBlk:"))]
    return any(mask >> (SIGNAL - 1) & 1 for mask in masks)


class InterruptionNotice:
    """A notice that a host will be taken away: a file that appears, or a URL that gets status 200; "" for none."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._is_reported = False

    def has_arrived(self) -> bool:
        """Return whether the notice is there; False on a failure, which is reported once unless it is a 404."""
        if not self._place.startswith(("http://", "https://")):
            return os.path.exists(self._place)
        try:
            return self._request()
        except Exception as error:  # urllib also raises errors of http.client; whatever it is, the watch continues
            if getattr(error, "code", 0) != 404 and not self._is_reported:
                self._is_reported = True
                problem = f"the interruption notice at {self._place} cannot be read ({error})"
                print(f"cpuft: {problem}, so interruptions of this host go unnoticed", file=sys.stderr, flush=True)
            return False

    def _request(self) -> bool:
        # Imported here, because few runs need them.
        from urllib.error import HTTPError
        from urllib.parse import urlsplit
        from urllib.request import ProxyHandler, Request, build_opener

        opener = build_opener(ProxyHandler({}))  # the metadata service is on the host itself
        parts, headers = urlsplit(self._place), dict[str, str]()
        if parts.path.startswith(_METADATA):
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            token = Request(f"{parts.scheme}://{parts.netloc}/latest/api/token", headers=lifetime, method="PUT")
            with suppress(HTTPError), opener.open(token, timeout=_ANSWER_SECONDS) as answer:
                headers["X-aws-ec2-metadata-token"] = answer.read(1000).decode("ascii").strip()
        with opener.open(Request(self._place, headers=headers), timeout=_ANSWER_SECONDS) as answer:
            return bool(answer.status == 200)
