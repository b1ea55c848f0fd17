"""Try again what may fail for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from cpuft.errors import CpuftError

T = TypeVar("T")


def retry(
    function: Callable[[], T],
    pauses: Iterable[float],
    say: Callable[[str], None] = lambda line: None,
    may_help: Callable[[CpuftError], bool] = lambda error: error.is_transient,
) -> T:
    """Return what a function returns. While it raises a CpuftError for which `may_help` is true, it is called again
    after each of the pauses in seconds, before which `say` gets "5 s: THE ERROR". Other errors are raised at once, as
    is the one after the last pause.
    """
    for pause in pauses:
        try:
            return function()
        except CpuftError as error:
            if not may_help(error):
                raise
            say(f"{pause:.0f} s: {error}")
        time.sleep(pause)
    return function()
