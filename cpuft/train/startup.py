"""What keeps the start of a process short, and how a process that a verb has started ends."""

from __future__ import annotations

import functools
import gc
import os
import signal
import socket
import sys
import threading
import traceback
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

from cpuft.errors import CpuftError, explain_os_error
from cpuft.terminal import protect_streams

HUB_SECONDS = 3.0
"""Time in seconds in which the Hugging Face hub must accept a connection."""


def pause_garbage_collection() -> None:
    """Stop Python's garbage collection until `resume_garbage_collection`; call it before torch is imported. With
    collection, a rank's imports of torch and transformers take 3.9 s of a core, not 3.1.
    """
    gc.disable()


def resume_garbage_collection() -> None:
    """Let garbage be collected again, if it is paused, but not among the objects that exist now."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def run_as_process(work: Callable[[], None]) -> None:
    """Do the work of a process that a verb has started; garbage collection is paused until the work resumes it.

    An error ends the process as `report_error` says. SIGTERM, an exception so that half-written files are removed, ends
    it with code 143.
    """
    protect_streams()
    pause_garbage_collection()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        work()
    except Exception as error:
        sys.exit(report_error(error))


def report_error(error: Exception) -> int:
    """Print the line of `describe_exit` for an error, or its traceback if there is none; return the exit code."""
    problem, exit_code = describe_exit(error)
    if problem:
        print(f"cpuft: error: {problem}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    return exit_code


def describe_exit(error: Exception) -> tuple[str, int]:
    """Return the line and the exit code with which a process ends after an error: a CpuftError's own, those of a full
    disk, or 2 for another problem with a path; ("", 1) for a missing file and other errors, which need a traceback.
    """
    explained = explain_os_error(error) if isinstance(error, OSError) else error
    return (str(explained), explained.exit_code) if isinstance(explained, CpuftError) else ("", 1)


@functools.cache
def find_hub_problem() -> str:
    """Return why the Hugging Face hub cannot be used, as a clause for the middle of an error; empty if it can.

    The first call tries to connect for up to 3 s. If the hub does not answer, its client is set to read its cache only:
    it would try again five times for each file, with pauses that add up to 25 s.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        given = next((name for name in names if os.environ.get(name)), names[0])
        return f"{given} forbids asking the Hugging Face hub"
    url = urlsplit(constants.ENDPOINT)
    proxy = urllib.request.getproxies().get(url.scheme, "")
    if proxy and not urllib.request.proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if _accepts_connection(url.hostname or "", url.port or (443 if url.scheme == "https" else 80)):
        return ""
    constants.HF_HUB_OFFLINE = True
    for name, flag in (("transformers.utils.hub", "_is_offline_mode"), ("datasets.config", "HF_HUB_OFFLINE")):
        if hasattr(sys.modules.get(name), flag):
            setattr(sys.modules[name], flag, True)
    return f"the Hugging Face hub does not answer within {HUB_SECONDS:.0f} s"


def advise_on_hub(problem: str) -> str:
    """Return what to do about a problem of `find_hub_problem`: "unset HF_HUB_OFFLINE to download it once" for
    "HF_HUB_OFFLINE forbids ...", else "check the network and the proxy settings".
    """
    variable, forbids, _ = problem.partition(" forbids ")
    return f"unset {variable} to download it once" if forbids else "check the network and the proxy settings"


def _accepts_connection(host: str, port: int) -> bool:
    accepted = threading.Event()

    def connect() -> None:
        with suppress(OSError, ValueError), socket.create_connection((host, port), timeout=HUB_SECONDS):
            accepted.set()

    # On a thread, because looking up a name has no timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return accepted.is_set()
