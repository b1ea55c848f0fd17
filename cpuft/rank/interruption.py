"""A run is told to stop in good order: by its launch, or by a notice on one of its hosts.

`cpuft.rank` watches for that beside its worker, so that no step waits for it, and sends that SIGUSR1: once, and not
before it listens. A program that does not listen goes on undisturbed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import FrameType

from cpuft.rank.world import World

ASKED = "logs/interrupt"
"""In the run's directory: who asks for its end, written by the launch. mpirun passes on no signal."""
SIGN = "logs/mpirun.log"
"""Likewise; each host's first rank touches it now and then, where it is the same file there: some rank is alive."""
NOTICE = "CPUFT_NOTICE"
SIGNAL = signal.SIGUSR1
_LOOK_SECONDS = 1.0
_NOTICE_EVERY, _SIGN_EVERY = 5, 5
"""Looks; EC2 gives a notice two minutes before the end."""
_ANSWER_SECONDS = 2.0
_METADATA = "/latest/meta-data/"
"""How paths of EC2's metadata begin, which want a token (version 2 of the service)."""
_came = threading.Event()
_polled = threading.Event()
"""Whether this program has ever looked at `came`: only then can it end by itself."""


def listen(is_script: bool = False) -> None:
    """Note SIGUSR1 from now on instead of ending by it, and whether the launch has asked before. On the main thread.

    `is_script`: in a script of the user's that never looks at `came`, the user's Ctrl-C raises KeyboardInterrupt, as it
    would in a terminal.
    """
    signal.signal(SIGNAL, _interrupt_script if is_script else _note)
    signal.siginterrupt(SIGNAL, False)  # libraries' system calls are begun again
    if os.path.exists(_find(os.environ, ASKED)):
        _came.set()


def _note(number: int, frame: FrameType | None) -> None:
    _came.set()


def _interrupt_script(number: int, frame: FrameType | None) -> None:
    _came.set()
    if not _polled.is_set() and _asked_by(_find(os.environ, ASKED)) == signal.SIGINT.name:
        raise KeyboardInterrupt


def came() -> bool:
    """Whether this process was told that its run is to stop."""
    _polled.set()
    return _came.is_set()


def describe_cause(environ: Mapping[str, str]) -> str:
    """Who told this rank to stop."""
    if asked := _asked_by(_find(environ, ASKED)):
        return asked
    notice = environ.get(NOTICE, "")
    return f"{f'the notice {notice}' if notice else SIGNAL.name} on {socket.gethostname()}"


def _asked_by(path: str) -> str:
    """The name of the signal for which the launch asked, from its file; empty where there is none."""
    with suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read().strip()
    return ""


def is_leaving(environ: Mapping[str, str]) -> bool:
    """Whether a rank that was told to stop was so because its host is about to go."""
    return bool(environ.get(NOTICE)) and not os.path.exists(_find(environ, ASKED))


def _find(environ: Mapping[str, str], name: str) -> str:
    return os.path.join(environ.get("CPUFT_RUN_DIR") or "/nowhere", name)


def start_watch(child: int, world: World, environ: Mapping[str, str]) -> None:
    """Watch for as long as the child lives; each host's first rank looks for a notice, and gives a sign of life."""
    first = world.local_rank == 0
    notice, sign = (environ.get(NOTICE, ""), _find(environ, SIGN)) if first else ("", "")
    looks = Notice(notice).stands if notice else lambda: False
    threading.Thread(target=_watch, args=(child, _find(environ, ASKED), looks, sign), daemon=True).start()


def _watch(child: int, asked: str, notice: Callable[[], bool], sign: str) -> None:
    look, stands, told = 0, False, False
    while os.path.exists(f"/proc/{child}"):
        if sign and look % _SIGN_EVERY == 0:
            with suppress(OSError):
                os.utime(sign)
        stands = stands or os.path.exists(asked) or (look % _NOTICE_EVERY == 0 and notice())
        if stands and not told and is_listening(child):
            told = True
            with suppress(ProcessLookupError):
                os.kill(child, SIGNAL)
        look += 1
        time.sleep(_LOOK_SECONDS)


def is_listening(process: int) -> bool:
    """Whether a process catches SIGUSR1, or holds it back to look for it later."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigBlk:"))]
    return any(mask >> (SIGNAL - 1) & 1 for mask in masks)


class Notice:
    """A file that is there once a host is about to go, or an address that then answers 200, and 404 until then."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._told = False

    def stands(self) -> bool:
        """Look now: at most a few seconds long. An address that cannot be asked is said once, and is no notice."""
        if not self._place.startswith(("http://", "https://")):
            return os.path.exists(self._place)
        try:
            return self._ask()
        except Exception as error:  # urllib lets through what http.client raises; whatever it is, the watch goes on
            if getattr(error, "code", 0) != 404 and not self._told:
                self._told = True
                why = f"{self._place} cannot be asked ({error})"
                print(f"cpuft: {why}: no notice will come from there", file=sys.stderr, flush=True)
            return False

    def _ask(self) -> bool:
        # Imported here, because few runs ask.
        from urllib.error import HTTPError
        from urllib.parse import urlsplit
        from urllib.request import ProxyHandler, Request, build_opener

        opener = build_opener(ProxyHandler({}))  # metadata are the host's own
        parts, headers = urlsplit(self._place), dict[str, str]()
        if parts.path.startswith(_METADATA):
            lasts = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            token = Request(f"{parts.scheme}://{parts.netloc}/latest/api/token", headers=lasts, method="PUT")
            with suppress(HTTPError), opener.open(token, timeout=_ANSWER_SECONDS) as answer:
                headers["X-aws-ec2-metadata-token"] = answer.read(1000).decode("ascii").strip()
        with opener.open(Request(self._place, headers=headers), timeout=_ANSWER_SECONDS) as answer:
            return bool(answer.status == 200)
